"""What only a GPU shows: parity over NCCL, streams that overlap, no wait inside a step.

Run it on a machine with one NVIDIA GPU (under ten minutes)::

    python -m tests.gpu.check_gpu [--out FOLDER]

Two and four ranks share the GPU, each with an NCCL host identity of its own: this rehearses
correctness, its speed says nothing. The last lines are a table; the exit code is 1 if a check
fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mfsdp_cli.plan import Plan
from mfsdp_cli.runtime import topology as topology_
from mfsdp_cli.runtime.settings import TrainSettings
from tests.gpu.profile import streams_of_a_step
from tests.helpers.parity import difference
from tests.helpers.plans import plan_of
from tests.helpers.training import SETTINGS, Trained, engine_of, train

STEPS = 10
SIZES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "(1,1,2)": {"model": "gpt2-tiny", "dp": 2},
        "(2,2,1)": {"model": "gpt2-tiny", "pp": 2, "vpp": 2},
    },
    4: {
        "(2,1,2)": {"model": "gpt2-tiny", "pp": 2, "dp": 2},
        "(2,2,2)": {"model": "gpt2-tiny", "pp": 2, "vpp": 2, "dp": 2},
        "(2,2,2) by unit": {
            **{"model": "llama-tiny", "pp": 2, "vpp": 2, "dp": 2},
            "resident_chunks": 0,
        },
        "(1,1,4) hybrid": {
            **{"model": "llama-tiny", "dp": 4},
            "num_distributed_optimizer_instances": 2,
        },
        "(2,2,2) EP 2": {
            **{"model": "deepseek-v3-proxy-tiny", "pp": 2, "vpp": 2, "dp": 2},
            "ep": 2,
        },
    },
}
PRECISIONS = ("fp32", "bf16")
#: Largest relative difference of the loss, the norm of ten steps, the weights. In bf16 the engine
#: computes on the same rounded weights as the reference, in another order.
LIMITS = {"fp32": (1e-5, 1e-5, 1e-5), "bf16": (5e-3, 1e-1, 5e-2)}


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, help="where the profiler's trace goes")
    out = arguments.parse_args().out
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = out or Path(folder)
        rows = _spawn(1, _references, folder)
        for ranks in SIZES:
            rows += _spawn(ranks, _compare, folder, str(out))
    for row in rows:
        print(row["line"])
    failed = [row for row in rows if not row["ok"]]
    print(f"{len(rows)} checks, {len(failed)} failed, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


def _spawn(ranks: int, run: Callable[..., Any], *arguments: str) -> list[dict[str, Any]]:
    """Run on some ranks of this machine's one GPU; the rows of rank 0."""
    with tempfile.TemporaryDirectory() as answers:
        file = str(Path(answers, "rows.json"))
        mp.spawn(_enter, args=(ranks, run, file, arguments), nprocs=ranks)  # type: ignore[no-untyped-call]
        rows: list[dict[str, Any]] = json.loads(Path(file).read_text())
    return rows


def _enter(rank: int, ranks: int, run: Any, file: str, arguments: tuple[str, ...]) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(29500 + ranks),
    )
    torch.set_num_threads(2)
    topology_.use_device("nccl", ranks)
    rows = run(ranks, *arguments)
    if rank == 0:
        Path(file).write_text(json.dumps(rows))
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def _cases(ranks: int) -> list[tuple[str, str, Plan]]:
    return [
        (name, precision, plan_of(**case, seq=64))
        for name, case in SIZES[ranks].items()
        for precision in PRECISIONS
    ]


def _settings(precision: str) -> TrainSettings:
    return replace(SETTINGS, precision=precision, steps=STEPS)


def _file(folder: str, plan: Plan, precision: str) -> Path:
    return Path(folder, f"{plan.model.name}-{precision}.pt")


def _connect(plan: Plan, engine: str) -> topology_.Topology:
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    return topology_.connect_plan(plan, engine=engine, backend="nccl", local_device=0)


def _references(_ranks: int, folder: str) -> list[dict[str, Any]]:
    """One rank, every model and precision once."""
    for ranks in SIZES:
        for _, precision, plan in _cases(ranks):
            file = _file(folder, plan, precision)
            if not file.exists():
                topology = _connect(plan, "single")
                engine = engine_of("single", plan, topology, _settings(precision))
                torch.save(asdict(train(engine, STEPS)), file)
    return []


def _compare(ranks: int, folder: str, out: str) -> list[dict[str, Any]]:
    rows = []
    for name, precision, plan in _cases(ranks):
        topology = _connect(plan, "mfsdp")
        engine: Any = engine_of("mfsdp", plan, topology, _settings(precision))
        mine = train(engine, STEPS)
        reference = Trained(**torch.load(_file(folder, plan, precision), weights_only=True))
        rows.append(_row(f"{name} {precision} {plan.model.name}", precision, mine, reference))
        if name.endswith("by unit") and precision == "fp32":
            rows += streams_of_a_step(engine, STEPS + 1, topology, Path(out))
        dist.barrier()
    return rows


def _row(name: str, precision: str, mine: Trained, reference: Trained) -> dict[str, Any]:
    """The worst of all ranks, as a line of the table."""
    found = difference(mine, reference)
    worst = torch.tensor(
        [found.first_norm, found.loss, found.norm, found.weights],
        device="cuda",
        dtype=torch.float64,
    )
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    first_norm, loss, norm, weights = worst.tolist()
    limits = LIMITS[precision]
    ok = loss <= limits[0] and norm <= limits[1] and weights <= limits[2]
    line = f"{'ok  ' if ok else 'FAIL'} {name:42} loss {loss:.1e} norm {norm:.1e} " + (
        f"(first {first_norm:.1e}) weights {weights:.1e}"
    )
    return {"ok": ok, "line": line}


if __name__ == "__main__":
    sys.exit(main())
