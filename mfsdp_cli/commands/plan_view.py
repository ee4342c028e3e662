"""What ``mfsdp plan`` shows a person."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mfsdp_cli.layout.printer import stage_signs
from mfsdp_cli.plan import Plan

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

GIB = 1 << 30
#: From this width on a bar stands beside each rank's memory.
BARS_FROM = 76
BAR_WIDTH = 20
_UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))


def plan_view(plan: Plan, out: Path | None, *, width: int) -> list[RenderableType]:
    """Model, ranks, bubble, prediction, candidates, what to type next; fits ``width`` columns."""
    document = plan.document
    views: list[RenderableType] = [*_lines(_head(plan))]
    views += [_blank(), _ranks(plan, bars=width >= BARS_FROM), _blank()]
    views += _lines([*_parameters(document), *_schedule(document), *_predicted(document)])
    if document["candidates"]:
        views += [_blank(), _candidates(document["candidates"])]
    views += _lines(f"assumed: {text}" for text in document["model"]["assumptions"])
    return [*views, _blank(), *_lines(_next(plan, out))]


def preset_table() -> RenderableType:
    """The models known by name."""
    from mfsdp_cli.model.parameters import count_parameters
    from mfsdp_cli.model.presets import preset, preset_names

    table = _table("preset", "layers", "hidden", "parameters", right=(1, 2, 3))
    for name in preset_names():
        spec = preset(name)
        total = short_count(count_parameters(spec).total)
        table.add_row(name, str(spec.num_layers), str(spec.hidden_size), total)
    return table


def short_count(number: int) -> str:
    """A count in three digits: 671B, 8.03B, 427K."""
    for size, unit in _UNITS:
        if number >= size:
            value = number / size
            return f"{value:.0f}{unit}" if value >= 100 else f"{value:.3g}{unit}"
    return str(number)


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """A bar of ``width`` signs of which ``share`` are full."""
    full = round(min(max(share, 0.0), 1.0) * width)
    return "█" * full + "·" * (width - full)


def _head(plan: Plan) -> Iterable[str]:
    model, parallel = plan.document["model"], plan.parallel
    counts = model["parameters"]
    active = f", {short_count(counts['active'])} active" if plan.model.moe else ""
    mtp = f" and {short_count(counts['mtp'])} of MTP" if counts["mtp"] else ""
    yield f"{model['name']}: {short_count(counts['total'])} parameters{mtp}{active}"
    yield (
        f"{parallel.world_size} ranks: PP {parallel.pipeline_model_parallel_size}, "
        f"VPP {parallel.virtual_pipeline_model_parallel_size}, DP {parallel.data_parallel_size}"
        + "".join(
            f", {name} {size}"
            for name, size in (
                ("TP", parallel.tensor_model_parallel_size),
                ("CP", parallel.context_parallel_size),
                ("EP", parallel.expert_model_parallel_size),
            )
            if size > 1
        )
    )
    yield (
        f"{parallel.num_microbatches} microbatches a step: global batch "
        f"{parallel.global_batch_size} / (micro batch {parallel.micro_batch_size} x "
        f"DP {parallel.data_parallel_size}), {parallel.seq_length} tokens each"
    )
    yield f"layout {plan.document['layout']['string']}"


def _ranks(plan: Plan, *, bars: bool) -> RenderableType:
    """One row a pipeline rank: its chunks, parameters, forwards in flight, memory."""
    ranks = plan.document["ranks"]
    largest = max(rank["memory"]["peak_bytes"] for rank in ranks)
    headers = ["rank", "chunks", "params", "live", "peak GiB", *(["memory"] if bars else [])]
    table = _table(*headers, right=(0, 2, 3, 4))
    for rank in ranks:
        peak = rank["memory"]["peak_bytes"]
        chunks = " ".join(_chunk(stage) for stage in plan.layout.stages_of(rank["pp_rank"]))
        live = rank["in_flight_chunks"]
        row = [str(rank["pp_rank"]), chunks, short_count(rank["parameters"])]
        row += ["-" if live is None else str(live), f"{peak / GIB:.2f}"]
        table.add_row(*row, *([bar(peak / largest)] if bars else []))
    return table


def _chunk(stage: Any) -> str:
    """``Et*3`` for a chunk; a dash where it holds nothing."""
    from mfsdp_cli.layout.printer import compress

    signs = stage_signs(stage)
    return compress(signs) if signs else "-"


def _parameters(document: dict[str, Any]) -> Iterable[str]:
    total = document["model"]["parameters"]["total"] + document["model"]["parameters"]["mtp"]
    held = sum(rank["parameters"] for rank in document["ranks"])
    copies = sum(rank["copied_parameters"] for rank in document["ranks"])
    expert_parallel = document["parallel"]["expert_model_parallel_size"]
    held_by = (
        "over all pipeline ranks"
        if expert_parallel == 1
        else f"on one rank a stage (EP {expert_parallel})"
    )
    yield f"parameters: {total:,} unique, {held:,} {held_by}, {copies:,} copies"
    for group in document["shared_groups"]:
        ranks = ", ".join(map(str, group["pp_ranks"]))
        yield f"shared: {group['name']} ({group['kind']}) on pipeline ranks {ranks}"


def _schedule(document: dict[str, Any]) -> Iterable[str]:
    schedule = document["schedule"]
    if schedule["bubble_fraction"] is None:
        yield f"schedule {schedule['name']}: cannot be built from these microbatches"
        return
    yield (
        f"schedule {schedule['name']}: bubble {schedule['bubble_fraction']:.2%} of the step "
        f"(idle / whole), {schedule['bubble_ratio']:.2%} over ideal (idle / ideal), with equal "
        "chunk times"
    )
    yield f"gathers: at most {schedule['gathers_per_step']} stage gathers a rank and step"


def _predicted(document: dict[str, Any]) -> Iterable[str]:
    predicted = document["predicted"]
    if predicted["step_time_s"] is None:
        return
    assumed = ", assumed" if predicted["hardware_assumed"] else ""
    yield (
        f"predicted ({predicted['hardware']}{assumed}): {predicted['step_time_s']:.3g} s a step, "
        f"{_rate(predicted['tokens_per_s_per_gpu'])} tokens/s a rank"
    )


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _candidates(candidates: list[dict[str, Any]]) -> RenderableType:
    table = _table("PP", "VPP", "step s", "peak GiB", "why", right=(0, 1, 2, 3))
    for candidate in candidates:
        known = candidate["step_time_s"] is not None
        table.add_row(
            str(candidate["pipeline_model_parallel_size"]),
            str(candidate["virtual_pipeline_model_parallel_size"]),
            f"{candidate['step_time_s']:.3g}" if known else "-",
            f"{candidate['peak_bytes'] / GIB:.2f}" if known else "-",
            candidate["reason"],
        )
    return table


#: What mfsdp train does not run although the plan is sound: expert parallelism, a model it cannot
#: build.
_UNTRAINABLE = frozenset({"MF217"})


def _next(plan: Plan, out: Path | None) -> Iterable[str]:
    if plan.errors:
        yield "next: mend the errors below; mfsdp train refuses this plan"
    elif out is None:
        yield f"next: {plan.document['signature']} --out plan.json"
    else:
        yield f"written: {out}"
        yield f"next: mfsdp validate {out}"
        if not _UNTRAINABLE & {finding.code for finding in plan.findings}:
            yield f"      mfsdp train {out}"


def _table(*headers: str, right: tuple[int, ...] = ()) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, header in enumerate(headers):
        numeric = index in right or header == "memory"
        table.add_column(
            header,
            justify="right" if index in right else "left",
            no_wrap=numeric,
            overflow="fold",
        )
    return table


def _lines(texts: Iterable[str]) -> list[RenderableType]:
    from rich.text import Text

    return [Text(text, overflow="fold") for text in texts]


def _blank() -> RenderableType:
    from rich.text import Text

    return Text("")
