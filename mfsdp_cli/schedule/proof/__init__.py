"""Proof of a schedule: invariants, each with a code and a minimal counterexample.

Invariant n of the design has code MF(310+n). Those about divisors (9), norm weights (10), bytes
(the rest of 13) and samples (15) are judged where the numbers are: in training and in cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.layout.layout import Layout
from mfsdp_cli.schedule.build import Schedule
from mfsdp_cli.schedule.proof.check import FAIL, PASS, SKIP, Check, Subject, passed, skipped
from mfsdp_cli.schedule.proof.collectives import check_collectives, never_waits
from mfsdp_cli.schedule.proof.completeness import check_complete
from mfsdp_cli.schedule.proof.end_of_step import check_end_of_step
from mfsdp_cli.schedule.proof.gradients import check_last_microbatch, check_reductions
from mfsdp_cli.schedule.proof.layers import check_layers
from mfsdp_cli.schedule.proof.memory import check_gathered, check_residency
from mfsdp_cli.schedule.proof.messages import Boundary, check_messages
from mfsdp_cli.schedule.proof.sharing import Group, check_sharing
from mfsdp_cli.schedule.proof.waiting import check_waiting

__all__ = [
    "FAIL",
    "PASS",
    "SKIP",
    "Boundary",
    "Check",
    "Group",
    "check_order",
    "prove",
]

P2P = ("rendezvous", "buffered")


def prove(
    schedule: Schedule,
    *,
    layout: Layout | None = None,
    num_layers: int | None = None,
    mtp_num_layers: int = 0,
    shared_groups: Sequence[Group] | None = None,
    tied: bool | None = None,
    boundaries: Mapping[int, Boundary] | None = None,
    p2p: str = "rendezvous",
) -> list[Check]:
    """Judge a schedule. What the arguments say nothing about is skipped.

    Args:
        layout, num_layers, mtp_num_layers: for invariant 14; layout also for 11.
        shared_groups, tied: the plan's groups, and whether head and embedding share a matrix.
        boundaries: by stage, the tensor that goes to the next stage, for invariant 3.
        p2p: ``rendezvous``: a send waits for its receive; ``buffered``: it does not.
    """
    spec = schedule.spec
    subject = Subject(schedule.graph(), spec.num_stages, spec.num_microbatches, schedule)
    rendezvous = _check_p2p(p2p) == "rendezvous" and subject.graph.has_messages
    settled = never_waits(subject, rendezvous=rendezvous)
    checks = check_order(subject, p2p=p2p, boundaries=boundaries, settled=settled and rendezvous)
    checks.append(
        passed("MF315")
        if settled
        else check_collectives(subject, checks[1:], rendezvous=rendezvous)
    )
    checks += judge_memory_and_gradients(
        subject,
        complete=checks[0],
        when=spec.gradient_reduction,
        last_backward=schedule.last_backward,
    )
    checks += [
        check_sharing(subject, groups=shared_groups, layout=layout, tied=tied),
        check_end_of_step(subject),
        check_residency(subject, spec.resident_chunks),
    ]
    if layout is None or num_layers is None:
        return [*checks, skipped("MF324", "no layout given")]
    layers = check_layers(layout, spec, num_layers=num_layers, mtp_num_layers=mtp_num_layers)
    return [*checks, layers]


def check_order(
    subject: Subject,
    *,
    p2p: str,
    boundaries: Mapping[int, Boundary] | None = None,
    settled: bool = False,
) -> list[Check]:
    """Invariants 1 to 4, by code.

    Args:
        settled: whether it is known that no rank waits for ever, even under rendezvous.
    """
    rendezvous = _check_p2p(p2p) == "rendezvous"
    messages = check_messages(subject, boundaries)
    waiting = (
        (passed("MF312"), passed("MF314"))
        if settled
        else check_waiting(subject, rendezvous=rendezvous)
    )
    if messages.status == FAIL:
        waiting = waiting[0], skipped("MF314", "sends and receives do not pair (MF313)")
    return [check_complete(subject), waiting[0], messages, waiting[1]]


def _check_p2p(p2p: str) -> str:
    if p2p not in P2P:
        raise MfsdpError("MF305", f"p2p is {p2p!r}; it is one of {', '.join(P2P)}", where="--p2p")
    return p2p


def judge_memory_and_gradients(
    subject: Subject, *, complete: Check, when: str | None, last_backward: Sequence[int] | None
) -> list[Check]:
    """Invariants 6 to 8; the last two say nothing about lists in which backwards are missing."""
    checks = [check_gathered(subject)]
    if complete.status == FAIL:
        reason = "forwards and backwards are not complete (MF311)"
        return [*checks, skipped("MF317", reason), skipped("MF318", reason)]
    checks.append(check_reductions(subject, when))
    if last_backward is not None:
        checks.append(check_last_microbatch(subject, last_backward))
    return checks
