"""Megatron's command-line flags for a plan: the same model, sizes, layout and batch.

A list of words, ready for a shell array. Reading them back with ``mfsdp plan`` gives the same
counts and the same layout (a test does it). Flags that a value equal to Megatron's own default
would need are still written: a default may change.
"""

from __future__ import annotations

from mfsdp_cli.layout.layout import Layout
from mfsdp_cli.layout.printer import format_layout
from mfsdp_cli.model.spec import LatentAttention, MixtureOfExperts, ModelSpec
from mfsdp_cli.parallel import Parallel, Settings

#: (activation, gated) -> the flag that says it; None: Megatron's default.
_ACTIVATIONS = {
    ("gelu", False): None,
    ("gelu_tanh", False): "openai-gelu",
    ("silu", True): "swiglu",
    ("quick_gelu", True): "quick-geglu",
    ("squared_relu", False): "squared-relu",
}


def megatron_args(
    model: ModelSpec, parallel: Parallel, layout: Layout, settings: Settings
) -> list[str]:
    """All flags, as words."""
    return [
        *_words(_sizes(parallel, layout, settings)),
        *_words(_model(model, parallel.tensor_model_parallel_size)),
        *_words(_attention(model)),
        *_words(_moe(model)),
        *_words(_training(settings)),
    ]


def _words(flags: dict[str, object]) -> list[str]:
    """``{"num-layers": 8, "swiglu": True}`` as words; False and None are left out."""
    words: list[str] = []
    for name, value in flags.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not False and value is not None:
            words += [f"--{name}", str(value)]
    return words


def _sizes(parallel: Parallel, layout: Layout, settings: Settings) -> dict[str, object]:
    interleaved = parallel.virtual_pipeline_model_parallel_size > 1
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage
    return {
        "pipeline-model-parallel-size": parallel.pipeline_model_parallel_size,
        "pipeline-model-parallel-layout": format_layout(layout) if layout.pp > 1 else None,
        "microbatch-group-size-per-virtual-pipeline-stage": group if interleaved else None,
        "no-overlap-p2p-communication": interleaved and not settings.overlap_p2p_communication,
        "tensor-model-parallel-size": parallel.tensor_model_parallel_size,
        "context-parallel-size": parallel.context_parallel_size,
        "expert-model-parallel-size": parallel.expert_model_parallel_size,
        "micro-batch-size": parallel.micro_batch_size,
        "global-batch-size": parallel.global_batch_size,
        "seq-length": parallel.seq_length,
    }


def _model(model: ModelSpec, tensor_parallel: int) -> dict[str, object]:
    rope = model.position_embedding_type == "rope"
    return {
        "num-layers": model.num_layers,
        "hidden-size": model.hidden_size,
        "ffn-hidden-size": model.ffn_hidden_size,
        "num-attention-heads": model.num_attention_heads,
        "max-position-embeddings": model.max_position_embeddings,
        "position-embedding-type": model.position_embedding_type,
        "rotary-base": _number(model.rotary_base) if rope else None,
        "vocab-size": model.vocab_size,
        "make-vocab-size-divisible-by": _divisor(model, tensor_parallel),
        "normalization": model.normalization,
        "norm-epsilon": model.layernorm_epsilon,
        "untie-embeddings-and-output-weights": model.untie_embeddings_and_output_weights,
        **_activation(model),
        "disable-bias-linear": not model.add_bias_linear,
        "add-qkv-bias": model.add_qkv_bias and not model.add_bias_linear,
        "init-method-std": model.init_method_std,
        "attention-dropout": 0,
        "hidden-dropout": 0,
        "mtp-num-layers": model.mtp_num_layers or None,
    }


def _activation(model: ModelSpec) -> dict[str, object]:
    """The flag of an activation; none where it is Megatron's default or has no flag."""
    flag = _ACTIVATIONS.get((model.activation, model.gated_linear_unit))
    return {flag: True} if flag else {}


