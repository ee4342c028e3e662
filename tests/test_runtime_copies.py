"""Copies of one parameter stay equal bit by bit over 50 steps that move them.

Wherever they are: on different pipeline ranks, on one, three with an MTP layer's. Their shards lie
at different places of buffers of different sizes, so nothing keeps them equal by accident.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mfsdp_cli.fsdp import (
    AdamSettings,
    LocalMember,
    ShardedOptimizer,
    ShardMesh,
    SharedParameter,
    full_weights,
    fully_shard,
    fully_shard_context,
    microbatch,
    unit_of,
)
from mfsdp_cli.plan import Plan
from tests.helpers.copies import copies_of_the_embedding
from tests.helpers.plans import plan_of
from tests.helpers.ranks import run_ranks
from tests.helpers.sharding import group_of
from tests.helpers.training import SETTINGS, engine_of, reconnect

STEPS = 50
TINY = {
    "model_type": "llama",
    "tie_word_embeddings": True,
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 256,
    "initializer_range": 0.06,
}
SIZES: dict[str, Any] = {"dp": 2, "gbs": 2, "seq": 8}
#: Layouts on four ranks, and how many copies all ranks see.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "two ranks": ({"pp": 2, "layout": "Et|tL", **SIZES}, 4),
    "three members": ({"pp": 2, "layout": "Et|tmL", "mtp": 1, **SIZES}, 6),
}


def _trained(_rank: int, _world: int, files: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {"one rank": _on_one_rank()}
    for name, file in files.items():
        plan = Plan.load(Path(file))
        engine: Any = engine_of("mfsdp", plan, reconnect(plan), replace(SETTINGS, clip_grad=0.5))
        before = copies_of_the_embedding(engine)
        losses = [engine.train_step(step).loss for step in range(1, STEPS + 1)]
        found[name] = before, copies_of_the_embedding(engine), losses
        dist.barrier()
    return found


class Ends(nn.Module):
    """A chunk with the tied matrix behind ``first`` other elements."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.ones(first, 1))
        self.word = nn.Parameter(torch.linspace(-1, 1, 21).view(7, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.word * self.before.mean()
        return x @ weight if x.shape[-1] == len(weight) else x @ weight.T


def _on_one_rank() -> Any:
    """Embedding and head as two chunks of every rank, sharded over all four."""
    chunks = [Ends(2), Ends(5)]
    mesh = ShardMesh(dist.new_group(), dist.new_group())
    with fully_shard_context("cpu") as context:
        for chunk in chunks:
            fully_shard(chunk, mesh)
    groups = [group_of(chunk) for chunk in chunks]
    members = [
        LocalMember(member, group, group.names.index("word")) for member, group in enumerate(groups)
    ]
    shared = SharedParameter("word", dist.group.WORLD, 2, members)
    optimizer = ShardedOptimizer(
        chunks, AdamSettings(lr=1e-2), shared=[shared], norm_group=dist.group.WORLD
    )
    before, losses = _words(chunks), []
    for step in range(STEPS):
        context.zero_grad()
        token = nn.functional.one_hot(torch.tensor([(step + dist.get_rank()) % 7]), 7).float()
        with microbatch(context, is_last=True):
            loss = nn.functional.cross_entropy(chunks[1](chunks[0](token)), token)
            loss.backward()
        losses.append(loss.item())
        context.finish_reductions()
        optimizer.sum_shared_gradients()
        optimizer.clip(0.5, optimizer.grad_norm())
        optimizer.step()
    owned = [
        group.layout.owned(member.index) for group, member in zip(groups, members, strict=True)
    ]
    return before, _words(chunks), losses, [(each.start, each.stop) for each in owned]


def _words(chunks: list[Ends]) -> list[list[list[float]]]:
    found = []
    for chunk in chunks:
        unit = unit_of(chunk)
        assert unit is not None
        found.append(dict(full_weights(unit))["word"].tolist())
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("copies")
    model = folder / "tiny.json"
    model.write_text(json.dumps(TINY))
    files = {}
    for name, (sizes, _) in CASES.items():
        files[name] = str(folder / f"{name}.json")
        plan_of(str(model), **sizes).save(Path(files[name]))
    return run_ranks(4, _trained, files)


@pytest.mark.parametrize("case", CASES)
def test_copies_on_pipeline_ranks_stay_equal(case: str, ranks: list[dict[str, Any]]) -> None:
    before = [copy for rank in ranks for copy in rank[case][0]]
    after = [copy for rank in ranks for copy in rank[case][1]]
    assert len(before) == len(after) == CASES[case][1]
    assert len({copy.digest for copy in before}) == 1
    assert len({copy.digest for copy in after}) == 1
    assert before[0].digest != after[0].digest
    # Ranks of the same place among the data-parallel ones own other elements of it.
    assert len({copy.owned for rank in ranks[::2] for copy in rank[case][1]}) > 1
    for rank in ranks:
        losses = rank[case][2]
        assert sum(losses[-5:]) < sum(losses[:5])


def test_copies_on_one_rank_stay_equal(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        before, after, losses, _ = rank["one rank"]
        assert before[0] == before[1]
        assert after[0] == after[1]
        assert after == ranks[0]["one rank"][1]
        moved = torch.tensor(after[0]) - torch.tensor(before[0])
        assert moved.abs().min() > 0
        assert losses[-1] < losses[0]
    # Some rank owns other elements of one copy than of the other.
    assert any(first != second for *_, (first, second) in (rank["one rank"] for rank in ranks))
