"""Megatron's options as a model description, with Megatron's own defaults.

Arguments and configuration names differ in some defaults: as an argument ``--num-query-groups``
counts only with ``--group-query-attention`` and MLA has no query rank unless one is given; as
configuration fields ``num_query_groups`` always counts and ``q_lora_rank`` is 512.
"""

from __future__ import annotations

from dataclasses import fields as fields_of
from typing import Any

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.model.megatron_options import Options
from mfsdp_cli.model.spec import LatentAttention, MixtureOfExperts, ModelSpec
from mfsdp_cli.model.validity import MAX_LAYERS
from mfsdp_cli.model.vocabulary import padded
from mfsdp_cli.parallel import Settings

DEFAULT_DIVISOR = 128
_VOCABULARIES = {"GPT2BPETokenizer": 50257}
_PARALLEL = (
    "pipeline_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "tensor_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "micro_batch_size",
    "global_batch_size",
    "seq_length",
    "microbatch_group_size_per_virtual_pipeline_stage",
    "make_vocab_size_divisible_by",
)
_OTHER_PARALLEL = (
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
_POSITIONS = {
    "learned_absolute": "learned_absolute",
    "rope": "rope",
    "yarn": "rope",
    "mrope": "rope",
    "none": "none",
}
_ACTIVATIONS = {"swiglu": "silu", "squaredrelu": "squared_relu", "fast_gelu": "gelu_tanh"}
_MLA_CONFIG_DEFAULTS = {"q_lora_rank": 512, "kv_lora_rank": 512}


def parallel_of(options: Options) -> dict[str, int | str]:
    """Layout, batch and parallel sizes, under Megatron's long names with underscores."""
    for name in _PARALLEL:
        if name in options.values and options.values[name] < 1:
            raise options.error("MF405", name, f"must be at least 1, got {options.values[name]}")
    names = (*_PARALLEL, *_OTHER_PARALLEL)
    return {name: options.values[name] for name in names if name in options.values}


def settings_of(options: Options) -> dict[str, Any]:
    """The fields of :class:`mfsdp_cli.parallel.Settings` that the file speaks of."""
    names = [field.name for field in fields_of(Settings)]
    return {name: options.values[name] for name in names if name in options.values}


def model_of(options: Options, *, name: str, config_names: bool, tensor_parallel: int) -> ModelSpec:
    """The model that Megatron would build from these options.

    Args:
        config_names: the file uses configuration fields (YAML) rather than arguments.
        tensor_parallel: what the vocabulary is padded for.

    Raises:
        MfsdpError: MF404 a required option is missing, MF405 a value that cannot be, MF407
            options that disagree.
    """
    return _Reader(options, config_names).model(name, tensor_parallel)


class _Reader:
    def __init__(self, options: Options, config_names: bool) -> None:
        self.options = options
        self.config_names = config_names
        self.assumptions: list[str] = []

    def model(self, name: str, tensor_parallel: int) -> ModelSpec:
        layers = self._required("num_layers")
        if layers > MAX_LAYERS:
            raise self.options.error("MF405", "num_layers", f"at most {MAX_LAYERS}, got {layers}")
        vocabulary, allocated = self._vocabulary(tensor_parallel)
        bias = self._get("add_bias_linear", True)
        activation, gated = self._activation()
        positions = self._positions()
        return ModelSpec(
            name=name,
            num_layers=layers,
            hidden_size=self._required("hidden_size"),
            ffn_hidden_size=self._ffn_size(),
            vocab_size=vocabulary,
            padded_vocab_size=allocated,
            max_position_embeddings=self._max_positions(),
            untie_embeddings_and_output_weights=self._untied(),
            gated_linear_unit=gated,
            activation=activation,
            normalization=self._normalization(),
            layernorm_epsilon=self._get("layernorm_epsilon", 1e-5),
            add_bias_linear=bias,
            add_qkv_bias=bias or self._get("add_qkv_bias", False),
            qk_layernorm=self._get("qk_layernorm", False),
            position_embedding_type=positions,
            rotary_base=self._get("rotary_base", 10000.0),
            init_method_std=self._get("init_method_std", 0.02),
            **self._attention(),
            moe=self._experts(layers),
            mtp_num_layers=self._get("mtp_num_layers", 0),
            assumptions=tuple(self.assumptions),
            source=self.options.where,
        )

    def _get(self, name: str, default: Any) -> Any:
        return self.options.get(name, default)

    def _required(self, name: str) -> int:
        value = self.options.get(name)
        if value is None:
            shown = name if self.config_names else "--" + name.replace("_", "-")
            raise MfsdpError("MF404", f"{shown} is missing", where=self.options.where)
        if value < 1:
            raise self.options.error("MF405", name, f"must be at least 1, got {value}")
        return int(value)

    def _assume(self, text: str) -> None:
        self.assumptions.append(text)

    def _vocabulary(self, tensor_parallel: int) -> tuple[int, int]:
        """The vocabulary, and what is allocated for it; a padded size is never padded again."""
        size, allocated = self.options.get("vocab_size"), self.options.get("padded_vocab_size")
        if allocated is not None:
            return size or allocated, allocated
        if size is None:
            size = self._vocabulary_of_tokenizer()
        divisor = self._get("make_vocab_size_divisible_by", DEFAULT_DIVISOR)
        if size < 1 or divisor < 1:
            raise self.options.error("MF405", "vocab_size", f"{size} padded to {divisor}")
        return size, padded(size, divisor, tensor_parallel)

    def _vocabulary_of_tokenizer(self) -> int:
        tokenizer = self.options.get("tokenizer_type")
        if tokenizer not in _VOCABULARIES:
            told = f", and {tokenizer} alone does not tell it" if tokenizer else ""
            raise MfsdpError(
                "MF404",
                f"the vocabulary's size is missing{told}",
                where=self.options.where,
                hint="add --vocab-size N (before padding)",
            )
        self._assume(f"vocabulary of {_VOCABULARIES[tokenizer]} assumed from {tokenizer}")
        return _VOCABULARIES[tokenizer]

    def _activation(self) -> tuple[str, bool]:
        """The activation, and whether the linear unit is gated."""
        gated = self._get("gated_linear_unit", False)
        if self._get("swiglu", False):
            return "silu", True
        if self._get("quick_geglu", False):
            return "quick_gelu", True
        if self._get("squared_relu", False):
            return "squared_relu", gated
        if self._get("openai_gelu", False):
            return "gelu_tanh", gated
        name = str(self._get("activation_func", "gelu")).rpartition(".")[2].lower()
        return _ACTIVATIONS.get(name, name), gated or name == "swiglu"

    def _ffn_size(self) -> int:
        """Megatron's default: 4h, with ``--swiglu`` the multiple of 64 below 8h/3."""
        if (size := self.options.get("ffn_hidden_size")) is not None:
            return size
        hidden = self._required("hidden_size")
        swiglu = self._get("swiglu", False)
        size = int((4 * hidden * 2 / 3) / 64) * 64 if swiglu else 4 * hidden
        rule = "the multiple of 64 below 8h/3" if swiglu else "4h"
        self._assume(f"ffn_hidden_size is absent: {size} ({rule})")
        return size

    def _untied(self) -> bool:
        untied = self.options.get("untie_embeddings_and_output_weights")
        if untied is None:
            self._assume("no --untie-embeddings-and-output-weights: tied, Megatron's default")
        return bool(untied)

    def _positions(self) -> str:
        given = self.options.get("position_embedding_type")
        if given is None:
            self._assume("no position_embedding_type: learned_absolute, Megatron's default")
        kind = _POSITIONS.get(given or "learned_absolute")
        if kind is None:
            hint = f"one of {', '.join(_POSITIONS)}"
            raise self.options.error(
                "MF408", "position_embedding_type", f"{given!r} is not supported", hint
            )
        if given in ("yarn", "mrope"):
            self._assume(f"positions {given} are taken as rope: they change no parameter")
        return kind

    def _max_positions(self) -> int:
        if self.options.get("max_position_embeddings") is not None:
            return self._required("max_position_embeddings")
        if self.options.get("seq_length") is None:
            return self._required("max_position_embeddings")
        length = self._required("seq_length")
        self._assume(f"max_position_embeddings is absent: the sequence length {length}")
        return length

    def _normalization(self) -> str:
        latent = self.config_names and self._get("multi_latent_attention", False)
        return str(self._get("normalization", "RMSNorm" if latent else "LayerNorm"))

    def _attention(self) -> dict[str, Any]:
        heads = self._required("num_attention_heads")
        attention: dict[str, Any] = {"num_attention_heads": heads}
        if self._get("multi_latent_attention", False):
            latent = self._latent_attention()
            width = latent.qk_head_dim + latent.qk_pos_emb_head_dim
            return attention | {
                "num_query_groups": heads,
                "kv_channels": width,
                "latent_attention": latent,
            }
        return attention | {
            "num_query_groups": self._query_groups(heads),
            "kv_channels": self._head_width(heads),
        }

    def _query_groups(self, heads: int) -> int:
        groups = self.options.get("num_query_groups")
        grouped = self.options.get("group_query_attention")
        if grouped is None:
            grouped = self.config_names and groups is not None
        if grouped:
            return 1 if groups is None else groups
        if groups is not None:
            self.options.warn(
                "MF420",
                f"{self.options.origins['num_query_groups']} {groups} is ignored, as Megatron "
                f"does without --group-query-attention: {heads} groups, one a head",
                hint="add --group-query-attention, or leave --num-query-groups out",
            )
        return heads

    def _head_width(self, heads: int) -> int:
        if (width := self.options.get("kv_channels")) is not None:
            return width
        hidden = self._required("hidden_size")
        if hidden % heads:
            raise self.options.error(
                "MF405",
                "num_attention_heads",
                f"{heads} heads do not divide the hidden size {hidden}",
                hint="or give --kv-channels",
            )
        return hidden // heads

    def _latent_attention(self) -> LatentAttention:
        defaults = _MLA_CONFIG_DEFAULTS if self.config_names else {"kv_lora_rank": 32}
        for name, value in defaults.items():
            if name not in self.options.values:
                self._assume(f"{name} is absent: {value}, Megatron's default")
        return LatentAttention(
            q_lora_rank=self._get("q_lora_rank", defaults.get("q_lora_rank")),
            kv_lora_rank=self._get("kv_lora_rank", defaults["kv_lora_rank"]),
            qk_head_dim=self._get("qk_head_dim", 128),
            qk_pos_emb_head_dim=self._get("qk_pos_emb_head_dim", 64),
            v_head_dim=self._get("v_head_dim", 128),
        )

    def _experts(self, layers: int) -> MixtureOfExperts | None:
        if not (experts := self._get("num_experts", 0)):
            return None
        width = self.options.get("moe_ffn_hidden_size")
        if width is None:
            width = self._ffn_size()
            self._assume(f"moe_ffn_hidden_size is absent: {width}, that of dense layers")
        return MixtureOfExperts(
            num_moe_experts=experts,
            moe_router_topk=self._get("moe_router_topk", 2),
            moe_ffn_hidden_size=width,
            moe_shared_expert_intermediate_size=self._get("moe_shared_expert_intermediate_size", 0),
            moe_layer_pattern=self._pattern(layers),
            moe_router_enable_expert_bias=self._get("moe_router_enable_expert_bias", False),
            moe_router_score_function=self._get("moe_router_score_function", "softmax"),
            moe_router_num_groups=self.options.get("moe_router_num_groups"),
            moe_router_group_topk=self.options.get("moe_router_group_topk"),
            moe_router_topk_scaling_factor=self.options.get("moe_router_topk_scaling_factor"),
            moe_aux_loss_coeff=self._get("moe_aux_loss_coeff", 0.0),
            moe_router_load_balancing_type=self._get("moe_router_load_balancing_type", "aux_loss"),
            moe_router_bias_update_rate=self._get("moe_router_bias_update_rate", 1e-3),
        )

    def _pattern(self, layers: int) -> tuple[bool, ...]:
        """A number N makes layers 0, N, 2N, ... MoE; a list says it layer by layer."""
        frequency = self._get("moe_layer_freq", 1)
        if isinstance(frequency, int):
            return tuple(layer % frequency == 0 for layer in range(layers))
        if len(frequency) != layers:
            raise self.options.error(
                "MF407",
                "moe_layer_freq",
                f"the pattern has {len(frequency)} layers, the model {layers}",
            )
        return tuple(kind == 1 for kind in frequency)
