"""A schedule as a trace for Chrome (``chrome://tracing``) and Perfetto.

A rank is a process, a stream a thread; arrows go from each send to its receive.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from mfsdp_cli.schedule.actions import RECEIVES
from mfsdp_cli.schedule.attributes import StageCost, Stream, node_attributes, stream_of
from mfsdp_cli.schedule.graph import Graph
from mfsdp_cli.schedule.timing import StepTimes

# Microseconds of one unit of time where times are no seconds.
UNIT_US = 1000.0
# Receives have threads of their own: a rank may send and receive on one stream at one time.
_P2P = (Stream.FORWARD_P2P, Stream.BACKWARD_P2P)
_THREADS = [str(stream) for stream in Stream] + [f"{stream} receive" for stream in _P2P]
Event = dict[str, Any]


def to_trace(graph: Graph, times: StepTimes, costs: dict[int, StageCost]) -> str:
    """The trace as JSON text; times in microseconds, one unit a millisecond if not measured."""
    scale = 1e6 if times.measured else UNIT_US
    events = [
        *_names(graph),
        *_slices(graph, times, scale, costs),
        *_arrows(graph, times, scale),
    ]
    document = {"traceEvents": events, "displayTimeUnit": "ms"}
    return json.dumps(document, allow_nan=False, separators=(",", ":")) + "\n"


def _names(graph: Graph) -> Iterator[Event]:
    for rank in range(len(graph.lists)):
        process = {"ph": "M", "pid": rank}
        yield {**process, "name": "process_name", "args": {"name": f"pipeline rank {rank}"}}
        yield {**process, "name": "process_sort_index", "args": {"sort_index": rank}}
        for thread, name in enumerate(_THREADS):
            yield {**process, "tid": thread, "name": "thread_name", "args": {"name": name}}


def _slices(
    graph: Graph, times: StepTimes, scale: float, costs: dict[int, StageCost]
) -> Iterator[Event]:
    for node in range(len(graph)):
        yield {
            "ph": "X",
            "name": str(graph.actions[node]),
            "cat": str(graph.kinds[node]),
            **_place(graph, node),
            "ts": times.starts[node] * scale,
            "dur": (times.ends[node] - times.starts[node]) * scale,
            "args": node_attributes(graph, node, costs),
        }


def _arrows(graph: Graph, times: StepTimes, scale: float) -> Iterator[Event]:
    for node in range(len(graph)):
        sender = graph.sender(node)
        if sender is None:
            continue
        arrow = {"name": "message", "cat": "p2p", "id": node}
        yield {"ph": "s", **arrow, **_place(graph, sender), "ts": times.starts[sender] * scale}
        yield {
            "ph": "f",
            "bp": "e",
            **arrow,
            **_place(graph, node),
            "ts": times.starts[node] * scale,
        }


def _place(graph: Graph, node: int) -> Event:
    kind = graph.kinds[node]
    name = str(stream_of(kind)) + (" receive" if kind in RECEIVES else "")
    return {"pid": graph.rank(node), "tid": _THREADS.index(name)}
