"""The mixture-of-experts part of ``config.json``, a reader for each kind of model class."""

from __future__ import annotations

from typing import Any

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.model.fields import Fields
from mfsdp_cli.model.spec import MixtureOfExperts


def mixtral(fields: Fields, layers: int) -> MixtureOfExperts:
    """Every layer MoE, experts as wide as ``intermediate_size``."""
    return MixtureOfExperts(
        num_moe_experts=fields.integer("num_local_experts", default=8),
        moe_router_topk=fields.integer("num_experts_per_tok", default=2),
        moe_ffn_hidden_size=fields.integer("intermediate_size"),
        moe_shared_expert_intermediate_size=0,
        moe_layer_pattern=(True,) * layers,
    )


def qwen3_moe(fields: Fields, layers: int) -> MixtureOfExperts:
    """Every ``decoder_sparse_step``-th layer MoE, but for ``mlp_only_layers``."""
    step = fields.integer("decoder_sparse_step", default=1)
    dense = set(fields.integers("mlp_only_layers"))
    return MixtureOfExperts(
        num_moe_experts=fields.integer("num_experts", "num_local_experts"),
        moe_router_topk=fields.integer("num_experts_per_tok", default=8),
        moe_ffn_hidden_size=fields.integer("moe_intermediate_size"),
        moe_shared_expert_intermediate_size=0,
        moe_layer_pattern=tuple(
            layer not in dense and (layer + 1) % step == 0 for layer in range(layers)
        ),
    )


def llama4(fields: Fields, layers: int) -> MixtureOfExperts:
    """Every ``interleave_moe_layer_step``-th layer MoE (or ``moe_layers``), one shared expert."""
    step = fields.integer("interleave_moe_layer_step", default=1)
    named = set(fields.integers("moe_layers")) or set(range(step - 1, layers, step))
    width = fields.integer("intermediate_size")
    return MixtureOfExperts(
        num_moe_experts=fields.integer("num_local_experts"),
        moe_router_topk=fields.integer("num_experts_per_tok", default=1),
        moe_ffn_hidden_size=width,
        moe_shared_expert_intermediate_size=width,
        moe_layer_pattern=tuple(layer in named for layer in range(layers)),
        moe_router_score_function="sigmoid",
    )


def deepseek_v2(fields: Fields, layers: int) -> MixtureOfExperts | None:
    """Softmax scores, no router bias; ``n_routed_experts`` null: a dense model."""
    if not fields.has("n_routed_experts") and not fields.absent("n_routed_experts"):
        return None
    return _deepseek(fields, layers, dense=0, scores="softmax", bias=False)


def deepseek_v3(fields: Fields, layers: int) -> MixtureOfExperts | None:
    """Sigmoid scores with a correction bias (``topk_method`` noaux_tc, the class default)."""
    if not fields.has("n_routed_experts") and not fields.absent("n_routed_experts"):
        return None
    bias = fields.text("topk_method", default="noaux_tc") == "noaux_tc"
    return _deepseek(fields, layers, dense=3, scores="sigmoid", bias=bias)


def glm4_moe(fields: Fields, layers: int) -> MixtureOfExperts:
    """DeepSeek-V3's experts; the correction bias is always there."""
    return _deepseek(fields, layers, dense=1, scores="sigmoid", bias=True)


def _deepseek(
    fields: Fields, layers: int, *, dense: int, scores: str, bias: bool
) -> MixtureOfExperts:
    experts = fields.integer("n_routed_experts")
    width = fields.integer("moe_intermediate_size")
    first = fields.integer("first_k_dense_replace", default=dense, minimum=0)
    shared = _shared_experts(fields)
    groups, chosen = _groups(fields)
    scale = fields.number("routed_scaling_factor", default=1.0)
    return MixtureOfExperts(
        num_moe_experts=experts,
        moe_router_topk=fields.integer("num_experts_per_tok"),
        moe_ffn_hidden_size=width,
        moe_shared_expert_intermediate_size=shared * width,
        moe_layer_pattern=_pattern(fields, layers, first),
        moe_router_enable_expert_bias=bias,
        moe_router_score_function=fields.text("scoring_func", default=scores),
        moe_router_num_groups=groups,
        moe_router_group_topk=chosen,
        moe_router_topk_scaling_factor=None if scale == 1.0 else scale,
        **_balance(fields),
    )


def _shared_experts(fields: Fields) -> int:
    """``n_shared_experts``: null means none; absence is an error, for classes disagree."""
    if not fields.has("n_shared_experts") and not fields.absent("n_shared_experts"):
        return 0
    return fields.integer("n_shared_experts", minimum=0)


def _pattern(fields: Fields, layers: int, first: int) -> tuple[bool, ...]:
    """Dense up to ``first``, then every ``moe_layer_freq``-th layer MoE, or a list of 0 and 1."""
    if not isinstance(fields.raw("moe_layer_freq"), list):
        frequency = fields.integer("moe_layer_freq") if fields.has("moe_layer_freq") else 1
        return tuple(layer >= first and layer % frequency == 0 for layer in range(layers))
    kinds = fields.integers("moe_layer_freq")
    if len(kinds) != layers:
        raise MfsdpError(
            "MF407",
            f"moe_layer_freq lists {len(kinds)} layers, num_hidden_layers is {layers}",
            where=fields.where,
        )
    return tuple(kind != 0 and layer >= first for layer, kind in enumerate(kinds))


def _groups(fields: Fields) -> tuple[int | None, int | None]:
    """Group-limited routing, where there is more than one group to choose from."""
    if fields.text("topk_method", default="") == "greedy" or not fields.has("n_group"):
        return None, None
    groups = fields.integer("n_group")
    return (groups, fields.integer("topk_group")) if groups > 1 else (None, None)


def _balance(fields: Fields) -> dict[str, Any]:
    """The load-balancing loss, where the file names a weight for it."""
    if not fields.has("aux_loss_alpha"):
        return {}
    kind = "seq_aux_loss" if fields.flag("seq_aux", default=True) else "aux_loss"
    return {
        "moe_aux_loss_coeff": fields.number("aux_loss_alpha"),
        "moe_router_load_balancing_type": kind,
    }
