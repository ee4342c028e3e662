"""Models known by name.

The ``-tiny`` ones train on bytes in about a minute on a laptop: at least 8 decoder layers, no MTP,
fewer routed choices than experts. ``deepseek-v3-proxy`` keeps DeepSeek-V3's structure (MLA, a
dense beginning, group-limited sigmoid routing with bias, a shared expert, its vocabulary) at a
size that eight GPUs of one host train.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.model.nearest import did_you_mean
from mfsdp_cli.model.spec import LatentAttention, MixtureOfExperts, ModelSpec


def preset_names() -> list[str]:
    """All names, alphabetically."""
    return sorted(_PRESETS)


def preset(name: str) -> ModelSpec:
    """The model of a name. Raises MF411 with the nearest names where there is none."""
    if name not in _PRESETS:
        raise MfsdpError(
            "MF411",
            f"there is no preset {name!r}",
            hint=did_you_mean(name, preset_names()) or f"presets: {', '.join(preset_names())}",
        )
    return _PRESETS[name]()


def _deepseek_v3() -> ModelSpec:
    """DeepSeek-V3 (arXiv:2412.19437, 4.2)."""
    return ModelSpec(
        name="deepseek-v3",
        num_layers=61,
        hidden_size=7168,
        ffn_hidden_size=18432,
        num_attention_heads=128,
        num_query_groups=128,
        kv_channels=192,
        vocab_size=129280,
        padded_vocab_size=129280,
        max_position_embeddings=163840,
        layernorm_epsilon=1e-6,
        qk_layernorm=True,
        init_method_std=0.006,
        latent_attention=LatentAttention(1536, 512, 128, 64, 128),
        moe=_deepseek_experts(256, 8, 2048, dense=3, layers=61),
        mtp_num_layers=1,
    )


def _deepseek_v3_proxy() -> ModelSpec:
    return replace(
        _deepseek_v3(),
        name="deepseek-v3-proxy",
        num_layers=16,
        hidden_size=1024,
        ffn_hidden_size=4096,
        num_attention_heads=16,
        num_query_groups=16,
        max_position_embeddings=4096,
        latent_attention=LatentAttention(512, 256, 128, 64, 128),
        moe=_deepseek_experts(64, 8, 512, dense=1, layers=16),
        mtp_num_layers=0,
    )


def _deepseek_v3_proxy_tiny() -> ModelSpec:
    # Two runs that differ by rounding alone drift apart as tokens near a tie change experts. With
    # half of the experts chosen, no factor on their output and weights of about half of
    # 1/sqrt(hidden size), ties are rare and weigh little: 200 steps from weights 1e-7 apart end
    # 3e-4 apart in validation loss. With top-2, a factor of 2.5 and a std of 0.02 (one step of
    # learning rate 1e-3 is 5% of a weight then) they are 6e-3 apart after 60.
    experts = replace(
        _deepseek_experts(8, 4, 48, dense=1, layers=8),
        moe_router_num_groups=None,
        moe_router_group_topk=None,
        moe_router_topk_scaling_factor=None,
    )
    return replace(
        _deepseek_v3(),
        name="deepseek-v3-proxy-tiny",
        num_layers=8,
        ffn_hidden_size=192,
        latent_attention=LatentAttention(32, 32, 16, 8, 16),
        moe=experts,
        mtp_num_layers=0,
        init_method_std=0.06,
        **_TINY,
        num_query_groups=4,
        kv_channels=24,
    )


def _deepseek_experts(
    experts: int, topk: int, width: int, *, dense: int, layers: int
) -> MixtureOfExperts:
    """DeepSeek-V3's experts: one shared, sigmoid scores, 4 of 8 groups, bias, sequence balance."""
    return MixtureOfExperts(
        num_moe_experts=experts,
        moe_router_topk=topk,
        moe_ffn_hidden_size=width,
        moe_shared_expert_intermediate_size=width,
        moe_layer_pattern=(False,) * dense + (True,) * (layers - dense),
        moe_router_enable_expert_bias=True,
        moe_router_score_function="sigmoid",
        moe_router_num_groups=8,
        moe_router_group_topk=4,
        moe_router_topk_scaling_factor=2.5,
        moe_aux_loss_coeff=1e-4,
        moe_router_load_balancing_type="seq_aux_loss",
    )


def _llama3_8b() -> ModelSpec:
    """Llama 3 8B (arXiv:2407.21783, table 3)."""
    return ModelSpec(
        name="llama3-8b",
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=128,
        vocab_size=128256,
        padded_vocab_size=128256,
        max_position_embeddings=8192,
        rotary_base=500000.0,
    )


def _llama3_70b() -> ModelSpec:
    return replace(
        _llama3_8b(),
        name="llama3-70b",
        num_layers=80,
        hidden_size=8192,
        ffn_hidden_size=28672,
        num_attention_heads=64,
    )


def _llama_tiny() -> ModelSpec:
    return replace(
        _llama3_8b(),
        name="llama-tiny",
        num_layers=8,
        ffn_hidden_size=192,
        rotary_base=10000.0,
        **_TINY,
        num_query_groups=2,
        kv_channels=16,
    )


def _gpt2() -> ModelSpec:
    """GPT-2 small: tied embeddings, learned positions, LayerNorm, biases everywhere."""
    return ModelSpec(
        name="gpt2",
        num_layers=12,
        hidden_size=768,
        ffn_hidden_size=3072,
        num_attention_heads=12,
        num_query_groups=12,
        kv_channels=64,
        vocab_size=50257,
        padded_vocab_size=50257,
        max_position_embeddings=1024,
        untie_embeddings_and_output_weights=False,
        gated_linear_unit=False,
        activation="gelu_tanh",
        normalization="LayerNorm",
        add_bias_linear=True,
        add_qkv_bias=True,
        position_embedding_type="learned_absolute",
    )


def _gpt2_tiny() -> ModelSpec:
    return replace(
        _gpt2(),
        name="gpt2-tiny",
        num_layers=8,
        ffn_hidden_size=256,
        **_TINY,
        num_query_groups=4,
        kv_channels=16,
    )


_TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "padded_vocab_size": 256,
    "max_position_embeddings": 256,
}
"""What all tiny models share: bytes as tokens."""

_PRESETS: dict[str, Callable[[], ModelSpec]] = {
    "deepseek-v3": _deepseek_v3,
    "deepseek-v3-proxy": _deepseek_v3_proxy,
    "deepseek-v3-proxy-tiny": _deepseek_v3_proxy_tiny,
    "gpt2": _gpt2,
    "gpt2-tiny": _gpt2_tiny,
    "llama-tiny": _llama_tiny,
    "llama3-70b": _llama3_70b,
    "llama3-8b": _llama3_8b,
}
