"""Compute orders: in which sequence each pipeline rank runs its forwards and backwards.

A rank warms up with forwards only, then alternates one forward and one backward, then cools down
with the backwards that are left. The two schedules differ in the sequence the forwards and
backwards come from, and in how many forwards the warm-up has.
"""

from __future__ import annotations

from collections.abc import Sequence

from mfsdp_cli.schedule.actions import Action, Kind
from mfsdp_cli.schedule.spec import ScheduleSpec


def compute_orders(spec: ScheduleSpec) -> list[list[Action]]:
    """The forwards and backwards of every pipeline rank, in order; one list a rank."""
    if spec.name == "1f1b":
        return [_one_f_one_b(spec, rank) for rank in range(spec.pp)]
    table = schedule_table(spec.num_microbatches, spec.vpp, spec.group_size)
    return [_interleaved(spec, rank, table) for rank in range(spec.pp)]


def schedule_table(
    num_microbatches: int, num_chunks: int, group_size: int
) -> list[tuple[int, int]]:
    """Megatron's order of (microbatch, chunk) on every rank under interleaving.

    Microbatches come in groups; each group runs through all chunks before the next group starts.
    Two chunks, five microbatches in groups of three::

        microbatch  0 1 2 0 1 2 3 4 3 4
        chunk       0 0 0 1 1 1 0 0 1 1
    """
    return [
        (microbatch, chunk)
        for first in range(0, num_microbatches, group_size)
        for chunk in range(num_chunks)
        for microbatch in range(first, min(first + group_size, num_microbatches))
    ]


def warmup_forwards(spec: ScheduleSpec, rank: int) -> int:
    """Forwards a rank runs before its first backward, the one directly before it left out.

    Under interleaving every hop from the last rank costs two (the forward that has to arrive and
    the backward that has to return), and all chunks but the last run a whole group first.
    """
    hops = spec.pp - rank - 1
    if spec.name == "1f1b":
        return min(spec.num_microbatches, hops)
    wanted = 2 * hops + (spec.vpp - 1) * spec.group_size
    return min(spec.num_microbatches * spec.vpp, wanted)


def _one_f_one_b(spec: ScheduleSpec, rank: int) -> list[Action]:
    microbatches = range(spec.num_microbatches)
    forwards = [Action(Kind.FORWARD, rank, microbatch) for microbatch in microbatches]
    backwards = [Action(Kind.BACKWARD, rank, microbatch) for microbatch in microbatches]
    return _alternate(forwards, backwards, warmup_forwards(spec, rank))


def _interleaved(spec: ScheduleSpec, rank: int, table: Sequence[tuple[int, int]]) -> list[Action]:
    """Backwards visit the chunks from the last to the first."""
    pp, last = spec.pp, spec.vpp - 1
    forwards = [Action(Kind.FORWARD, chunk * pp + rank, mb) for mb, chunk in table]
    backwards = [Action(Kind.BACKWARD, (last - chunk) * pp + rank, mb) for mb, chunk in table]
    return _alternate(forwards, backwards, warmup_forwards(spec, rank))


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    steady = len(forwards) - warmup
    order = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards[:steady], strict=True):
        order += (forward, backward)
    return order + backwards[steady:]
