"""Which units to keep gathered between two uses, within a budget of bytes.

The order of uses is known, so this is offline caching: keep what is needed again soonest. An
interval runs from one use of a unit to its next; kept, it occupies the unit's bytes in between and
saves one gather. Budget for three layers, of equal size, used 0 1 2 2 1 0::

    use          0   1   2   2   1   0
    layer 2              |===|                  shortest: kept first
    layer 1          |===========|
    layer 0      |===================|          longest: the first to be freed

Shortest intervals first is what Belady's rule keeps (IBM Systems Journal 5(2), 1966).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mfsdp_cli.fsdp.order import Use


def kept_uses(uses: Sequence[Use], sizes: Mapping[int, int], budget: int) -> frozenset[int]:
    """Positions of uses after which the unit stays gathered to its next use.

    Args:
        uses: of one step. Nothing is kept over its end: the weights change there.
        sizes: bytes of a unit while gathered, by its index.
        budget: bytes that all gathered units may take, the one in use and the one that is on its
            way included. What these two need is always there, beyond the budget if it must be.
    """
    taken = [_working_bytes(uses, sizes, position) for position in range(len(uses))]
    kept = set()
    for start, stop in sorted(_intervals(uses), key=lambda interval: interval[1] - interval[0]):
        unit = uses[start].unit
        between = [p for p in range(start + 1, stop) if unit not in _working(uses, p)]
        if all(taken[position] + sizes[unit] <= budget for position in between):
            kept.add(start)
            for position in between:
                taken[position] += sizes[unit]
    return frozenset(kept)


def _working(uses: Sequence[Use], position: int) -> set[int]:
    """The unit in use and the one that is prefetched meanwhile."""
    return {use.unit for use in uses[position : position + 2]}


def _working_bytes(uses: Sequence[Use], sizes: Mapping[int, int], position: int) -> int:
    return sum(sizes[unit] for unit in _working(uses, position))


def _intervals(uses: Sequence[Use]) -> list[tuple[int, int]]:
    latest: dict[int, int] = {}
    intervals = []
    for position, use in enumerate(uses):
        if use.unit in latest:
            intervals.append((latest[use.unit], position))
        latest[use.unit] = position
    return intervals
