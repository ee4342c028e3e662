"""Plans for tests, made as ``mfsdp plan`` makes them."""

from __future__ import annotations

from typing import Any

from mfsdp_cli.plan import Plan
from mfsdp_cli.planning.build import build_plan
from mfsdp_cli.planning.request import PlanRequest


def plan_of(
    model: str,
    *,
    pp: int = 1,
    vpp: int | None = None,
    dp: int = 1,
    layout: str | None = None,
    mbs: int = 1,
    gbs: int = 8,
    seq: int = 32,
    group: int | None = None,
    ep: int = 1,
    mtp: int | None = None,
    layers: int | None = None,
    **settings: Any,
) -> Plan:
    """The plan of a preset with these sizes and settings."""
    sizes: dict[str, Any] = {
        "pipeline_model_parallel_size": pp,
        "world_size": pp * dp,
        "micro_batch_size": mbs,
        "global_batch_size": gbs,
        "seq_length": seq,
    }
    if ep > 1:
        sizes["expert_model_parallel_size"] = ep
    if vpp is not None:
        sizes["num_virtual_stages_per_pipeline_rank"] = vpp
    if layout is not None:
        sizes["pipeline_model_parallel_layout"] = layout
    if group is not None:
        sizes["microbatch_group_size_per_virtual_pipeline_stage"] = group
    return build_plan(
        PlanRequest(model, sizes=sizes, settings=settings, mtp_num_layers=mtp, num_layers=layers)
    )
