"""What a rank holds of a named tensor, in the form that torch's distributed checkpoint takes.

A shard cuts parameters at any element, so a tensor is saved flat: every rank writes the ranges it
owns, and reads whatever ranges it will own, from whichever files hold them. Nothing is ever whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Pieces:
    """Ranges of one flattened tensor on this rank.

    Args:
        shape: of the whole tensor.
        parts: (first element, values) of each range; values are 1-D views of what is in use, so
            that reading into them loads in place.
    """

    def __init__(self, shape: Sequence[int], parts: Sequence[tuple[int, torch.Tensor]]) -> None:
        self.shape = torch.Size(shape)
        self.parts = [part for part in parts if part[1].numel()]

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Pieces:
        """All of a contiguous tensor."""
        return cls(tensor.shape, [(0, tensor.detach().view(-1))])

    def size(self) -> torch.Size:
        """Of the flattened tensor."""
        return torch.Size([self.shape.numel()])

    def __create_write_items__(self, fqn: str, _object: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets, position),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties.create_from_tensor(values), self.size()
                ),
            )
            for position, (chunk, (_, values)) in enumerate(
                zip(self.__create_chunk_list__(), self.parts, strict=True)
            )
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size([start]), torch.Size([values.numel()]))
            for start, values in self.parts
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        found = {
            position: values
            for position, (start, values) in enumerate(self.parts)
            if index.offset == torch.Size([start])
        }
        # Saving, the position is one among all ranks' ranges; reading, it is ours, and tells two
        # copies on one rank apart.
        position = index.index if index.index in found else min(found)
        return found[position]


def state_name(kind: str, name: str) -> str:
    """The name of a part of the training state in a checkpoint."""
    return f"model.{name}" if kind == "weight" else f"optimizer.state.{kind}.{name}"


class SavePlanner(DefaultSavePlanner):
    """Writes :class:`Pieces`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class LoadPlanner(DefaultLoadPlanner):
    """Reads into :class:`Pieces`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state as it is: torch's own would flatten it and fill in meta tensors."""
        self.original_state_dict = self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        values: torch.Tensor = self.state_dict[index.fqn].__get_tensor_shard__(index)
        return values
