"""The catalogue of faults: each changes the engine where the mistake would be made.

A fault is a context manager. While it is open, real code of the engine or the runner is replaced
by code with the mistake; what is reported is never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from mfsdp_cli.fsdp import parameter_group as groups
from mfsdp_cli.fsdp.context import Context
from mfsdp_cli.fsdp.mesh import ShardMesh
from mfsdp_cli.fsdp.optimizer import ShardedOptimizer
from mfsdp_cli.fsdp.parameter_group import ParameterGroup, Reduction
from mfsdp_cli.fsdp.reductions import Reductions
from mfsdp_cli.fsdp.shared_parameters import SharedParameter
from mfsdp_cli.runtime import engine_mfsdp, forward
from mfsdp_cli.runtime.chunks import set_initial_weights
from mfsdp_cli.runtime.engine_mfsdp import MfsdpEngine
from mfsdp_cli.runtime.executor import Executor
from mfsdp_cli.runtime.stage_runner import StageRunner
from mfsdp_cli.schedule.actions import Action, Kind

Installed = AbstractContextManager[Any]


@dataclass(frozen=True)
class Fault:
    """A mistake and what numeric validation must say of it.

    Args:
        install: puts it in.
        found: step and phase of the first divergence; empty where there is none.
        said: part of the explanation.
    """

    install: Callable[[], Installed]
    found: str
    said: str = ""


NONE = Fault(nullcontext, "")

# -- gradients: how often they count ---------------------------------------------------------------


def _doubled_gradient() -> Installed:
    collect = ParameterGroup.collect_gradients

    def twice(group: ParameterGroup) -> None:
        for name, parameter in zip(group.names, group.parameters, strict=True):
            if name.endswith("mlp.linear_fc1.weight") and parameter.grad is not None:
                parameter.grad.mul_(2)
        collect(group)

    return patch.object(ParameterGroup, "collect_gradients", twice)


def _scaled_losses(scale: Callable[[float], float]) -> Installed:
    build = StageRunner.__init__

    def wrong(
        runner: StageRunner, chunk: Any, loss_scale: float, *others: Any, **named: Any
    ) -> None:
        build(runner, chunk, scale(loss_scale), *others, **named)

    return patch.object(StageRunner, "__init__", wrong)


def _dropped_microbatch() -> Installed:
    backward = StageRunner.backward

    def scaled(runner: StageRunner, microbatch: int, gradient: Any) -> Any:
        with patch.object(runner, "_loss_scale", runner._loss_scale * (microbatch != 1)):
            return backward(runner, microbatch, gradient)

    return patch.object(StageRunner, "backward", scaled)


def _lost_gradient() -> Installed:
    """One unit's first reduction of the step adds nothing."""
    start = Reductions.start

    def skip(reductions: Reductions, unit: Any, **how: Any) -> None:
        if unit.name == "decoder.layers.1" and not getattr(reductions, "lost", False):
            reductions.lost = True  # type: ignore[attr-defined]
            for group in unit.groups:
                group.unsharded_grad.zero_()
        start(reductions, unit, **how)

    return patch.object(Reductions, "start", skip)


def _added_up(add: Callable[[ParameterGroup, torch.Tensor, torch.Tensor], None]) -> Installed:
    """Every reduction ends in another way of adding its shard to the main gradient."""

    def accumulate(group: ParameterGroup, shard: torch.Tensor) -> None:
        assert group.main_grad is not None
        add(group, group.main_grad, shard)

    return patch.object(ParameterGroup, "accumulate", accumulate)


def _overwritten(group: ParameterGroup, main_grad: torch.Tensor, shard: torch.Tensor) -> None:
    main_grad.copy_(shard / group.mesh.divisor)


def _summed_over_ranks(group: ParameterGroup, main_grad: torch.Tensor, shard: torch.Tensor) -> None:
    main_grad.add_(shard)


def _divided_twice(group: ParameterGroup, main_grad: torch.Tensor, shard: torch.Tensor) -> None:
    main_grad.add_(shard, alpha=1.0 / group.mesh.divisor**2)


