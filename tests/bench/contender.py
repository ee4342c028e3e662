"""Four ranks that train one engine when told to and are idle in between.

All contenders live at once and take turns, a few steps each: a machine whose speed drifts slows
all of them, and what a process costs to start is paid once.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import socket
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

START_METHOD = "spawn"


@dataclass(frozen=True)
class Report:
    """What one rank says about its turn.

    Args:
        seconds: wall time of the turn, between two barriers.
        cpu_seconds: processor time that all threads of the rank used in it.
        losses, norms: of each step.
        peak_bytes: largest resident memory since the engine was built, beyond what it was before.
        persistent_bytes: weights, gradients and optimizer state, counted.
    """

    seconds: float
    cpu_seconds: float
    losses: list[float]
    norms: list[float]
    peak_bytes: int
    persistent_bytes: int


class Contender:
    """The ranks of one engine on one plan.

    Args:
        engine: ``mfsdp``, ``distopt`` or ``torch``.
        plan: file of the plan.
        world: number of ranks.
    """

    def __init__(self, engine: str, plan: Path, world: int) -> None:
        context = mp.get_context(START_METHOD)
        port = _free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, world, port, engine, str(plan), there), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self._answers()  # all are built

    def run(self, steps: int) -> list[Report]:
        """Train some steps more; one report a rank."""
        for pipe in self._pipes:
            pipe.send(steps)
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = []
        for rank, pipe in enumerate(self._pipes):
            try:
                answer = pipe.recv()
            except EOFError:
                answer = f"rank {rank} is gone"
            if isinstance(answer, str):
                self.close()
                raise RuntimeError(answer)
            answers.append(answer)
        return answers

    def close(self) -> None:
        """End the ranks."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _serve(rank: int, world: int, port: int, engine: str, plan: str, pipe: Connection) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    warnings.filterwarnings("ignore")  # torch's, about its own hooks on views
    try:
        _take_turns(engine, plan, pipe)
    except EOFError:
        pass  # the bench is over
    except BaseException:
        pipe.send(f"rank {rank}:\n{traceback.format_exc()}")
    os._exit(0)  # without destructors: gloo's threads may wait for peers that are gone


def _take_turns(name: str, plan_file: str, pipe: Connection) -> None:
    import torch

    from mfsdp_cli.plan import Plan
    from mfsdp_cli.runtime.corpus import load_corpus
    from mfsdp_cli.runtime.data import Data
    from mfsdp_cli.runtime.settings import TrainSettings
    from mfsdp_cli.runtime.topology import connect_plan

    torch.set_num_threads(1)
    plan, settings = Plan.load(plan_file), TrainSettings(adam_eps=1e-6)
    parallel = plan.parallel
    topology = connect_plan(plan)
    data = Data(
        load_corpus([]),
        vocab_size=plan.model.vocab_size,
        seq_length=parallel.seq_length,
        micro_batch_size=parallel.micro_batch_size,
        global_batch_size=parallel.global_batch_size,
        seed=settings.seed,
    )
    make = _engine_class(name)
    data.training(1, 0)
    release_free_memory()
    before = resident_bytes("VmRSS")
    engine = make(plan, topology, settings, data)
    release_free_memory()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    pipe.send(None)
    step = 0
    while True:
        steps = pipe.recv()
        topology.barrier()
        began, cpu_began = time.perf_counter(), time.process_time()
        results = [engine.train_step(step + n) for n in range(1, steps + 1)]
        topology.barrier()
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        step += steps
        pipe.send(
            Report(
                seconds,
                cpu_seconds,
                [result.loss for result in results],
                [result.grad_norm for result in results],
                resident_bytes("VmHWM") - before,
                engine.persistent_bytes(),
            )
        )


def _engine_class(name: str) -> Any:
    """Imported before memory is measured: code is not what is compared."""
    if name == "mfsdp":
        from mfsdp_cli.runtime.engine_mfsdp import MfsdpEngine

        return MfsdpEngine
    if name == "distopt":
        from mfsdp_cli.baselines.distopt import DistOptEngine

        return DistOptEngine
    from torch_engine import TorchEngine

    return TorchEngine


def resident_bytes(field: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (the peak) of this process; Linux only."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) * 1024


def release_free_memory() -> None:
    """Give what is not in use back to the system, so that it is not counted."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
