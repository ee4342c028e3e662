from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.model.presets import preset, preset_names
from mfsdp_cli.model.spec import ModelSpec


@pytest.mark.parametrize("name", preset_names())
def test_json_there_and_back(name: str) -> None:
    spec = preset(name)
    assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be between 1"),
        ({"num_layers": 10_001}, "num_layers must be at most 10000, got 10001"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number, got '64'"),
        ({"hidden_size": True}, "hidden_size must be a whole number, got True"),
        ({"vocab_size": 2**31}, "vocab_size must be between 1 and 2147483647"),
        ({"padded_vocab_size": 255}, r"padded vocabulary \(255\) is smaller than the voc"),
        ({"num_query_groups": 3}, r"num_attention_heads \(4\) is not a multiple of num_query"),
        ({"normalization": "BatchNorm"}, "normalization must be one of RMSNorm, LayerNorm"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type must be one of rope"),
        ({"layernorm_epsilon": float("inf")}, "layernorm_epsilon must be above zero and finite"),
        ({"rotary_base": None}, "rotary_base must be a number, got None"),
        ({"qk_layernorm": 1}, "qk_layernorm must be true or false, got 1"),
        ({"mtp_num_layers": -1}, "mtp_num_layers must be between 0"),
        (
            {"mtp_num_layers": 1, "position_embedding_type": "learned_absolute"},
            "multi-token prediction needs rotary positions",
        ),
    ],
)
def test_descriptions_check_themselves(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(MfsdpError, match=f"MF402. .*{message}"):
        replace(preset("llama-tiny"), **changes)


def test_experts_check_themselves() -> None:
    spec = preset("deepseek-v3-proxy-tiny")
    assert spec.moe is not None
    with pytest.raises(MfsdpError, match="the MoE pattern has 8 layers, the model 7"):
        replace(spec, num_layers=7)
    with pytest.raises(MfsdpError, match="moe_router_topk 9 is above 8 experts"):
        replace(spec.moe, moe_router_topk=9)
    with pytest.raises(MfsdpError, match="must hold true and false only"):
        replace(spec.moe, moe_layer_pattern=(0, 1))  # type: ignore[arg-type]
    with pytest.raises(MfsdpError, match="moe_router_enable_expert_bias must be true or false"):
        replace(spec.moe, moe_router_enable_expert_bias=None)  # type: ignore[arg-type]
    with pytest.raises(MfsdpError, match="no bias on shared experts"):
        replace(spec, add_bias_linear=True)


@pytest.mark.parametrize("document", [None, [], "x", {}, {"name": "x"}, {"unknown": 1}])
def test_a_plan_file_without_a_model(document: Any) -> None:
    with pytest.raises(MfsdpError, match="MF401"):
        ModelSpec.from_json(document)


@pytest.mark.parametrize(
    "changes",
    [
        {"latent_attention": 5},
        {"latent_attention": {"kv_lora_rank": 4}},
        {"moe": "ab"},
        {"moe": {"moe_layer_pattern": 7}},
        {"assumptions": 3},
    ],
)
def test_rubbish_in_a_plan_file(changes: dict[str, Any]) -> None:
    with pytest.raises(MfsdpError, match="MF401"):
        ModelSpec.from_json(preset("deepseek-v3-proxy-tiny").to_json() | changes)