def _rounded(group: ParameterGroup, main_grad: torch.Tensor, shard: torch.Tensor) -> None:
    main_grad.add_(shard, alpha=1.0 / group.mesh.divisor)
    main_grad.copy_(main_grad.bfloat16())


def _doubled_alone(group: ParameterGroup, main_grad: torch.Tensor, shard: torch.Tensor) -> None:
    """A group of one: the shard is the unsharded gradient, and counts as both."""
    main_grad.add_(shard, alpha=1.0 / group.mesh.divisor)
    if group.mesh.size == 1:
        main_grad.add_(shard)


def _replicas_added_up_always() -> Installed:
    """Hybrid sharding: the outer sum after every microbatch takes in what was summed before."""
    start = Reductions.start

    def always(reductions: Reductions, unit: Any, **_: Any) -> None:
        start(reductions, unit, is_last=True)

    return patch.object(Reductions, "start", always)


def _undivided_experts() -> Installed:
    """Expert gradients are divided by the ranks that hold the expert alone."""
    return patch.object(ShardMesh, "divisor", property(lambda mesh: mesh.size * mesh.replicas))


# -- the tied embedding ----------------------------------------------------------------------------


def _sum_twice() -> Installed:
    add_up = SharedParameter.sum_gradients

    def twice(shared: SharedParameter) -> int:
        add_up(shared)
        return add_up(shared)

    return patch.object(SharedParameter, "sum_gradients", twice)


def _sum_raw_shards() -> Installed:
    """Rank r of one stage adds what rank r of the other owns, place by place."""

    def add(shared: SharedParameter) -> int:
        group = shared.process_group
        assert group is not None
        own = shared._gradient(shared.local[0])
        sizes: list[int] = [0] * group.size()
        dist.all_gather_object(sizes, own.numel(), group=group)
        padded = torch.zeros(max(sizes))
        padded[: own.numel()] = own
        everyone = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(everyone, padded, group=group)
        partner = (group.rank() + group.size() // 2) % group.size()
        own.add_(everyone[partner][: own.numel()])
        return own.numel()

    return patch.object(SharedParameter, "sum_gradients", add)


def _embedding_not_reduced() -> Installed:
    """The copies are summed between stages from gradients of each data-parallel rank's own."""
    start = ParameterGroup.start_reduce

    def own_part(shard: torch.Tensor, whole: torch.Tensor, group: Any) -> dist.Work:
        shard.copy_(whole.chunk(group.size())[group.rank()]).mul_(group.size())
        work = dist.barrier(group=group, async_op=True)
        assert isinstance(work, dist.Work)
        return work

    def early(group: ParameterGroup, **how: Any) -> Reduction:
        shared = any("word_embeddings" in n or "output_layer" in n for n in group.names)
        with patch.object(groups, "reduce_scatter_sum", own_part) if shared else nullcontext():
            return start(group, **how)

    return patch.object(ParameterGroup, "start_reduce", early)


# -- norm, clipping, update ------------------------------------------------------------------------


def _everything_counts(optimizer: ShardedOptimizer) -> list[torch.Tensor]:
    return [group.main_grad for group in optimizer._groups if group.main_grad is not None]


def _replicas_count() -> Installed:
    """The squared norm is summed over data-parallel ranks, and then over all ranks again."""
    local = ShardedOptimizer.local_squared_norm

    def summed(optimizer: ShardedOptimizer) -> torch.Tensor:
        total = local(optimizer)
        dist.all_reduce(total, group=optimizer._groups[0].mesh.reduce)
        return total

    return patch.object(ShardedOptimizer, "local_squared_norm", summed)


def _early_state() -> Installed:
    """Adam's state is made by a step with zero gradients."""
    build = ShardedOptimizer.__init__

    def warmed(optimizer: ShardedOptimizer, *args: Any, **kwargs: Any) -> None:
        build(optimizer, *args, **kwargs)
        for weight, gradient in optimizer._slices:
            weight.grad = torch.zeros_like(gradient)
        for settings in optimizer._adam.param_groups:
            settings["lr"] = 0.0
        optimizer._adam.step()

    return patch.object(ShardedOptimizer, "__init__", warmed)


def _one_chunk_only() -> Installed:
    """The optimizer updates the weights of the first chunk alone."""
    update = ShardedOptimizer.update

    def first(optimizer: ShardedOptimizer, lr: float | None = None) -> None:
        chunk = optimizer.context.chunks[0]
        kept = [
            s for s in optimizer._slices if s[0].untyped_storage().data_ptr() in _pointers(chunk)
        ]
        with patch.object(optimizer, "_slices", kept):
            update(optimizer, lr)

    return patch.object(ShardedOptimizer, "update", first)


def _pointers(chunk: Any) -> set[int]:
    return {g.main_weight.untyped_storage().data_ptr() for u in chunk.units for g in u.groups}


# -- layers and weights ----------------------------------------------------------------------------


def _after_building(change: Callable[[Any], None]) -> Installed:
    build = engine_mfsdp.build_chunks

    def changed(*args: Any, **kwargs: Any) -> Any:
        chunks = build(*args, **kwargs)
        for chunk in chunks:
            change(chunk)
        return chunks

    return patch.object(engine_mfsdp, "build_chunks", changed)


def _swap_layers(chunk: Any) -> None:
    """The first two layers of a chunk run in the other order."""
    if len(chunk.stage.layers) > 1 and chunk.stage.embedding:
        first, second, *others = chunk.module.decoder.layers
        chunk.module.decoder.layers = nn.ModuleList([second, first, *others])


def _run_layer_twice(chunk: Any) -> None:
    """The second layer of the first chunk is the first once more."""
    if chunk.stage.embedding:
        layers = chunk.module.decoder.layers
        second = layers[1]

        def same(*args: Any, **kwargs: Any) -> Any:
            return layers[0](*args, **kwargs)

        second.forward = same


def _layout_seed(chunk: Any) -> None:
    set_initial_weights(chunk, 1234 + chunk.stage.stage)


def _move_copy(chunk: Any) -> None:
    """The head's copy starts an ulp away in one element."""
    if chunk.stage.loss:
        weight = chunk.module.output_layer.weight.data
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(1.0))


