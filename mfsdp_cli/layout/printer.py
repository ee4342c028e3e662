"""Layouts as the shortest string that Megatron reads as the same layout."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from mfsdp_cli.layout.layout import Layout, StageLayout


def format_layout(layout: Layout) -> str:
    """The shortest layout string; of equally short ones the one of fewest parts."""
    return compress("|".join(stage_signs(stage) for stage in layout.stages))


def stage_signs(stage: StageLayout) -> str:
    """One stage spelt out, as in ``Ettt``."""
    return "E" * stage.embedding + "t" * len(stage.layers) + "m" * len(stage.mtp) + "L" * stage.loss


@lru_cache(maxsize=64)
def compress(signs: str) -> str:
    """The shortest string of the grammar that expands to ``signs``.

    Dynamic programming from the end: the rest from a sign on begins with that sign, with a run of
    it (``t*4``) or with a group that repeats (``(tt|)*29``); groups hold no groups.
    """
    size = len(signs)
    cost, choice = [(0, 0)] * (size + 1), [_Piece("", 0)] * size
    repeats = _repeats(signs)
    for start in range(size - 1, -1, -1):
        best = (cost[start + 1][0] + 1, cost[start + 1][1] + 1)
        piece = _Piece(signs[start], start + 1)
        for length in range(3, _run(signs, start) + 1):  # tt is shorter than t*2
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


def _join(choice: list[_Piece]) -> str:
    parts, start = [], 0
    while start < len(choice):
        parts.append(choice[start].text)
        start = choice[start].next
    return "".join(parts)


def _run(signs: str, start: int) -> int:
    end = start
    while end < len(signs) and signs[end] == signs[start]:
        end += 1
    return end - start


def _runs(signs: str) -> tuple[str, int]:
    """The shortest string for ``signs`` without groups, and how many parts it has."""
    texts, parts, start = [], 0, 0
    while start < len(signs):
        run = _run(signs, start)
        texts.append(f"{signs[start]}*{run}" if run > 2 else signs[start] * run)
        parts, start = parts + (1 if run > 2 else run), start + run
    return "".join(texts), parts


def _repeats(signs: str) -> list[list[tuple[int, int]]]:
    """For each start all (period, times) such that ``signs`` repeats there, times at least 2.

    A period that itself repeats a shorter one is left out: the shorter one is never longer to
    write, and a run of one sign needs no group.
    """
    size = len(signs)
    found: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    runs = [_run(signs, start) for start in range(size)]
    for period in range(2, size // 2 + 1):
        equal = 0  # signs from here on that equal those one period later
        for start in range(size - period - 1, -1, -1):
            equal = equal + 1 if signs[start] == signs[start + period] else 0
            if equal < period or runs[start] >= 2 * period:
                continue
            shorter = found[start]
            if not any(period % p == 0 and p * times >= 2 * period for p, times in shorter):
                shorter.append((period, 1 + equal // period))
    return found
