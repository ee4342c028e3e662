"""Hybrid sharding on a plain module, worked by hand: four ranks, two shards, two replicas.

The weight has three elements, padded to four. Rank r multiplies it by r + 1, so that its gradient
is r + 1 everywhere, and the mean over four ranks is 2.5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mfsdp_cli.fsdp import (
    AdamSettings,
    Context,
    ShardedOptimizer,
    ShardMesh,
    full_gradients,
    full_weights,
    fully_shard,
    fully_shard_context,
    microbatch,
)
from tests.helpers.ranks import run_ranks

ELEMENTS = 3


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ELEMENTS))

    def forward(self, factor: float) -> torch.Tensor:
        return self.weight * factor


def wrapped(mesh: ShardMesh, **options: Any) -> tuple[Scale, Context]:
    model = Scale()
    with fully_shard_context("cpu") as context:
        fully_shard(model, mesh, name="scale", **options)
    return model, context


class Groups:
    """Communicators of four ranks: shards within {0, 1} and {2, 3}, copies in {0, 2} and {1, 3}."""

    def __init__(self, rank: int) -> None:
        def mine(first: list[int], second: list[int]) -> Any:
            groups = dist.new_group(first), dist.new_group(second)
            return groups[0] if rank in first else groups[1]

        self.gather, self.reduce = mine([0, 1], [2, 3]), mine([0, 1], [2, 3])
        self.replicate = mine([0, 2], [1, 3])

    def mesh(self, divisor: int | None = None) -> ShardMesh:
        return ShardMesh(self.gather, self.reduce, self.replicate, divisor)


def backward(model: Scale, context: Context, factors: list[float], *, forget: bool = False) -> None:
    """One microbatch a factor; ``forget`` leaves the last one's ``is_last`` out."""
    for number, factor in enumerate(factors):
        with microbatch(context, is_last=number == len(factors) - 1 and not forget):
            model(factor).sum().backward()


def gradient_of(context: Context) -> list[float]:
    (unit,) = context.units
    ((_, gradient),) = full_gradients(unit)
    return gradient.tolist()


def _mean(rank: int, groups: Groups) -> Any:
    model, context = wrapped(groups.mesh())
    events: list[tuple[str, int]] = []
    context.on_event = lambda event: events.append((event.operation, event.bytes))
    optimizer = ShardedOptimizer([model], AdamSettings(), norm_group=dist.group.WORLD)
    context.zero_grad()
    backward(model, context, [rank + 1.0, rank + 1.0])
    before_the_end = list(events)
    context.finish_reductions()
    return gradient_of(context), before_the_end, events, float(optimizer.grad_norm())


def _divided(rank: int, groups: Groups) -> Any:
    model, context = wrapped(groups.mesh(divisor=2))
    backward(model, context, [rank + 1.0])
    context.finish_reductions()
    return gradient_of(context)


def _forgotten(rank: int, groups: Groups) -> Any:
    model, context = wrapped(groups.mesh())
    optimizer = ShardedOptimizer([model], AdamSettings())
    backward(model, context, [rank + 1.0], forget=True)
    try:
        optimizer.step()
    except RuntimeError as error:
        message = str(error)
    else:
        message = ""
    # The lost step leaves nothing: the next one is as if it had been the first.
    context.zero_grad()
    backward(model, context, [rank + 1.0])
    context.finish_reductions()
    return message, gradient_of(context)


def _low_precision(rank: int, groups: Groups) -> Any:
    model, context = wrapped(groups.mesh(), gradient_dtype=torch.bfloat16)
    backward(model, context, [256.0, 1.0, 1.0])
    context.finish_reductions()
    (group,) = context.groups
    assert group.main_grad is not None
    return gradient_of(context), str(group.main_grad.dtype)


def _replicas_stay_equal(rank: int, groups: Groups) -> Any:
    model, context = wrapped(groups.mesh())
    optimizer = ShardedOptimizer([model], AdamSettings(lr=0.1), norm_group=dist.group.WORLD)
    for _ in range(3):
        context.zero_grad()
        backward(model, context, [rank + 1.0])
        optimizer.step()
    (unit,) = context.units
    ((_, weight),) = full_weights(unit)
    return weight.tolist()