@contextmanager
def _built_twice() -> Iterator[None]:
    """The second stage builds the first stage's layers."""
    build = engine_mfsdp.build_chunks

    def wrong(spec: Any, layout: Any, *args: Any, **kwargs: Any) -> Any:
        first, second, *others = layout.stages
        again = replace(second, layers=first.layers)
        return build(spec, replace(layout, stages=(first, again, *others)), *args, **kwargs)

    with patch.object(engine_mfsdp, "build_chunks", wrong):
        yield


# -- what runs, and on what ------------------------------------------------------------------------


def _batches(index: Callable[[int, int, int], int]) -> Installed:
    def batches(engine: MfsdpEngine, step: int, source: Any) -> Any:
        topology = engine._topology
        return lambda microbatch: source(step, index(microbatch, topology.dp, topology.dp_rank))

    return patch.object(MfsdpEngine, "_batches_of", batches)


def _one_communicator() -> Installed:
    """Activations and gradients share a communicator, and a rank sends its gradient first.

    As batched point-to-point does with two ranks: both messages go to the same rank, which takes
    the first that comes for the activation.
    """
    make = MfsdpEngine._make_executor

    def shared(engine: MfsdpEngine) -> Executor:
        topology = engine._topology
        engine._actions = _gradients_first(engine._actions)
        engine._topology = replace(topology, pp_backward=topology.pp_forward)
        executor = make(engine)
        engine._topology = topology
        return executor

    return patch.object(MfsdpEngine, "_make_executor", shared)


def early_last_microbatch() -> Installed:
    """On a rank's first chunk the microbatch before the last counts as the last."""
    backward = Executor._backward

    def early(executor: Executor, action: Action) -> None:
        if action.stage in (0, 1) and action.microbatch == 0:
            executor._backwards_left[action.stage] -= 1
        backward(executor, action)

    return patch.object(Executor, "_backward", early)


