"""Run a function on several gloo ranks of this machine, for tests."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _entry(
    rank: int, world: int, port: int, fn: Callable[..., Any], args: tuple[Any, ...], queue: Any
) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        queue.put((rank, fn(rank, world, *args), None))
    except Exception:
        queue.put((rank, None, traceback.format_exc()))
        raise
    dist.barrier()
    # Without running destructors: gloo's threads may be torn down in an order that aborts.
    os._exit(0)


def run_ranks(world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """``[fn(rank, world, *args) for rank in range(world)]``, each in a process of its own.

    ``fn`` must be importable and return something picklable (numbers, lists, no tensors).
    """
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    port = _free_port()
    processes = mp.spawn(
        _entry, args=(world, port, fn, args, queue), nprocs=world, join=False, start_method="spawn"
    )
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    while len(results) + len(errors) < world:
        rank, value, error = queue.get()
        if error is None:
            results[rank] = value
        else:
            errors[rank] = error
            break
    if errors:
        for process in processes.processes:
            process.kill()
        rank, error = next(iter(errors.items()))
        raise AssertionError(f"rank {rank} failed:\n{error}")
    processes.join()
    return [results[rank] for rank in range(world)]
