"""Layouts as the shortest string that Megatron reads as the same layout."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from mfsdp_cli.layout.layout import Layout, StageLayout

_EXACT = 3_000
_LONGEST_PERIOD = 64


def format_layout(layout: Layout) -> str:
    """The shortest layout string; of equally short ones the one of fewest parts."""
    return compress("|".join(stage_signs(stage) for stage in layout.stages))


def spell_layout(layout: Layout) -> str:
    """A layout string stage by stage, as in ``Et*8|t*8|t*7|t*7L``: longer, easier to read."""
    return "|".join(_runs(stage_signs(stage))[0] for stage in layout.stages)


def stage_signs(stage: StageLayout) -> str:
    """One stage spelt out, as in ``Ettt``."""
    return "E" * stage.embedding + "t" * len(stage.layers) + "m" * len(stage.mtp) + "L" * stage.loss


@lru_cache(maxsize=64)
def compress(signs: str) -> str:
    """The shortest string of the grammar that expands to ``signs``.

    Dynamic programming from the end: the rest from a sign on begins with that sign, with a run of
    it (``t*4``) or with a group that repeats (``(tt|)*29``); groups hold no groups. A run ends
    where the sign changes or where a group can begin. Above :data:`_EXACT` signs groups of more
    than :data:`_LONGEST_PERIOD` signs are not looked for.
    """
    size = len(signs)
    cost, choice = [(0, 0)] * (size + 1), [_Piece("", 0)] * size
    runs = _run_sizes(signs)
    repeats = _repeats(signs, runs)
    groups = [start for start, found in enumerate(repeats) if found]
    for start in range(size - 1, -1, -1):
        best = (cost[start + 1][0] + 1, cost[start + 1][1] + 1)
        piece = _Piece(signs[start], start + 1)
        for length in _run_lengths(runs, start, groups):
            rest = cost[start + length]
            total = (rest[0] + 2 + len(str(length)), rest[1] + 1)
            if total < best:
                best, piece = total, _Piece(f"{signs[start]}*{length}", start + length)
        for period, times in repeats[start]:
            inner, parts = _runs(signs[start : start + period])
            for count in range(2, times + 1):
                rest = cost[start + count * period]
                total = (rest[0] + len(inner) + 3 + len(str(count)), rest[1] + parts + 1)
                if total < best:
                    best, piece = total, _Piece(f"({inner})*{count}", start + count * period)
        cost[start], choice[start] = best, piece
    return _join(choice)


class _Piece(NamedTuple):
    """How the rest of a string begins, and where what follows starts."""

    text: str
    next: int


def _run_lengths(runs: Sequence[int], start: int, groups: Sequence[int]) -> Iterator[int]:
    """How many equal signs a run may take (tt is shorter than t*2): all, or up to a group.

    ``groups`` are the places where a group can begin, ascending.
    """
    if runs[start] > 2:
        yield runs[start]
    for place in range(bisect_left(groups, start + 3), bisect_left(groups, start + runs[start])):
        yield groups[place] - start


def _join(choice: list[_Piece]) -> str:
    parts, start = [], 0
    while start < len(choice):
        parts.append(choice[start].text)
        start = choice[start].next
    return "".join(parts)


def _run_sizes(signs: str) -> list[int]:
    """For each place how many equal signs follow from it on."""
    runs = [1] * len(signs)
    for start in range(len(signs) - 2, -1, -1):
        if signs[start] == signs[start + 1]:
            runs[start] = runs[start + 1] + 1
    return runs


def _runs(signs: str) -> tuple[str, int]:
    """The shortest string for ``signs`` without groups, and how many parts it has."""
    texts, parts, start, runs = [], 0, 0, _run_sizes(signs)
    while start < len(signs):
        run = runs[start]
        texts.append(f"{signs[start]}*{run}" if run > 2 else signs[start] * run)
        parts, start = parts + (1 if run > 2 else run), start + run
    return "".join(texts), parts


def _repeats(signs: str, runs: Sequence[int]) -> list[list[tuple[int, int]]]:
    """For each start all (period, times) such that ``signs`` repeats there, times at least 2.

    A period that itself repeats a shorter one is left out: the shorter one is never longer to
    write, and a run of one sign needs no group.
    """
    size = len(signs)
    found: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    longest = size // 2 if size <= _EXACT else min(size // 2, _LONGEST_PERIOD)
    for period in range(2, longest + 1):
        equal = 0  # signs from here on that equal those one period later
        for start in range(size - period - 1, -1, -1):
            equal = equal + 1 if signs[start] == signs[start + period] else 0
            if equal < period or runs[start] >= 2 * period:
                continue
            shorter = found[start]
            if not any(period % p == 0 and p * times >= 2 * period for p, times in shorter):
                shorter.append((period, 1 + equal // period))
    return found
