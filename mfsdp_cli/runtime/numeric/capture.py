"""One rank of a numeric run: ``python -m mfsdp_cli.runtime.numeric.capture``.

Trains a few steps and saves, a file a rank and step, loss, norm, gradients and weights. The
reference trains twice, the second time adding microbatches up backwards: how far apart the two end
is the noise floor, what rounding alone does to this model.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

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
from mfsdp_cli.runtime.numeric.job import FLOOR, Capture
from mfsdp_cli.runtime.numeric.proxy import full_plan, proxy_plan
from mfsdp_cli.runtime.report import write_report
from mfsdp_cli.runtime.settings import TrainSettings
from mfsdp_cli.runtime.topology import Topology
from mfsdp_cli.runtime.watch import Watch


def numeric_settings(steps: int, seed: int) -> TrainSettings:
    """Learning rate 1e-3 from the first step, Adam eps 1e-6 (the contract's)."""
    return TrainSettings(
        steps=steps, seed=seed, lr=1e-3, lr_warmup_steps=0, adam_eps=1e-6, keep_gradients=True
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
        local_device=topology_.local_rank(),
    )
    text = load_corpus(())
    # Real text: on tokens drawn at random gradients shrink to noise within a few steps, and their
    # norm is rounding then.
    tokens = text.tokens.astype(np.int64) % plan.model.vocab_size
    data = Data(
        Corpus(tokens, text.source),
        vocab_size=plan.model.vocab_size,
        seq_length=parallel.seq_length,
        micro_batch_size=parallel.micro_batch_size,
        global_batch_size=parallel.global_batch_size,
        seed=capture.seed,
    )
    settings = numeric_settings(capture.steps, capture.seed)
    save_steps(make_engine(capture.engine, plan, topology, settings, data), capture, topology)
    if alone:
        backwards = SingleEngine(plan, topology, settings, data, backwards=True)
        save_steps(backwards, replace(capture, engine=FLOOR), topology)
    dist.barrier()


def save_steps(engine: Engine, capture: Capture, topology: Topology) -> None:
    """Run the steps and save each."""
    for step in range(1, capture.steps + 1):
        result = engine.train_step(step)
        weights, gradients = engine.named_weights(), engine.named_gradients()
        if topology.dp_rank < topology.ep:  # the others hold the same
            torch.save(
                {
                    "loss": result.loss,
                    "grad_norm": result.grad_norm,
                    "gradients": gradients,
                    "weights": weights,
                },
                capture.file(topology.rank, step),
            )
    engine.close()


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
