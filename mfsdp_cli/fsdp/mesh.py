"""The ranks a parameter is sharded over, with a communicator for each direction of traffic.

Gathers and reductions run on communicators of their own, so that neither waits for the other:
a process group has one stream and runs its collectives in order. However many chunks a rank
holds, these are its two communication streams.

Hybrid sharding (HSDP) adds a second axis: parameters are sharded inside and replicated outside.
Four ranks, sharded over two and replicated twice::

                gather, reduce
              rank 0   rank 1        rank 0 owns the first half, rank 1 the second
    replicate   |        |
              rank 2   rank 3        the same halves again
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class ShardMesh:
    """One axis of ranks over which parameters are sharded, and one over which they are copied.

    Args:
        gather: communicator of the all-gathers; None for a group of one.
        reduce: communicator of the reduce-scatters over the same ranks; None for a group of one.
        replicate: the ranks that own the same shard; None where there is but one copy. Their
            gradients are added up once a step, after the last microbatch.
        gradient_divisor: what the sum of gradients over all ranks of both axes is divided by;
            None: their number, which makes it the mean. Experts under expert parallelism see the
            samples of all data-parallel ranks, and are divided by the number of those.

    Raises:
        ValueError: one of ``gather`` and ``reduce`` is missing, they differ in size, or the
            divisor is not positive.
    """

    gather: dist.ProcessGroup | None = None
    reduce: dist.ProcessGroup | None = None
    replicate: dist.ProcessGroup | None = None
    gradient_divisor: int | None = None

    def __post_init__(self) -> None:
        if (self.gather is None) != (self.reduce is None):
            raise ValueError("Expected both communicators or none, got one")
        if self.gather is not None and self.reduce is not None:
            sizes = (self.gather.size(), self.reduce.size())
            if sizes[0] != sizes[1]:
                raise ValueError(f"Expected two communicators of one size, got {sizes}")
        if self.gradient_divisor is not None and self.gradient_divisor < 1:
            raise ValueError(f"Expected a divisor of at least 1, got {self.gradient_divisor}")

    @property
    def size(self) -> int:
        """Ranks that share one copy of the parameters."""
        return 1 if self.gather is None else self.gather.size()

    @property
    def rank(self) -> int:
        return 0 if self.gather is None else self.gather.rank()

    @property
    def replicas(self) -> int:
        """Copies of the parameters."""
        return 1 if self.replicate is None else self.replicate.size()

    @property
    def replica(self) -> int:
        """Which of the copies this rank holds a shard of."""
        return 0 if self.replicate is None else self.replicate.rank()

    @property
    def divisor(self) -> int:
        """What the sum of gradients is divided by."""
        return self.gradient_divisor or self.size * self.replicas
