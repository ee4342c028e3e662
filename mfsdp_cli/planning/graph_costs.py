"""What the nodes of the schedule graph cost, for the files that show it."""

from __future__ import annotations

from mfsdp_cli.cost.hardware import Hardware
from mfsdp_cli.plan import Plan
from mfsdp_cli.planning.assemble import Assembly, sharding_of
from mfsdp_cli.planning.costs import GRADIENT_BYTES, Costs
from mfsdp_cli.planning.units import stage_units
from mfsdp_cli.schedule.attributes import StageCost


def graph_costs(plan: Plan, hardware: Hardware) -> dict[int, StageCost]:
    """Seconds, bytes and units of every stage's actions."""
    sharding = sharding_of(plan.parallel)
    units = [stage_units(plan.model, plan.layout, stage, sharding) for stage in plan.layout.stages]
    parts = Assembly(
        plan.model,
        plan.parallel,
        plan.layout,
        plan.settings,
        plan.built,
        plan.shared_groups,
        units,
        list(plan.findings),
    )
    costs = Costs(parts, hardware)
    return {stage.stage: _cost(costs, stage.stage) for stage in plan.layout.stages}


def _cost(costs: Costs, number: int) -> StageCost:
    stage, units = costs.stages[number], costs.plan.units[number]
    time = costs.stage_time(costs.plan.layout.stages[number])
    return StageCost(
        forward_s=time.forward,
        backward_s=time.backward,
        output_bytes=stage.boundary,
        parameter_bytes=stage.gathered,
        gradient_bytes=sum(unit.parameters for unit in units) * GRADIENT_BYTES,
        units=tuple(unit.name for unit in units),
    )
