"""Parameters that several stages hold: one logical parameter each, several copies.

The word embedding is needed where tokens come in, again by MTP layers, and as a tied head on the
loss stage. Whether the head is tied or not, an MTP stage elsewhere holds a copy: a group of the
first and the last pipeline rank alone would let it drift.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from mfsdp_cli.layout.layout import Layout
from mfsdp_cli.model.parameters import (
    OUTPUT_LAYER,
    WORD_EMBEDDING,
    embedding_tensors,
    head_tensors,
)
from mfsdp_cli.model.spec import ModelSpec


@dataclass(frozen=True)
class SharedMember:
    """One copy: where it lives and what Megatron-Core calls it there."""

    pp_rank: int
    vp_stage: int
    parameter: str


@dataclass(frozen=True)
class SharedGroup:
    """All copies of one logical parameter.

    Args:
        name: what is shared.
        kind: ``tied`` where the head is a copy of the embedding, else ``mtp``.
        pp_ranks: pipeline ranks with a copy, ascending.
        members: the copies by stage; the first is the owner, the others stay bit-equal to it.
    """

    name: str
    kind: str
    pp_ranks: tuple[int, ...]
    members: tuple[SharedMember, ...]

    @property
    def owner(self) -> SharedMember:
        """The copy that counts: in totals, in the gradient norm, in checkpoints."""
        return self.members[0]

    def to_json(self) -> dict[str, Any]:
        """The group as the plan document has it."""
        return {
            "name": self.name,
            "kind": self.kind,
            "pp_ranks": list(self.pp_ranks),
            "members": [asdict(member) for member in self.members],
        }


def shared_groups(spec: ModelSpec, layout: Layout) -> tuple[SharedGroup, ...]:
    """The shared parameters of a layout; none where one stage holds every user of the embedding."""
    members = tuple(_copies(spec, layout))
    if len(members) < 2:
        return ()
    tied = any(member.parameter == OUTPUT_LAYER for member in members)
    ranks = tuple(sorted({member.pp_rank for member in members}))
    return (SharedGroup("word_embeddings", "tied" if tied else "mtp", ranks, members),)


def _copies(spec: ModelSpec, layout: Layout) -> Iterator[SharedMember]:
    for stage in layout.stages:
        tensors = [*embedding_tensors(spec, stage), *head_tensors(spec, stage)]
        for tensor in tensors:
            if tensor.name == WORD_EMBEDDING or tensor.copy_of == WORD_EMBEDDING:
                yield SharedMember(stage.pp_rank, stage.vp_stage, tensor.name)
