"""Invariants 7 and 8: when gradients are reduced, and which backward is a chunk's last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mfsdp_cli.errors import Finding
from mfsdp_cli.schedule.actions import Kind
from mfsdp_cli.schedule.lowering import UPDATE, last_backwards
from mfsdp_cli.schedule.proof.check import Check, Subject, fault, judged

_CONTRIBUTES = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


def check_reductions(subject: Subject, when: str | None) -> Check:
    """Judge invariant 7.

    Args:
        when: ``microbatch``: each reduction takes one backward; ``last``: one reduction a stage;
            None: any number.
    """
    return judged("MF317", _reduction_findings(subject, when))


def _reduction_findings(subject: Subject, when: str | None) -> Iterator[Finding]:
    for rank in range(len(subject.graph.lists)):
        yield from _rank_findings(subject, rank, when)


def _rank_findings(subject: Subject, rank: int, when: str | None) -> Iterator[Finding]:
    graph = subject.graph
    pending: dict[int, list[int]] = {}
    reduced: set[int] = set()
    for node in graph.nodes_of_rank(rank):
        kind, stage = graph.kinds[node], graph.stages[node]
        if kind in _CONTRIBUTES:
            pending.setdefault(stage, []).append(node)
        elif kind is Kind.REDUCE_GRAD:
            taken = pending.pop(stage, [])
            problem = _reduction_problem(len(taken), stage in reduced, when)
            if problem:
                yield _fault(subject, node, problem)
            reduced.add(stage)
        elif kind in UPDATE and pending:
            yield from _unreduced(subject, pending)
            pending = {}
    yield from _unreduced(subject, pending)


def _reduction_problem(taken: int, again: bool, when: str | None) -> str:
    if taken == 0:
        return "reduces a gradient that no backward has made since the last reduction"
    if when == "last" and again:
        return "reduces a stage a second time, but reduction is set to the last microbatch only"
    if when == "microbatch" and taken > 1:
        return f"reduces {taken} backwards at once, but reduction is set to every microbatch"
    return ""


def _unreduced(subject: Subject, pending: dict[int, list[int]]) -> Iterator[Finding]:
    for nodes in pending.values():
        yield _fault(subject, nodes[0], "makes a gradient that is not reduced before the step ends")


def _fault(subject: Subject, node: int, problem: str) -> Finding:
    return fault("MF317", f"{subject.name(node)} {problem}", where=subject.where([node]))


def check_last_microbatch(subject: Subject, last_backward: Sequence[int]) -> Check:
    """Judge invariant 8.

    Args:
        last_backward: by stage, the microbatch whose backward runs with ``is_last_microbatch``.
    """
    actual = last_backwards(subject.graph.lists)
    return judged(
        "MF318",
        (
            fault(
                "MF318",
                f"stage {stage} on rank {subject.graph.stage_ranks[stage]} takes microbatch "
                f"{declared} for its last backward, but {stage}B{actual.get(stage)} comes last",
            )
            for stage, declared in enumerate(last_backward)
            if actual.get(stage) != declared
        ),
    )
