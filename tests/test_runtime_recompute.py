"""Activation recomputation: another way to the same numbers, with less kept in between."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mfsdp_cli.runtime import forward
from mfsdp_cli.runtime.chunks import Chunk, build_chunks, routers_with_bias, unsplit_layout
from mfsdp_cli.runtime.data import Batch
from tests.helpers.alone import alone
from tests.helpers.parity import differences
from tests.helpers.plans import plan_of

DENSE, EXPERTS = "llama-tiny", "deepseek-v3-proxy-tiny"
GRANULARITIES = ("full", "selective")
SEQUENCE = 32


def _check_on_four_ranks(cases: list[tuple[str, str]], folder: Path, engine: str) -> None:
    plans = {
        f"{model}-{granularity}": plan_of(
            model, pp=2, vpp=2, dp=2, recompute_granularity=granularity, resident_chunks=0
        )
        for model, granularity in cases
    }
    for name, found in differences(plans, 4, folder, steps=3, engine=engine).items():
        found.check()
        # A token counted twice, or not at all, would move the bias of an expert the other way.
        assert found.router_biases == (0 if name.startswith(EXPERTS) else None)


def test_equals_one_rank_that_keeps_everything(tmp_path: Path) -> None:
    _check_on_four_ranks([(EXPERTS, "full"), (DENSE, "selective")], tmp_path, "mfsdp")


@pytest.mark.sweep
def test_the_other_granularity_equals_it_too(tmp_path: Path) -> None:
    _check_on_four_ranks([(EXPERTS, "selective"), (DENSE, "full")], tmp_path, "mfsdp")


@pytest.mark.sweep
def test_distopt_recomputes_to_the_same_numbers(tmp_path: Path) -> None:
    _check_on_four_ranks([(EXPERTS, "full"), (EXPERTS, "selective")], tmp_path, "distopt")


def _chunk(model: str, granularity: str) -> Chunk:
    alone()
    spec = plan_of(model).model
    return build_chunks(spec, unsplit_layout(spec), 0, seed=3, recompute=granularity)[0]


def _loss(chunk: Chunk) -> torch.Tensor:
    tokens = torch.arange(SEQUENCE).view(1, -1) % 50
    positions = torch.arange(SEQUENCE).view(1, -1)
    batch = Batch(tokens, tokens.roll(-1, 1), positions, torch.ones(1, SEQUENCE))
    forward.set_auxiliary_loss_scale(1.0, torch.device("cpu"))
    return forward.batch_loss(chunk.module, batch).mean


def _kept_bytes(model: str, granularity: str) -> int:
    """Bytes that autograd keeps for one microbatch, each storage once, weights left out."""
    chunk = _chunk(model, granularity)
    weights = {p.untyped_storage().data_ptr() for p in chunk.module.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _loss(chunk)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("model", [DENSE, EXPERTS])
def test_less_is_kept_the_more_is_recomputed(model: str) -> None:
    none, selective, full = (_kept_bytes(model, how) for how in ("none", "selective", "full"))
    print(f"\n{model}: kept {none} bytes, {selective} selective, {full} full")
    assert full < selective < none


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_router_counts_each_token_once(granularity: str) -> None:
    counts = {}
    for how in ("none", granularity):
        chunk = _chunk(EXPERTS, how)
        _loss(chunk).backward()
        counts[how] = {
            name: router.local_tokens_per_expert.tolist()
            for name, router in routers_with_bias(chunk.module)
        }
    topk = chunk.spec.moe.moe_router_topk  # type: ignore[union-attr]
    assert counts[granularity] == counts["none"]
    assert counts["none"]
    assert all(sum(tokens) == SEQUENCE * topk for tokens in counts["none"].values())


def test_random_numbers_go_on_as_without_recomputation() -> None:
    drawn = []
    for granularity in ("none", "full"):
        chunk = _chunk(DENSE, granularity)
        torch.manual_seed(5)
        _loss(chunk).backward()
        drawn.append(torch.rand(3).tolist())
    assert drawn[0] == drawn[1]
    # On the CPU nothing may pile up that waits for CUDA to be initialized.
    if not torch.cuda.is_available():
        before = len(torch.cuda._queued_calls)
        _loss(chunk).backward()
        assert len(torch.cuda._queued_calls) == before
