"""The description of a model that everything else reads: planning, building, counting.

Field names follow Megatron-Core's ``TransformerConfig`` where it has one, so that a reader who
knows Megatron knows these.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.model.validity import check_experts, check_latent_attention, check_model


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (MLA), DeepSeek-V2's attention (arXiv:2405.04434, 2.1).

    Sizes are per head except the two LoRA ranks. ``q_lora_rank`` None: queries are projected
    directly.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        check_latent_attention(self)


@dataclass(frozen=True)
class MixtureOfExperts:
    """The MoE layers of a model.

    Args:
        num_moe_experts: routed experts a layer.
        moe_router_topk: routed experts a token goes to.
        moe_ffn_hidden_size: inner width of one routed expert.
        moe_shared_expert_intermediate_size: inner width of all shared experts together; 0: none.
        moe_layer_pattern: one bool a decoder layer, True where the layer is MoE.
        moe_router_enable_expert_bias: a bias buffer a router (not trained; DeepSeek-V3).
        moe_router_score_function: ``softmax`` or ``sigmoid``.
        moe_router_num_groups, moe_router_group_topk: group-limited routing; None: off.
        moe_router_topk_scaling_factor: factor on the routed output; None: 1.
        moe_aux_loss_coeff: weight of the load-balancing loss; 0: none.
        moe_router_load_balancing_type: ``none``, ``aux_loss`` or ``seq_aux_loss``.
        moe_router_bias_update_rate: step of the router bias update.
    """

    num_moe_experts: int
    moe_router_topk: int
    moe_ffn_hidden_size: int
    moe_shared_expert_intermediate_size: int
    moe_layer_pattern: tuple[bool, ...]
    moe_router_enable_expert_bias: bool = False
    moe_router_score_function: str = "softmax"
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_topk_scaling_factor: float | None = None
    moe_aux_loss_coeff: float = 0.0
    moe_router_load_balancing_type: str = "none"
    moe_router_bias_update_rate: float = 1e-3

    def __post_init__(self) -> None:
        check_experts(self)


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer, exactly enough to count, plan and build it.

    Args:
        kv_channels: width of one attention head (ignored where ``latent_attention`` is given).
        add_bias_linear: biases on every linear layer, the router included; the three flags after
            it put them on some alone (Megatron-Core builds the first of them alone).
        qk_layernorm: norms on queries and keys a head, or on the two latents of MLA.
        vocab_size: tokens of the model itself; ``padded_vocab_size`` is what is allocated.
        mtp_num_layers: multi-token-prediction layers after the decoder.
        assumptions: what the reader of the input had to assume, in words.
        source: where the description came from (``preset``, a file name).
    """

    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    padded_vocab_size: int
    max_position_embeddings: int
    untie_embeddings_and_output_weights: bool = True
    gated_linear_unit: bool = True
    activation: str = "silu"
    normalization: str = "RMSNorm"
    layernorm_epsilon: float = 1e-5
    add_bias_linear: bool = False
    add_qkv_bias: bool = False
    add_attention_output_bias: bool = False
    add_mlp_bias: bool = False
    qk_layernorm: bool = False
    position_embedding_type: str = "rope"
    rotary_base: float = 10000.0
    init_method_std: float = 0.02
    latent_attention: LatentAttention | None = None
    moe: MixtureOfExperts | None = None
    mtp_num_layers: int = 0
    assumptions: tuple[str, ...] = ()
    source: str = "preset"

    def __post_init__(self) -> None:
        check_model(self)

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder layer ``layer`` (0-based) is a mixture of experts."""
        return self.moe is not None and self.moe.moe_layer_pattern[layer]

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values (tuples become lists)."""
        return _plain(asdict(self))

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> ModelSpec:
        """The inverse of :meth:`to_json`. Raises MF401 where a field is missing or unknown."""
        if not isinstance(document, dict):
            raise MfsdpError("MF401", f"the model description must be an object, got {document!r}")
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(document) - known)
        if unknown:
            raise MfsdpError("MF401", f"the model description has unknown fields: {unknown}")
        values = dict(document)
        try:
            if values.get("latent_attention") is not None:
                values["latent_attention"] = LatentAttention(**values["latent_attention"])
            if values.get("moe") is not None:
                moe = dict(values["moe"])
                moe["moe_layer_pattern"] = tuple(moe["moe_layer_pattern"])
                values["moe"] = MixtureOfExperts(**moe)
            values["assumptions"] = tuple(values.get("assumptions", ()))
            return cls(**values)
        except (TypeError, KeyError, ValueError) as error:
            raise MfsdpError("MF401", f"the model description is incomplete: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
