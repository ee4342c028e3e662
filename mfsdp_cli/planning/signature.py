"""One command line that makes the same plan again."""

from __future__ import annotations

import shlex
from dataclasses import fields
from typing import Any

from mfsdp_cli.layout.layout import Layout
from mfsdp_cli.layout.printer import format_layout
from mfsdp_cli.parallel import Parallel, Settings
from mfsdp_cli.planning.request import PlanRequest
from mfsdp_cli.planning.settings import resolve_settings

GIB = 1 << 30
#: Settings that are a pair of flags, on and off; other switches only have the name that sets them.
_PAIRS = frozenset(
    {
        "overlap_p2p_communication",
        "batch_p2p_communication",
        "gradient_accumulation_fusion",
        "deallocate_pipeline_outputs",
    }
)


def signature(request: PlanRequest, parallel: Parallel, layout: Layout, settings: Settings) -> str:
    """``mfsdp plan MODEL`` with every size, the layout and the settings that differ."""
    words = ["mfsdp", "plan", request.model, *_model_flags(request)]
    words += ["--world-size", str(parallel.world_size)]
    words += ["--pp", str(parallel.pipeline_model_parallel_size)]
    words += ["--vpp", str(parallel.virtual_pipeline_model_parallel_size)]
    words += ["--layout", format_layout(layout), *_sizes(parallel), *_settings(settings, parallel)]
    return shlex.join([*words, *_limits(request)])


def _limits(request: PlanRequest) -> list[str]:
    """What memory is judged against and times are predicted for."""
    words = [] if request.hardware is None else ["--hardware", request.hardware]
    if request.gpus_per_node is not None:
        words += ["--gpus-per-node", str(request.gpus_per_node)]
    if request.memory_limit is not None:
        words += ["--memory-limit", f"{request.memory_limit / GIB:.12g}"]
    return words


def _model_flags(request: PlanRequest) -> list[str]:
    given = {
        "--num-layers": request.num_layers,
        "--mtp-num-layers": request.mtp_num_layers,
        "--make-vocab-size-divisible-by": request.make_vocab_size_divisible_by,
    }
    return [
        word for flag, value in given.items() if value is not None for word in (flag, str(value))
    ]


def _sizes(parallel: Parallel) -> list[str]:
    words = ["--mbs", str(parallel.micro_batch_size), "--gbs", str(parallel.global_batch_size)]
    words += ["--seq", str(parallel.seq_length)]
    for flag, size in (
        ("--tp", parallel.tensor_model_parallel_size),
        ("--cp", parallel.context_parallel_size),
        ("--ep", parallel.expert_model_parallel_size),
    ):
        if size > 1:
            words += [flag, str(size)]
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    if group != parallel.pipeline_model_parallel_size:
        words += ["--microbatch-group-size-per-virtual-pipeline-stage", str(group)]
    return words


def _settings(settings: Settings, parallel: Parallel) -> list[str]:
    """Settings that differ from what these sizes have by default."""
    usual, _ = resolve_settings({}, vpp=parallel.virtual_pipeline_model_parallel_size)
    words: list[str] = []
    for field in fields(Settings):
        value: Any = getattr(settings, field.name)
        if value != getattr(usual, field.name):
            words += _flag(field.name, value)
    return words


def _flag(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if not isinstance(value, bool):
        return [f"--{flag}", str(value)]
    if value:
        return [f"--{flag}"]
    return [f"--no-{flag}"] if name in _PAIRS else []
