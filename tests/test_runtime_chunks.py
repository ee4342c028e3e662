from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.model import families
from mfsdp_cli.model.load import load_model
from mfsdp_cli.model.parameters import stage_tensors
from mfsdp_cli.model.presets import preset
from mfsdp_cli.model.spec import ModelSpec
from mfsdp_cli.runtime import transformer_config
from mfsdp_cli.runtime.chunks import (
    WORD_EMBEDDING,
    build_chunks,
    build_unsplit,
    global_names,
    unsplit_layout,
)
from mfsdp_cli.runtime.limits import ACTIVATIONS, refuse_unrunnable, unbuildable
from mfsdp_cli.runtime.numeric.proxy import proxy_model
from mfsdp_cli.runtime.weights import initial_weight
from tests.helpers.alone import alone
from tests.helpers.plans import plan_of
from tests.helpers.ranks import run_ranks
from tests.helpers.training import reconnect

MODELS = ("llama-tiny", "gpt2-tiny", "deepseek-v3-proxy-tiny")
SEED = 7
CONFIGS = Path(__file__).parent / "data" / "configs"
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"pp": 2, "vpp": 2, "dp": 2},
    {"pp": 4},
    {"pp": 2, "layout": "Et*5|t*3L", "dp": 2},
    {"pp": 4, "layout": "Et*3||tt||t|t|t|L"},
)


@pytest.mark.parametrize("model", MODELS)
def test_the_unsplit_model_is_what_the_plan_counts(model: str) -> None:
    alone()
    spec = preset(model)
    chunk = build_unsplit(spec, seed=SEED)
    layout = unsplit_layout(spec)
    planned = {
        tensor.name: tuple(tensor.shape)
        for tensor in stage_tensors(spec, layout, layout.stages[0])
        if tensor.trainable
    }
    built = {name: tuple(value.shape) for name, value in chunk.module.named_parameters()}
    assert built == planned


def test_router_biases_are_buffers_of_the_plan() -> None:
    alone()
    spec = preset("deepseek-v3-proxy-tiny")
    layout = unsplit_layout(spec)
    planned = {t.name for t in stage_tensors(spec, layout, layout.stages[0]) if not t.trainable}
    buffers = dict(build_unsplit(spec, seed=SEED).module.named_buffers())
    assert planned == {name for name in buffers if name.endswith("expert_bias")}
    assert len(planned) == 7


def _chunks(rank: int, world: int) -> list[dict[str, Any]]:
    """On each rank: what every model and layout built."""
    found = []
    for model in MODELS:
        for sizes in LAYOUTS:
            plan = plan_of(model, **sizes)
            topology = reconnect(plan)
            chunks = build_chunks(plan.model, plan.layout, topology.pp_rank, seed=SEED)
            for chunk in chunks:
                names = global_names(chunk)
                for name, value in chunk.module.named_parameters():
                    expected = initial_weight(plan.model, names[name], value.shape, SEED)
                    assert torch.equal(value, expected), names[name]
            found.append(
                {
                    "model": model,
                    "names": [list(global_names(chunk).values()) for chunk in chunks],
                    "layers": [
                        [layer.layer_number - 1 for layer in chunk.module.decoder.layers]
                        for chunk in chunks
                    ],
                    "expected_layers": [list(chunk.stage.layers) for chunk in chunks],
                    "counts": [sum(p.numel() for p in c.module.parameters()) for c in chunks],
                    "expected_counts": [
                        plan.document["layout"]["stages"][chunk.stage.stage]["parameters"]
                        for chunk in chunks
                    ],
                    "dp_rank": topology.dp_rank,
                    "embeddings": [
                        value.double().sum().item()
                        for chunk in chunks
                        for name, value in chunk.module.named_parameters()
                        if global_names(chunk)[name] == WORD_EMBEDDING
                    ],
                }
            )
    return found


