"""How the parameters of one group lie in one flat buffer, and which range each rank owns.

Parameters follow one another without gaps. The buffer is cut into equal shards by element,
wherever parameter boundaries fall; only the padded tail makes the last shards shorter. Two
parameters of 3 and 4 elements on 4 ranks (7 elements, shards of 2)::

    element    0   1   2   3   4   5   6  (7: padding)
    parameter  a   a   a   b   b   b   b
    rank       0   0   1   1   2   2   3   3

Rank 1 owns a[2] and b[0]; rank 3 owns b[3] alone. A rank may own nothing: 3 elements on 4 ranks
leave rank 3 with an empty range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch


@dataclass(frozen=True)
class Range:
    """A half-open range of elements."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def overlap(self, other: Range) -> Range:
        """The common part; empty (``start == stop``) where there is none."""
        start = max(self.start, other.start)
        return Range(start, max(start, min(self.stop, other.stop)))

    def shift(self, offset: int) -> Range:
        return Range(self.start + offset, self.stop + offset)

    def within(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of a flat tensor that this range covers."""
        return tensor[self.start : self.stop]


@dataclass(frozen=True)
class FlatLayout:
    """Where every parameter of a group lies, and who owns what.

    Args:
        shapes: shape of each parameter, in buffer order.
        world: number of ranks that share the buffer.
        rank: this rank among them.
    """

    shapes: tuple[torch.Size, ...]
    world: int
    rank: int

    def __post_init__(self) -> None:
        if self.world < 1:
            raise ValueError(f"Expected a group of at least one rank, got {self.world}")
        if not 0 <= self.rank < self.world:
            raise ValueError(f"Expected a rank in 0..{self.world - 1}, got {self.rank}")

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], world: int, rank: int) -> FlatLayout:
        return cls(tuple(tensor.shape for tensor in tensors), world, rank)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First element of each parameter, and the total at the end."""
        return (0, *accumulate(shape.numel() for shape in self.shapes))

    @property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return self.offsets[-1]

    @property
    def shard_numel(self) -> int:
        """Elements of a shard, padding included; the same on every rank."""
        return -(-self.numel // self.world)

    @property
    def padded_numel(self) -> int:
        return self.shard_numel * self.world

    def parameter(self, index: int) -> Range:
        """The range of a parameter in the whole buffer."""
        return Range(self.offsets[index], self.offsets[index + 1])

    def shard(self, rank: int | None = None) -> Range:
        """The elements a rank owns in the whole buffer, without padding (default: this rank)."""
        rank = self.rank if rank is None else rank
        start = min(rank * self.shard_numel, self.numel)
        return Range(start, min(start + self.shard_numel, self.numel))

    def owned(self, index: int, rank: int | None = None) -> Range:
        """The elements of a parameter that a rank owns, counted from the parameter's first."""
        whole = self.parameter(index)
        return whole.overlap(self.shard(rank)).shift(-whole.start)

    def owned_in_shard(self, index: int) -> Range:
        """The same elements, counted from the first of this rank's shard."""
        overlap = self.parameter(index).overlap(self.shard())
        if overlap.numel == 0:
            return Range(0, 0)
        return overlap.shift(-self.shard().start)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """One view a parameter, in its own shape, into a flat tensor of ``padded_numel``."""
        return [
            self.parameter(index).within(flat).view(shape)
            for index, shape in enumerate(self.shapes)
        ]
