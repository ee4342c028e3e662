"""From a spec to the schedule: compute orders through all lowering passes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mfsdp_cli.errors import MfsdpError, Severity
from mfsdp_cli.schedule.actions import Action, Kind
from mfsdp_cli.schedule.graph import Graph
from mfsdp_cli.schedule.lowering import (
    add_end_of_step,
    add_reduce_grad,
    add_send_receive,
    last_backwards,
)
from mfsdp_cli.schedule.orders import compute_orders
from mfsdp_cli.schedule.residency import add_unshard_reshard
from mfsdp_cli.schedule.simulate import Timeline, peak_in_flight, simulate
from mfsdp_cli.schedule.spec import ScheduleSpec, microbatch_findings


@dataclass(frozen=True)
class Schedule:
    """What every pipeline rank executes in one step.

    Args:
        actions: in order, one list a pp_rank; do not change them.
        digest: SHA-256 of the canonical text; equal digests mean equal lists.
        gathers_per_step: stage gathers (``UNSHARD``) of each rank.
        in_flight_chunks: most forwards of each rank that await their backward at once.
        last_backward: by stage, the microbatch of its last backward, where
            ``is_last_microbatch`` is true.
        timeline: compute actions with equal chunk times and free communication.
    """

    spec: ScheduleSpec
    actions: list[list[Action]] = field(repr=False, compare=False)
    digest: str
    gathers_per_step: list[int]
    in_flight_chunks: list[int]
    last_backward: list[int]
    timeline: Timeline = field(repr=False, compare=False)

    @property
    def bubble_fraction(self) -> float:
        """Idle / whole, simulated with equal chunk times and free communication."""
        return self.timeline.bubble_fraction

    @property
    def bubble_ratio(self) -> float:
        """Idle / ideal, simulated with equal chunk times and free communication."""
        return self.timeline.bubble_ratio

    @property
    def actions_per_rank(self) -> list[int]:
        """Length of each rank's list."""
        return [len(actions) for actions in self.actions]

    def graph(self) -> Graph:
        """The actions of all ranks as one graph."""
        spec = self.spec
        return Graph(
            self.actions,
            {stage: spec.rank_of(stage) for stage in range(spec.num_stages)},
            tied_pp_ranks=spec.tied_pp_ranks,
            messages=spec.pp > 1,
        )


def build_schedule(spec: ScheduleSpec, *, strict: bool = True) -> Schedule:
    """The schedule of a spec; pure and deterministic.

    Args:
        strict: refuse microbatch counts that Megatron refuses. A caller that reports them itself
            (:func:`mfsdp_cli.schedule.spec.microbatch_findings`) switches this off.

    Raises:
        MfsdpError: MF304 for a microbatch count that is refused, or with which ranks would wait
            for each other for ever.
    """
    if strict:
        _refuse_errors(spec)
    orders = compute_orders(spec)
    timeline = _simulate(spec, orders)
    lists = add_unshard_reshard(orders, spec.resident_chunks)
    lists = add_reduce_grad(lists, spec.gradient_reduction)
    lists = add_send_receive(lists, timeline, rank_of=spec.rank_of, num_stages=spec.num_stages)
    lists = add_end_of_step(lists, tied_pp_ranks=spec.tied_pp_ranks, router_bias=spec.router_bias)
    last = last_backwards(orders)
    return Schedule(
        spec=spec,
        actions=lists,
        digest=digest_of(lists),
        gathers_per_step=[_count(actions, Kind.UNSHARD) for actions in lists],
        in_flight_chunks=peak_in_flight(orders),
        last_backward=[last[stage] for stage in range(spec.num_stages)],
        timeline=timeline,
    )


def build_evaluation(spec: ScheduleSpec) -> list[list[Action]]:
    """What every pipeline rank executes to evaluate one batch: the step's forwards alone.

    Gathers and messages are placed anew. Without the backwards ranks meet in another order: a
    receive left at its use would wait behind a send that waits for it.

    Raises:
        MfsdpError: MF304 where ranks would wait for each other for ever.
    """
    orders = [
        [action for action in order if action.kind is Kind.FORWARD]
        for order in compute_orders(spec)
    ]
    timeline = _simulate(spec, orders)
    lists = add_unshard_reshard(orders, spec.resident_chunks)
    return add_send_receive(lists, timeline, rank_of=spec.rank_of, num_stages=spec.num_stages)


def canonical_text(lists: Iterable[Sequence[Action]]) -> str:
    """The schedule as text: one line a rank, actions separated by commas."""
    return "".join(",".join(map(str, actions)) + "\n" for actions in lists)


def digest_of(lists: Iterable[Sequence[Action]]) -> str:
    """SHA-256 of the canonical text, in hexadecimal."""
    return hashlib.sha256(canonical_text(lists).encode()).hexdigest()


def _refuse_errors(spec: ScheduleSpec) -> None:
    for finding in microbatch_findings(spec):
        if finding.severity is Severity.ERROR:
            raise MfsdpError(finding.code, finding.message, hint=finding.hint, where=finding.where)


def _simulate(spec: ScheduleSpec, orders: list[list[Action]]) -> Timeline:
    try:
        return simulate(orders, rank_of=spec.rank_of, num_stages=spec.num_stages)
    except MfsdpError as error:
        raise MfsdpError(
            "MF304",
            f"{spec.num_microbatches} microbatches in groups of {spec.group_size} on {spec.pp} "
            f"pipeline ranks with {spec.vpp} virtual stages each: {error.finding.message}",
            where="--global-batch-size",
            hint=f"a number of microbatches divisible by the {spec.pp} pipeline ranks",
        ) from error


def _count(actions: Sequence[Action], kind: Kind) -> int:
    return sum(action.kind is kind for action in actions)
