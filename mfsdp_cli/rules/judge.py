"""The one table of rules, and the one way to apply it.

Flags, plan files, Megatron arguments and YAML all become the same :class:`Subject` first, so that
the same configuration gets the same answer whichever way it came in.
"""

from __future__ import annotations

from mfsdp_cli.errors import Finding
from mfsdp_cli.layout.checks import layout_findings
from mfsdp_cli.rules.pipeline import PIPELINE_RULES
from mfsdp_cli.rules.sizes import SIZE_RULES
from mfsdp_cli.rules.table import Rule, Subject, Target, apply_rules
from mfsdp_cli.rules.training import TRAINING_RULES
from mfsdp_cli.schedule.spec import ScheduleSpec, microbatch_findings

#: Code and name of the rules on microbatch counts, which the schedule states.
MICROBATCHES = ("MF304", "microbatch counts")
RULES: tuple[Rule, ...] = (*SIZE_RULES, *TRAINING_RULES, *PIPELINE_RULES)


def judge(subject: Subject, target: Target = Target.MFSDP) -> list[Finding]:
    """All findings of the table for a run, microbatch counts and idle ranks included."""
    layout = layout_findings(subject.model, subject.layout) if subject.layout else []
    return [*apply_rules(RULES, subject, target), *_microbatches(subject), *layout]


def _microbatches(subject: Subject) -> list[Finding]:
    """Counts the schedule refuses, with how the number of microbatches came about."""
    sizes = subject.parallel
    spec = ScheduleSpec(
        name=subject.settings.schedule,
        pp=sizes.pipeline_model_parallel_size,
        vpp=sizes.virtual_pipeline_model_parallel_size,
        num_microbatches=sizes.num_microbatches,
        group_size=sizes.microbatch_group_size_per_virtual_pipeline_stage,
    )
    origin = (
        f"global batch {sizes.global_batch_size} / (micro batch {sizes.micro_batch_size} x "
        f"data-parallel size {sizes.data_parallel_size})"
    )
    return microbatch_findings(spec, origin=origin)
