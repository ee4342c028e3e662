"""From given sizes to the pipeline: its ranks, virtual stages and layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mfsdp_cli.cost.flops import Flops
from mfsdp_cli.errors import Finding, MfsdpError, Severity
from mfsdp_cli.layout.auto import SplitCosts
from mfsdp_cli.layout.choose import LayoutRequest
from mfsdp_cli.layout.choose import choose_layout as chosen
from mfsdp_cli.layout.grammar import count_stages, examine_layout
from mfsdp_cli.layout.layout import Layout
from mfsdp_cli.model.spec import ModelSpec
from mfsdp_cli.planning.sizes import DEFAULT_SEQUENCE, flag

STRING = "pipeline_model_parallel_layout"
CHUNKS = "num_virtual_stages_per_pipeline_rank"
CHUNKS_OF_CONFIG = "virtual_pipeline_model_parallel_size"
_SWITCHES = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_PER_STAGE = "num_layers_per_virtual_pipeline_stage"


@dataclass(frozen=True)
class PipelineRequest:
    """What was said about the pipeline; counts are known to be positive integers."""

    spec: ModelSpec
    sizes: Mapping[str, Any]
    split: str | None = None

    @property
    def declared_chunks(self) -> int | None:
        """Virtual stages a rank as declared by number."""
        chunks = self.sizes.get(CHUNKS)
        return self.sizes.get(CHUNKS_OF_CONFIG) if chunks is None else chunks

    @property
    def interleaved(self) -> bool:
        """Whether more than one virtual stage a rank is asked for."""
        return (self.declared_chunks or 1) > 1 or self.sizes.get(_PER_STAGE) is not None


def check_pipeline(sizes: Mapping[str, Any]) -> list[Finding]:
    """MF207 for layout options of a wrong kind, or virtual stages declared twice."""
    findings = []
    for name in _SWITCHES:
        value = sizes.get(name)
        if value is not None and not isinstance(value, bool):
            findings.append(_fault(f"{name} must be true or false, got {value!r}", flag(name)))
    first, second = sizes.get(CHUNKS), sizes.get(CHUNKS_OF_CONFIG)
    if first is not None and second is not None and first != second:
        findings.append(
            _fault(
                f"{first} and {second} virtual stages a rank are both declared",
                f"{flag(CHUNKS)} {first}, {CHUNKS_OF_CONFIG} {second}",
            )
        )
    return findings


def pipeline_size(request: PipelineRequest) -> int | None:
    """The number of pipeline ranks where it is said; None where it is to be searched.

    A layout string alone says it too: its stages divided by the declared virtual stages. Without
    a number of ranks it is the smallest that what was given needs.
    """
    sizes = request.sizes
    if sizes.get("pipeline_model_parallel_size") is not None:
        return int(sizes["pipeline_model_parallel_size"])
    text = sizes.get(STRING)
    if text is not None:
        return max(1, count_stages(text) // (request.declared_chunks or 1))
    if sizes.get("world_size") is not None:
        return None
    uneven = any(sizes.get(name) is not None for name in _ENDS)
    return 2 if uneven or request.interleaved else 1


def choose_layout(request: PipelineRequest, pp: int) -> tuple[Layout | None, list[Finding]]:
    """The layout for ``pp`` pipeline ranks, or None and everything that stands against it."""
    spec, sizes = request.spec, request.sizes
    asked = LayoutRequest(
        pp=pp,
        vpp=request.declared_chunks,
        layout=sizes.get(STRING),
        split=request.split,
        first_layers=sizes.get(_ENDS[0]),
        last_layers=sizes.get(_ENDS[1]),
        layers_per_virtual_stage=sizes.get(_PER_STAGE),
        account_for_embedding=bool(sizes.get(_SWITCHES[0])),
        account_for_loss=bool(sizes.get(_SWITCHES[1])),
    )
    length = sizes.get("seq_length") or min(DEFAULT_SEQUENCE, spec.max_position_embeddings)
    try:
        return chosen(spec, asked, costs_by_operations(spec, length)), []
    except MfsdpError as error:
        return None, _all_of(request, pp) or [error.finding]


def _all_of(request: PipelineRequest, pp: int) -> list[Finding]:
    """Every fault of a layout string, where there is one."""
    text = request.sizes.get(STRING)
    if text is None:
        return []
    return examine_layout(
        text,
        num_layers=request.spec.num_layers,
        mtp_num_layers=request.spec.mtp_num_layers,
        pp=pp,
        vpp=request.declared_chunks,
    )[1]


def costs_by_operations(spec: ModelSpec, length: int) -> SplitCosts:
    """Forward operations a token: of every layer, of the MTP layers, and of the head."""
    flops = Flops(spec, 1, length)
    cost = {is_moe: flops.layer(is_moe) / length for is_moe in set(_kinds(spec))}
    head = 2.0 * spec.hidden_size * spec.padded_vocab_size
    depth = spec.mtp_num_layers
    mtp = depth * flops.mtp_layer() / length if depth else 0.0
    return SplitCosts(
        tuple(cost[is_moe] for is_moe in _kinds(spec)), last=(1 + depth) * head, mtp=mtp
    )


def _kinds(spec: ModelSpec) -> list[bool]:
    return [spec.is_moe_layer(layer) for layer in range(spec.num_layers)]


def _fault(message: str, where: str, hint: str = "") -> Finding:
    return Finding("MF207", Severity.ERROR, message, hint, where)
