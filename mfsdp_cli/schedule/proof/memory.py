"""Invariants 6 and 13: what is gathered while a rank computes, and how much of it."""

from __future__ import annotations

from collections.abc import Iterator

from mfsdp_cli.errors import Finding
from mfsdp_cli.schedule.actions import COMPUTE, Kind
from mfsdp_cli.schedule.proof.check import Check, Subject, fault, judged


def check_gathered(subject: Subject) -> Check:
    """Judge invariant 6: compute touches gathered, current parameters; none survive the step."""
    return judged("MF316", _gather_findings(subject))


def _gather_findings(subject: Subject) -> Iterator[Finding]:
    for rank in range(len(subject.graph.lists)):
        yield from _rank_findings(subject, rank)


def _rank_findings(subject: Subject, rank: int) -> Iterator[Finding]:
    graph = subject.graph
    gathered: dict[int, int] = {}  # stage -> its UNSHARD
    for node in graph.nodes_of_rank(rank):
        kind, stage = graph.kinds[node], graph.stages[node]
        if kind in COMPUTE and stage not in gathered:
            yield _fault(subject, node, f"computes on stage {stage}, which is not gathered")
        elif kind is Kind.UNSHARD:
            if stage in gathered:
                yield _fault(subject, node, "gathers a stage that is gathered already")
            gathered[stage] = node
        elif kind is Kind.RESHARD and gathered.pop(stage, None) is None:
            yield _fault(subject, node, "frees a stage that is not gathered")
        elif kind is Kind.OPTIMIZER:
            yield from _survivors(subject, gathered, f"survives {kind}")
            gathered = {}
    yield from _survivors(subject, gathered, "is never freed")


def _survivors(subject: Subject, gathered: dict[int, int], problem: str) -> Iterator[Finding]:
    for stage, node in gathered.items():
        yield _fault(subject, node, f"gathers stage {stage}, which {problem}")


def _fault(subject: Subject, node: int, problem: str) -> Finding:
    return fault("MF316", f"{subject.name(node)} {problem}", where=subject.where([node]))


def check_residency(subject: Subject, resident_chunks: int) -> Check:
    """Judge the residency part of invariant 13: gathered chunks at a time and rank."""
    return judged("MF323", _residency_findings(subject, max(1, resident_chunks)))


def _residency_findings(subject: Subject, budget: int) -> Iterator[Finding]:
    graph = subject.graph
    for rank in range(len(graph.lists)):
        gathered: set[int] = set()
        for node in graph.nodes_of_rank(rank):
            if graph.kinds[node] is Kind.RESHARD:
                gathered.discard(graph.stages[node])
            elif graph.kinds[node] is Kind.UNSHARD:
                gathered.add(graph.stages[node])
                if len(gathered) > budget:
                    yield fault(
                        "MF323",
                        f"{subject.name(node)} makes {len(gathered)} gathered chunks, stages "
                        f"{sorted(gathered)}; the residency budget is {budget}",
                        where=subject.where([node]),
                    )
                    break
