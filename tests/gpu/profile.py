"""One training step under torch's profiler and sync debugging: what ran on which stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from mfsdp_cli.runtime.topology import Topology

Interval = tuple[float, float]


def streams_of_a_step(
    engine: Any, step: int, topology: Topology, out: Path
) -> list[dict[str, Any]]:
    """Three checks: streams apart and overlapping, no host wait, no ``record_stream``."""
    recorded: list[torch.Tensor] = []
    executor = engine._executor
    run = executor.run

    def watched(batches: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    waits = ""
    with mock.patch.object(torch.Tensor, "record_stream", lambda t, _stream: recorded.append(t)):
        engine._settings = _without_copies(engine._settings)
        executor.run = watched
        try:
            engine.train_step(step)
        except RuntimeError as error:
            waits = str(error).splitlines()[0]
        executor.run = run
    if waits:
        return [_row(False, f"no host wait inside a step: {waits}")]
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        engine.train_step(step + 1)
        torch.cuda.synchronize()
    if topology.rank == 0:
        profiler.export_chrome_trace(str(out / "step.json.gz"))
    streams = _by_kind(profiler)
    return [
        _row(True, "no host wait inside a step (sync debug mode error)"),
        _row(not recorded, f"record_stream called {len(recorded)} times"),
        _streams_apart(streams),
        _overlap("gathers", streams.get("gather", {}), streams.get("compute", {})),
        _overlap("reduce-scatters", streams.get("reduce", {}), streams.get("compute", {})),
    ]


def _without_copies(settings: Any) -> Any:
    """Gradients kept for comparison are copied to the host inside the step; not here."""
    from dataclasses import replace

    return replace(settings, keep_gradients=False)


def _by_kind(profiler: Any) -> dict[str, dict[int, list[Interval]]]:
    """Intervals of device work in microseconds, by kind and stream."""
    found: dict[str, dict[int, list[Interval]]] = {}
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() != torch.autograd.DeviceType.CUDA:
            continue
        kind = _kind(event.name())
        if kind:
            start = event.start_ns() / 1e3
            interval = (start, start + event.duration_ns() / 1e3)
            found.setdefault(kind, {}).setdefault(event.device_resource_id(), []).append(interval)
    return found


def _kind(name: str) -> str:
    lower = name.lower()
    if "nccl" not in lower:
        return "" if lower.startswith(("mem", "nccl:")) else "compute"
    if "allgather" in lower:
        return "gather"
    return "reduce" if "reducescatter" in lower else ""


def _streams_apart(streams: dict[str, dict[int, list[Interval]]]) -> dict[str, Any]:
    compute = set(streams.get("compute", {}))
    gather, reduce = set(streams.get("gather", {})), set(streams.get("reduce", {}))
    apart = bool(gather and reduce) and not (
        gather & reduce or gather & compute or reduce & compute
    )
    few = len(gather) == len(reduce) == 1
    return _row(
        apart and few, f"streams: compute {compute}, gathers {gather}, reduce-scatters {reduce}"
    )


def _overlap(
    what: str, mine: dict[int, list[Interval]], compute: dict[int, list[Interval]]
) -> dict[str, Any]:
    intervals = [interval for of_stream in mine.values() for interval in of_stream]
    others = sorted(interval for of_stream in compute.values() for interval in of_stream)
    shared = sum(
        max(0.0, min(stop, other_stop) - max(start, other_start))
        for start, stop in intervals
        for other_start, other_stop in others
    )
    beside = sum(
        any(start < other_stop and other_start < stop for other_start, other_stop in others)
        for start, stop in intervals
    )
    return _row(
        beside > 0,
        f"{what}: {len(intervals)} in a step, {beside} beside compute for {shared:.0f} us",
    )


def _row(ok: bool, text: str) -> dict[str, Any]:
    return {"ok": ok, "line": f"{'ok  ' if ok else 'FAIL'} {text}"}
