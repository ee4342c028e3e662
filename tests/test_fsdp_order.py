"""The order of uses: planned, traced, replayed, diverged, given up."""

from __future__ import annotations

from mfsdp_cli.fsdp.order import Orientation, Use, UseOrder

A, B, C = (Use(unit, Orientation.FORWARD) for unit in range(3))


def step(order: UseOrder, *uses: Use) -> list[Use | None]:
    """What is expected after each use of a step."""
    following = [order.advance(use) for use in uses]
    order.end_step()
    return following


def test_a_planned_order_is_followed_from_the_first_step() -> None:
    order = UseOrder([A, B, A])
    assert step(order, A, B, A) == [B, A, None]
    assert step(order, A, B, A) == [B, A, None]
    assert order.divergences == 0


def test_without_a_plan_the_first_step_is_traced_and_replayed() -> None:
    order = UseOrder()
    assert step(order, A, B, C) == [None, None, None]
    assert step(order, A, B, C) == [B, C, None]


def test_orientations_have_different_successors() -> None:
    back = Use(0, Orientation.BACKWARD)
    order = UseOrder()
    step(order, A, B, back, C)
    assert [order.advance(use) for use in (A, B, back)] == [B, back, C]


def test_another_use_ends_the_replay_and_the_next_step_follows_what_ran() -> None:
    order = UseOrder([A, B, C])
    assert step(order, A, C, B) == [B, None, None]
    assert order.divergences == 1
    assert step(order, A, C, B) == [C, B, None]
    assert order.divergences == 1


def test_a_shorter_and_a_longer_step_become_the_order() -> None:
    order = UseOrder([A, B, C])
    assert step(order, A, B) == [B, C]
    assert step(order, A, B) == [B, None]
    assert step(order, A, B, C) == [B, None, None]
    assert step(order, A, B, C) == [B, C, None]
    assert order.divergences == 2


def test_a_step_without_uses_keeps_the_order_to_come() -> None:
    order = UseOrder([])
    assert step(order) == []
    assert step(order, A) == [None]
    assert step(order, A) == [None]


def test_a_step_that_was_given_up_leaves_the_order_as_it_was() -> None:
    order = UseOrder([A, B, C])
    order.advance(A)
    order.restart()
    assert step(order, A, B, C) == [B, C, None]
    assert order.divergences == 0
