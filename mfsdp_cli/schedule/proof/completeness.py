"""Invariant 1: each (stage, microbatch) has exactly its forward and its backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mfsdp_cli.errors import Finding
from mfsdp_cli.schedule.actions import COMPUTE, Kind
from mfsdp_cli.schedule.proof.check import Check, Subject, fault, judged

CODE = "MF311"
_TITLES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "input-gradient backward",
    Kind.BACKWARD_WEIGHT: "weight-gradient backward",
}


@dataclass
class _Stage:
    """Microbatches of one stage by kind."""

    seen: dict[Kind, set[int]] = field(default_factory=lambda: {kind: set() for kind in COMPUTE})


def check_complete(subject: Subject) -> Check:
    """Judge invariant 1."""
    return judged(CODE, _findings(subject))


def _findings(subject: Subject) -> Iterator[Finding]:
    stages: dict[int, _Stage] = {}
    yield from _idle_ranks(subject)
    yield from _misplaced(subject)
    yield from _repeated(subject, stages)
    yield from _absent_stages(subject, stages)
    for stage in sorted(stages):
        yield from _missing(subject, stage, stages[stage])


def _idle_ranks(subject: Subject) -> Iterator[Finding]:
    graph = subject.graph
    for rank, actions in enumerate(graph.lists):
        if not any(action.kind in COMPUTE for action in actions):
            yield fault(CODE, f"rank {rank} runs no forward and no backward", where=f"rank {rank}")


def _misplaced(subject: Subject) -> Iterator[Finding]:
    """Actions outside the stages and microbatches there are, or on a rank that is not theirs."""
    graph = subject.graph
    for node, stage in enumerate(graph.stages):
        if stage < 0:
            continue
        owner = graph.stage_ranks.get(stage)
        microbatch = graph.microbatches[node]
        if stage >= subject.num_stages or owner is None:
            problem = f"there are {subject.num_stages} stages"
        elif microbatch >= subject.num_microbatches:
            problem = f"there are {subject.num_microbatches} microbatches"
        elif graph.rank(node) != owner:
            problem = f"stage {stage} is on rank {owner}"
        else:
            continue
        yield fault(
            CODE,
            f"{subject.name(node)} does not belong there: {problem}",
            where=subject.where([node]),
        )


def _repeated(subject: Subject, stages: dict[int, _Stage]) -> Iterator[Finding]:
    """Actions that run twice; fills ``stages`` on the way."""
    graph = subject.graph
    for node, kind in enumerate(graph.kinds):
        if kind not in COMPUTE:
            continue
        stage, microbatch = graph.stages[node], graph.microbatches[node]
        seen = stages.setdefault(stage, _Stage()).seen[kind]
        if microbatch in seen:
            first = graph.find(kind, stage, microbatch)
            assert first is not None
            yield fault(
                CODE,
                f"{subject.name(node)} runs twice: action {graph.index(first) + 1} of rank "
                f"{graph.rank(first)} and action {graph.index(node) + 1} of rank "
                f"{graph.rank(node)}",
                where=subject.where([node]),
            )
        seen.add(microbatch)


def _absent_stages(subject: Subject, stages: dict[int, _Stage]) -> Iterator[Finding]:
    present = sum(stage < subject.num_stages for stage in stages)
    if present < subject.num_stages:
        first = next(stage for stage in range(subject.num_stages) if stage not in stages)
        yield fault(
            CODE,
            f"stage {first} never runs: of stages 0 to {subject.num_stages - 1} only {present} do",
            hint="every stage needs a forward and a backward of every microbatch",
        )


def _missing(subject: Subject, stage: int, found: _Stage) -> Iterator[Finding]:
    seen = found.seen
    split = seen[Kind.BACKWARD_INPUT] | seen[Kind.BACKWARD_WEIGHT]
    yield from _gap(subject, stage, Kind.FORWARD, seen[Kind.FORWARD], set())
    both = seen[Kind.BACKWARD] & split
    if both:
        microbatch = min(both)
        yield fault(
            CODE,
            f"stage {stage}, microbatch {microbatch} on rank {_rank(subject, stage)} has a full "
            f"backward ({stage}B{microbatch}) and a split one as well",
        )
    if not split:
        yield from _gap(subject, stage, Kind.BACKWARD, seen[Kind.BACKWARD], set())
        return
    for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
        yield from _gap(subject, stage, kind, seen[kind], seen[Kind.BACKWARD])


def _gap(
    subject: Subject, stage: int, kind: Kind, seen: set[int], instead: set[int]
) -> Iterator[Finding]:
    """The first microbatch without its action, and how many more there are."""
    covered = {mb for mb in seen | instead if mb < subject.num_microbatches}
    count = subject.num_microbatches - len(covered)
    if count == 0:
        return
    first = next(mb for mb in range(subject.num_microbatches) if mb not in covered)
    more = f", and of {count - 1} more microbatches" if count > 1 else ""
    yield fault(
        CODE,
        f"rank {_rank(subject, stage)}, stage {stage}: the {_TITLES[kind]} of microbatch {first} "
        f"({stage}{kind}{first}) is missing{more}; microbatches are 0 to "
        f"{subject.num_microbatches - 1}",
        where=_beside(subject, stage, first),
    )


def _beside(subject: Subject, stage: int, microbatch: int) -> str:
    """Where the other half of a missing action is."""
    for kind in _TITLES:
        node = subject.graph.find(kind, stage, microbatch)
        if node is not None:
            return subject.where([node])
    return ""


def _rank(subject: Subject, stage: int) -> str:
    return str(subject.graph.stage_ranks.get(stage, "?"))
