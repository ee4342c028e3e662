"""What the runtime cannot build, named before anything starts. Knows no torch."""

from __future__ import annotations

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.model.spec import LatentAttention, MixtureOfExperts, ModelSpec
from mfsdp_cli.parallel import Parallel

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu")
_SCORES = ("softmax", "sigmoid")
_BALANCING = ("none", "aux_loss", "seq_aux_loss")


def unbuildable(spec: ModelSpec) -> list[str]:
    """Everything in a model that the runtime cannot build, in words; empty where it can."""
    reasons = []
    rotated = spec.kv_channels
    if spec.latent_attention is not None:
        rotated = spec.latent_attention.qk_pos_emb_head_dim
        reasons += _unbuildable_latent_attention(spec, spec.latent_attention)
    if spec.position_embedding_type == "rope" and rotated % 2:
        reasons.append(f"rotary positions on an odd head width {rotated}")
    if spec.activation not in ACTIVATIONS:
        reasons.append(f"the activation {spec.activation!r} (not one of {', '.join(ACTIVATIONS)})")
    if spec.add_attention_output_bias and not spec.add_bias_linear:
        reasons.append("a bias on the attention output alone")
    if spec.add_mlp_bias and not spec.add_bias_linear:
        reasons.append("biases on the MLP alone")
    if spec.moe is not None:
        reasons += _unbuildable_experts(spec.moe)
        if spec.add_bias_linear:
            reasons.append("linear biases in a mixture of experts")
    return reasons


def _unbuildable_latent_attention(spec: ModelSpec, attention: LatentAttention) -> list[str]:
    reasons = []
    if spec.position_embedding_type != "rope":
        reasons.append("latent attention without rotary positions")
    if attention.q_lora_rank is None and spec.qk_layernorm:
        # Megatron-Core 0.19.2 norms the one latent by a Transformer Engine kernel only.
        reasons.append("latent attention with norms whose queries have no low rank")
    return reasons


def _unbuildable_experts(moe: MixtureOfExperts) -> list[str]:
    reasons = []
    if moe.moe_router_score_function not in _SCORES:
        reasons.append(f"router scores by {moe.moe_router_score_function!r}")
    if moe.moe_router_load_balancing_type not in _BALANCING:
        reasons.append(f"router balancing by {moe.moe_router_load_balancing_type!r}")
    if moe.moe_router_score_function == "softmax" and moe.moe_router_topk == 1:
        reasons.append("softmax over the one expert a token goes to")
    if moe.moe_router_enable_expert_bias and moe.moe_router_score_function == "softmax":
        reasons.append("a router bias with softmax scores")
    return reasons


def refuse_unbuildable(spec: ModelSpec) -> None:
    """Raise MF502 naming everything in the model that cannot be built."""
    if reasons := unbuildable(spec):
        raise MfsdpError(
            "MF502",
            f"{spec.name} cannot be trained here: {'; '.join(reasons)} cannot be built",
            where=f"model {spec.name}",
        )


def refuse_unrunnable(parallel: Parallel, engine: str) -> None:
    """Raise MF502 for sizes that no engine runs here."""
    sizes = {
        "--tensor-model-parallel-size": parallel.tensor_model_parallel_size,
        "--context-parallel-size": parallel.context_parallel_size,
    }
    unknown = [f"{flag} {size}" for flag, size in sizes.items() if size > 1]
    if unknown:
        raise MfsdpError(
            "MF502",
            f"engine {engine} does not run this yet: {', '.join(unknown)}",
            hint="plan again with 1; engine single runs any plan as one rank",
        )
