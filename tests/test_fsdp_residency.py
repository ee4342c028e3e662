"""Which units stay gathered: within the budget, none left out, the most that can be."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations

import pytest

from mfsdp_cli.fsdp.order import Orientation, Use
from mfsdp_cli.fsdp.residency import kept_uses


def uses_of(*units: int) -> list[Use]:
    return [Use(unit, Orientation.FORWARD) for unit in units]


def gathered(uses: Sequence[Use], kept: frozenset[int], position: int) -> set[int]:
    """The units that are gathered during a use, kept ones and the prefetched one included."""
    there = {use.unit for use in uses[position : position + 2]}
    for start in kept:
        unit = uses[start].unit
        stop = next(p for p in range(start + 1, len(uses)) if uses[p].unit == unit)
        if start <= position <= stop:
            there.add(unit)
    return there


def fits(uses: Sequence[Use], sizes: dict[int, int], budget: int, kept: frozenset[int]) -> bool:
    """Whether nothing goes beyond the budget but what a use and its prefetch need anyway."""
    for position in range(len(uses)):
        there = gathered(uses, kept, position)
        needed = gathered(uses, frozenset(), position)
        if there != needed and sum(sizes[unit] for unit in there) > budget:
            return False
    return True


def choices(uses: Sequence[Use]) -> list[int]:
    """Uses that another use of the same unit follows."""
    return [
        position
        for position, use in enumerate(uses)
        if any(later.unit == use.unit for later in uses[position + 1 :])
    ]


def most(uses: Sequence[Use], sizes: dict[int, int], budget: int) -> int:
    """By trying every choice: the most gathers that can be saved."""
    candidates = choices(uses)
    return max(
        number
        for number in range(len(candidates) + 1)
        for kept in combinations(candidates, number)
        if fits(uses, sizes, budget, frozenset(kept))
    )


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_forward_and_backward_keep_the_most_that_can_be_kept(
    layers: int, microbatches: int
) -> None:
    one = [*range(layers), *reversed(range(layers))]
    uses = uses_of(*(one * microbatches))[:12]
    sizes = dict.fromkeys(range(layers), 8)
    for budget in range(0, 8 * layers + 9, 8):
        kept = kept_uses(uses, sizes, budget)
        assert len(kept) == most(uses, sizes, budget), budget


@pytest.mark.parametrize("seed", range(40))
def test_any_order_stays_within_the_budget_and_leaves_nothing_out(seed: int) -> None:
    draw = random.Random(seed)
    units = draw.randint(2, 5)
    uses = uses_of(*(draw.randrange(units) for _ in range(draw.randint(2, 10))))
    sizes = {unit: draw.randint(1, 9) for unit in range(units)}
    budget = draw.randint(0, sum(sizes.values()))
    kept = kept_uses(uses, sizes, budget)
    assert fits(uses, sizes, budget, kept)
    for other in set(choices(uses)) - kept:
        assert not fits(uses, sizes, budget, kept | {other}), other
    assert len(kept) <= most(uses, sizes, budget)


def test_nothing_is_kept_over_the_end_of_a_step() -> None:
    assert kept_uses(uses_of(0, 1), {0: 1, 1: 1}, 100) == frozenset()
    assert kept_uses([], {}, 100) == frozenset()
