"""The two baselines against one another: what every other comparison rests on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.plan import Plan
from tests.helpers.alone import alone
from tests.helpers.plans import plan_of
from tests.helpers.ranks import run_ranks
from tests.helpers.training import (
    SETTINGS,
    engine_of,
    largest_difference,
    reconnect,
    train,
)

STEPS = 5
MODELS = ("llama-tiny", "gpt2-tiny", "deepseek-v3-proxy-tiny")
LAYOUTS: dict[str, dict[str, Any]] = {
    "interleaved": {"pp": 2, "vpp": 2, "dp": 2},
    "uneven": {"pp": 2, "layout": "Et*5|t*3L", "dp": 2},
    "data parallel": {"dp": 4},
    "deep": {"pp": 4},
    "empty stages": {"pp": 4, "layout": "Et*3||tt||t|t|t|L"},
}


def _plan(model: str, layout: str) -> Plan:
    return plan_of(model, **LAYOUTS[layout])


def _reference_file(folder: str, model: str) -> Path:
    return Path(folder, f"{model}.pt")


def _compare(rank: int, world: int, folder: str) -> list[dict[str, Any]]:
    """On each rank: every model and layout with engine distopt against the saved reference."""
    found = []
    for model in MODELS:
        reference = torch.load(_reference_file(folder, model), weights_only=False)
        for layout in LAYOUTS if model == "gpt2-tiny" else list(LAYOUTS)[:1]:
            plan = _plan(model, layout)
            topology = reconnect(plan)
            engine = engine_of("distopt", plan, topology)
            mine = train(engine, STEPS)
            found.append(
                {
                    "case": f"{model}, {layout}",
                    "steps": mine.steps,
                    "gradients": largest_difference(mine.gradients, reference.gradients),
                    "weights": largest_difference(mine.weights, reference.weights),
                    "names": sorted(mine.weights) if topology.dp_rank == 0 else [],
                    "before": mine.before,
                    "after": mine.after,
                }
            )
            assert engine.evaluate() == mine.after
    return found


def test_distopt_equals_single(tmp_path: Path) -> None:
    references = {}
    for model in MODELS:
        references[model] = train(engine_of("single", plan_of(model), alone()), STEPS)
        torch.save(references[model], _reference_file(str(tmp_path), model))
    ranks = run_ranks(4, _compare, str(tmp_path))
    for cases in zip(*ranks, strict=True):
        reference = references[cases[0]["case"].split(",")[0]]
        names = {name for case in cases for name in case["names"]}
        assert names == set(reference.weights), cases[0]["case"]
        for case in cases:
            first, expected = case["steps"][0], reference.steps[0]
            assert first == pytest.approx(expected, rel=1e-6), case
            for step, expected in zip(case["steps"], reference.steps, strict=True):
                assert step == pytest.approx(expected, rel=1e-5), case
            assert case["gradients"][0] < 1e-5, case
            assert case["weights"][0] < 1e-5, case
            assert case["before"] == pytest.approx(reference.before, rel=1e-6), case
            assert case["after"] == pytest.approx(reference.after, rel=1e-5), case
    assert reference.steps[-1][0] < reference.steps[0][0]


def test_one_batch_gives_one_loss_and_gradient_however_it_is_cut() -> None:
    # Microbatches of 1, 2 and 8 sequences: losses, gradients and evaluations are means.
    found = [
        train(engine_of("single", plan_of("gpt2-tiny", mbs=mbs), alone()), 1) for mbs in (1, 2, 8)
    ]
    for other in found[1:]:
        assert other.before == pytest.approx(found[0].before, rel=1e-6)
        assert other.steps[0] == pytest.approx(found[0].steps[0], rel=1e-6)
        assert largest_difference(other.gradients, found[0].gradients)[0] < 1e-5


def test_the_norm_counts_a_tied_matrix_once() -> None:
    engine = engine_of("single", plan_of("gpt2-tiny"), alone())
    result = engine.train_step(1)
    gradients = engine.named_gradients()
    squares = sum(value.double().square().sum().item() for value in gradients.values())
    assert result.grad_norm == pytest.approx(squares**0.5, rel=1e-9)
    assert "output_layer.weight" not in gradients


def test_evaluation_leaves_training_as_it_is() -> None:
    plan = plan_of("deepseek-v3-proxy-tiny", gbs=4)
    plain = engine_of("single", plan, alone())
    watched = engine_of("single", plan, alone())
    for step in (1, 2, 3):
        watched.evaluate()
        assert watched.train_step(step) == plain.train_step(step)


def test_a_router_bias_moves_by_its_rate_towards_balance() -> None:
    from mfsdp_cli.runtime.chunks import routers_with_bias

    plan = plan_of("deepseek-v3-proxy-tiny", gbs=4)
    assert plan.model.moe is not None
    engine: Any = engine_of("single", plan, alone())
    counts = []
    for _, router in routers_with_bias(engine._model):
        router.register_forward_hook(lambda module, _args, output: counts.append(output[1].sum(0)))
    engine.train_step(1)
    routers = [router for _, router in routers_with_bias(engine._model)]
    assert len(routers) == 7
    per_router = torch.stack(counts).view(4, 7, -1).sum(0)  # 4 microbatches, layer by layer
    for router, tokens in zip(routers, per_router, strict=True):
        assert tokens.sum() == 4 * 32 * plan.model.moe.moe_router_topk
        direction = torch.sign(tokens.float().mean() - tokens)
        torch.testing.assert_close(router.expert_bias, direction * 1e-3)
        assert router.local_tokens_per_expert.sum() == 0


def test_weight_decay_shrinks_matrices_alone() -> None:
    # Without a gradient to follow (lr so small that only decay shows), norms stay at 1.
    settings = replace(SETTINGS, lr=1e-3, weight_decay=100.0, adam_eps=1e30)
    engine = engine_of("single", plan_of("gpt2-tiny"), alone(), settings)
    before = engine.named_weights()
    engine.train_step(1)
    after = engine.named_weights()
    for name, weight in before.items():
        kept = 0.9 if weight.dim() > 1 else 1.0
        torch.testing.assert_close(
            after[name], weight * kept, msg=lambda text, n=name: f"{n} {text}"
        )


def test_bf16_computes_near_fp32_with_fp32_main_weights() -> None:
    plan = plan_of("deepseek-v3-proxy-tiny", gbs=4)
    fp32 = train(engine_of("single", plan, alone()), 3)
    engine = engine_of("single", plan, alone(), replace(SETTINGS, precision="bf16"))
    start = engine.named_weights()
    bf16 = train(engine, 3)
    for mine, reference in zip(bf16.steps, fp32.steps, strict=True):
        assert mine[0] == pytest.approx(reference[0], abs=0.02)
        assert mine[0] != reference[0]
    name = "decoder.layers.3.mlp.shared_experts.linear_fc1.weight"
    assert start[name].dtype == torch.float32
    assert not torch.equal(start[name], start[name].bfloat16().float())


def test_single_refuses_more_than_one_rank() -> None:
    with pytest.raises(MfsdpError, match="runs on 1 rank, not 2"):
        engine_of("single", plan_of("gpt2-tiny"), replace(alone(), world_size=2))
