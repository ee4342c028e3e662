"""Step time and peak memory of a pipeline in closed form: no schedule is built.

Exact counts are taken from the same stage costs as the plan's; only what a schedule decides is
approximated: how many forwards wait at once, how often a stage is gathered, how long ranks idle.
"""

from __future__ import annotations

from dataclasses import dataclass

from mfsdp_cli.cost.state import persistent_state, two_largest
from mfsdp_cli.planning.costs import GRADIENT_BYTES, Costs


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step and bytes of the heaviest rank."""

    seconds: float
    peak: int


def estimate(costs: Costs) -> Estimate:
    """The estimate for an assembly without schedule."""
    ranks = range(costs.plan.layout.pp)
    return Estimate(_seconds(costs), max(_peak(costs, rank) for rank in ranks))


def _seconds(costs: Costs) -> float:
    """The busiest rank's work, the pipeline's filling and emptying, gathers not hidden."""
    parallel, layout = costs.plan.parallel, costs.plan.layout
    times = [costs.stage_time(stage) for stage in layout.stages]
    each = [time.forward + time.backward for time in times]
    busy = max(sum(each[rank :: layout.pp]) for rank in range(layout.pp))
    work = busy * parallel.num_microbatches
    idle = (layout.pp - 1) * sum(each) / len(each)
    moved = max(_moved(costs, rank) for rank in range(layout.pp))
    link = costs.hardware.link(costs.sharding_ranks(experts=False))
    return work + idle + max(0.0, moved / link - work)


def _moved(costs: Costs, rank: int) -> float:
    """Bytes gathered and reduced by a rank in a step."""
    parallel, settings = costs.plan.parallel, costs.plan.settings
    microbatches, layout = parallel.num_microbatches, costs.plan.layout
    groups = -(-microbatches // parallel.microbatch_group_size_per_virtual_pipeline_stage)
    gathers = 2 * groups if layout.vpp > 1 else 1
    if settings.resident_chunks == 0:
        gathers = 2 * microbatches
    elif settings.resident_chunks >= layout.vpp:
        gathers = 1
    reductions = 1 if settings.gradient_reduction == "last" else microbatches
    size = sum(stage.gathered for stage in costs.stages[rank :: layout.pp])
    return size * (gathers + reductions * GRADIENT_BYTES / costs.precision.compute)


def _peak(costs: Costs, rank: int) -> int:
    stages = costs.stages[rank :: costs.plan.layout.pp]
    units = [unit for stage in stages for unit in stage.units]
    state = sum(persistent_state(units, costs.precision).values())
    live = in_flight(costs, rank) * sum(stage.held for stage in stages) / len(stages)
    largest = max(two_largest(stage.units) for stage in stages)
    resident = costs.plan.settings.resident_chunks
    gathered = sum(sorted((stage.gathered for stage in stages), reverse=True)[:resident])
    if resident == 0:
        gathered = largest * costs.precision.compute
    working = max(stage.working for stage in stages)
    moving = largest * GRADIENT_BYTES + working + costs.hardware.framework_bytes
    return round(state + live + gathered + moving)


def in_flight(costs: Costs, rank: int) -> int:
    """Most forwards that wait at once: the warm-up and the one before the first backward."""
    parallel, layout = costs.plan.parallel, costs.plan.layout
    hops = layout.pp - rank - 1
    if layout.vpp == 1:
        return min(parallel.num_microbatches, hops + 1)
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    warmup = 2 * hops + (layout.vpp - 1) * group
    return min(parallel.num_microbatches * layout.vpp, warmup + 1)
