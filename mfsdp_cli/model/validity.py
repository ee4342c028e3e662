"""What a model description must satisfy, whichever input it came from.

The descriptions of :mod:`mfsdp_cli.model.spec` call these checks when they are made, so that a
preset, a ``config.json``, Megatron arguments and an edited plan file meet the same rules.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from mfsdp_cli.errors import MfsdpError

if TYPE_CHECKING:
    from mfsdp_cli.model.spec import LatentAttention, MixtureOfExperts, ModelSpec

MAX_LAYERS = 10_000
"""More layers than any real model: a typing error must not fill the memory."""
MAX_EXPERTS = 65_536
MAX_SIZE = 2**31 - 1

_SIZES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "vocab_size",
    "padded_vocab_size",
    "max_position_embeddings",
)
_FLAGS = (
    "untie_embeddings_and_output_weights",
    "gated_linear_unit",
    "add_bias_linear",
    "add_qkv_bias",
    "add_attention_output_bias",
    "add_mlp_bias",
    "qk_layernorm",
)
_CHOICES = {
    "normalization": ("RMSNorm", "LayerNorm"),
    "position_embedding_type": ("rope", "learned_absolute", "none"),
}


def check_model(spec: ModelSpec) -> None:
    """Raise MF402 naming the fields and the numbers that cannot be."""
    _whole_numbers(spec, _SIZES)
    _whole_numbers(spec, ("mtp_num_layers",), minimum=0)
    _at_most(spec, "num_layers", MAX_LAYERS)
    _at_most(spec, "mtp_num_layers", MAX_LAYERS)
    _flags(spec, _FLAGS)
    for name, choices in _CHOICES.items():
        if getattr(spec, name) not in choices:
            _fail(f"{name} must be one of {', '.join(choices)}, got {getattr(spec, name)!r}")
    _positive(spec, ("layernorm_epsilon", "rotary_base", "init_method_std"))
    _divides(spec, "num_attention_heads", "num_query_groups")
    if spec.padded_vocab_size < spec.vocab_size:
        _fail(
            f"the padded vocabulary ({spec.padded_vocab_size}) is smaller than the vocabulary "
            f"({spec.vocab_size})"
        )
    if spec.moe is not None and len(spec.moe.moe_layer_pattern) != spec.num_layers:
        _fail(
            f"the MoE pattern has {len(spec.moe.moe_layer_pattern)} layers, the model "
            f"{spec.num_layers}"
        )
    if spec.mtp_num_layers and spec.position_embedding_type == "learned_absolute":
        _fail("multi-token prediction needs rotary positions, but positions are learned")
    if spec.moe is not None and spec.add_bias_linear:
        _no_biased_shared_expert(spec.moe)


def check_experts(moe: MixtureOfExperts) -> None:
    """Raise MF402 where the experts contradict themselves."""
    sizes = ("num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size")
    _whole_numbers(moe, sizes)
    _whole_numbers(moe, ("moe_shared_expert_intermediate_size",), minimum=0)
    _at_most(moe, "num_moe_experts", MAX_EXPERTS)
    _flags(moe, ("moe_router_enable_expert_bias",))
    if moe.moe_router_topk > moe.num_moe_experts:
        _fail(f"moe_router_topk {moe.moe_router_topk} is above {moe.num_moe_experts} experts")
    if not all(isinstance(is_moe, bool) for is_moe in moe.moe_layer_pattern):
        _fail(f"the MoE pattern must hold true and false only, got {moe.moe_layer_pattern!r}")
    groups, chosen = moe.moe_router_num_groups, moe.moe_router_group_topk
    if groups is None and chosen is None:
        return
    _whole_numbers(moe, ("moe_router_num_groups", "moe_router_group_topk"))
    _divides(moe, "num_moe_experts", "moe_router_num_groups")
    assert groups is not None
    assert chosen is not None
    if chosen > groups or chosen * (moe.num_moe_experts // groups) < moe.moe_router_topk:
        _fail(
            f"{chosen} of {groups} expert groups ({moe.num_moe_experts} experts) cannot give "
            f"{moe.moe_router_topk} experts a token"
        )


def check_latent_attention(attention: LatentAttention) -> None:
    """Raise MF402 where a size of latent attention is not a positive whole number."""
    _whole_numbers(attention, ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"))
    if attention.q_lora_rank is not None:
        _whole_numbers(attention, ("q_lora_rank",))


def _fail(message: str) -> NoReturn:
    raise MfsdpError("MF402", message)


def _whole_numbers(owner: Any, names: Sequence[str], *, minimum: int = 1) -> None:
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, int) or isinstance(value, bool):
            _fail(f"{name} must be a whole number, got {value!r}")
        if not minimum <= value <= MAX_SIZE:
            _fail(f"{name} must be between {minimum} and {MAX_SIZE}, got {value}")


def _at_most(owner: Any, name: str, limit: int) -> None:
    if getattr(owner, name) > limit:
        _fail(f"{name} must be at most {limit}, got {getattr(owner, name)}")


def _flags(owner: Any, names: Sequence[str]) -> None:
    for name in names:
        if not isinstance(getattr(owner, name), bool):
            _fail(f"{name} must be true or false, got {getattr(owner, name)!r}")


def _positive(spec: ModelSpec, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(spec, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            _fail(f"{name} must be a number, got {value!r}")
        if not 0 < value <= sys.float_info.max:
            _fail(f"{name} must be above zero and finite, got {value}")


def _divides(owner: Any, whole: str, part: str) -> None:
    if getattr(owner, whole) % getattr(owner, part):
        _fail(
            f"{whole} ({getattr(owner, whole)}) is not a multiple of {part} "
            f"({getattr(owner, part)})"
        )


def _no_biased_shared_expert(moe: MixtureOfExperts) -> None:
    if moe.moe_shared_expert_intermediate_size and any(moe.moe_layer_pattern):
        _fail("Megatron-Core builds no bias on shared experts, but add_bias_linear is true")
