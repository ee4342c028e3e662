"""Layouts from numbers: how many decoder layers each stage takes.

=================== ===================================================================
``even``            every stage the same number; an error where that leaves layers out
``uneven_ends``     Megatron's first and last pipeline rank by hand, the rest even
``balanced``        pipeline ranks differ by at most one layer, the ends take fewer
``auto``            by cost (:mod:`mfsdp_cli.layout.auto`)
=================== ===================================================================

Embedding on the first stage; MTP layers, final norm, head and loss on the last, as Megatron does
without a layout string. A pipeline *rank* holds ``vpp`` stages.
"""

from __future__ import annotations

from collections.abc import Sequence

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.layout.checks import build_layout
from mfsdp_cli.layout.layout import Layout
from mfsdp_cli.layout.printer import format_layout, spell_layout
from mfsdp_cli.model.spec import ModelSpec

FIRST = "--decoder-first-pipeline-num-layers"
LAST = "--decoder-last-pipeline-num-layers"


def layout_of_counts(counts: Sequence[int], pp: int, mtp_num_layers: int) -> Layout:
    """The layout of decoder layers a stage (``pp * vpp`` numbers, by stage)."""
    stages = ["t" * count for count in counts]
    stages[0] = f"E{stages[0]}"
    stages[-1] = f"{stages[-1]}{'m' * mtp_num_layers}L"
    return build_layout(stages, pp)


def even_split(
    spec: ModelSpec,
    pp: int,
    vpp: int = 1,
    *,
    account_for_embedding: bool = False,
    account_for_loss: bool = False,
) -> Layout:
    """The same number of layers on every stage.

    Args:
        account_for_embedding, account_for_loss: the embedding on the first stage, the loss on
            the last stand for a layer each, as Megatron's ``--account-for-...`` say.

    Raises:
        MfsdpError: MF104 with the number of layers that floor division would build.
    """
    check_sizes(pp, vpp)
    slots = spec.num_layers + account_for_embedding + account_for_loss
    each, left = divmod(slots, pp * vpp)
    if left or each < 1:
        raise _does_not_divide(spec, pp, vpp, slots)
    counts = [each] * (pp * vpp)
    counts[0] -= account_for_embedding
    counts[-1] -= account_for_loss
    if min(counts[0], counts[-1]) < 0:
        raise MfsdpError(
            "MF104",
            f"{slots} slots on {pp * vpp} stages leave none for embedding and loss together",
            where=_where(spec, pp, vpp),
        )
    return layout_of_counts(counts, pp, spec.mtp_num_layers)


def balanced_split(spec: ModelSpec, pp: int, vpp: int = 1) -> Layout:
    """Pipeline ranks that differ by at most one layer; those near the ends take fewer.

    Inside a rank the stages differ by at most one as well, the first rank's first stage and the
    last rank's last stage being the lighter ones.

    Raises:
        MfsdpError: MF114 where there are fewer layers than stages.
    """
    check_sizes(pp, vpp)
    require_a_layer_each(spec, pp, vpp)
    each, more = divmod(spec.num_layers, pp)
    ranks = [each] * pp
    for pp_rank in sorted(range(pp), key=lambda r: (-min(r, pp - 1 - r), r))[:more]:
        ranks[pp_rank] += 1
    counts = [0] * (pp * vpp)
    for pp_rank, layers in enumerate(ranks):
        for vp_stage, count in enumerate(_spread(layers, vpp, heavy_first=pp_rank == pp - 1)):
            counts[vp_stage * pp + pp_rank] = count
    return layout_of_counts(counts, pp, spec.mtp_num_layers)


