"""The sharded state: all a rank needs to go on, in logical coordinates."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from mfsdp_cli.fsdp import (
    AdamSettings,
    ShardedOptimizer,
    ShardMesh,
    full_state_dict,
    fully_shard,
    fully_shard_context,
    microbatch,
    sharded_state_dict,
)
from tests.helpers.ranks import run_ranks


def _train(chunks: list[nn.Module], optimizer: ShardedOptimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.context.zero_grad()
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        with microbatch(optimizer.context, is_last=True):
            loss = chunks[1](chunks[0](x)).square().mean()
            loss.backward()
        optimizer.context.finish_reductions()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _make(mesh: ShardMesh, seed: int) -> tuple[list[nn.Module], ShardedOptimizer]:
    torch.manual_seed(seed)
    chunks: list[nn.Module] = [nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5)) for _ in range(2)]
    with fully_shard_context("cpu"):
        for chunk in chunks:
            for layer in chunk.children():
                fully_shard(layer, mesh)
            fully_shard(chunk, mesh)
    return chunks, ShardedOptimizer(chunks, AdamSettings())


def _go_on(rank: int, world: int) -> tuple[list[float], list[float], list[tuple[str, int, int]]]:
    mesh = ShardMesh(dist.new_group(), dist.new_group())
    chunks, optimizer = _make(mesh, 0)
    _train(chunks, optimizer, range(3))
    kept = {
        name: {key: value.clone() for key, value in shard.tensors.items()}
        for name, shard in sharded_state_dict(optimizer).items()
    }
    expected = _train(chunks, optimizer, range(3, 6))
    others, fresh = _make(mesh, 1)
    shards = sharded_state_dict(fresh)
    for name, shard in shards.items():
        for key, value in shard.tensors.items():
            value.copy_(kept[name][key])
    fresh.context.refresh_weights()
    owned = [(name, shard.range.start, shard.range.stop) for name, shard in shards.items()]
    return expected, _train(others, fresh, range(3, 6)), owned


def test_another_model_goes_on_from_the_sharded_state() -> None:
    ranks = run_ranks(3, _go_on)
    for expected, found, _ in ranks:
        assert found == expected
    owned: dict[str, int] = {}
    for _, _, ranges in ranks:
        for name, start, stop in ranges:
            owned[name] = owned.get(name, 0) + stop - start
    assert owned == {
        name: p.numel()
        for name, p in nn.ModuleList(
            nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5)) for _ in range(2)
        ).named_parameters()
    }


def _whole(rank: int, world: int) -> dict[str, dict[str, list[float]]]:
    chunks, optimizer = _make(ShardMesh(dist.new_group(), dist.new_group()), 0)
    _train(chunks, optimizer, range(3))
    full = full_state_dict(optimizer)
    for name, shard in sharded_state_dict(optimizer).items():
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            whole = full[name][kind]
            assert whole.shape == shard.shape
            assert torch.equal(shard.range.within(whole.flatten()), shard.tensors[kind])
            assert whole.abs().sum() > 0
    return {name: {k: v.flatten().tolist() for k, v in s.items()} for name, s in full.items()}


def test_the_full_state_is_the_shards_put_together_the_same_on_every_rank() -> None:
    first, *others = run_ranks(3, _whole)
    assert others == [first, first]
    assert len(first) == 8
