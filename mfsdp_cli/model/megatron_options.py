"""Megatron's options that say something about the model, the layout or a judged setting.

Spellings are those of Megatron-LM's arguments and of Megatron-Core's configuration fields, with
underscores. Options that are not here (learning rates, paths, logging) are passed over; options
that change the model in a way that cannot be described are refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mfsdp_cli.errors import Finding, MfsdpError, Severity

VALUES: dict[str, tuple[str, str]] = {
    **{
        name: (name, "int")
        for name in (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "max_position_embeddings",
            "vocab_size",
            "padded_vocab_size",
            "make_vocab_size_divisible_by",
            "num_experts",
            "moe_ffn_hidden_size",
            "moe_router_topk",
            "moe_shared_expert_intermediate_size",
            "moe_router_num_groups",
            "moe_router_group_topk",
            "q_lora_rank",
            "kv_lora_rank",
            "qk_head_dim",
            "qk_pos_emb_head_dim",
            "v_head_dim",
            "mtp_num_layers",
            "pipeline_model_parallel_size",
            "tensor_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "num_virtual_stages_per_pipeline_rank",
            "num_layers_per_virtual_pipeline_stage",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "micro_batch_size",
            "global_batch_size",
            "seq_length",
            "microbatch_group_size_per_virtual_pipeline_stage",
            "num_distributed_optimizer_instances",
            "resident_chunks",
        )
    },
    **{
        name: (name, "float")
        for name in (
            "rotary_base",
            "layernorm_epsilon",
            "init_method_std",
            "moe_aux_loss_coeff",
            "moe_router_topk_scaling_factor",
            "moe_router_bias_update_rate",
        )
    },
    **{
        name: (name, "text")
        for name in (
            "normalization",
            "activation_func",
            "moe_router_score_function",
            "tokenizer_type",
            "recompute_granularity",
            "fp8_format",
            "fp4_format",
            "cuda_graph_impl",
            "outer_dp_sharding_strategy",
            "data_parallel_sharding_strategy",
            "gradient_reduction",
            "schedule",
        )
    },
    # Of these "none" is a choice like any other, not the absence of one.
    "position_embedding_type": ("position_embedding_type", "choice"),
    "moe_router_load_balancing_type": ("moe_router_load_balancing_type", "choice"),
    "moe_layer_freq": ("moe_layer_freq", "pattern"),
    "pipeline_model_parallel_layout": ("pipeline_model_parallel_layout", "layout"),
    "encoder_num_layers": ("num_layers", "int"),
    "encoder_seq_length": ("seq_length", "int"),
    "num_moe_experts": ("num_experts", "int"),
    "norm_epsilon": ("layernorm_epsilon", "float"),
    "virtual_pipeline_model_parallel_size": ("num_virtual_stages_per_pipeline_rank", "int"),
    "num_layers_in_first_pipeline_stage": ("decoder_first_pipeline_num_layers", "int"),
    "num_layers_in_last_pipeline_stage": ("decoder_last_pipeline_num_layers", "int"),
    "microbatch_group_size_per_vp_stage": (
        "microbatch_group_size_per_virtual_pipeline_stage",
        "int",
    ),
    "fp8": ("fp8_format", "text"),
    "fp4": ("fp4_format", "text"),
}
"""Spelling -> (canonical name, kind of its value)."""

SWITCHES: dict[str, tuple[str, Any]] = {
    **{
        name: (name, True)
        for name in (
            "group_query_attention",
            "swiglu",
            "squared_relu",
            "quick_geglu",
            "openai_gelu",
            "gated_linear_unit",
            "add_bias_linear",
            "add_qkv_bias",
            "qk_layernorm",
            "untie_embeddings_and_output_weights",
            "multi_latent_attention",
            "moe_router_enable_expert_bias",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
            "overlap_p2p_communication",
            "batch_p2p_communication",
            "calculate_per_token_loss",
            "use_distributed_optimizer",
            "gradient_accumulation_fusion",
            "delay_wgrad_compute",
            "disable_bucketing",
            "deallocate_pipeline_outputs",
            "sequence_parallel",
        )
    },
    "disable_bias_linear": ("add_bias_linear", False),
    "share_embeddings_and_output_weights": ("untie_embeddings_and_output_weights", False),
    "use_rotary_position_embeddings": ("position_embedding_type", "rope"),
    "no_overlap_p2p_communication": ("overlap_p2p_communication", False),
    "overlap_p2p_comm": ("overlap_p2p_communication", True),
    "batch_p2p_comm": ("batch_p2p_communication", True),
    "no_gradient_accumulation_fusion": ("gradient_accumulation_fusion", False),
    "no_deallocate_pipeline_outputs": ("deallocate_pipeline_outputs", False),
    "fp16": ("precision", "fp16"),
    "bf16": ("precision", "bf16"),
    "fp8_hybrid": ("fp8_format", "hybrid"),
    "fp8_e4m3": ("fp8_format", "e4m3"),
    "recompute_activations": ("recompute_granularity", "selective"),
    "enable_cuda_graph": ("cuda_graph_impl", "local"),
    "external_cuda_graph": ("cuda_graph_impl", "transformer_engine"),
}
"""Flag without a value -> (canonical name, what it says)."""

UNSUPPORTED: dict[str, str] = {
    "attention_output_gate": "gated attention outputs",
    "decoder_num_layers": "encoder-decoder models",
    "experimental_attention_variant": "attention variants",
    "heterogeneous_layers_config_encoded_json": "layers of different widths",
    "heterogeneous_layers_config_path": "layers of different widths",
    "hybrid_layer_pattern": "hybrid layer patterns",
    "hybrid_override_pattern": "hybrid layer patterns",
    "is_hybrid_model": "hybrid layer patterns",
    "linear_attention_freq": "linear attention",
    "moe_latent_size": "latent experts",
    "moe_shared_expert_gate": "gated shared experts",
    "mtp_use_repeated_layer": "one MTP layer used several times",
    "softmax_type": "attention sinks",
}
"""Spelling -> what it brings that a model description cannot say."""

_HARMLESS = {"softmax_type": ("vanilla",)}


@dataclass
class Options:
    """What a file says, under canonical names.

    Args:
        where: the file, for messages.
        values: canonical name -> value, in the kind of the tables above.
        origins: canonical name -> how and where the file spells it.
        findings: warnings about what was read.
    """

    where: str
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def set(self, name: str, value: Any, origin: str) -> None:
        """Put a value; a second, different one replaces it with a warning, as argparse would."""
        if name in self.values and self.values[name] != value:
            self.warn(
                "MF421",
                f"{self.origins[name]} says {self.values[name]!r} and later {origin} {value!r}; "
                "the last counts",
            )
        self.values[name] = value
        self.origins[name] = origin

    def warn(self, code: str, message: str, hint: str = "") -> None:
        """Add a warning about the file."""
        self.findings.append(Finding(code, Severity.WARNING, message, hint, self.where))

    def refuse_unsupported(self, spelling: str, value: Any, origin: str) -> None:
        """Raise MF408 where an option changes the model beyond description."""
        if spelling not in UNSUPPORTED or value in (None, False, "None", "none", "null"):
            return
        if value not in _HARMLESS.get(spelling, ()):
            raise MfsdpError(
                "MF408",
                f"{origin}: {UNSUPPORTED[spelling]} are not supported",
                where=self.where,
            )

    def error(self, code: str, name: str, message: str, hint: str = "") -> MfsdpError:
        """An error about one option, naming it as the file does."""
        origin = self.origins.get(name, name)
        return MfsdpError(code, f"{origin}: {message}", where=self.where, hint=hint)


def spelling_of(key: str) -> str:
    """``--num-layers`` and ``num_layers`` alike as ``num_layers``."""
    return key.strip().lstrip("-").replace("-", "_").lower()
