"""The executor on real chunks: evaluation and training side by side."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.alone import alone
from tests.helpers.plans import plan_of
from tests.helpers.ranks import run_ranks
from tests.helpers.training import engine_of, reconnect


def _evaluated(rank: int, world: int, resident: int) -> dict[str, Any]:
    """What an evaluation gathers at once and leaves, on two data-parallel ranks."""
    plan = plan_of("llama-tiny", dp=2, resident_chunks=resident)
    engine: Any = engine_of("mfsdp", plan, reconnect(plan))
    context = engine.context
    loss = engine.evaluate()
    return {
        "loss": loss,
        "units": sorted(unit.gathered_bytes for unit in context.units),
        "peak": context.peak_gathered_bytes,
        "left": context.gathered_bytes,
        "recorded": context.order._seen,
    }


@pytest.mark.parametrize("resident", [0, 1])
def test_evaluation_gathers_what_the_plan_allows(resident: int) -> None:
    for result in run_ranks(2, _evaluated, resident):
        units = result["units"]
        if resident:
            assert result["peak"] == sum(units)
        else:
            # The root stays while the others come one by one.
            assert result["peak"] <= sum(units[-2:])
            assert result["peak"] < sum(units) / 2
        assert result["left"] == 0
        assert result["recorded"] == []


def _watched(rank: int, world: int) -> list[Any]:
    """Evaluations before, between and after two steps, and the steps' losses and norms."""
    plan = plan_of("gpt2-tiny", pp=2, vpp=2)
    engine: Any = engine_of("mfsdp", plan, reconnect(plan))
    found: list[Any] = [engine.evaluate()]
    for step in (1, 2):
        result = engine.train_step(step)
        found += [result.loss, result.grad_norm, engine.evaluate(), engine.evaluate()]
    return [*found, engine.context.order.divergences]


def test_evaluations_are_the_references_and_leave_training_as_it_is() -> None:
    engine = engine_of("single", plan_of("gpt2-tiny"), alone())
    expected = [engine.evaluate()]
    for step in (1, 2):
        result = engine.train_step(step)
        expected += [result.loss, result.grad_norm, *[engine.evaluate()] * 2]
    for *found, divergences in run_ranks(2, _watched):
        assert found == pytest.approx(expected, rel=1e-6)
        assert divergences == 0
