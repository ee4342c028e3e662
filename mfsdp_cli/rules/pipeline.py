"""Rules on the pipeline: virtual stages and point-to-point.

Microbatch counts are judged by :mod:`mfsdp_cli.schedule.spec`, idle ranks by
:mod:`mfsdp_cli.layout.checks`; :mod:`mfsdp_cli.rules.judge` joins them.
"""

from __future__ import annotations

from mfsdp_cli.errors import Severity
from mfsdp_cli.rules.table import Binds, Rule, Subject

_ARGUMENTS = "Megatron-LM, arguments.py, validate_args: interleaved schedule"
_SCHEDULES = "megatron-core 0.19.2, schedules.py, forward_backward_pipelining_with_interleaving"


def batched(subject: Subject) -> bool:
    """Whether sends and receives go out in batches: where not said, exactly if not overlapped."""
    asked = subject.settings.batch_p2p_communication
    return not subject.settings.overlap_p2p_communication if asked is None else asked


def _interleaved(subject: Subject) -> bool:
    return subject.parallel.virtual_pipeline_model_parallel_size > 1


def _one_rank_interleaved(subject: Subject) -> str | None:
    chunks = subject.parallel.virtual_pipeline_model_parallel_size
    if not _interleaved(subject) or subject.parallel.pipeline_model_parallel_size > 1:
        return None
    return f"{chunks} virtual stages a rank need more than 1 pipeline rank"


def _batched_between_two(subject: Subject) -> str | None:
    ranks = subject.parallel.pipeline_model_parallel_size
    if not _interleaved(subject) or ranks != 2 or not batched(subject):
        return None
    chunks = subject.parallel.virtual_pipeline_model_parallel_size
    return (
        f"batched point-to-point with pipeline size {ranks} and {chunks} virtual stages: a batch "
        "holds two sends between the same two ranks, which cannot be told apart, and activations "
        "and gradients get mixed up"
    )


def _overlapped_and_batched(subject: Subject) -> str | None:
    settings = subject.settings
    if not (settings.overlap_p2p_communication and settings.batch_p2p_communication):
        return None
    return "point-to-point communication is asked to be both overlapped and batched"


def _overlap_without_chunks(subject: Subject) -> str | None:
    if _interleaved(subject) or not subject.settings.overlap_p2p_communication:
        return None
    return (
        "overlapped point-to-point is asked for with 1 virtual stage a rank; the plain 1F1B "
        "schedule does not overlap it, so the flag is ignored"
    )


PIPELINE_RULES = (
    Rule(
        "MF240",
        "virtual stages need a pipeline",
        Binds.BOTH,
        _one_rank_interleaved,
        where="--num-virtual-stages-per-pipeline-rank",
        hint="--pipeline-model-parallel-size 2 or more, or --vpp 1",
        source=_ARGUMENTS,
    ),
    Rule(
        "MF241",
        "batched point-to-point between two interleaved ranks",
        Binds.BOTH,
        _batched_between_two,
        where="--no-overlap-p2p-communication",
        hint="--overlap-p2p-communication",
        source=_ARGUMENTS + "; megatron-core itself does not check it",
    ),
    Rule(
        "MF242",
        "overlapped and batched point-to-point",
        Binds.BOTH,
        _overlapped_and_batched,
        where="--overlap-p2p-communication --batch-p2p-communication",
        hint="one of the two: overlapped where virtual stages are used, batched otherwise",
        source=_SCHEDULES,
    ),
    Rule(
        "MF243",
        "overlap without virtual stages",
        Binds.BOTH,
        _overlap_without_chunks,
        where="--overlap-p2p-communication",
        hint="leave it out, or use virtual stages",
        source=_ARGUMENTS,
        severity=Severity.WARNING,
    ),
)
