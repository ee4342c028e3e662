"""The best split where a rank holds several stages that lie apart.

Its stages are contiguous each, but a rank's sum joins layers from several places, so that no
dynamic program over positions alone is exact. Branch and bound is: stages are filled in order,
and a branch is left when

* its heaviest rank, or the level to which the rest would fill the ranks that are still open, is
  above the best split known;
* the same ranks were filled to the same height by the same layers before;
* all layers that are left are alike. Then it matters only how many of them each rank takes, and
  giving one after the other to the lightest rank that has room is best for the heaviest rank and
  for the squares at once (a separable convex sum).

Models have a few unlike layers in front (dense ones before MoE) and equal ones behind: that is a
hundred branches. Patterns that alternate to the end may need more than :data:`MAX_BRANCHES`; then
the best split found stands, and ``proven`` says whether it is known to be the best.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from mfsdp_cli.layout.partition import Found, Part, Problem, Score

MAX_BRANCHES = 4_000
"""About 60 ms."""
PATIENCE = 10
"""How many times as many where no split within the limits was found by then."""


def interleaved(
    problem: Problem, better_than: Score | None = None, branches: int = MAX_BRANCHES
) -> Found | None:
    """The best split, or None where there is none within the limits.

    Args:
        better_than: a score known from elsewhere; what is worse need not be found.
        branches: how many are looked into.
    """
    return _Search(problem, better_than, branches).run()


class _Search:
    def __init__(self, problem: Problem, known: Score | None, branches: int) -> None:
        self.problem, self.known, self.branches = problem, known, branches
        self.patience = PATIENCE * branches
        self.before = problem.costs_before()
        self.size, self.pp = len(problem.parts), problem.pp
        self.alike_from = _alike_from(problem.parts)
        self.best: Score | None = None
        self.counts = [0] * problem.stages
        self.seen: set[tuple[int, ...]] = set()
        self.open = [self._open(stage) for stage in range(problem.open_stages + 1)]
        self.must = [sum(problem.least[stage:]) for stage in range(problem.stages + 1)]

    def _open(self, stage: int) -> list[list[int]]:
        """By rank its stages from one on that may hold layers."""
        stages: list[list[int]] = [[] for _ in range(self.pp)]
        for later in range(stage, self.problem.open_stages):
            stages[later % self.pp].append(later)
        return stages

    def run(self) -> Found | None:
        loads, room = [0] * self.pp, [0] * self.pp
        for stage, extra in enumerate(self.problem.extra):
            loads[stage % self.pp] += extra
        for rank, limit in enumerate(self.problem.limits or ()):
            room[rank] = limit - sum(self.problem.fixed[rank :: self.pp])
        if min(room) < 0:
            return None
        self._fill(0, 0, loads, room)
        return None if self.best is None else Found(self.best, self.branches > 0)

    def _fill(self, stage: int, place: int, loads: list[int], room: list[int]) -> None:
        """Fill the stages from one on with the layers from a place on."""
        self.branches -= 1
        if self.branches <= 0 and (self.best is not None or self.branches < -self.patience):
            return
        if place >= self.alike_from or stage == self.problem.open_stages:
            self._finish(stage, place, loads, room)
            return
        state = (stage, place, *loads, *(room if self.problem.limits else ()))
        if state in self.seen or self._hopeless(stage, place, loads):
            return
        self.seen.add(state)
        rank = stage % self.pp
        for count, cost, used in self._sizes(stage, place, loads, room):
            self.counts[stage] = count
            loads[rank] += cost
            room[rank] -= used
            self._fill(stage + 1, place + count, loads, room)
            loads[rank] -= cost
            room[rank] += used
        self.counts[stage] = 0

    def _sizes(
        self, stage: int, place: int, loads: Sequence[int], room: Sequence[int]
    ) -> list[tuple[int, int, int]]:
        """(layers, cost, bytes) of a stage, the likeliest first."""
        problem, rank = self.problem, stage % self.pp
        most = self.size - place - self.must[stage + 1]
        sizes, used, limited = [], 0, problem.limits is not None
        for count in range(most + 1):
            if count:
                used += problem.bytes_of(problem.parts[place + count - 1], stage)
            cost = self.before[place + count] - self.before[place]
            if self._too_heavy(loads[rank] + cost) or (limited and used > room[rank]):
                break
            if count >= problem.least[stage]:
                sizes.append((count, cost, used))
        open_ = self.open[stage]
        level = self._level(stage, place, loads)
        wanted = (level - loads[rank]) / max(1, len(open_[rank]))
        return sorted(sizes, key=lambda size: abs(size[1] - wanted))

    def _too_heavy(self, load: int) -> bool:
        best = self.best or self.known
        return best is not None and load > best.heaviest

    def _level(self, stage: int, place: int, loads: Sequence[int]) -> int:
        """How high the layers that are left would fill the open ranks, were they a liquid."""
        rest = self.before[-1] - self.before[place]
        level, number = rest, 0
        for load in sorted(load for rank, load in enumerate(loads) if self.open[stage][rank]):
            if number and level <= load * number:
                break
            level, number = level + load, number + 1
        return -(-level // max(1, number))

    def _hopeless(self, stage: int, place: int, loads: Sequence[int]) -> bool:
        best = self.best or self.known
        if best is None:
            return False
        level = self._level(stage, place, loads)
        heaviest = max(level, *loads)
        if heaviest != best.heaviest:
            return heaviest > best.heaviest
        # At best every open rank below the level is filled up to it, and no further.
        open_ = self.open[stage]
        fewest = sum(
            max(load, level - 1) ** 2 if open_[rank] else load * load
            for rank, load in enumerate(loads)
        )
        return fewest > best.squares

    def _finish(self, stage: int, place: int, loads: list[int], room: list[int]) -> None:
        """All layers that are left are alike: give each to the lightest rank that has room."""
        left = self.size - place
        if stage == self.problem.open_stages:
            if left == 0:
                self._offer(self.counts)
            return
        takes = self._takes(stage, self.problem.parts[-1], loads, room, left)
        if takes is None:
            return
        counts = self.counts[:stage] + [0] * (self.problem.stages - stage)
        for rank, number in enumerate(takes):
            self._spread(counts, rank, self.open[stage][rank], number, room[rank])
        self._offer(counts)

    def _takes(
        self, stage: int, part: Part, loads: Sequence[int], room: Sequence[int], left: int
    ) -> list[int] | None:
        """How many equal layers each rank takes; None where not all find room."""
        takes, most = [], []
        for rank, stages in enumerate(self.open[stage]):
            least = sum(self.problem.least[s] for s in stages)
            takes.append(least)
            most.append(self._most(stages, part, room[rank], left))
            if most[-1] < least:
                return None
        left -= sum(takes)
        if left < 0:
            return None
        heap = [
            (loads[rank] + takes[rank] * part.cost, takes[rank], -rank)
            for rank in range(self.pp)
            if takes[rank] < most[rank]
        ]
        heapq.heapify(heap)
        while left and heap:
            load, number, rank = heap[0]
            if self._too_heavy(load + part.cost):
                return None
            takes[-rank] += 1
            left -= 1
            if takes[-rank] < most[-rank]:
                heapq.heapreplace(heap, (load + part.cost, number + 1, rank))
            else:
                heapq.heappop(heap)
        return None if left else takes

    def _most(self, stages: Sequence[int], part: Part, room: int, left: int) -> int:
        """Layers for which a rank has room: each stage's least, the rest where they take least."""
        if not stages:
            return 0
        if self.problem.limits is None:
            return left
        sizes = [self.problem.bytes_of(part, stage) for stage in stages]
        needed = [self.problem.least[stage] for stage in stages]
        room -= sum(size * least for size, least in zip(sizes, needed, strict=True))
        if room < 0:
            return -1
        return min(left, sum(needed) + (room // min(sizes) if min(sizes) else left))

    def _spread(
        self, counts: list[int], rank: int, stages: Sequence[int], number: int, room: int
    ) -> None:
        """A rank's layers over its stages, as even as the limit allows; later ones take more."""
        problem, part = self.problem, self.problem.parts[-1]
        sizes = {stage: problem.bytes_of(part, stage) for stage in stages}
        smallest = min(sizes.values(), default=0)
        for stage in stages:
            counts[stage] = problem.least[stage]
            room -= sizes[stage] * problem.least[stage]
        left = number - sum(problem.least[stage] for stage in stages)
        for after in range(left - 1, -1, -1):
            fits = (s for s in stages if sizes[s] <= room - after * smallest or not problem.limits)
            stage = min(fits, key=lambda s: (problem.extra[s] + counts[s] * part.cost, -s))
            counts[stage] += 1
            room -= sizes[stage]

    def _offer(self, counts: Sequence[int]) -> None:
        score = self.problem.score(counts)
        if self.best is None or score < self.best:
            self.best = score


def _alike_from(parts: Sequence[Part]) -> int:
    """The place from which on all layers are the same."""
    place = len(parts)
    while place > 1 and parts[place - 2] == parts[-1]:
        place -= 1
    return max(0, place - 1)
