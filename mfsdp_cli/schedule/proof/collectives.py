"""Invariant 5: the ranks of a communicator see the same collectives, and none cross."""

from __future__ import annotations

from collections.abc import Sequence

from mfsdp_cli.errors import Finding
from mfsdp_cli.schedule.actions import Kind
from mfsdp_cli.schedule.graph import Graph
from mfsdp_cli.schedule.proof.check import FAIL, Check, Subject, fault, judged, passed, skipped
from mfsdp_cli.schedule.proof.execution import Party, Wait, stuck
from mfsdp_cli.schedule.proof.waiting import deadlock, message_parties

CODE = "MF315"
_Group = tuple[Kind, tuple[int, ...]]


def never_waits(subject: Subject, *, rendezvous: bool) -> bool:
    """Whether all lists end with messages and collectives together.

    One run that settles invariants 2, 4 and 5 at once where it succeeds; where it does not, each
    is judged alone.
    """
    groups = _groups(subject.graph)
    if any(_uneven(subject, *group) for group in groups):
        return False
    return not _waits(subject.graph, groups, rendezvous)


def check_collectives(subject: Subject, before: Sequence[Check], *, rendezvous: bool) -> Check:
    """Judge invariant 5.

    Args:
        before: invariants 2 to 4; ranks that are stuck without collectives say nothing here.
        rendezvous: whether a send waits for its receive.
    """
    groups = _groups(subject.graph)
    missing = [finding for group in groups for finding in _uneven(subject, *group)]
    if missing:
        return judged(CODE, missing)
    if any(check.status == FAIL for check in before):
        return skipped(CODE, "ranks are stuck without collectives already")
    waits = _waits(subject.graph, groups, rendezvous)
    return judged(CODE, [deadlock(subject, CODE, waits)]) if waits else passed(CODE)


def _groups(graph: Graph) -> list[_Group]:
    """Collectives between pipeline ranks, and the ranks of each."""
    groups: list[_Group] = [(Kind.GRAD_NORM, tuple(range(len(graph.lists))))]
    return groups + [(Kind.TIED_ALLREDUCE, tuple(ranks)) for ranks in graph.tied_pp_ranks]


def _waits(graph: Graph, groups: Sequence[_Group], rendezvous: bool) -> list[Wait]:
    meetings = [party for group in groups for party in _meetings(graph, *group)]
    messages = list(message_parties(graph)) if rendezvous else []
    return stuck(graph, [*messages, *_merged(meetings)], buffered=not rendezvous)


def _occurrences(graph: Graph, kind: Kind, rank: int) -> list[int]:
    return [node for node in graph.nodes_of(kind) if graph.rank(node) == rank]


def _uneven(subject: Subject, kind: Kind, ranks: tuple[int, ...]) -> list[Finding]:
    """Ranks that enter a collective less often than another of its communicator."""
    counts = {rank: len(_occurrences(subject.graph, kind, rank)) for rank in ranks}
    expected = max(counts.values())
    most = next(rank for rank, count in counts.items() if count == expected)
    return [
        fault(
            CODE,
            f"rank {rank} enters {kind} {count} times, rank {most} {expected} times: "
            f"rank {most} waits for ever",
        )
        for rank, count in counts.items()
        if count != expected
    ]


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
