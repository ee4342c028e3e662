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
    """Sum ``whole`` over the group, each rank's equal part into ``shard``."""
    work = _reduce_scatter(shard, whole, group=group, async_op=True)
    assert isinstance(work, dist.Work)
    return work


def all_reduce_sum(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Sum ``tensor`` over the group, in place."""
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert isinstance(work, dist.Work)
    return work
