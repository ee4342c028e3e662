"""Invariant 14: every layer exactly once, on the stages that the schedule runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mfsdp_cli.errors import Finding
from mfsdp_cli.layout.layout import Layout, StageLayout
from mfsdp_cli.schedule.proof.check import Check, fault, judged
from mfsdp_cli.schedule.spec import ScheduleSpec

CODE = "MF324"


def check_layers(
    layout: Layout, spec: ScheduleSpec, *, num_layers: int, mtp_num_layers: int
) -> Check:
    """Judge invariant 14.

    Args:
        num_layers, mtp_num_layers: what the model has; layers are 0-based and global.
    """
    return judged(CODE, _findings(layout, spec, num_layers, mtp_num_layers))


def _findings(
    layout: Layout, spec: ScheduleSpec, num_layers: int, mtp_num_layers: int
) -> Iterator[Finding]:
    yield from _sizes(layout, spec)
    for place, stage in enumerate(layout.stages):
        yield from _numbering(layout, place, stage)
    decoder = [(layer, stage) for stage in layout.stages for layer in stage.layers]
    yield from _once("decoder.layers", decoder, num_layers)
    mtp = [(layer, stage) for stage in layout.stages for layer in stage.mtp]
    yield from _once("mtp.layers", mtp, mtp_num_layers)
    yield from _ends(layout)


def _sizes(layout: Layout, spec: ScheduleSpec) -> Iterator[Finding]:
    if (layout.pp, layout.vpp) != (spec.pp, spec.vpp) or len(layout.stages) != spec.num_stages:
        yield fault(
            CODE,
            f"the layout has {len(layout.stages)} stages on {layout.pp} x {layout.vpp} chunks, "
            f"the schedule runs {spec.num_stages} on {spec.pp} x {spec.vpp}",
        )


def _numbering(layout: Layout, place: int, stage: StageLayout) -> Iterator[Finding]:
    if (stage.stage, stage.stage % layout.pp, stage.stage // layout.pp) != (
        place,
        stage.pp_rank,
        stage.vp_stage,
    ):
        yield fault(
            CODE,
            f"stage {stage.stage} stands at place {place} of the layout, on rank {stage.pp_rank}, "
            f"virtual stage {stage.vp_stage}; stage = virtual stage x {layout.pp} + rank",
        )


def _once(name: str, found: Sequence[tuple[int, StageLayout]], count: int) -> Iterator[Finding]:
    """Each of layers 0 to count-1 once, in ascending order over the stages."""
    first: dict[int, StageLayout] = {}
    highest = -1
    for layer, stage in found:
        if layer in first:
            other = first[layer]
            yield fault(
                CODE,
                f"{name}.{layer} is on stage {other.stage} (rank {other.pp_rank}) and on stage "
                f"{stage.stage} (rank {stage.pp_rank})",
            )
        elif not 0 <= layer < count:
            yield fault(
                CODE,
                f"{name}.{layer} is on stage {stage.stage} (rank {stage.pp_rank}), but the model "
                f"has {count} of them",
            )
        elif layer < highest:
            yield fault(CODE, f"{name}.{layer} on stage {stage.stage} comes after {name}.{highest}")
        first[layer] = stage
        highest = max(highest, layer)
    for layer in range(count):
        if layer not in first:
            yield fault(CODE, f"{name}.{layer} is on no stage")


def _ends(layout: Layout) -> Iterator[Finding]:
    """One embedding, on the first stage; one loss, on the last."""
    for what, expected in (("embedding", 0), ("loss", len(layout.stages) - 1)):
        stages = [stage.stage for stage in layout.stages if getattr(stage, what)]
        if stages != [expected]:
            yield fault(CODE, f"the {what} is on stages {stages}, not on stage {expected} alone")