def uneven_ends(
    spec: ModelSpec, pp: int, vpp: int = 1, *, first: int | None, last: int | None
) -> Layout:
    """Megatron's ``--decoder-first/last-pipeline-num-layers``: layers of the end ranks by hand.

    Raises:
        MfsdpError: MF112 where the numbers do not add up to a model, naming option and numbers.
    """
    check_sizes(pp, vpp)
    given = {FIRST: first, LAST: last}
    named = {option: layers for option, layers in given.items() if layers is not None}
    for option, layers in named.items():
        _check_end(spec, option, layers, pp, vpp)
    ranks = _rank_layers(spec, named, pp)
    for pp_rank, layers in enumerate(ranks):
        if layers % vpp:
            raise MfsdpError(
                "MF112",
                f"{layers} layers of pipeline rank {pp_rank} do not divide into {vpp} virtual "
                "stages",
                where=_ends_where(spec, named, pp),
            )
    counts = [ranks[stage % pp] // vpp for stage in range(pp * vpp)]
    return layout_of_counts(counts, pp, spec.mtp_num_layers)


def virtual_stages(
    spec: ModelSpec,
    pp: int,
    layers_per_stage: int,
    *,
    account_for_embedding: bool = False,
    account_for_loss: bool = False,
) -> int:
    """Virtual stages a rank for ``--num-layers-per-virtual-pipeline-stage``.

    Raises:
        MfsdpError: MF104 where PP does not divide the layers, MF113 where the layers a stage do
            not divide a rank's; Megatron floored here and built fewer layers.
    """
    check_sizes(pp, layers_per_stage)
    slots = spec.num_layers + account_for_embedding + account_for_loss
    if slots % pp or slots < pp:
        raise _does_not_divide(spec, pp, 1, slots)
    a_rank = slots // pp
    if a_rank % layers_per_stage:
        usable = [n for n in range(1, a_rank + 1) if a_rank % n == 0]
        raise MfsdpError(
            "MF113",
            f"{slots} layers on {pp} pipeline ranks are {a_rank} a rank, which do not divide "
            f"into virtual stages of {layers_per_stage}",
            where=f"--num-layers-per-virtual-pipeline-stage {layers_per_stage}",
            hint="usable: " + ", ".join(f"{n} (v={a_rank // n})" for n in usable),
        )
    return a_rank // layers_per_stage


def require_a_layer_each(spec: ModelSpec, pp: int, vpp: int) -> None:
    """Raise MF114 where a stage would have no decoder layer."""
    if spec.num_layers < pp * vpp:
        raise MfsdpError(
            "MF114",
            f"{spec.num_layers} layers cannot fill {pp * vpp} stages ({pp} pipeline ranks x {vpp} "
            "virtual)",
            where=_where(spec, pp, vpp),
            hint="a layout string may leave stages without decoder layers",
        )


def check_sizes(pp: int, vpp: int) -> None:
    """Raise MF116 for sizes that no pipeline has."""
    if pp < 1 or vpp < 1:
        raise MfsdpError("MF116", f"pipeline sizes start at 1, got {min(pp, vpp)}")
    if pp == 1 and vpp > 1:
        raise MfsdpError(
            "MF116",
            f"one pipeline rank cannot interleave {vpp} virtual stages",
            hint="virtual stages need a pipeline size of 2 or more",
        )


def _spread(layers: int, parts: int, *, heavy_first: bool) -> list[int]:
    """Layers over a rank's stages, as even as they go."""
    each, more = divmod(layers, parts)
    heavy = [each + 1] * more
    light = [each] * (parts - more)
    return heavy + light if heavy_first else light + heavy


def _check_end(spec: ModelSpec, option: str, layers: int, pp: int, vpp: int) -> None:
    if layers < 1 or layers > spec.num_layers:
        raise MfsdpError(
            "MF112",
            f"{option} {layers} is not between 1 and the model's {spec.num_layers} layers",
            where=f"model {spec.name}",
        )
    if pp == 1 and layers != spec.num_layers:
        raise MfsdpError(
            "MF112",
            f"{option} {layers} with one pipeline rank would build {layers} of "
            f"{spec.num_layers} layers",
            where=f"--pipeline-model-parallel-size 1, model {spec.name}",
            hint=f"leave {option} out: one rank holds all {spec.num_layers}",
        )
    if layers % vpp:
        raise MfsdpError(
            "MF112", f"{option} {layers} does not divide into {vpp} virtual stages a rank"
        )


def _rank_layers(spec: ModelSpec, named: dict[str, int], pp: int) -> list[int]:
    """Decoder layers a pipeline rank with the ends given."""
    if pp == 1:
        return [spec.num_layers]
    middle, rest = pp - len(named), spec.num_layers - sum(named.values())
    if middle == 0 and rest:
        raise MfsdpError(
            "MF112",
            f"{' and '.join(f'{o} {n}' for o, n in named.items())} hold "
            f"{sum(named.values())} of {spec.num_layers} layers and no rank is left",
            where=_ends_where(spec, named, pp),
        )
    if middle and (rest < middle or rest % middle):
        raise MfsdpError(
            "MF112",
            f"{rest} layers are left for {middle} pipeline ranks, which they do not divide over "
            f"({spec.num_layers} layers, {' and '.join(f'{o} {n}' for o, n in named.items())})",
            where=_ends_where(spec, named, pp),
        )
    ranks = [rest // middle if middle else 0] * pp
    ranks[0] = named.get(FIRST, ranks[0])
    ranks[-1] = named.get(LAST, ranks[-1])
    return ranks


def _ends_where(spec: ModelSpec, named: dict[str, int], pp: int) -> str:
    options = " ".join(f"{option} {layers}" for option, layers in named.items())
    return f"{options} --pipeline-model-parallel-size {pp}, model {spec.name}"


def _does_not_divide(spec: ModelSpec, pp: int, vpp: int, slots: int) -> MfsdpError:
    stages = pp * vpp
    extra = slots - spec.num_layers
    counted = f" ({slots} with embedding and loss counted)" if extra else ""
    kind = "pipeline stages" if vpp == 1 else f"stages ({pp} pipeline ranks x {vpp} virtual)"
    return MfsdpError(
        "MF104",
        f"{spec.num_layers} layers{counted} do not divide into {stages} {kind} "
        f"({stages} x {slots // stages} would build {stages * (slots // stages)})",
        where=_where(spec, pp, vpp),
        hint=_uneven_hint(spec, pp, vpp),
    )


def _uneven_hint(spec: ModelSpec, pp: int, vpp: int) -> str:
    if spec.num_layers < pp * vpp:
        return f"at most {spec.num_layers} stages can hold a layer each"
    layout = balanced_split(spec, pp, vpp)
    ranks = layout.decoder_layers_per_pp_rank()
    shown = str(ranks) if len(ranks) <= 16 else f"{str(ranks[:16])[:-1]}, ...]"
    text = spell_layout(layout) if len(layout.stages) <= 16 else format_layout(layout)
    return f'drop the forced even split (an uneven one is {shown}), or pass --layout "{text}"'


def _where(spec: ModelSpec, pp: int, vpp: int) -> str:
    virtual = f" --num-virtual-stages-per-pipeline-rank {vpp}" if vpp > 1 else ""
    return f"--pipeline-model-parallel-size {pp}{virtual}, model {spec.name}"
