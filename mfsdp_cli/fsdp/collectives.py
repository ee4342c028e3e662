"""The collectives of the engine, under the names that the installed torch has.

torch 2.13 renamed ``all_gather_into_tensor`` and ``reduce_scatter_tensor``; older versions that
the package supports know the old names only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(
    whole: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None
) -> dist.Work:
    """Gather equal flat shards into ``whole``; the handle must be waited for."""
    work = _all_gather(whole, shard, group=group, async_op=True)
    assert isinstance(work, dist.Work)
    return work


def reduce_scatter_sum(
    shard: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup | None
) -> dist.Work:
    """Sum ``whole`` over the group, each rank's equal part into ``shard``.

    ``whole`` must stay as it is until the handle has been waited for.
    """
    if group is not None and dist.get_backend(group) == "gloo":
        return _ExchangedSum(shard, whole, group)
    work = _reduce_scatter(shard, whole, group=group, async_op=True)
    assert isinstance(work, dist.Work)
    return work


def all_reduce_sum(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Sum ``tensor`` over the group, in place."""
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert isinstance(work, dist.Work)
    return work


class _ExchangedSum(dist.Work):
    """A reduce-scatter on gloo: every rank sends the others their parts and adds up its own.

    gloo has none of its own. torch's stands in with a copy of the whole and an all-reduce: twice
    the traffic, and on two ranks about three times the processor time of this.

    Args:
        shard: takes the first part that arrives, then the sum, in the order of ranks.
    """

    def __init__(self, shard: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
        super().__init__()
        parts, rank = whole.view(group.size(), -1), group.rank()
        peers = [peer for peer in range(group.size()) if peer != rank]
        self._shard = shard
        received = [shard, *(torch.empty_like(shard) for _ in peers[1:])]
        self._terms = [*received[:rank], parts[rank], *received[rank:]]
        self._works = [
            group.recv([part], peer, 0) for peer, part in zip(peers, received, strict=True)
        ]
        self._works += [group.send([parts[peer]], peer, 0) for peer in peers]

    def wait(self, *_: Any) -> bool:
        """Wait for all parts and add them up."""
        if not self._works:
            return True
        for work in self._works:
            work.wait()
        first, second, *others = self._terms
        torch.add(first, second, out=self._shard)
        for term in others:
            self._shard.add_(term)
        self._works, self._terms = [], []
        return True
