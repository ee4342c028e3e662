"""The plan document: the contract's keys, from an assembled plan and its costs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mfsdp_cli.layout.printer import format_layout, stage_signs
from mfsdp_cli.model.parameters import count_parameters, rank_counts, stage_counts
from mfsdp_cli.plan import SCHEMA, Plan, run_digest
from mfsdp_cli.planning.assemble import Assembly
from mfsdp_cli.planning.context import rank_contexts
from mfsdp_cli.planning.costs import Costs, Prediction
from mfsdp_cli.planning.megatron_args import megatron_args


def make_plan(
    parts: Assembly,
    costs: Costs,
    *,
    signature: str,
    hardware_assumed: bool,
    candidates: list[dict[str, Any]],
) -> Plan:
    """The plan with its document.

    Args:
        hardware_assumed: nobody named the hardware that times are predicted for.
        candidates: what a search compared; empty where sizes were given.
    """
    same = derived(parts)
    document = {
        "schema": SCHEMA,
        "signature": signature,
        "plan_digest": digest(parts),
        "model": same["model"],
        "parallel": same["parallel"],
        "settings": same["settings"],
        "layout": same["layout"],
        "ranks": _ranks(same["ranks"], costs),
        "shared_groups": same["shared_groups"],
        "context": _contexts(same["context"], costs),
        "schedule": same["schedule"],
        "predicted": _predicted(costs, assumed=hardware_assumed),
        "candidates": candidates,
        "megatron_args": same["megatron_args"],
        "findings": [finding.to_json() for finding in parts.findings],
    }
    return Plan(
        parts.model,
        parts.parallel,
        parts.layout,
        parts.settings,
        parts.schedule,
        parts.groups,
        tuple(parts.findings),
        document,
    )


def derived(parts: Assembly) -> dict[str, Any]:
    """What a document says that follows from its assembly alone, whatever the hardware.

    A reader makes it again and compares: no number in it can be changed by hand.
    """
    return {
        "model": _model(parts),
        "parallel": parts.parallel.to_json(),
        "settings": parts.settings.to_json(),
        "layout": _layout(parts),
        "ranks": [_counts(parts, rank) for rank in range(parts.layout.pp)],
        "shared_groups": [group.to_json() for group in parts.groups],
        "context": _orders(parts),
        "schedule": _schedule(parts),
        "megatron_args": megatron_args(parts.model, parts.parallel, parts.layout, parts.settings),
    }


def digest(parts: Assembly) -> str:
    """The plan digest of an assembly."""
    schedule = None if parts.schedule is None else parts.schedule.digest
    # Spelt out: a shorter spelling found one day must not make it another run.
    layout = "|".join(map(stage_signs, parts.layout.stages))
    return run_digest(parts.model, parts.parallel, layout, parts.settings, schedule)


def _model(parts: Assembly) -> dict[str, Any]:
    model = parts.model
    return {
        "name": model.name,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "padded_vocab_size": model.padded_vocab_size,
        "parameters": asdict(count_parameters(model)),
        "assumptions": list(model.assumptions),
        "spec": model.to_json(),
    }


def _layout(parts: Assembly) -> dict[str, Any]:
    stages = []
    for stage in parts.layout.stages:
        counts = stage_counts(parts.model, parts.layout, stage, parts.sharding)
        stages.append(
            {
                "stage": stage.stage,
                "pp_rank": stage.pp_rank,
                "vp_stage": stage.vp_stage,
                "layers": list(stage.layers),
                "embedding": stage.embedding,
                "loss": stage.loss,
                "mtp": list(stage.mtp),
                "parameters": counts.parameters,
                "mtp_parameters": counts.mtp_parameters,
                "copied_parameters": counts.copied_parameters,
            }
        )
    return {
        "string": format_layout(parts.layout),
        "decoder_layers_per_pp_rank": parts.layout.decoder_layers_per_pp_rank(),
        "stages": stages,
    }


def _counts(parts: Assembly, rank: int) -> dict[str, Any]:
    counts = rank_counts(parts.model, parts.layout, rank, parts.sharding)
    schedule = parts.schedule
    return {
        "pp_rank": rank,
        "parameters": counts.parameters,
        "mtp_parameters": counts.mtp_parameters,
        "copied_parameters": counts.copied_parameters,
        "routed_parameters": counts.routed_parameters,
        "in_flight_chunks": None if schedule is None else schedule.in_flight_chunks[rank],
    }


def _ranks(counts: list[dict[str, Any]], costs: Costs) -> list[dict[str, Any]]:
    return [{**rank, "memory": costs.memory(rank["pp_rank"]).to_json()} for rank in counts]


def _orders(parts: Assembly) -> list[dict[str, Any]]:
    if parts.schedule is None:
        return []
    contexts = rank_contexts(parts.schedule, parts.units)
    for rank, context in enumerate(contexts):
        context["residency"] = {
            "resident_chunks": parts.settings.resident_chunks,
            "gradient_reduction": parts.settings.gradient_reduction,
            "gathers_per_step": parts.schedule.gathers_per_step[rank],
        }
    return contexts


def _contexts(orders: list[dict[str, Any]], costs: Costs) -> list[dict[str, Any]]:
    for context in orders:
        gathered = costs.memory(context["pp_rank"]).gathered_peak
        context["residency"]["peak_gathered_bytes"] = gathered
    return orders


def _schedule(parts: Assembly) -> dict[str, Any]:
    schedule = parts.schedule
    if schedule is None:
        nothing: dict[str, Any] = {"bubble_fraction": None, "bubble_ratio": None, "digest": None}
        return {
            "name": parts.settings.schedule,
            **nothing,
            "gathers_per_step": None,
            "actions_per_rank": [],
        }
    return {
        "name": schedule.spec.name,
        "bubble_fraction": schedule.bubble_fraction,
        "bubble_ratio": schedule.bubble_ratio,
        "digest": schedule.digest,
        "gathers_per_step": max(schedule.gathers_per_step),
        "actions_per_rank": schedule.actions_per_rank,
    }


def _predicted(costs: Costs, *, assumed: bool) -> dict[str, Any]:
    prediction: Prediction | None = costs.prediction()
    common = {"hardware": costs.hardware.name, "hardware_assumed": assumed}
    if prediction is None:
        return {
            "step_time_s": None,
            "tokens_per_s_per_gpu": None,
            "model_flops_utilization": None,
            "communication_bytes": {},
            **common,
        }
    return {
        "step_time_s": prediction.step_time,
        "tokens_per_s_per_gpu": prediction.tokens_per_s_per_gpu,
        "model_flops_utilization": prediction.model_flops_utilization,
        "communication_bytes": prediction.traffic.to_json(),
        **common,
    }
