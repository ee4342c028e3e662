"""What the keys of ``config.json`` mean to each model class of transformers.

Sources: the configuration and modeling files of transformers 4.57, and for kimi_k2 DeepSeek's own
``modeling_deepseek.py``. "Class default" is what the class takes where the key is absent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.model import expert_families as experts
from mfsdp_cli.model.fields import Fields
from mfsdp_cli.model.spec import LatentAttention, MixtureOfExperts, ModelSpec
from mfsdp_cli.model.validity import MAX_LAYERS

_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu2": "squared_relu",
    "swish": "silu",
}


@dataclass(frozen=True)
class Family:
    """One model class.

    Args:
        read_experts: reads the MoE part; None: dense.
        tied: class default of ``tie_word_embeddings``.
        kv_heads: class default of ``num_key_value_heads``; None: as many as heads.
        head_dim: class default of ``head_dim``; None: hidden size over heads.
        bias: ``all`` (``attention_bias`` covers q, k, v and output), ``qkv`` (it covers q, k, v),
            ``always`` (q, k, v biased without a key) or ``none``.
        mlp_bias: whether there is a key ``mlp_bias``.
        qk_norm: norms on queries and keys of each head; a text: by that key.
        latent: MLA.
        mtp: whether ``num_nextn_predict_layers`` counts.
        activation: where the file names none.
        left_out: what the description does not say of this class; it changes no parameter.
    """

    read_experts: Callable[[Fields, int], MixtureOfExperts | None] | None = None
    tied: bool = False
    kv_heads: int | None = None
    head_dim: int | None = None
    bias: str = "none"
    mlp_bias: bool = False
    qk_norm: bool | str = False
    latent: bool = False
    mtp: bool = False
    activation: str = "silu"
    left_out: str = ""


FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(experts.deepseek_v2, latent=True),
    "deepseek_v3": Family(experts.deepseek_v3, latent=True, mtp=True),
    "gemma": Family(
        tied=True,
        kv_heads=16,
        head_dim=256,
        bias="all",
        activation="gelu_tanh",
        left_out="the scale of the embedding and the offset of norm weights",
    ),
    "glm4_moe": Family(experts.glm4_moe, kv_heads=8, bias="qkv", qk_norm="use_qk_norm", mtp=True),
    "gpt2": Family(tied=True),
    "kimi_k2": Family(experts.deepseek_v3, latent=True, mtp=True),
    "llama": Family(bias="all", mlp_bias=True),
    "llama4_text": Family(
        experts.llama4,
        kv_heads=8,
        head_dim=128,
        bias="all",
        left_out="chunked attention, layers without positions, L2 norms of queries and keys",
    ),
    "mistral": Family(kv_heads=8),
    "mixtral": Family(experts.mixtral, kv_heads=8),
    "qwen2": Family(kv_heads=32, bias="always"),
    "qwen3": Family(kv_heads=32, head_dim=128, bias="all", qk_norm=True),
    "qwen3_moe": Family(experts.qwen3_moe, kv_heads=4, bias="all", qk_norm=True),
    "qwen3_vl_moe_text": Family(experts.qwen3_moe, kv_heads=4, bias="all", qk_norm=True),
    "qwen3_vl_text": Family(kv_heads=32, head_dim=128, bias="all", qk_norm=True),
}
"""The known values of ``model_type``."""


def build(model_type: str, fields: Fields, name: str) -> ModelSpec:
    """The model of a configuration whose ``model_type`` is one of :data:`FAMILIES`."""
    if model_type == "gpt2":
        return _gpt2(fields, name)
    family = FAMILIES[model_type]
    layers = fields.integer("num_hidden_layers")
    if layers > MAX_LAYERS:
        raise fields.wrong("num_hidden_layers", f"at most {MAX_LAYERS}")
    vocabulary = fields.integer("vocab_size")
    moe = family.read_experts(fields, layers) if family.read_experts else None
    values: dict[str, Any] = {
        "name": name,
        "num_layers": layers,
        "hidden_size": fields.integer("hidden_size"),
        "ffn_hidden_size": _dense_width(model_type, fields, moe),
        "vocab_size": vocabulary,
        "padded_vocab_size": vocabulary,
        "max_position_embeddings": fields.integer("max_position_embeddings", default=2048),
        "untie_embeddings_and_output_weights": not _tied(fields, family),
        "activation": _activation(fields, family.activation),
        "layernorm_epsilon": fields.number("rms_norm_eps", default=1e-6),
        "rotary_base": _rotary_base(fields),
        "moe": moe,
        **_attention(fields, family),
        "mtp_num_layers": _mtp_layers(model_type, fields),
    }
    _note_what_is_left_out(fields, family)
    return ModelSpec(**values, assumptions=tuple(fields.assumptions), source=fields.where)


def _tied(fields: Fields, family: Family) -> bool:
    if not fields.has("tie_word_embeddings"):
        state = "tied" if family.tied else "untied"
        fields.assume(f"tie_word_embeddings is absent: {state} assumed, the class default")
    return fields.flag("tie_word_embeddings", default=family.tied)


def _activation(fields: Fields, default: str) -> str:
    name = fields.text("hidden_activation", "hidden_act", default=default)
    return _ACTIVATIONS.get(name, name)


def _rotary_base(fields: Fields) -> float:
    """The base, at the top level or (since transformers 5) in ``rope_parameters``."""
    for key in ("rope_parameters", "rope_scaling"):
        value = fields.raw(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise fields.wrong(key, "an object or null")
        kind = value.get("rope_type", value.get("type", "default"))
        if kind not in ("default", None):
            fields.assume(f"{key} ({kind}) is left out: it changes no parameter")
        if "rope_theta" in value:
            return Fields(value, f"{fields.where}, {key}").number("rope_theta")
    return fields.number("rope_theta", default=10000.0)


def _dense_width(model_type: str, fields: Fields, moe: MixtureOfExperts | None) -> int:
    """Inner width of the dense layers; where there are none it does not matter."""
    if moe is not None and all(moe.moe_layer_pattern):
        has = fields.has("intermediate_size")
        return fields.integer("intermediate_size") if has else moe.moe_ffn_hidden_size
    llama4 = model_type == "llama4_text"
    return fields.integer("intermediate_size_mlp" if llama4 else "intermediate_size")


def _mtp_layers(model_type: str, fields: Fields) -> int:
    key = "num_nextn_predict_layers"
    if not fields.has(key):
        return 0
    layers = fields.integer(key, minimum=0)
    if layers and not FAMILIES[model_type].mtp:
        raise MfsdpError(
            "MF408", f"{key} {layers} is not supported for {model_type}", where=fields.where
        )
    return layers


def _attention(fields: Fields, family: Family) -> dict[str, Any]:
    heads = fields.integer("num_attention_heads")
    if family.latent:
        return _latent_attention(fields, heads)
    groups = family.kv_heads or heads
    if fields.has("num_key_value_heads"):
        groups = fields.integer("num_key_value_heads")
    else:
        fields.assume(f"num_key_value_heads is absent: {groups} assumed, the class default")
    return {
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": _head_width(fields, family, heads),
        "qk_layernorm": _has_qk_norm(fields, family),
        **_biases(fields, family),
    }


def _head_width(fields: Fields, family: Family, heads: int) -> int:
    """``head_dim``, which need not be hidden size over heads."""
    if fields.has("head_dim"):
        return fields.integer("head_dim")
    if family.head_dim is not None:
        return fields.integer("head_dim", default=family.head_dim)
    hidden = fields.integer("hidden_size")
    if hidden % heads:
        raise MfsdpError(
            "MF405",
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and there "
            "is no head_dim",
            where=fields.where,
        )
    return hidden // heads


def _has_qk_norm(fields: Fields, family: Family) -> bool:
    if isinstance(family.qk_norm, str):
        return fields.flag(family.qk_norm, default=False)
    return family.qk_norm


def _biases(fields: Fields, family: Family) -> dict[str, bool]:
    attention = family.bias == "always" or (
        family.bias in ("all", "qkv") and fields.flag("attention_bias", default=False)
    )
    output = attention and family.bias == "all"
    mlp = family.mlp_bias and fields.flag("mlp_bias", default=False)
    if output and mlp:
        return {"add_bias_linear": True, "add_qkv_bias": True}
    return {"add_qkv_bias": attention, "add_attention_output_bias": output, "add_mlp_bias": mlp}


def _latent_attention(fields: Fields, heads: int) -> dict[str, Any]:
    """MLA. ``q_lora_rank`` null means queries without a low rank; absent, the class default.

    ``head_dim`` and ``num_key_value_heads`` mean nothing here, whatever they say.
    """
    if fields.flag("attention_bias", default=False):
        raise MfsdpError(
            "MF408", "latent attention with attention_bias is not supported", where=fields.where
        )
    query = None
    if fields.has("q_lora_rank") or fields.absent("q_lora_rank"):
        query = fields.integer("q_lora_rank", default=1536)
    attention = LatentAttention(
        q_lora_rank=query,
        kv_lora_rank=fields.integer("kv_lora_rank", default=512),
        qk_head_dim=fields.integer("qk_nope_head_dim", default=128),
        qk_pos_emb_head_dim=fields.integer("qk_rope_head_dim", default=64),
        v_head_dim=fields.integer("v_head_dim", default=128),
    )
    return {
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "kv_channels": attention.qk_head_dim + attention.qk_pos_emb_head_dim,
        "qk_layernorm": True,
        "latent_attention": attention,
    }


def _note_what_is_left_out(fields: Fields, family: Family) -> None:
    if family.left_out:
        fields.assume(f"left out, for it changes no parameter: {family.left_out}")
    if fields.has("quantization_config"):
        fields.assume("quantization_config is left out: parameters are counted, not bytes")
    if fields.has("sliding_window") and fields.flag("use_sliding_window", default=True):
        fields.assume("sliding_window is left out: it changes no parameter")


def _gpt2(fields: Fields, name: str) -> ModelSpec:
    if fields.flag("add_cross_attention", default=False):
        raise MfsdpError("MF408", "cross attention is not supported", where=fields.where)
    hidden, heads = fields.integer("n_embd"), fields.integer("n_head")
    if hidden % heads:
        raise MfsdpError(
            "MF405", f"n_embd {hidden} is not a multiple of n_head {heads}", where=fields.where
        )
    vocabulary = fields.integer("vocab_size")
    inner = fields.integer("n_inner") if fields.has("n_inner") else 4 * hidden
    return ModelSpec(
        name=name,
        num_layers=fields.integer("n_layer"),
        hidden_size=hidden,
        ffn_hidden_size=inner,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        vocab_size=vocabulary,
        padded_vocab_size=vocabulary,
        max_position_embeddings=fields.integer("n_positions", "n_ctx", default=1024),
        untie_embeddings_and_output_weights=not _tied(fields, FAMILIES["gpt2"]),
        gated_linear_unit=False,
        activation=_ACTIVATIONS.get(
            kind := fields.text("activation_function", default="gelu_new"), kind
        ),
        normalization="LayerNorm",
        layernorm_epsilon=fields.number("layer_norm_epsilon", default=1e-5),
        add_bias_linear=True,
        add_qkv_bias=True,
        position_embedding_type="learned_absolute",
        assumptions=tuple(fields.assumptions),
        source=fields.where,
    )
