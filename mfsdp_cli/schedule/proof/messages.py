"""Invariant 3: which message belongs to which, and that none overtakes another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mfsdp_cli.errors import Finding
from mfsdp_cli.schedule.actions import RECEIVES, SENDS, Kind
from mfsdp_cli.schedule.graph import Graph
from mfsdp_cli.schedule.proof.check import Check, Subject, fault, judged, passed, skipped

# Way to the stage a message goes to, and the kind that takes it there.
_TAKEN_BY = {Kind.SEND_F: (Kind.RECV_F, 1), Kind.SEND_B: (Kind.RECV_B, -1)}


@dataclass(frozen=True)
class Boundary:
    """The tensor between a stage and the next one, as either side sees it.

    Args:
        sent, received: shape and dtype, such as ``((4096, 1, 7168), "bf16")``.
    """

    sent: tuple[tuple[int, ...], str]
    received: tuple[tuple[int, ...], str]


def check_messages(subject: Subject, boundaries: Mapping[int, Boundary] | None = None) -> Check:
    """Judge invariant 3.

    Args:
        boundaries: by stage, the tensor that goes from it to the next one.
    """
    if not subject.graph.has_messages:
        if _needs_messages(subject):
            return skipped("MF313", "the schedule has no messages")
        return passed("MF313")
    return judged("MF313", _message_findings(subject, boundaries or {}))


def _needs_messages(subject: Subject) -> bool:
    return len(set(subject.graph.stage_ranks.values())) > 1


def _message_findings(subject: Subject, boundaries: Mapping[int, Boundary]) -> Iterator[Finding]:
    paired = True
    for finding in _unpaired(subject):
        paired = False
        yield finding
    yield from _missing_inputs(subject)
    for stage, boundary in sorted(boundaries.items()):
        if boundary.sent != boundary.received:
            yield fault(
                "MF313",
                f"stage {stage} sends {_tensor(boundary.sent)}, stage {stage + 1} receives "
                f"{_tensor(boundary.received)}",
            )
    if paired:
        yield from _overtaking(subject)


def _tensor(tensor: tuple[tuple[int, ...], str]) -> str:
    shape, dtype = tensor
    return f"{dtype} of shape {list(shape)}"


def _unpaired(subject: Subject) -> Iterator[Finding]:
    graph = subject.graph
    for node, kind in enumerate(graph.kinds):
        if kind not in SENDS and kind not in RECEIVES:
            continue
        stage, microbatch = graph.stages[node], graph.microbatches[node]
        if graph.find(kind, stage, microbatch) != node:
            yield _message_fault(subject, node, "stands twice")
            continue
        partner = _partner(graph, node)
        other = "receive" if kind in SENDS else "send"
        if partner is None:
            yield _message_fault(subject, node, f"has no {other}")
        elif graph.rank(partner) == graph.rank(node):
            yield _message_fault(subject, node, f"has its {other} on the same rank")


def _message_fault(subject: Subject, node: int, problem: str) -> Finding:
    return fault("MF313", f"{subject.name(node)} {problem}", where=subject.where([node]))


def _partner(graph: Graph, node: int) -> int | None:
    kind = graph.kinds[node]
    if kind in RECEIVES:
        return graph.sender(node)
    taken_by, way = _TAKEN_BY[kind]
    return graph.find(taken_by, graph.stages[node] + way, graph.microbatches[node])


def _missing_inputs(subject: Subject) -> Iterator[Finding]:
    """Compute actions whose input comes from another rank without a receive."""
    graph = subject.graph
    steps = (
        (Kind.FORWARD, Kind.RECV_F, -1),
        (Kind.BACKWARD, Kind.RECV_B, 1),
        (Kind.BACKWARD_INPUT, Kind.RECV_B, 1),
    )
    for kind, receive, way in steps:
        for node in graph.nodes_of(kind):
            stage, microbatch = graph.stages[node], graph.microbatches[node]
            source = stage + way
            if not graph.needs_message(source, stage):
                continue
            if graph.find(receive, stage, microbatch) is None:
                yield _message_fault(
                    subject,
                    node,
                    f"needs what stage {source} on rank {graph.stage_ranks[source]} makes, but "
                    f"there is no {stage}{receive}{microbatch}",
                )


def _overtaking(subject: Subject) -> Iterator[Finding]:
    """Channels, (source, destination, direction), whose receives are in another order."""
    graph = subject.graph
    sent: dict[tuple[int, int, Kind], list[int]] = {}
    received: dict[tuple[int, int, Kind], list[int]] = {}
    for node, kind in enumerate(graph.kinds):
        if kind in SENDS:
            partner = _partner(graph, node)
            assert partner is not None
            sent.setdefault((graph.rank(node), graph.rank(partner), kind), []).append(node)
        elif kind in RECEIVES:
            partner = graph.sender(node)
            assert partner is not None
            channel = (graph.rank(partner), graph.rank(node), graph.kinds[partner])
            received.setdefault(channel, []).append(node)
    for channel, sends in sent.items():
        for send, receive in zip(sends, received[channel], strict=True):
            if graph.sender(receive) != send:
                yield fault(
                    "MF313",
                    f"messages overtake each other: rank {channel[0]} sends {graph.actions[send]} "
                    f"where rank {channel[1]} receives {graph.actions[receive]}",
                    where=subject.where([receive, send]),
                )
                break