SCENARIOS = (_mean, _divided, _forgotten, _low_precision, _replicas_stay_equal)


def _all(rank: int, _world: int) -> dict[str, Any]:
    groups = Groups(rank)
    return {scenario.__name__: scenario(rank, groups) for scenario in SCENARIOS}


@pytest.fixture(scope="module")
def on_four() -> list[dict[str, Any]]:
    return run_ranks(4, _all)


def test_gradients_1_to_4_become_their_mean_on_every_rank(on_four: list[dict[str, Any]]) -> None:
    for rank in on_four:
        gradient, _, _, _ = rank["_mean"]
        assert gradient == [2 * 2.5] * ELEMENTS  # two microbatches


def test_replicas_are_summed_once_a_step_after_the_last_microbatch(
    on_four: list[dict[str, Any]],
) -> None:
    padded, shard = 4 * 4, 2 * 4  # bytes
    for rank in on_four:
        _, before_the_end, events, _ = rank["_mean"]
        microbatch_events = [("gather", padded), ("gather", padded), ("reduce", padded)]
        assert before_the_end == microbatch_events * 2
        assert events == [*before_the_end, ("replicate", shard)]


def test_the_norm_counts_one_replica(on_four: list[dict[str, Any]]) -> None:
    for rank in on_four:
        assert rank["_mean"][3] == pytest.approx(5 * math.sqrt(ELEMENTS), rel=1e-12)


def test_the_divisor_replaces_the_number_of_ranks(on_four: list[dict[str, Any]]) -> None:
    for rank in on_four:
        assert rank["_divided"] == [(1 + 2 + 3 + 4) / 2] * ELEMENTS


def test_a_forgotten_last_microbatch_is_an_error_and_the_next_step_is_right(
    on_four: list[dict[str, Any]],
) -> None:
    for rank in on_four:
        message, gradient = rank["_forgotten"]
        assert "is_last=True" in message
        assert gradient == [2.5] * ELEMENTS


def test_bf16_gradients_are_added_up_in_fp32(on_four: list[dict[str, Any]]) -> None:
    assert (torch.tensor(256.0, dtype=torch.bfloat16) + 1).item() == 256  # what it must not do
    for rank in on_four:
        gradient, dtype = rank["_low_precision"]
        assert gradient == [258.0] * ELEMENTS
        assert dtype == "torch.bfloat16"


def test_replicas_hold_the_same_weights_after_three_steps(on_four: list[dict[str, Any]]) -> None:
    weights = [rank["_replicas_stay_equal"] for rank in on_four]
    assert all(weight == weights[0] for weight in weights)
    # A constant gradient: Adam moves each element by the learning rate a step.
    assert weights[0] == pytest.approx([1 - 3 * 0.1] * ELEMENTS, rel=1e-6)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Scale()
        self.weight = nn.Parameter(torch.ones(ELEMENTS))


def _two_chunks() -> tuple[Pair, Scale]:
    first, second = Pair(), Scale()
    with fully_shard_context("cpu"):
        fully_shard(first.inner, ShardMesh(), name="inner")
        fully_shard(first, ShardMesh(), name="first")
        fully_shard(second, ShardMesh(), name="second")
    return first, second


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda first, second: [], "at least one chunk"),
        (lambda first, second: [first, second, second], "once, got Scale twice"),
        (lambda first, second: [first], "\\['second'\\] were left out"),
        (lambda first, second: [first, second, Scale()], "wrapped by fully_shard, got a Scale"),
        (lambda first, second: [first, second, first.inner], "outermost modules, got Scale"),
        (lambda first, second: [first, second, *_two_chunks()], "one fully_shard_context"),
    ],
    ids=["empty", "twice", "left-out", "not-wrapped", "inner", "two-contexts"],
)
def test_an_optimizer_takes_every_chunk_of_one_context_once(
    choose: Callable[[Pair, Scale], list[nn.Module]], message: str
) -> None:
    first, second = _two_chunks()
    with pytest.raises(ValueError, match=message):
        ShardedOptimizer(choose(first, second), AdamSettings())
    assert ShardedOptimizer([second, first], AdamSettings()).context.finalized
