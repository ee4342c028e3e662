"""Megatron-Core's ``TransformerConfig`` for a model description and a layout."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.layout.layout import Layout, StageLayout
from mfsdp_cli.model.spec import MixtureOfExperts, ModelSpec
from mfsdp_cli.runtime.limits import refuse_unbuildable


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return torch.pow(functional.relu(x), 2)


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)  # arXiv:1606.08415, section 2


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
    "relu": functional.relu,
    "squared_relu": _squared_relu,
}

#: By granularity, Megatron's settings for what the cost model counts.
_RECOMPUTATION: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def make(
    spec: ModelSpec,
    layout: Layout,
    *,
    dtype: torch.dtype = torch.float32,
    ep: int = 1,
    recompute: str = "none",
    per_token_loss: bool = False,
) -> Any:
    """The configuration of every chunk of the layout (all share it).

    No dropout, no fusion that needs a GPU kernel, no initialization by Megatron.

    Args:
        dtype: dtype of parameters and of what goes between stages.
        ep: expert-parallel size.
        recompute: what backward computes again instead of keeping: ``none``, ``selective`` (core
            attention) or ``full`` (every layer, from what it took).
        per_token_loss: gradients will be divided by the number of valid tokens; routers and MTP
            layers scale their own losses for that.

    Raises:
        MfsdpError: MF502 naming what cannot be built.
    """
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    refuse_unbuildable(spec)
    values: dict[str, Any] = dict(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.ffn_hidden_size,
        num_attention_heads=spec.num_attention_heads,
        num_query_groups=spec.num_query_groups,
        kv_channels=spec.kv_channels,
        normalization=spec.normalization,
        layernorm_epsilon=spec.layernorm_epsilon,
        add_bias_linear=spec.add_bias_linear,
        add_qkv_bias=spec.add_qkv_bias,
        qk_layernorm=spec.qk_layernorm,
        gated_linear_unit=spec.gated_linear_unit,
        activation_func=_ACTIVATIONS[spec.activation],
        init_method_std=spec.init_method_std,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        perform_initialization=False,
        transformer_impl="local",
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        deterministic_mode=True,
        calculate_per_token_loss=per_token_loss,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        mtp_num_layers=spec.mtp_num_layers or None,
        **_pipeline(layout, dtype),
        **_experts(spec.moe, ep),
        **_RECOMPUTATION[recompute],
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron warns of defaults that nobody set
            if spec.latent_attention is None:
                return TransformerConfig(**values)
            return MLATransformerConfig(**values, **_latent_attention(spec))
    except (AssertionError, ValueError) as error:
        raise MfsdpError(
            "MF502", f"Megatron-Core refuses {spec.name}: {error}", where=f"model {spec.name}"
        ) from error


def _pipeline(layout: Layout, dtype: torch.dtype) -> dict[str, Any]:
    """What Megatron's own schedules read; ours does not.

    Sends and receives are never batched: with interleaving at PP 2 the two ranks would mix up
    activations and gradients, silently.
    """
    interleaved = layout.vpp > 1
    return {
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if interleaved else None,
        "pipeline_model_parallel_layout": [_stage_names(stage) for stage in layout.stages],
        "pipeline_dtype": dtype,
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": False,
        "batch_p2p_sync": False,
        "variable_seq_lengths": False,
        "deallocate_pipeline_outputs": False,
    }


def _stage_names(stage: StageLayout) -> list[str]:
    return (
        ["embedding"] * stage.embedding
        + ["decoder"] * len(stage.layers)
        + ["mtp"] * len(stage.mtp)
        + ["loss"] * stage.loss
    )


def _experts(moe: MixtureOfExperts | None, ep: int) -> dict[str, Any]:
    if moe is None:
        return {}
    return {
        "num_moe_experts": moe.num_moe_experts,
        "expert_model_parallel_size": ep,
        "moe_router_topk": moe.moe_router_topk,
        "moe_ffn_hidden_size": moe.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.moe_shared_expert_intermediate_size or None,
        "moe_layer_freq": [int(is_moe) for is_moe in moe.moe_layer_pattern],
        "moe_router_enable_expert_bias": moe.moe_router_enable_expert_bias,
        "moe_router_bias_update_rate": moe.moe_router_bias_update_rate,
        "moe_router_score_function": moe.moe_router_score_function,
        "moe_router_num_groups": moe.moe_router_num_groups,
        "moe_router_group_topk": moe.moe_router_group_topk,
        "moe_router_topk_scaling_factor": moe.moe_router_topk_scaling_factor,
        "moe_router_load_balancing_type": moe.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": moe.moe_aux_loss_coeff,
        "moe_token_dispatcher_type": "allgather",
        "moe_grouped_gemm": False,
    }


def _latent_attention(spec: ModelSpec) -> dict[str, Any]:
    attention = spec.latent_attention
    assert attention is not None
    return {
        "q_lora_rank": attention.q_lora_rank,
        "kv_lora_rank": attention.kv_lora_rank,
        "qk_head_dim": attention.qk_head_dim,
        "qk_pos_emb_head_dim": attention.qk_pos_emb_head_dim,
        "v_head_dim": attention.v_head_dim,
        "rope_type": "rope",
        "rotary_base": spec.rotary_base,
        "rotary_scaling_factor": 1.0,
    }
