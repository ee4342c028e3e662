"""Invariants 2 to 5: who waits for whom, which message belongs to which, and collectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mfsdp_cli.errors import Finding
from mfsdp_cli.schedule.actions import RECEIVES, SENDS, Kind
from mfsdp_cli.schedule.graph import Graph
from mfsdp_cli.schedule.proof.check import (
    FAIL,
    Check,
    Subject,
    fault,
    judged,
    passed,
    skipped,
)
from mfsdp_cli.schedule.proof.execution import Party, Wait, shortest_cycle, stuck

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


def check_waiting(subject: Subject, *, rendezvous: bool) -> tuple[Check, Check]:
    """Judge invariants 2 and 4.

    Where no rank gets stuck under rendezvous, none does otherwise. So the weaker condition is
    tried only where the stronger one fails.

    Args:
        rendezvous: whether a send waits for its receive; invariant 4 is skipped if not.
    """
    graph = subject.graph
    if rendezvous and graph.has_messages:
        waits = stuck(graph, _message_parties(graph))
        if not waits:
            return passed("MF312"), passed("MF314")
        if not stuck(graph, buffered=True):
            return passed("MF312"), judged("MF314", [_deadlock(subject, "MF314", waits)])
    waits = stuck(graph, buffered=True)
    if waits:
        reason = "ranks wait for each other even when sends do not wait (MF312)"
        return judged("MF312", [_deadlock(subject, "MF312", waits)]), skipped("MF314", reason)
    reason = "sends are buffered" if graph.has_messages else "the schedule has no messages"
    return passed("MF312"), skipped("MF314", reason)


def _message_parties(graph: Graph) -> Iterator[Party]:
    """Each send with its receive; a receive that stands twice is paired once."""
    for kind in RECEIVES:
        for node in graph.nodes_of(kind):
            sender = graph.sender(node)
            first = graph.find(kind, graph.stages[node], graph.microbatches[node])
            if sender is not None and first == node:
                yield sender, node


def _deadlock(subject: Subject, code: str, waits: Sequence[Wait]) -> Finding:
    cycle = shortest_cycle(subject.graph, waits)
    if len(cycle) == 1:
        wait = cycle[0]
        message = f"{subject.name(wait.node)} waits for {subject.name(wait.needs)}, which the same"
        message += " rank runs later"
    else:
        message = "deadlock: " + "; ".join(_wait_text(subject, wait) for wait in cycle)
    return fault(code, message, where=subject.where([wait.node for wait in cycle]))


def _wait_text(subject: Subject, wait: Wait) -> str:
    graph = subject.graph
    return (
        f"rank {graph.rank(wait.node)} waits in {graph.actions[wait.node]} for "
        f"{graph.actions[wait.needs]} of rank {graph.rank(wait.needs)}"
    )


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
    unpaired = list(_unpaired(subject))
    yield from unpaired
    yield from _missing_inputs(subject)
    for stage, boundary in sorted(boundaries.items()):
        if boundary.sent != boundary.received:
            yield fault(
                "MF313",
                f"stage {stage} sends {_tensor(boundary.sent)}, stage {stage + 1} receives "
                f"{_tensor(boundary.received)}",
            )
    if not unpaired:
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


def check_collectives(subject: Subject, before: Sequence[Check], *, rendezvous: bool) -> Check:
    """Judge invariant 5: the same collectives on all ranks of a communicator, none crossing.

    Args:
        before: invariants 2 to 4; ranks that are stuck without collectives say nothing here.
        rendezvous: whether a send waits for its receive.
    """
    graph = subject.graph
    groups = [(Kind.GRAD_NORM, tuple(range(len(graph.lists))))]
    groups += [(Kind.TIED_ALLREDUCE, tuple(ranks)) for ranks in graph.tied_pp_ranks]
    missing = [finding for kind, ranks in groups for finding in _uneven(subject, kind, ranks)]
    if missing:
        return judged("MF315", missing)
    if any(check.status == FAIL for check in before):
        return skipped("MF315", "ranks are stuck without collectives already")
    parties = [party for kind, ranks in groups for party in _meetings(graph, kind, ranks)]
    messages = _message_parties(graph) if rendezvous else ()
    waits = stuck(graph, _merged([*messages, *parties]), buffered=not rendezvous)
    if waits:
        return judged("MF315", [_deadlock(subject, "MF315", waits)])
    return passed("MF315")


def _occurrences(graph: Graph, kind: Kind, rank: int) -> list[int]:
    return [node for node in graph.nodes_of(kind) if graph.rank(node) == rank]


def _uneven(subject: Subject, kind: Kind, ranks: tuple[int, ...]) -> Iterator[Finding]:
    """A rank that enters a collective more or less often than the first of its communicator."""
    graph = subject.graph
    counts = {rank: len(_occurrences(graph, kind, rank)) for rank in ranks}
    expected = max(counts.values())
    for rank, count in counts.items():
        if count != expected:
            most = next(other for other in ranks if counts[other] == expected)
            yield fault(
                "MF315",
                f"rank {rank} enters {kind} {count} times, rank {most} {expected} times: "
                f"rank {most} waits for ever",
            )


def _meetings(graph: Graph, kind: Kind, ranks: tuple[int, ...]) -> list[Party]:
    return list(zip(*(_occurrences(graph, kind, rank) for rank in ranks), strict=True))


def _merged(parties: Sequence[Party]) -> list[Party]:
    """Parties that share a node become one: a rank sums all its groups in one action."""
    merged: dict[int, set[int]] = {}
    for party in parties:
        union = set(party)
        for node in party:
            union |= merged.get(node, set())
        for node in union:
            merged[node] = union
    return [sorted(union) for union in {id(union): union for union in merged.values()}.values()]
