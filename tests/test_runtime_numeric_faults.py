"""Numeric validation on real runs: the sound engine passes, every fault put into it is named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from mfsdp_cli.fsdp.context import Context
from mfsdp_cli.fsdp.optimizer import ShardedOptimizer
from mfsdp_cli.fsdp.parameter_group import ParameterGroup
from mfsdp_cli.fsdp.shared_parameters import SharedParameter
from mfsdp_cli.plan import Plan
from mfsdp_cli.runtime import engine_mfsdp
from mfsdp_cli.runtime.engine import Engine
from mfsdp_cli.runtime.engine_mfsdp import MfsdpEngine
from mfsdp_cli.runtime.numeric.capture import save_steps
from mfsdp_cli.runtime.numeric.job import Capture
from mfsdp_cli.runtime.numeric.run import judge, load_steps
from mfsdp_cli.runtime.stage_runner import StageRunner
from mfsdp_cli.runtime.topology import Topology
from tests.helpers.alone import alone
from tests.helpers.plans import plan_of
from tests.helpers.ranks import run_ranks
from tests.helpers.training import engine_of, reconnect

STEPS = 2
Fault = Callable[[], AbstractContextManager[Any]]


def _plan() -> Plan:
    """The tied model on two stages a rank, two data-parallel ranks."""
    return plan_of("gpt2-tiny", pp=2, vpp=2, dp=2, resident_chunks=2)


def _doubled_gradient() -> AbstractContextManager[Any]:
    collect = ParameterGroup.collect_gradients

    def twice(group: ParameterGroup) -> None:
        for name, parameter in zip(group.names, group.parameters, strict=True):
            if name.endswith("mlp.linear_fc1.weight") and parameter.grad is not None:
                parameter.grad.mul_(2)
        collect(group)

    return patch.object(ParameterGroup, "collect_gradients", twice)


def _dropped_microbatch() -> AbstractContextManager[Any]:
    backward = StageRunner.backward

    def scaled(runner: StageRunner, microbatch: int, gradient: Any) -> Any:
        with patch.object(runner, "_loss_scale", runner._loss_scale * (microbatch != 1)):
            return backward(runner, microbatch, gradient)

    return patch.object(StageRunner, "backward", scaled)


def _lost_gradient() -> AbstractContextManager[Any]:
    """One unit's first reduction of the step adds nothing."""
    reduce = Context._reduce

    def skip(context: Context, unit: Any) -> None:
        if unit.name == "decoder.layers.1" and not getattr(context, "lost", False):
            context.lost = True  # type: ignore[attr-defined]
            for group in unit.groups:
                group.unsharded_grad.zero_()
        reduce(context, unit)

    return patch.object(Context, "_reduce", skip)


def _swapped_layers() -> AbstractContextManager[Any]:
    build = engine_mfsdp.build_chunks

    def swapped(*args: Any, **kwargs: Any) -> Any:
        chunks = build(*args, **kwargs)
        first, second, *others = chunks[0].module.decoder.layers
        chunks[0].module.decoder.layers = nn.ModuleList([second, first, *others])
        return chunks

    return patch.object(engine_mfsdp, "build_chunks", swapped)


def _drifting_copy() -> AbstractContextManager[Any]:
    """The head's copy starts an ulp away in one element."""
    build = engine_mfsdp.build_chunks

    def drifted(*args: Any, **kwargs: Any) -> Any:
        chunks = build(*args, **kwargs)
        for chunk in chunks:
            if chunk.stage.loss:
                weight = chunk.module.output_layer.weight.data
                weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(1.0))
        return chunks

    return patch.object(engine_mfsdp, "build_chunks", drifted)


def _one_sample_twice() -> AbstractContextManager[Any]:
    def batches(engine: MfsdpEngine, step: int, source: Any) -> Any:
        return lambda microbatch: source(step, microbatch * engine._topology.dp)

    return patch.object(MfsdpEngine, "_batches_of", batches)


def _everything_counts(optimizer: ShardedOptimizer) -> list[torch.Tensor]:
    return [group.main_grad for group in optimizer._groups if group.main_grad is not None]


#: Fault -> what puts it in, and the step and phase that must be named.
FAULTS: dict[str, tuple[Fault, str]] = {
    "none": (nullcontext, ""),
    "a gradient counts twice": (_doubled_gradient, "1 gradient"),
    "a microbatch is dropped": (_dropped_microbatch, "1 gradient"),
    "a reduction is lost": (_lost_gradient, "1 gradient"),
    "copies are not summed": (
        lambda: patch.object(SharedParameter, "sum_gradients", lambda _: 0),
        "1 gradient",
    ),
    "the norm counts a copy": (
        lambda: patch.object(ShardedOptimizer, "_counted_gradients", _everything_counts),
        "1 norm",
    ),
    "nothing is clipped": (
        lambda: patch.object(ShardedOptimizer, "clip", lambda *_: 1.0),
        "1 update",
    ),
    "gathered weights are stale": (
        lambda: patch.object(Context, "release", lambda *_: None),
        "2 forward",
    ),
    "layers are swapped": (_swapped_layers, "1 forward"),
    "ranks train on one sample": (_one_sample_twice, "1 forward"),
    "copies differ": (_drifting_copy, "1 copies"),
}


def _save(engine: Engine, name: str, folder: str, topology: Topology) -> Capture:
    capture = Capture(folder, name, STEPS, "gloo", full=True)
    save_steps(engine, capture, topology)
    return capture


def _run_all(rank: int, world: int, folder: str) -> None:
    topology = reconnect(_plan())
    for name, (fault, _) in FAULTS.items():
        with fault():
            _save(engine_of("mfsdp", _plan(), topology), name, folder, topology)


def test_every_fault_is_named_and_the_sound_engine_passes(tmp_path: Path) -> None:
    plan = _plan()
    reference = load_steps(
        _save(engine_of("single", plan, alone()), "single", str(tmp_path), alone()), 1
    )
    run_ranks(4, _run_all, str(tmp_path))
    found = {}
    for name in FAULTS:
        mine = load_steps(Capture(str(tmp_path), name, STEPS, "gloo", full=True), 4)
        result = judge(plan, mine, reference, None, reference)
        first = result.document["first_divergence"]
        found[name] = f"{first['step']} {first['phase']}" if first else ""
        assert len(result.findings) == bool(first)
    assert found == {name: expected for name, (_, expected) in FAULTS.items()}
