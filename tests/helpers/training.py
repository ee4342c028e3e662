"""Train a few steps with an engine inside a test, and what to look at afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from mfsdp_cli.plan import Plan
from mfsdp_cli.runtime.corpus import Corpus, load_corpus
from mfsdp_cli.runtime.data import Data
from mfsdp_cli.runtime.engine import Engine, make_engine
from mfsdp_cli.runtime.settings import TrainSettings
from mfsdp_cli.runtime.topology import Topology, connect_plan

SETTINGS = TrainSettings(
    adam_eps=1e-6, lr=1e-3, lr_warmup_steps=0, eval_steps=2, seed=7, keep_gradients=True
)


@cache
def _corpus() -> Corpus:
    return load_corpus([]).cut_at(ord("\n"))  # each line a document: masks are uneven


@dataclass
class Trained:
    """What a few steps left on one rank.

    Args:
        steps: loss and norm of each.
        gradients: of the first step.
        before, after: evaluations before the first step and after the last.
        router_biases: after the last step.
    """

    steps: list[tuple[float, float]]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    before: float
    after: float
    router_biases: dict[str, torch.Tensor]


def engine_of(name: str, plan: Plan, topology: Topology, settings: Any = SETTINGS) -> Engine:
    parallel = plan.parallel
    data = Data(
        _corpus(),
        vocab_size=plan.model.vocab_size,
        seq_length=parallel.seq_length,
        micro_batch_size=parallel.micro_batch_size,
        global_batch_size=parallel.global_batch_size,
        seed=settings.seed,
        eod_mask_loss=settings.eod_mask_loss,
    )
    return make_engine(name, plan, topology, settings, data)


def train(engine: Engine, steps: int) -> Trained:
    before = engine.evaluate()
    results, gradients = [], {}
    for step in range(1, steps + 1):
        result = engine.train_step(step)
        results.append((result.loss, result.grad_norm))
        if step == 1:
            gradients = {name: value.clone() for name, value in engine.named_gradients().items()}
    weights, after, biases = engine.named_weights(), engine.evaluate(), engine.router_biases()
    return Trained(results, gradients, weights, before, after, biases)


def reconnect(plan: Plan, engine: str = "mfsdp") -> Topology:
    """The topology of a plan on the ranks that are there, in place of an earlier one."""
    from mfsdp_cli.runtime import megatron_on_cpu

    megatron_on_cpu.prepare("cpu")
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    return connect_plan(plan, engine=engine)


def largest_difference(
    mine: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]
) -> tuple[float, str]:
    """The largest ``||a - b|| / ||b||`` of a tensor, and its name."""
    found = (0.0, "")
    for name, value in mine.items():
        norm = reference[name].norm().item()
        difference = (value - reference[name]).norm().item()
        found = max(found, (difference / norm if norm > 1e-7 else difference, name))
    return found
