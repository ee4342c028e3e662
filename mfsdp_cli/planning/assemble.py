"""From decided sizes, layout and settings to the plan: schedule, costs, findings."""

from __future__ import annotations

from dataclasses import dataclass

from mfsdp_cli.errors import Finding, MfsdpError, Severity
from mfsdp_cli.layout.layout import Layout
from mfsdp_cli.layout.shared import SharedGroup, shared_groups
from mfsdp_cli.model.parameters import Sharding
from mfsdp_cli.model.spec import ModelSpec
from mfsdp_cli.parallel import Parallel, Settings
from mfsdp_cli.planning.units import UnitSize, stage_units
from mfsdp_cli.rules.judge import judge
from mfsdp_cli.rules.table import Subject, Target
from mfsdp_cli.schedule.build import Schedule, build_schedule
from mfsdp_cli.schedule.spec import ScheduleSpec


@dataclass(frozen=True)
class Assembly:
    """What a plan is made of. ``schedule`` is None where the microbatch count allows none; the
    findings say why.
    """

    model: ModelSpec
    parallel: Parallel
    layout: Layout
    settings: Settings
    schedule: Schedule | None
    groups: tuple[SharedGroup, ...]
    units: list[list[UnitSize]]
    findings: list[Finding]

    @property
    def sharding(self) -> Sharding:
        return sharding_of(self.parallel)


def sharding_of(parallel: Parallel) -> Sharding:
    """How tensor and expert parallelism divide parameters."""
    return Sharding(parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size)


def assemble(
    model: ModelSpec,
    parallel: Parallel,
    layout: Layout,
    settings: Settings,
    *,
    target: Target = Target.MFSDP,
) -> Assembly:
    """Build the schedule and judge the rules.

    Raises:
        MfsdpError: MF302, MF303, MF305 for a schedule that does not fit the sizes.
    """
    groups = shared_groups(model, layout)
    spec = schedule_spec(model, parallel, settings, groups)
    findings = judge(Subject(model, parallel, settings, layout), target)
    schedule = None
    try:
        schedule = build_schedule(spec, strict=False)
    except MfsdpError as error:
        if not any(finding.severity is Severity.ERROR for finding in findings):
            findings.append(error.finding)
    sharding = sharding_of(parallel)
    units = [stage_units(model, layout, stage, sharding) for stage in layout.stages]
    return Assembly(model, parallel, layout, settings, schedule, groups, units, findings)


def schedule_spec(
    model: ModelSpec, parallel: Parallel, settings: Settings, groups: tuple[SharedGroup, ...]
) -> ScheduleSpec:
    """What the schedule is built from."""
    return ScheduleSpec(
        name=settings.schedule,
        pp=parallel.pipeline_model_parallel_size,
        vpp=parallel.virtual_pipeline_model_parallel_size,
        num_microbatches=parallel.num_microbatches,
        group_size=parallel.microbatch_group_size_per_virtual_pipeline_stage,
        resident_chunks=settings.resident_chunks,
        gradient_reduction=settings.gradient_reduction,
        tied_pp_ranks=tuple(group.pp_ranks for group in groups if len(group.pp_ranks) > 1),
        router_bias=model.moe is not None and model.moe.moe_router_enable_expert_bias,
    )
