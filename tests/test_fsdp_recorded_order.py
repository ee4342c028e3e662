"""What is gathered when, on plain torch modules: traced, replayed, left, recomputed, kept.

A log has ``+n`` where layer n is gathered, ``Fn`` where it runs forward (recomputation included)
and ``Bn`` where its output's gradient arrives. Two ranks run every scenario in one start.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from mfsdp_cli.fsdp import (
    AdamSettings,
    Event,
    ShardedOptimizer,
    ShardMesh,
    full_weights,
    fully_shard,
    fully_shard_context,
    microbatch,
)
from tests.helpers.ranks import run_ranks

WIDTH = 4
LAYER_BYTES = 4 * WIDTH * WIDTH
KINDS = ("plain", "reentrant", "not reentrant")


class Layer(nn.Module):
    def __init__(self, number: int, log: list[str]) -> None:
        super().__init__()
        self.number, self.log = number, log
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append(f"F{self.number}")
        return torch.tanh(self.linear(x))


class Model(nn.Module):
    """Layers one after the other; the model itself has no parameter of its own."""

    def __init__(self, layers: int, log: list[str], kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Layer(number, log) for number in range(layers))
        self.order: Sequence[int] = range(layers)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            layer = self.layers[number]
            if self.kind == "plain" or not torch.is_grad_enabled():
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.kind == "reentrant")
        return x


def _note_backward(module: nn.Module, _args: Any, output: torch.Tensor) -> None:
    if torch.is_grad_enabled() and output.requires_grad:
        log, number = module.log, module.number
        output.register_hook(lambda _gradient: log.append(f"B{number}"))  # type: ignore[union-attr]


class Run:
    """A sharded model with its optimizer, and what happened."""

    def __init__(self, layers: int = 3, *, kind: str = "plain", resident_bytes: int = 0) -> None:
        ranks = list(range(dist.get_world_size()))
        mesh = ShardMesh(dist.new_group(ranks), dist.new_group(ranks))
        self.log: list[str] = []
        self.model = Model(layers, self.log, kind)
        with fully_shard_context("cpu", resident_bytes=resident_bytes) as context:
            for number, layer in enumerate(self.model.layers):
                fully_shard(layer, mesh, name=str(number))
                layer.register_forward_hook(_note_backward)
            fully_shard(self.model, mesh, name="root")
        self.context = context
        context.on_event = self._event
        self.optimizer = ShardedOptimizer([self.model], AdamSettings(lr=1e-2))

    def _event(self, event: Event) -> None:
        if event.operation == "gather":
            self.log.append(f"+{event.unit}")

    def step(self, order: Sequence[int] | None = None) -> str:
        """The log of one step, up to what is gathered for the next."""
        self.log.clear()
        self.model.order = order or range(len(self.model.layers))
        self.context.zero_grad()
        x = torch.full((2, WIDTH), 0.5, requires_grad=True)
        with microbatch(self.context, is_last=True):
            self.model(x).square().mean().backward()
        self.optimizer.step()
        return " ".join(self.log)

    def evaluate(self) -> str:
        self.log.clear()
        with torch.no_grad():
            self.model(torch.ones(2, WIDTH))
        return " ".join(self.log)

    def weights(self) -> list[float]:
        return [
            value
            for unit in self.context.units
            for _, tensor in full_weights(unit)
            for value in tensor.flatten().tolist()
        ]


def _traced() -> Any:
    run = Run()
    return [run.step() for _ in range(3)]


def _diverged() -> Any:
    run = Run()
    run.step()
    run.step()
    sizes = {}

    def note(module: nn.Module, _args: Any) -> None:
        sizes[module.number] = run.context.gathered_bytes

    run.model.layers[2].register_forward_pre_hook(note)
    steps = [run.step([0, 2, 1])]
    gathered_when_2_runs = sizes[2]
    steps += [run.step([0, 2, 1])]
    return steps, gathered_when_2_runs, run.context.order.divergences


def _evaluated() -> Any:
    run = Run()
    run.step()
    before = run.step()
    evaluation, after, later = run.evaluate(), run.step(), run.step()
    return before, evaluation, after, later, run.context.order.divergences


def _recomputed() -> Any:
    found = {}
    for kind in KINDS:
        run = Run(kind=kind)
        found[kind] = [run.step() for _ in range(3)], run.weights()
    return found


def _budgets() -> Any:
    found = {}
    for layers in (3, 4):
        for budget in range(layers + 2):
            run = Run(layers, resident_bytes=budget * LAYER_BYTES)
            steps = [run.step() for _ in range(3)]
            gathers = [step.count("+") for step in steps]
            found[layers, budget] = gathers, run.context.peak_gathered_bytes, run.weights()
    return found


def _deleted() -> Any:
    run = Run(resident_bytes=2 * LAYER_BYTES)
    run.step()
    run.step()
    context = run.context
    storages = [weakref.ref(group.main_weight) for group in context.groups]
    alive = [storage() is not None for storage in storages]
    context.on_event = None
    del run
    gc.collect()
    return alive, [storage() is not None for storage in storages], len(context.units)


def _all(_rank: int, _world: int) -> dict[str, Any]:
    scenarios = (_traced, _diverged, _evaluated, _recomputed, _budgets, _deleted)
    return {scenario.__name__: scenario() for scenario in scenarios}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    first, second = run_ranks(2, _all)
    assert first == second, "the ranks gathered in different orders"
    return first


def _gathers(log: str) -> str:
    return " ".join(word[1:] for word in log.split() if word.startswith("+"))


TRACED = "+0 F0 +1 F1 +2 F2 +2 B2 +1 B1 +0 B0 +0"
REPLAYED = "+1 F0 +2 F1 F2 +2 +1 B2 +0 B1 B0 +0"


def test_a_traced_step_is_replayed_one_ahead_and_wraps_around(found: dict[str, Any]) -> None:
    # Forward 1 is followed by 2, backward 1 by 0. The last gather is the next step's first.
    assert found["_traced"] == [TRACED, REPLAYED, REPLAYED]


def test_another_order_is_traced_anew_and_frees_what_was_prefetched(found: dict[str, Any]) -> None:
    (left, replayed), gathered, divergences = found["_diverged"]
    # 1 was on its way when 2 ran: it goes, and nothing is prefetched in the rest of the step.
    assert left == "+1 F0 +2 F2 +1 F1 +1 B1 +2 B2 +0 B0 +0"
    assert gathered == LAYER_BYTES
    assert replayed == "+2 F0 +1 F2 F1 +1 +2 B1 +0 B2 B0 +0"
    assert divergences == 1


def test_evaluation_leaves_the_order_alone(found: dict[str, Any]) -> None:
    before, evaluation, after, later, divergences = found["_evaluated"]
    assert before == later == REPLAYED
    assert evaluation == "F0 +1 F1 +2 F2"  # 0 was there for the next step
    assert after == f"+0 {REPLAYED}"
    assert divergences == 0


@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_gathers_and_trains_as_without(kind: str, found: dict[str, Any]) -> None:
    steps, weights = found["_recomputed"][kind]
    plain_steps, plain_weights = found["_recomputed"]["plain"]
    assert [_gathers(step) for step in steps] == [_gathers(step) for step in plain_steps]
    assert weights == pytest.approx(plain_weights, rel=1e-6)
    runs = 1 if kind == "plain" else 2
    assert all(step.count(f"F{layer}") == runs for step in steps for layer in range(3))


def test_recomputation_happens_between_gather_and_backward(found: dict[str, Any]) -> None:
    recomputed = found["_recomputed"]
    assert recomputed["reentrant"][0][1] == "+1 F0 +2 F1 F2 +2 F2 +1 B2 F1 +0 B1 F0 B0 +0"
    assert recomputed["not reentrant"][0][1] == "+1 F0 +2 F1 F2 +2 +1 B2 F2 +0 B1 F1 B0 F0 +0"


@pytest.mark.parametrize("layers", [3, 4])
def test_a_budget_saves_a_gather_a_layer_and_is_kept(layers: int, found: dict[str, Any]) -> None:
    for budget in range(layers + 2):
        gathers, peak, weights = found["_budgets"][layers, budget]
        # Traced, each of two uses gathers; one more for the step that follows.
        assert gathers[0] == 2 * layers + 1
        assert gathers[1:] == [2 * layers - min(budget, layers)] * 2
        # Beyond the budget goes only what is needed anyway: a layer and the one after it.
        assert peak == max(2, min(budget, layers)) * LAYER_BYTES
        assert weights == found["_budgets"][layers, 0][2]


def test_deleting_the_model_frees_it_prefetched_or_not(found: dict[str, Any]) -> None:
    before, after, units = found["_deleted"]
    assert all(before)
    assert not any(after)
    assert units == 0
