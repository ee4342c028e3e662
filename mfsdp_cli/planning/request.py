"""What a person asks a plan for, and how it joins what the model's file already says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mfsdp_cli.errors import Finding, MfsdpError

#: Ways to say how layers are divided; a flag of one way replaces those of a file.
_LAYOUT_STRING = "pipeline_model_parallel_layout"
_SPLIT_SIZES = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "num_layers_per_virtual_pipeline_stage",
)
_CHUNK_SIZES = ("num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size")


class PlanningFaults(MfsdpError):
    """Everything that makes a plan impossible; the first one is the error itself."""

    def __init__(self, findings: list[Finding]) -> None:
        first = findings[0]
        super().__init__(first.code, first.message, hint=first.hint, where=first.where)
        self.findings = findings


@dataclass(frozen=True)
class PlanRequest:
    """A plan as it is asked for; nothing is derived yet.

    Args:
        model: preset name or path.
        sizes: sizes and layout options that were given, by Megatron's option names with
            underscores (``pipeline_model_parallel_size``, ``world_size``).
        settings: fields of :class:`~mfsdp_cli.parallel.Settings` that were given.
        num_layers: depth that replaces the model's.
        hardware: name or YAML file; None: an H100 is assumed for predictions, memory is not judged.
        memory_limit: bytes a rank may use; None: the hardware's memory where hardware is given.
        split: ``auto``, ``balanced`` or ``even``; None: auto.
        top: how many ranked candidates to keep.
    """

    model: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    num_layers: int | None = None
    mtp_num_layers: int | None = None
    make_vocab_size_divisible_by: int | None = None
    hardware: str | None = None
    gpus_per_node: int | None = None
    memory_limit: int | None = None
    split: str | None = None
    top: int = 5


def join_sizes(asked: Mapping[str, Any], in_file: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of flags over those of the model's file.

    A flag that says how layers are divided takes the place of every other way the file says it,
    so that a file with a layout string can be planned anew with ``--decoder-last-...``.
    """
    kept = dict(in_file)
    if _LAYOUT_STRING in asked:
        _drop(kept, (*_SPLIT_SIZES, *_CHUNK_SIZES))
    if any(name in asked for name in _SPLIT_SIZES):
        _drop(kept, (_LAYOUT_STRING,))
    if any(name in asked for name in (*_CHUNK_SIZES, "num_layers_per_virtual_pipeline_stage")):
        _drop(kept, (*_CHUNK_SIZES, "num_layers_per_virtual_pipeline_stage"))
    return kept | dict(asked)


def _drop(sizes: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        sizes.pop(name, None)
