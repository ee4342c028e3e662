"""Which chunks a rank keeps gathered between uses, and when it gathers the others.

The order of uses is known, so this is offline caching: where a slot is needed, the chunk whose
next use is furthest away gives its slot up (Belady). Two things are added to it:

* With two slots or more, a gather is issued one compute action early, so that it overlaps with
  that action. The chunk of that action therefore keeps its slot. With two slots that costs
  2 gathers a step on PP4·V4·M16 (20 instead of 18); it is the fewest for gathers that are all
  issued early.
* A chunk that will be gathered anew, or not used again, is freed right after its last use, not
  when its slot is needed.

The first use of the next step follows the last use of this one, but its weights are new by then:
its gather is left to the beginning of the next step, after ``REFRESH_WEIGHTS``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mfsdp_cli.schedule.actions import Action, Kind

NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Interval:
    """A stage is gathered from its use ``first`` to its use ``last`` (indices of uses)."""

    stage: int
    first: int
    last: int


def add_unshard_reshard(
    orders: Sequence[Sequence[Action]], resident_chunks: int
) -> list[list[Action]]:
    """Add ``UNSHARD`` and ``RESHARD`` to compute orders.

    With 0 resident chunks every compute action gathers before and frees after: 2·M·V gathers.
    Never more than ``max(1, resident_chunks)`` chunks are gathered at a time.
    """
    return [_gather(order, resident_chunks) for order in orders]


def residency(uses: Sequence[int], slots: int) -> list[Interval]:
    """Intervals in which stages stay gathered, by first use; ``uses`` are stages in order.

    Example: ``residency([0, 1, 0, 2, 0], 2)`` keeps stage 0 throughout, stage 1 for its one use,
    stage 2 likewise.
    """
    next_use = _next_uses(uses)
    intervals: list[Interval] = []
    resident: dict[int, int] = {}  # stage -> index of its next use
    opened: dict[int, int] = {}
    latest: dict[int, int] = {}
    for index, stage in enumerate(uses):
        if stage not in resident:
            if len(resident) == slots:
                victim = _victim(resident, uses[index - 1])
                del resident[victim]
                intervals.append(Interval(victim, opened[victim], latest[victim]))
            opened[stage] = index
        resident[stage] = next_use[index]
        latest[stage] = index
    intervals += [Interval(stage, opened[stage], latest[stage]) for stage in resident]
    return sorted(intervals, key=lambda interval: interval.first)


def _next_uses(uses: Sequence[int]) -> list[int]:
    """For each use the index of the same stage's next one, NEVER for its last."""
    following = [NEVER] * len(uses)
    seen: dict[int, int] = {}
    for index in range(len(uses) - 1, -1, -1):
        following[index] = seen.get(uses[index], NEVER)
        seen[uses[index]] = index
    return following


def _victim(resident: dict[int, int], previous: int) -> int:
    """The resident stage used furthest from now, sparing the one in use when the gather starts."""
    candidates = [stage for stage in resident if stage != previous] or list(resident)
    return max(candidates, key=lambda stage: (resident[stage], -stage))


def _gather(order: Sequence[Action], resident_chunks: int) -> list[Action]:
    uses = [action.stage for action in order if action.stage is not None]
    if resident_chunks == 0:
        intervals = [Interval(stage, index, index) for index, stage in enumerate(uses)]
    else:
        intervals = residency(uses, resident_chunks)
    ahead = 1 if resident_chunks > 1 else 0
    opening: dict[int, list[int]] = {}
    closing: dict[int, list[int]] = {}
    for interval in intervals:
        opening.setdefault(max(0, interval.first - ahead), []).append(interval.stage)
        closing.setdefault(interval.last, []).append(interval.stage)
    gathered: list[Action] = []
    for index, action in enumerate(order):
        gathered += [Action(Kind.UNSHARD, stage) for stage in opening.get(index, ())]
        gathered.append(action)
        gathered += [Action(Kind.RESHARD, stage) for stage in closing.get(index, ())]
    return gathered
