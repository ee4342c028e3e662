"""The ranks a parameter is sharded over, with a communicator for each direction of traffic.

Gathers and reductions run on communicators of their own, so that neither waits for the other:
a process group has one stream and runs its collectives in order. However many chunks a rank
holds, these are its two communication streams.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class ShardMesh:
    """One axis of ranks over which parameters are sharded.

    Args:
        gather: communicator of the all-gathers; None for a group of one.
        reduce: communicator of the reduce-scatters over the same ranks; None for a group of one.
    """

    gather: dist.ProcessGroup | None = None
    reduce: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if (self.gather is None) != (self.reduce is None):
            raise ValueError("Expected both communicators or none, got one")
        if self.gather is not None and self.reduce is not None:
            sizes = (self.gather.size(), self.reduce.size())
            if sizes[0] != sizes[1]:
                raise ValueError(f"Expected two communicators of one size, got {sizes}")

    @property
    def size(self) -> int:
        return 1 if self.gather is None else self.gather.size()

    @property
    def rank(self) -> int:
        return 0 if self.gather is None else self.gather.rank()
