"""Edges of the schedule graph, one reason at a time."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from itertools import pairwise

from mfsdp_cli.schedule.actions import COMPUTE, Kind
from mfsdp_cli.schedule.attributes import Stream, stream_of
from mfsdp_cli.schedule.graph import CONTRIBUTES, Graph

Edge = tuple[int, int]


class Reason(StrEnum):
    """Why the target of an edge waits for its source."""

    DATA = "data"
    HOST = "host order"
    STREAM = "stream order"
    MESSAGE = "matched communication"
    BUFFER = "buffer lifetime"


def edges(graph: Graph, reason: Reason) -> Iterator[Edge]:
    """All edges of one reason, as (source, target)."""
    if reason is Reason.MESSAGE:
        yield from _message_edges(graph)
        return
    of_rank = {
        Reason.DATA: _data_edges,
        Reason.HOST: _host_edges,
        Reason.STREAM: _stream_edges,
        Reason.BUFFER: _buffer_edges,
    }[reason]
    for rank in range(len(graph.lists)):
        yield from of_rank(graph, graph.nodes_of_rank(rank))


def _host_edges(_graph: Graph, nodes: range) -> Iterator[Edge]:
    """A rank issues its actions one after another."""
    yield from pairwise(nodes)


def _stream_edges(graph: Graph, nodes: range) -> Iterator[Edge]:
    """Work on one stream of one rank runs in the order issued."""
    latest: dict[Stream, int] = {}
    for node in nodes:
        stream = stream_of(graph.kinds[node])
        if stream in latest:
            yield latest[stream], node
        latest[stream] = node


def _message_edges(graph: Graph) -> Iterator[Edge]:
    """From each send to its receive."""
    for node in range(len(graph)):
        source = graph.sender(node)
        if source is not None:
            yield source, node


def _data_edges(graph: Graph, nodes: range) -> Iterator[Edge]:
    """Activations and gradients, gathered parameters, reduced gradients, then the update."""
    gathered: dict[int, int] = {}
    contributors: dict[int, list[int]] = {}
    reduced: list[int] = []
    for node in nodes:
        kind, stage = graph.kinds[node], graph.stages[node]
        yield from ((source, node) for source in graph.data_inputs(node))
        if kind is Kind.UNSHARD:
            gathered[stage] = node
        elif kind in COMPUTE and stage in gathered:
            yield gathered[stage], node
        elif kind is Kind.REDUCE_GRAD:
            yield from ((source, node) for source in contributors.pop(stage, ()))
            reduced.append(node)
        elif stage < 0:
            yield from ((source, node) for source in reduced)
            reduced = [node]
        if kind in CONTRIBUTES:
            contributors.setdefault(stage, []).append(node)


def _buffer_edges(graph: Graph, nodes: range) -> Iterator[Edge]:
    """A stage is freed after its last use; a gather takes the place that was freed."""
    used: dict[int, int] = {}
    freed: int | None = None
    for node in nodes:
        kind, stage = graph.kinds[node], graph.stages[node]
        if kind in COMPUTE:
            used[stage] = node
        elif kind is Kind.RESHARD:
            if stage in used:
                yield used[stage], node
            freed = node
        elif kind is Kind.UNSHARD and freed is not None:
            yield freed, node
            freed = None