def test_every_layout_starts_from_the_same_model() -> None:
    # That the first losses agree is tested with the engines (test_baselines).
    alone()
    for cases in zip(*run_ranks(4, _chunks), strict=True):
        model = cases[0]["model"]
        for case in cases:
            assert case["layers"] == case["expected_layers"]
            assert case["counts"] == case["expected_counts"]
        firsts = [case for case in cases if case["dp_rank"] == 0]
        names = [name for case in firsts for chunk in case["names"] for name in chunk]
        unsplit = global_names(build_unsplit(preset(model), seed=SEED)).values()
        copies = [WORD_EMBEDDING] if model == "gpt2-tiny" else []
        assert sorted(names) == sorted([*unsplit, *copies])
        assert len({total for case in cases for total in case["embeddings"]}) == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"add_mlp_bias": True}, "biases on the MLP alone"),
        ({"add_attention_output_bias": True}, "a bias on the attention output alone"),
        ({"activation": "swish7"}, "activation 'swish7' (not one of silu, gelu,"),
        ({"kv_channels": 7}, "rotary positions on an odd head width 7"),
    ],
)
def test_what_cannot_be_built_is_named(changes: dict[str, Any], reason: str) -> None:
    alone()
    spec = preset("llama-tiny")
    assert unbuildable(spec) == []
    with pytest.raises(MfsdpError) as caught:
        build_unsplit(replace(spec, **changes), seed=SEED)
    assert caught.value.finding.code == "MF502"
    assert reason in caught.value.finding.message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"moe_router_score_function": "sqrtsoftplus"}, "router scores by 'sqrtsoftplus'"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "router balancing by 'sinkhorn'"),
        ({"moe_router_score_function": "softmax"}, "a router bias with softmax scores"),
        (
            {
                "moe_router_score_function": "softmax",
                "moe_router_topk": 1,
                "moe_router_enable_expert_bias": False,
            },
            "softmax over the one expert a token goes to",
        ),
    ],
)
def test_experts_that_cannot_be_built_are_named(changes: dict[str, Any], reason: str) -> None:
    spec = preset("deepseek-v3-proxy-tiny")
    assert unbuildable(spec) == []
    assert spec.moe is not None
    assert unbuildable(replace(spec, moe=replace(spec.moe, **changes))) == [reason]


FAMILIES = sorted(
    path.stem
    for path in CONFIGS.glob("*.json")
    if json.loads(path.read_text()).get("model_type") in families.FAMILIES
    and path.stem != "deepseek-v2-lite"
)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_proxy_of_every_family_is_built_as_planned(family: str) -> None:
    alone()
    spec = proxy_model(_short(load_model(str(CONFIGS / f"{family}.json")).spec))
    assert unbuildable(spec) == []
    chunk = build_unsplit(spec, seed=SEED)
    layout = unsplit_layout(spec)
    planned = {
        tensor.name: tuple(tensor.shape)
        for tensor in stage_tensors(spec, layout, layout.stages[0])
        if tensor.trainable
    }
    named = dict(chunk.module.named_parameters())
    assert {name: tuple(value.shape) for name, value in named.items()} == planned
    tokens = torch.arange(16).view(2, 8)
    positions = torch.arange(8).expand(2, -1)
    loss = chunk.module(tokens, positions, None, labels=tokens).float().mean()
    loss.backward()
    assert torch.isfinite(loss)
    assert [name for name, value in named.items() if value.grad is None] == []


def test_megatron_norms_no_latent_without_a_low_rank_of_queries() -> None:
    alone()
    spec = proxy_model(_short(load_model(str(CONFIGS / "deepseek-v2-lite.json")).spec))
    reasons = ["latent attention with norms whose queries have no low rank"]
    assert unbuildable(spec) == reasons
    plain = replace(spec, qk_layernorm=False)
    assert unbuildable(plain) == []
    build_unsplit(plain, seed=SEED)


def _short(spec: ModelSpec) -> ModelSpec:
    """The model with its last two decoder layers alone, MTP layers as they are."""
    moe = spec.moe
    if moe is not None:
        moe = replace(moe, moe_layer_pattern=moe.moe_layer_pattern[-2:])
    return replace(spec, num_layers=2, moe=moe)


def test_every_activation_that_is_not_refused_is_built() -> None:
    alone()
    given = torch.linspace(-3, 3, 13)
    expected = {
        "silu": functional.silu(given),
        "gelu": functional.gelu(given),
        "gelu_tanh": functional.gelu(given, approximate="tanh"),
        "quick_gelu": given * torch.sigmoid(1.702 * given),
        "relu": given.clamp(min=0),
        "squared_relu": given.clamp(min=0).square(),
    }
    assert set(expected) == set(ACTIVATIONS)
    for name, values in expected.items():
        spec = replace(preset("llama-tiny"), activation=name)
        config = transformer_config.make(spec, unsplit_layout(spec))
        torch.testing.assert_close(config.activation_func(given), values)


def test_what_megatron_refuses_is_said_in_its_words() -> None:
    alone()
    spec = preset("llama-tiny")
    layout = unsplit_layout(replace(spec, num_layers=7))
    with pytest.raises(MfsdpError, match="Megatron-Core refuses llama-tiny: Number of decoder"):
        transformer_config.make(spec, layout)


def test_sizes_that_no_engine_runs_are_named() -> None:
    parallel = plan_of("llama-tiny").parallel
    refuse_unrunnable(parallel, "mfsdp")
    refuse_unrunnable(replace(parallel, expert_model_parallel_size=4), "mfsdp")
    wide = replace(parallel, tensor_model_parallel_size=2, context_parallel_size=4)
    with pytest.raises(MfsdpError) as caught:
        refuse_unrunnable(wide, "distopt")
    assert caught.value.finding.message == (
        "engine distopt does not run this yet: --tensor-model-parallel-size 2,"
        " --context-parallel-size 4"
    )
