"""The layout that a set of flags asks for, and the flags that contradict each other."""

from __future__ import annotations

from dataclasses import dataclass

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.layout.auto import SplitCosts, auto_split
from mfsdp_cli.layout.grammar import parse_layout
from mfsdp_cli.layout.layout import Layout
from mfsdp_cli.layout.split import (
    FIRST,
    LAST,
    balanced_split,
    even_split,
    uneven_ends,
    virtual_stages,
)
from mfsdp_cli.model.spec import ModelSpec

SPLITS = ("even", "balanced", "auto")
_LAYOUT = "--pipeline-model-parallel-layout"
_PER_STAGE = "--num-layers-per-virtual-pipeline-stage"
_VIRTUAL = "--num-virtual-stages-per-pipeline-rank"
_EMBEDDING = "--account-for-embedding-in-pipeline-split"
_LOSS = "--account-for-loss-in-pipeline-split"


@dataclass(frozen=True)
class LayoutRequest:
    """What was asked for; None and False mean that the flag was not given.

    Args:
        pp: pipeline size.
        vpp: virtual stages a rank.
        layout: a layout string.
        split: ``even``, ``balanced`` or ``auto``.
        first_layers, last_layers: decoder layers of the first and last pipeline rank.
        layers_per_virtual_stage: Megatron's other way to give ``vpp``.
        account_for_embedding, account_for_loss: they stand for a layer each in an even split.
    """

    pp: int
    vpp: int | None = None
    layout: str | None = None
    split: str | None = None
    first_layers: int | None = None
    last_layers: int | None = None
    layers_per_virtual_stage: int | None = None
    account_for_embedding: bool = False
    account_for_loss: bool = False


def choose_layout(
    spec: ModelSpec, request: LayoutRequest, costs: SplitCosts | None = None
) -> Layout:
    """The layout of a request; without any wish the split by cost.

    Raises:
        MfsdpError: MF115 for flags that contradict each other, else what parsing and splitting
            raise (MF101 to MF116).
    """
    _check_contradictions(request)
    if request.layout is not None:
        return parse_layout(
            request.layout,
            num_layers=spec.num_layers,
            mtp_num_layers=spec.mtp_num_layers,
            pp=request.pp,
            vpp=request.vpp,
        )
    vpp = _virtual_stages(spec, request)
    if request.first_layers is not None or request.last_layers is not None:
        return uneven_ends(
            spec, request.pp, vpp, first=request.first_layers, last=request.last_layers
        )
    split = request.split or ("even" if _is_even(request) else "auto")
    if split == "even":
        return even_split(
            spec,
            request.pp,
            vpp,
            account_for_embedding=request.account_for_embedding,
            account_for_loss=request.account_for_loss,
        )
    if split == "balanced":
        return balanced_split(spec, request.pp, vpp)
    return auto_split(spec, request.pp, vpp, costs)


def _is_even(request: LayoutRequest) -> bool:
    """Whether flags were given that Megatron reads as an even split."""
    accounts = request.account_for_embedding or request.account_for_loss
    return accounts or request.layers_per_virtual_stage is not None


def _virtual_stages(spec: ModelSpec, request: LayoutRequest) -> int:
    if request.layers_per_virtual_stage is None:
        return 1 if request.vpp is None else request.vpp
    vpp = virtual_stages(
        spec,
        request.pp,
        request.layers_per_virtual_stage,
        account_for_embedding=request.account_for_embedding,
        account_for_loss=request.account_for_loss,
    )
    if request.vpp not in (None, vpp):
        raise MfsdpError(
            "MF115",
            f"{_PER_STAGE} {request.layers_per_virtual_stage} makes {vpp} virtual stages a rank, "
            f"but {_VIRTUAL} says {request.vpp}",
        )
    return vpp


def _check_contradictions(request: LayoutRequest) -> None:
    if request.split is not None and request.split not in SPLITS:
        raise MfsdpError(
            "MF115", f"there is no split {request.split!r}", hint=f"one of {', '.join(SPLITS)}"
        )
    ends = _given({FIRST: request.first_layers, LAST: request.last_layers})
    accounts = _given({_EMBEDDING: request.account_for_embedding, _LOSS: request.account_for_loss})
    per_stage = _given({_PER_STAGE: request.layers_per_virtual_stage})
    layout = _given({_LAYOUT: request.layout})
    split = [f"--split {request.split}"] if request.split else []
    _exclude(layout, ends + accounts + per_stage + split)
    _exclude(ends, accounts + per_stage + split)
    if request.split in ("balanced", "auto"):
        _exclude(split, accounts + per_stage)


def _given(flags: dict[str, object]) -> list[str]:
    return [flag for flag, value in flags.items() if value is not None and value is not False]


def _exclude(one: list[str], others: list[str]) -> None:
    if one and others:
        raise MfsdpError(
            "MF115",
            f"{one[0]} and {others[0]} both say how layers are split; only one of them can",
            where=" ".join([*one, *others]),
            hint=f"leave {others[0]} out, or {one[0]}",
        )