def _gradients_first(actions: Sequence[Action]) -> list[Action]:
    """Where a forward and a backward follow one another, send what both made in one batch."""
    reordered = list(actions)
    for send in [action for action in actions if action.kind is Kind.SEND_F]:
        place = reordered.index(send)
        for later, action in enumerate(reordered[place + 1 :], start=place + 1):
            if action.kind is Kind.FORWARD:
                break
            if action.kind is Kind.SEND_B:
                reordered.insert(later, reordered.pop(place))
                break
    return reordered


def _evaluated_with_gradients() -> Installed:
    """Evaluation runs as a training step does, so that routers count its tokens."""
    evaluate = Executor.evaluate

    def counting(executor: Executor, batches: Any) -> None:
        with patch.object(torch, "is_grad_enabled", lambda: True):
            evaluate(executor, batches)

    return patch.object(Executor, "evaluate", counting)


def _auxiliary_scale_of_one() -> Installed:
    set_scale = forward.set_auxiliary_loss_scale
    return patch.object(
        forward, "set_auxiliary_loss_scale", lambda _scale, device: set_scale(1.0, device)
    )


def _router_counts_of_one_rank() -> Installed:
    update = forward.update_router_bias
    return patch.object(
        forward, "update_router_bias", lambda modules, rate, _group: update(modules, rate, None)
    )


#: Tied embedding and head, two stages a rank, two data-parallel ranks, four microbatches.
TIED = {
    "none": NONE,
    "a gradient counts twice": Fault(
        _doubled_gradient, "1 gradient", "ratio 2.000 on decoder.layers."
    ),
    "a microbatch is dropped": Fault(
        _dropped_microbatch, "1 gradient", "microbatch 1 of data-parallel rank 0"
    ),
    "a reduction is lost": Fault(
        _lost_gradient, "1 gradient", "microbatch 0 of data-parallel rank 0"
    ),
    "only the last microbatch is kept": Fault(
        lambda: _added_up(_overwritten), "1 gradient", "only the last microbatch counts"
    ),
    "the mean over microbatches is taken twice": Fault(
        lambda: _scaled_losses(lambda scale: scale**2),
        "1 gradient",
        "ratio 0.250 on every gradient: the mean over microbatches is taken twice",
    ),
    "the mean over microbatches is a sum": Fault(
        lambda: _scaled_losses(lambda _scale: 1.0),
        "1 gradient",
        "ratio 4.000 on every gradient: the mean over microbatches is a sum",
    ),
    "the mean over ranks is a sum": Fault(
        lambda: _added_up(_summed_over_ranks),
        "1 gradient",
        "ratio 2.000 on every gradient: the mean over data-parallel ranks is a sum",
    ),
    "the mean over ranks is taken twice": Fault(
        lambda: _added_up(_divided_twice),
        "1 gradient",
        "ratio 0.500 on every gradient: the mean over data-parallel ranks is taken twice",
    ),
    "gradients are added up in bf16": Fault(
        lambda: _added_up(_rounded), "1 gradient", "added up in bf16"
    ),
    "copies are not summed": Fault(
        lambda: patch.object(SharedParameter, "sum_gradients", lambda _: 0),
        "1 gradient",
        "the copies of embedding.word_embeddings.weight are not summed",
    ),
    "copies count on both stages": Fault(
        _sum_twice,
        "1 gradient",
        "ratio 2.000 on the tied embedding: counted on both stages",
    ),
    "copies are summed over raw shards": Fault(
        _sum_raw_shards, "1 gradient", "by place in shards that start at different offsets"
    ),
    "copies are summed before the mean over ranks": Fault(
        _embedding_not_reduced, "1 gradient", "before the mean over data-parallel ranks"
    ),
    "the norm counts a copy": Fault(
        lambda: patch.object(ShardedOptimizer, "_counted_gradients", _everything_counts),
        "1 norm",
        "embedding.word_embeddings.weight is counted 2 times, once a copy",
    ),
    "the norm counts replicas": Fault(
        _replicas_count,
        "1 norm",
        "(ratio 1.4142): every data-parallel rank's replica is counted",
    ),
    "nothing is clipped": Fault(
        lambda: patch.object(ShardedOptimizer, "clip", lambda *_: 1.0),
        "1 clip",
        "nothing was clipped",
    ),
    "Adam's state is made from a zero gradient": Fault(
        _early_state, "1 update", "1.36 times too small"
    ),
    "the optimizer holds one chunk": Fault(
        _one_chunk_only, "1 update", "none; the optimizer does not hold"
    ),
    "gathered weights are stale": Fault(
        lambda: patch.object(Context, "release", lambda *_: None), "2 forward", "stale"
    ),
    "layers are swapped": Fault(
        lambda: _after_building(_swap_layers), "0 initial weights", "starts from other values"
    ),
    "a layer runs twice": Fault(
        lambda: _after_building(_run_layer_twice), "1 forward", "ran twice"
    ),
    "a layer is built twice, another never": Fault(
        _built_twice, "0 initial weights", "a layer is built twice or never"
    ),
    "initial weights depend on the layout": Fault(
        lambda: _after_building(_layout_seed), "0 initial weights", "depend on the layout"
    ),
    "copies differ": Fault(
        lambda: _after_building(_move_copy), "0 copies", "start from different values"
    ),
    "ranks train on one sample": Fault(
        lambda: _batches(lambda microbatch, dp, _: microbatch * dp),
        "1 forward",
        "it took the tokens for microbatch 0 of data-parallel rank 0 instead of its own",
    ),
    "a microbatch runs twice": Fault(
        lambda: _batches(lambda microbatch, dp, rank: max(1, microbatch) * dp + rank),
        "1 forward",
        "it took the tokens for microbatch 1 of data-parallel rank 0 instead of its own",
    ),
    "activations and gradients share a communicator": Fault(
        _one_communicator, "1 forward", "activations and gradients mixed up on one communicator"
    ),
}

