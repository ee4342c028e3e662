"""The best split where every rank holds one stage: dynamic programming over the ranks, exact."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import accumulate, combinations_with_replacement

from mfsdp_cli.layout.partition import Found, Problem


def contiguous(problem: Problem) -> Found | None:
    """The best split, or None where no split keeps the limits.

    The heaviest rank's cost first: bisection over the costs that a stage can have, each answered
    by the places where the ranks so far can end. Then the squares, over the ranks from the last.
    """
    ends = _Ends(problem)
    bounds = ends.bounds()
    if not ends.possible(bounds[-1]):
        return None
    least = bisect_left(bounds, True, key=ends.possible)
    return Found(problem.score(_fewest_squares(problem, ends, bounds[least])), proven=True)


class _Ends:
    """Where a stage that starts at a place may end, under a bound on its cost."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.size = problem, len(problem.parts)
        self.before = problem.costs_before()
        self.reach = [self._within_limit(stage) for stage in range(problem.stages)]

    def _within_limit(self, stage: int) -> list[int]:
        """By start: the furthest end within the rank's limit; -1 where even none is too much."""
        problem, size = self.problem, self.size
        if stage >= problem.open_stages:
            room = problem.limits is None or problem.fixed[stage] <= problem.limits[stage]
            return list(range(size + 1)) if room else [-1] * (size + 1)
        if problem.limits is None:
            return [size] * (size + 1)
        room_left = problem.limits[stage] - problem.fixed[stage]
        if room_left < 0:
            return [-1] * (size + 1)
        used = [0, *accumulate(problem.bytes_of(part, stage) for part in problem.parts)]
        reach, end = [], 0
        for start in range(size + 1):
            end = max(end, start)
            while end < size and used[end + 1] - used[start] <= room_left:
                end += 1
            reach.append(end)
        return reach

    def bounds(self) -> list[int]:
        """Costs that a stage can have, ascending: the heaviest one's is among them."""
        spans = {high - low for low, high in combinations_with_replacement(self.before, 2)}
        return sorted({span + extra for span in spans for extra in set(self.problem.extra)})

    def cost(self, stage: int, start: int, end: int) -> int:
        return self.before[end] - self.before[start] + self.problem.extra[stage]

    def possible(self, bound: int) -> bool:
        """Whether all layers find a place with no rank above the bound."""
        starts = {0}
        for stage in range(self.problem.stages):
            starts = {end for start in starts for end in self.ends(stage, start, bound)}
        return self.size in starts

    def ends(self, stage: int, start: int, bound: int) -> range:
        """Places where the stage may end."""
        highest = bound - self.problem.extra[stage] + self.before[start]
        last = min(self.reach[stage][start], bisect_right(self.before, highest) - 1)
        return range(start + self.problem.least[stage], last + 1)


def _fewest_squares(problem: Problem, ends: _Ends, bound: int) -> list[int]:
    """Of the splits within the bound the one whose squares are smallest, then with fewer layers
    on earlier ranks.
    """
    size, last = len(problem.parts), problem.stages - 1
    best: list[float] = [math.inf] * size + [0]
    follow: list[list[int]] = []
    for stage in range(last, -1, -1):
        now: list[float] = [math.inf] * (size + 1)
        next_ = [0] * (size + 1)
        for start in range(size + 1):
            for end in ends.ends(stage, start, bound):
                total = ends.cost(stage, start, end) ** 2 + best[end]
                if total < now[start]:
                    now[start], next_[start] = total, end
        best = now
        follow.append(next_)
    counts, place = [], 0
    for next_ in reversed(follow):
        counts.append(next_[place] - place)
        place = next_[place]
    return counts
