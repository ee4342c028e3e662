"""What each pipeline rank's FSDP context will see: its units and the order of their uses."""

from __future__ import annotations

from typing import Any

from mfsdp_cli.planning.units import UnitSize, backward_order
from mfsdp_cli.schedule.actions import Kind
from mfsdp_cli.schedule.build import Schedule

Units = list[list[UnitSize]]
"""The units of every stage, by stage."""


def rank_contexts(schedule: Schedule, units: Units) -> list[dict[str, Any]]:
    """One JSON object a pipeline rank.

    ``forward_order`` and ``backward_order`` list every use of a unit in the order of the step,
    ``{unit, stage, microbatch}``; a unit comes again for every microbatch.
    """
    reverse = [backward_order(stage) for stage in units]
    return [_context(schedule, units, reverse, rank) for rank in range(schedule.spec.pp)]


def _context(schedule: Schedule, units: Units, reverse: Units, rank: int) -> dict[str, Any]:
    spec = schedule.spec
    stages = range(rank, spec.num_stages, spec.pp)
    return {
        "pp_rank": rank,
        "chunks": [{"stage": stage, "vp_stage": stage // spec.pp} for stage in stages],
        "units": [
            {"unit": unit.name, "stage": stage, "parameters": unit.parameters}
            for stage in stages
            for unit in units[stage]
        ],
        "forward_order": _uses(schedule, rank, Kind.FORWARD, units),
        "backward_order": _uses(schedule, rank, Kind.BACKWARD, reverse),
    }


def _uses(schedule: Schedule, rank: int, kind: Kind, units: Units) -> list[dict[str, Any]]:
    return [
        {"unit": unit.name, "stage": action.stage, "microbatch": action.microbatch}
        for action in schedule.actions[rank]
        if action.kind is kind and action.stage is not None
        for unit in units[action.stage]
    ]
