"""Invariant 12: what follows the last backward, in this order, once.

The router bias update belongs between the gradient reductions and the norm; the sum over copies is
invariant 11's.
"""

from __future__ import annotations

from collections.abc import Iterator

from mfsdp_cli.errors import Finding
from mfsdp_cli.schedule.actions import END_OF_STEP, Kind
from mfsdp_cli.schedule.lowering import UPDATE
from mfsdp_cli.schedule.proof.check import Check, Subject, fault, judged

CODE = "MF322"
_PLACES = {kind: place for place, kind in enumerate((Kind.ROUTER_BIAS, *UPDATE))}
_BEFORE = -1


def check_end_of_step(subject: Subject) -> Check:
    """Judge invariant 12."""
    return judged(CODE, _findings(subject))


def _findings(subject: Subject) -> Iterator[Finding]:
    for rank in range(len(subject.graph.lists)):
        yield from _order(subject, rank)
        yield from _counts(subject, rank)


def _order(subject: Subject, rank: int) -> Iterator[Finding]:
    """The first action that comes after one that it must precede."""
    graph = subject.graph
    latest: int | None = None
    for node in graph.nodes_of_rank(rank):
        kind = graph.kinds[node]
        if kind is Kind.TIED_ALLREDUCE:
            continue
        if latest is not None and _place(kind) < _place(graph.kinds[latest]):
            yield fault(
                CODE,
                f"{subject.name(node)} comes after {graph.actions[latest]}; the step ends with "
                f"{' -> '.join(UPDATE)}",
                where=subject.where([node]),
            )
            return
        latest = node if kind in _PLACES else latest


def _place(kind: Kind) -> int:
    """Rank in the order of the step's end; what comes before the norm is equal."""
    return _PLACES.get(kind, _BEFORE)


def _counts(subject: Subject, rank: int) -> Iterator[Finding]:
    kinds = [action.kind for action in subject.graph.lists[rank] if action.kind in END_OF_STEP]
    expected = dict.fromkeys(UPDATE, 1)
    if subject.schedule is not None:
        expected[Kind.ROUTER_BIAS] = int(subject.schedule.spec.router_bias)
    for kind, count in expected.items():
        if kinds.count(kind) != count:
            yield fault(CODE, f"rank {rank} has {kinds.count(kind)} {kind} in a step, not {count}")
