"""A check's result, and what checks have in common: the subject they judge and how they name it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mfsdp_cli.errors import Finding, Severity
from mfsdp_cli.schedule.build import Schedule
from mfsdp_cli.schedule.graph import Graph
from mfsdp_cli.schedule.grid import grid

PASS, FAIL, SKIP = "pass", "fail", "skip"

# More findings of one check than this say nothing new.
MAX_FINDINGS = 20

NAMES = {
    "MF311": "every forward and backward exactly once",
    "MF312": "no cycle of waiting",
    "MF313": "sends and receives pair, first in first out",
    "MF314": "no deadlock when a send waits for its receive",
    "MF315": "every rank of a communicator sees the same collectives",
    "MF316": "compute on gathered parameters only, none left over",
    "MF317": "each gradient reduced once, after its last contributor",
    "MF318": "last microbatch at each chunk's last backward",
    "MF321": "one group for each shared parameter, summed before the norm",
    "MF322": "norm, clip, optimizer, refresh",
    "MF323": "gathered chunks within the residency budget",
    "MF324": "every layer exactly once",
}


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Args:
        code: ``MF311`` to ``MF324``; the last digits are the invariant's number plus 10.
        status: ``pass``, ``fail`` or ``skip``.
        finding: a minimal counterexample where the check failed.
        others: further counterexamples, at most MAX_FINDINGS in all.
        reason: why a check was skipped.
    """

    code: str
    name: str
    status: str
    finding: Finding | None = None
    others: tuple[Finding, ...] = ()
    reason: str = ""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All counterexamples."""
        return () if self.finding is None else (self.finding, *self.others)

    def to_json(self) -> dict[str, str]:
        """The contract's object for a check."""
        return {"code": self.code, "name": self.name, "status": self.status}


@dataclass(frozen=True)
class Subject:
    """What is judged.

    Args:
        num_stages, num_microbatches: what the schedule must cover.
        schedule: where the lists come from; None for lists read from a file.
    """

    graph: Graph
    num_stages: int
    num_microbatches: int
    schedule: Schedule | None = None

    def name(self, node: int) -> str:
        """An action with everything that locates it."""
        graph = self.graph
        stage, microbatch = graph.stages[node], graph.microbatches[node]
        parts = [f"rank {graph.rank(node)}"]
        parts += [f"stage {stage}"] if stage >= 0 else []
        parts += [f"microbatch {microbatch}"] if microbatch >= 0 else []
        return f"{graph.actions[node]} ({', '.join(parts)})"

    def where(self, nodes: Sequence[int]) -> str:
        """Rank and place of the first node, and the grid around all of them, each marked."""
        graph = self.graph
        marks = [(graph.rank(node), graph.index(node)) for node in nodes]
        rank, index = marks[0]
        return f"rank {rank}, action {index + 1}\n{grid(graph.lists, marks)}"


def passed(code: str) -> Check:
    """A check that found nothing."""
    return Check(code, NAMES[code], PASS)


def skipped(code: str, reason: str) -> Check:
    """A check that could not be made, and why."""
    return Check(code, NAMES[code], SKIP, reason=reason)


def judged(code: str, findings: Iterable[Finding]) -> Check:
    """Pass without findings, fail with them."""
    found: list[Finding] = []
    for finding in findings:
        found.append(finding)
        if len(found) == MAX_FINDINGS:
            break
    if not found:
        return passed(code)
    return Check(code, NAMES[code], FAIL, found[0], tuple(found[1:]))


def fault(code: str, message: str, *, where: str = "", hint: str = "") -> Finding:
    """A finding of severity error."""
    return Finding(code, Severity.ERROR, message, hint=hint, where=where)