#: A mixture of experts with router biases and a balancing loss.
EXPERTS = {
    "none": NONE,
    "evaluation counts router tokens": Fault(
        _evaluated_with_gradients, "1 router bias", "tokens of evaluation"
    ),
    "balancing losses are not scaled": Fault(
        _auxiliary_scale_of_one, "1 gradient", "the balancing loss is scaled otherwise"
    ),
    "router counts are one rank's": Fault(
        _router_counts_of_one_rank, "1 copies", "not summed over the data-parallel ranks"
    ),
}

#: Experts spread over two data-parallel ranks.
SPREAD_EXPERTS = {
    "none": NONE,
    "expert gradients are not divided": Fault(
        _undivided_experts,
        "1 gradient",
        "expert gradients are not divided by the data-parallel size",
    ),
}

#: Hybrid sharding: two replicas of every shard.
HYBRID = {
    "none": NONE,
    "the norm counts replicas": Fault(
        lambda: patch.object(ShardMesh, "replica", property(lambda _: 0)),
        "1 norm",
        "(ratio 1.4142): every data-parallel rank's replica is counted",
    ),
    "replicas are not added up": Fault(
        lambda: patch.object(Reduction, "replicated_bytes", property(lambda _: 0)),
        "1 gradient",
        "only the microbatches of one data-parallel rank count",
    ),
    "replicas are added up every microbatch": Fault(
        _replicas_added_up_always, "1 gradient", "times instead of once each"
    ),
}

#: A multi-token-prediction layer on a stage of its own.
AHEAD = {
    "none": NONE,
    "the loss of MTP is not scaled": Fault(
        _auxiliary_scale_of_one,
        "1 gradient",
        "the multi-token-prediction loss is not scaled by 1/microbatches",
    ),
    "the copy of MTP is outside the shared group": Fault(
        lambda: patch.object(engine_mfsdp, "_shared_parameters", lambda *_: []),
        "1 gradient",
        "the copies of embedding.word_embeddings.weight are not summed",
    ),
}

#: One data-parallel rank.
ALONE = {
    "none": NONE,
    "gradients are doubled in a group of one": Fault(
        lambda: _added_up(_doubled_alone),
        "1 gradient",
        "ratio 2.000 on every gradient: doubled where the data-parallel group has one rank",
    ),
}
