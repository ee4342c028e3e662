"""Layouts: which decoder layers, embedding, loss and MTP layers each stage holds.

A *stage* is a global virtual stage, ``stage = vp_stage * pp + pp_rank``; a layout lists its
stages in that order. Layers are 0-based and contiguous over the stages.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class StageLayout:
    """What one stage holds.

    Args:
        stage: global virtual stage.
        layers: decoder layers, 0-based, ascending.
        embedding: whether the word embedding is here.
        loss: whether the final norm, the head and the loss are here.
        mtp: MTP layers here, 0-based.
    """

    stage: int
    pp_rank: int
    vp_stage: int
    layers: tuple[int, ...] = ()
    embedding: bool = False
    loss: bool = False
    mtp: tuple[int, ...] = field(default=())


@dataclass(frozen=True)
class Layout:
    """All stages of a model, ordered by stage; ``pp * vpp`` of them."""

    pp: int
    vpp: int
    stages: tuple[StageLayout, ...]

    def stages_of(self, pp_rank: int) -> tuple[StageLayout, ...]:
        """The chunks of one pipeline rank, by vp_stage."""
        return tuple(stage for stage in self.stages if stage.pp_rank == pp_rank)

    def decoder_layers_per_pp_rank(self) -> list[int]:
        """Decoder layers each pipeline rank holds, all its chunks together."""
        counts = [0] * self.pp
        for stage in self.stages:
            counts[stage.pp_rank] += len(stage.layers)
        return counts
