"""One rank of a numeric run: ``python -m mfsdp_cli.runtime.numeric.capture``.

Trains a few steps and saves, a file a rank and step, everything that is compared. The reference
trains twice, the second time adding microbatches up backwards: how far apart the two end is the
noise floor, what rounding alone does to this model. Where that is much, it trains in two more
orders: one pair is a small sample.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mfsdp_cli.baselines.single import SingleEngine
from mfsdp_cli.errors import ExitCode
from mfsdp_cli.plan import Plan
from mfsdp_cli.runtime import topology as topology_
from mfsdp_cli.runtime.corpus import Corpus, load_corpus
from mfsdp_cli.runtime.data import Data
from mfsdp_cli.runtime.engine import Engine, make_engine
from mfsdp_cli.runtime.numeric.compare import measure_floor
from mfsdp_cli.runtime.numeric.job import FLOORS, Capture
from mfsdp_cli.runtime.numeric.load import load_steps
from mfsdp_cli.runtime.numeric.proxy import full_plan, proxy_plan
from mfsdp_cli.runtime.numeric.tolerances import MUCH
from mfsdp_cli.runtime.report import write_report
from mfsdp_cli.runtime.settings import TrainSettings
from mfsdp_cli.runtime.topology import Topology
from mfsdp_cli.runtime.watch import Watch

_NEWLINE = 10


def numeric_settings(steps: int, seed: int, *, per_token_loss: bool = False) -> TrainSettings:
    """Learning rate 1e-3 from the first step, Adam eps 1e-6 (the contract's).

    Per-token loss comes with masks: without them it would be the mean over microbatches.
    """
    return TrainSettings(
        steps=steps,
        seed=seed,
        lr=1e-3,
        lr_warmup_steps=0,
        adam_eps=1e-6,
        eval_steps=1,
        keep_gradients=True,
        observe=True,
        calculate_per_token_loss=per_token_loss,
        eod_mask_loss=per_token_loss,
    )


def run(capture: Capture) -> None:
    """Join the ranks, train, save."""
    given = Plan.load(Path(capture.folder, "plan.json"))
    plan = full_plan(given) if capture.full else proxy_plan(given)
    alone = capture.engine == "single"
    parallel = plan.parallel
    topology = topology_.connect_plan(
        plan,
        engine=capture.engine,
        backend=capture.backend,
        local_device=topology_.use_device(capture.backend, capture.ranks_per_device),
    )
    text = load_corpus(()).cut_at(_NEWLINE)  # each line a document: masks differ by microbatch
    settings = numeric_settings(
        capture.steps, capture.seed, per_token_loss=plan.settings.calculate_per_token_loss
    )
    # Real text: on tokens drawn at random gradients shrink to noise within a few steps, and their
    # norm is rounding then.
    tokens = text.tokens.astype(np.int64) % plan.model.vocab_size
    data = Data(
        Corpus(tokens, text.source, text.document_ends),
        vocab_size=plan.model.vocab_size,
        seq_length=parallel.seq_length,
        micro_batch_size=parallel.micro_batch_size,
        global_batch_size=parallel.global_batch_size,
        seed=capture.seed,
        eod_mask_loss=settings.eod_mask_loss,
    )
    save_steps(make_engine(capture.engine, plan, topology, settings, data), capture, topology)
    if alone:
        _save_other_orders(plan, topology, settings, data, capture)
    dist.barrier()


def _save_other_orders(
    plan: Plan, topology: Topology, settings: TrainSettings, data: Data, capture: Capture
) -> None:
    """Train the reference again, in other orders, as often as its rounding makes worth while."""
    for order, name in enumerate(FLOORS, start=1):
        engine = SingleEngine(plan, topology, settings, data, order=order)
        save_steps(engine, replace(capture, engine=name), topology)
        if order == 1:
            floor = measure_floor(load_steps(capture, 1), load_steps(capture.of(name), 1))
            if floor.largest(capture.steps) < MUCH:
                return


def save_steps(engine: Engine, capture: Capture, topology: Topology) -> None:
    """Run the steps and save each."""
    before: dict[str, Any] = {
        "weights_before": engine.named_weights(),
        "evaluation_before": engine.evaluate(),
    }
    for step in range(1, capture.steps + 1):
        result = engine.train_step(step)
        saved = {**before, **_state(engine, topology), **asdict(result)}
        before = {}
        if step == capture.steps:
            saved["evaluation_after"] = engine.evaluate()
        torch.save(saved, capture.file(topology.rank, step))
    engine.close()


def _state(engine: Engine, topology: Topology) -> dict[str, Any]:
    """What is compared after a step; gradients by the ranks that hold all experts together."""
    gradients, clipped = engine.named_gradients(), engine.clipped_gradients()
    first = topology.dp_rank < topology.ep  # the others hold the same
    contributions = engine.contributions() if isinstance(engine, SingleEngine) else {}
    return {
        "weights": engine.named_weights(),
        "gradients": gradients if first else {},
        "clipped": clipped if first else {},
        "router_biases": engine.router_biases(),
        "observed": list(engine.observed().items()),
        "contributions": contributions,
    }


def main() -> int:
    """Run the capture that the environment describes; returns the exit code."""
    Watch()
    try:
        run(Capture.from_environment())
    except BaseException as error:
        write_report(int(os.environ.get("RANK", "0")), error)
        return ExitCode.PROBLEM
    return ExitCode.OK


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without destructors: threads of process groups may otherwise wait for peers that are gone.
    os._exit(code)