def inexpressible(model: ModelSpec) -> list[str]:
    """What the model has that no flag of Megatron's says, in words."""
    reasons = []
    if (model.activation, model.gated_linear_unit) not in _ACTIVATIONS:
        gated = "gated " if model.gated_linear_unit else ""
        reasons.append(f"{gated}{model.activation} activation")
    if model.add_attention_output_bias and not model.add_bias_linear:
        reasons.append("a bias on attention outputs alone")
    if model.add_mlp_bias and not model.add_bias_linear:
        reasons.append("a bias on MLP layers alone")
    return reasons


def _attention(model: ModelSpec) -> dict[str, object]:
    if model.latent_attention is not None:
        return _latent(model, model.latent_attention)
    grouped = model.num_query_groups != model.num_attention_heads
    return {
        "kv-channels": model.kv_channels,
        "group-query-attention": grouped,
        "num-query-groups": model.num_query_groups if grouped else None,
        "qk-layernorm": model.qk_layernorm,
    }


def _latent(model: ModelSpec, mla: LatentAttention) -> dict[str, object]:
    return {
        "multi-latent-attention": True,
        "q-lora-rank": mla.q_lora_rank,
        "kv-lora-rank": mla.kv_lora_rank,
        "qk-head-dim": mla.qk_head_dim,
        "qk-pos-emb-head-dim": mla.qk_pos_emb_head_dim,
        "v-head-dim": mla.v_head_dim,
        "qk-layernorm": model.qk_layernorm,
    }


def _moe(model: ModelSpec) -> dict[str, object]:
    moe = model.moe
    if moe is None:
        return {}
    return {
        "num-experts": moe.num_moe_experts,
        "moe-router-topk": moe.moe_router_topk,
        "moe-ffn-hidden-size": moe.moe_ffn_hidden_size,
        "moe-shared-expert-intermediate-size": moe.moe_shared_expert_intermediate_size or None,
        "moe-layer-freq": _layer_pattern(moe),
        "moe-router-score-function": moe.moe_router_score_function,
        "moe-router-enable-expert-bias": moe.moe_router_enable_expert_bias,
        "moe-router-bias-update-rate": (
            moe.moe_router_bias_update_rate if moe.moe_router_enable_expert_bias else None
        ),
        "moe-router-num-groups": moe.moe_router_num_groups,
        "moe-router-group-topk": moe.moe_router_group_topk,
        "moe-router-topk-scaling-factor": moe.moe_router_topk_scaling_factor,
        "moe-router-load-balancing-type": moe.moe_router_load_balancing_type,
        "moe-aux-loss-coeff": moe.moe_aux_loss_coeff,
    }


def _training(settings: Settings) -> dict[str, object]:
    """What Megatron's own M-FSDP v2 needs, and the plan's precision and recomputation."""
    full = settings.recompute_granularity == "full"
    return {
        "use-megatron-fsdp": True,
        "megatron-fsdp-version": 2,
        "data-parallel-sharding-strategy": "optim_grads_params",
        "no-gradient-accumulation-fusion": True,
        "ckpt-format": "fsdp_dtensor",
        "bf16": settings.precision == "bf16",
        "fp16": settings.precision == "fp16",
        "recompute-granularity": (
            None if settings.recompute_granularity == "none" else settings.recompute_granularity
        ),
        "recompute-method": "uniform" if full else None,
        "recompute-num-layers": 1 if full else None,
    }


def _divisor(model: ModelSpec, tensor_parallel: int) -> int:
    """What Megatron must pad the vocabulary with to allocate what the model does.

    It pads to a multiple of the divisor times the tensor-parallel size, and the padded size is
    the first multiple of itself. Without padding 1 is the plainest.
    """
    if model.padded_vocab_size == model.vocab_size:
        return 1
    return model.padded_vocab_size // tensor_parallel


def _layer_pattern(moe: MixtureOfExperts) -> str:
    """``([0]*3+[1]*58)``, runs of equal kinds joined."""
    runs: list[list[int]] = []
    for is_moe in moe.moe_layer_pattern:
        if runs and runs[-1][0] == int(is_moe):
            runs[-1][1] += 1
        else:
            runs.append([int(is_moe), 1])
    return "(" + "+".join(f"[{kind}]*{count}" for kind, count in runs) + ")"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)
