"""Invariants 2 and 4: no rank waits for ever, with buffered sends or with rendezvous."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mfsdp_cli.errors import Finding
from mfsdp_cli.schedule.actions import RECEIVES
from mfsdp_cli.schedule.graph import Graph
from mfsdp_cli.schedule.proof.check import Check, Subject, fault, judged, passed, skipped
from mfsdp_cli.schedule.proof.execution import Party, Wait, shortest_cycle, stuck


def check_waiting(subject: Subject, *, rendezvous: bool) -> tuple[Check, Check]:
    """Judge invariants 2 and 4.

    Where no rank gets stuck under rendezvous, none does otherwise. So the weaker condition is
    tried only where the stronger one fails.

    Args:
        rendezvous: whether a send waits for its receive; invariant 4 is skipped if not.
    """
    graph = subject.graph
    if rendezvous and graph.has_messages:
        waits = stuck(graph, message_parties(graph))
        if not waits:
            return passed("MF312"), passed("MF314")
        if not stuck(graph, buffered=True):
            return passed("MF312"), judged("MF314", [deadlock(subject, "MF314", waits)])
    waits = stuck(graph, buffered=True)
    if waits:
        reason = "ranks wait for each other even when sends do not wait (MF312)"
        return judged("MF312", [deadlock(subject, "MF312", waits)]), skipped("MF314", reason)
    reason = "sends are buffered" if graph.has_messages else "the schedule has no messages"
    return passed("MF312"), skipped("MF314", reason)


def message_parties(graph: Graph) -> Iterator[Party]:
    """Each send with its receive; a receive that stands twice is paired once."""
    for kind in RECEIVES:
        for node in graph.nodes_of(kind):
            sender = graph.sender(node)
            first = graph.find(kind, graph.stages[node], graph.microbatches[node])
            if sender is not None and first == node:
                yield sender, node


def deadlock(subject: Subject, code: str, waits: Sequence[Wait]) -> Finding:
    """The shortest ring of ranks that wait for each other, as a finding."""
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
