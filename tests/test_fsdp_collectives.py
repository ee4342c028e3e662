"""The engine's collectives on gloo ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mfsdp_cli.fsdp.collectives import reduce_scatter_sum
from tests.helpers.ranks import run_ranks

NUMEL = 5


def _whole(rank: int, world: int, round_: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * round_ + rank)
    return torch.randn(NUMEL * world, generator=generator)


def _reduce(rank: int, world: int) -> list[bool]:
    """Two reductions under way at once, waited for in order; each bit-equal to the sum."""
    wholes = [_whole(rank, world, round_) for round_ in range(2)]
    shards = [torch.empty(NUMEL) for _ in wholes]
    group = dist.group.WORLD
    works = [reduce_scatter_sum(s, w, group) for s, w in zip(shards, wholes, strict=True)]
    equal = []
    for round_, (work, shard) in enumerate(zip(works, shards, strict=True)):
        work.wait()
        work.wait()  # a second time changes nothing
        total = _whole(0, world, round_)
        for other in range(1, world):
            total += _whole(other, world, round_)
        equal.append(torch.equal(shard, total[rank * NUMEL : (rank + 1) * NUMEL]))
        equal.append(torch.equal(wholes[round_], _whole(rank, world, round_)))
    return equal


def test_gloo_ranks_sum_their_shards_in_the_order_of_ranks() -> None:
    for world in (2, 3):
        assert run_ranks(world, _reduce) == [[True] * 4] * world
