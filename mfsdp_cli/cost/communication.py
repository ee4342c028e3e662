"""Bytes that one step moves, by kind, over all ranks together.

Collectives are counted as a ring moves them: each of R ranks sends ``(R - 1) / R`` of the whole
buffer in an all-gather or a reduce-scatter, and twice that in an all-reduce.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mfsdp_cli.cost.memory import StageMemory
from mfsdp_cli.schedule.actions import Action, Kind


@dataclass(frozen=True)
class Traffic:
    """Bytes one rank sends in a step."""

    all_gather: int = 0
    reduce_scatter: int = 0
    point_to_point: int = 0
    shared_parameters: int = 0
    expert_all_to_all: int = 0

    def times(self, ranks: int) -> Traffic:
        """The same for ``ranks`` ranks together."""
        return Traffic(*(ranks * value for value in self.values()))

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))

    def values(self) -> tuple[int, ...]:
        return (
            self.all_gather,
            self.reduce_scatter,
            self.point_to_point,
            self.shared_parameters,
            self.expert_all_to_all,
        )

    def to_json(self) -> dict[str, int]:
        return {
            "all_gather": self.all_gather,
            "reduce_scatter": self.reduce_scatter,
            "point_to_point": self.point_to_point,
            "shared_parameters": self.shared_parameters,
            "expert_all_to_all": self.expert_all_to_all,
            "total": sum(self.values()),
        }


def ring(size: int, ranks: int) -> int:
    """Bytes a rank sends in an all-gather or reduce-scatter of ``size`` bytes."""
    return size * (ranks - 1) // ranks


def rank_traffic(
    actions: Sequence[Action],
    stages: dict[int, StageMemory],
    *,
    compute_bytes: int,
    gradient_bytes: int,
    shared_bytes: int = 0,
    all_to_all: dict[int, int] | None = None,
) -> Traffic:
    """What one rank sends in a step.

    Args:
        shared_bytes: bytes it sends for parameters shared between pipeline ranks.
        all_to_all: bytes a microbatch's forward of a stage sends to other expert ranks.
    """
    count: Counter[tuple[Kind, int]] = Counter(
        (action.kind, action.stage) for action in actions if action.stage is not None
    )
    total = Traffic(shared_parameters=shared_bytes)
    for number, stage in stages.items():
        gathers = count[Kind.UNSHARD, number]
        reductions = count[Kind.REDUCE_GRAD, number]
        forwards = count[Kind.FORWARD, number]
        # A forward sends the stage's output, a backward the gradient of its input.
        sent = count[Kind.SEND_F, number] * stage.boundary
        sent += count[Kind.SEND_B, number] * stage.received
        # Forward and backward each dispatch and combine: four times the bytes of one dispatch.
        routed = 4 * forwards * (all_to_all or {}).get(number, 0)
        total += Traffic(
            gathers * _moved(stage, compute_bytes),
            reductions * _moved(stage, gradient_bytes),
            sent,
            0,
            routed,
        )
    return total


def _moved(stage: StageMemory, element: int) -> int:
    return sum(ring(unit.parameters * element, unit.ranks) for unit in stage.units)
