"""Every tensor of a model under Megatron-Core's own names, and what they add up to.

Names and shapes are those of Megatron-Core's ``GPTModel`` with its local layer specs
(``get_gpt_decoder_block_spec(use_transformer_engine=False)``), unsplit, layers counted from 0. A
test builds Megatron's modules and compares. Transformer Engine's layers fuse some norms into the
following linear layer: other names, the same numbers.

What a stage holds beyond its layers:

============================== ======================================================
tensor                         stage
============================== ======================================================
word and position embedding    the embedding's; again each MTP stage that has it not
final norm                     the loss stage; with MTP the last decoder layer's stage
``output_layer.weight``        the loss stage; tied: only where the embedding is not
============================== ======================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from mfsdp_cli.layout.layout import Layout, StageLayout
from mfsdp_cli.model.spec import LatentAttention, ModelSpec

WORD_EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"


class Role(StrEnum):
    """What a tensor is for: it decides how parallelism divides it."""

    EMBEDDING = "embedding"
    POSITION_EMBEDDING = "position_embedding"
    HEAD = "head"
    NORM = "norm"
    ATTENTION = "attention"
    MLP = "mlp"
    ROUTER = "router"
    ROUTER_BIAS = "router_bias"
    ROUTED_EXPERT = "routed_expert"
    SHARED_EXPERT = "shared_expert"
    MTP_PROJECTION = "mtp_projection"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the model.

    Args:
        name: Megatron-Core's name in the unsplit model, layers counted from 0.
        unit: what it is gathered with: ``embedding``, ``decoder.layers.N``, ``mtp.layers.N`` or
            ``root`` (what remains of a chunk).
        trainable: False for buffers (the router bias).
        copy_of: the parameter that this one repeats, owned by another stage.
        tensor_parallel: whether tensor parallelism divides it.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    unit: str = ""
    trainable: bool = True
    copy_of: str | None = None
    tensor_parallel: bool = False

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)


def stage_tensors(spec: ModelSpec, layout: Layout, stage: StageLayout) -> list[TensorSpec]:
    """All tensors that a stage holds, in Megatron's order, whole (not a rank's share).

    Copies of another stage's embedding carry ``copy_of``. Models with many experts have tens of
    thousands of tensors: for sums take :mod:`mfsdp_cli.model.counts`.
    """
    return list(_stage_tensors(spec, layout, stage))


def model_tensors(spec: ModelSpec) -> list[TensorSpec]:
    """All tensors of the unsplit model."""
    layers, mtp = tuple(range(spec.num_layers)), tuple(range(spec.mtp_num_layers))
    whole = StageLayout(0, 0, 0, layers, embedding=True, loss=True, mtp=mtp)
    return stage_tensors(spec, Layout(1, 1, (whole,)), whole)


def _stage_tensors(spec: ModelSpec, layout: Layout, stage: StageLayout) -> Iterator[TensorSpec]:
    yield from embedding_tensors(spec, stage)
    for layer in stage.layers:
        unit = f"decoder.layers.{layer}"
        for tensor in layer_tensors(spec, spec.is_moe_layer(layer)):
            yield replace(tensor, name=f"{unit}.{tensor.name}", unit=unit)
    if holds_final_norm(spec, layout, stage):
        yield from final_norm_tensors(spec)
    for depth in stage.mtp:
        unit = f"mtp.layers.{depth}"
        for tensor in mtp_tensors(spec):
            yield replace(tensor, name=f"{unit}.{tensor.name}", unit=unit)
    yield from head_tensors(spec, stage)


def embedding_tensors(spec: ModelSpec, stage: StageLayout) -> list[TensorSpec]:
    """Word and position embedding of a stage, as copies where another stage owns them.

    Together they are a unit of their own where their chunk calls them once and ties nothing to
    them.
    """
    if not (stage.embedding or stage.mtp):
        return []
    tied_here = stage.loss and not spec.untie_embeddings_and_output_weights
    unit = "root" if tied_here or stage.mtp else "embedding"
    tensors = [
        TensorSpec(
            WORD_EMBEDDING,
            (spec.padded_vocab_size, spec.hidden_size),
            Role.EMBEDDING,
            unit=unit,
            copy_of=None if stage.embedding else WORD_EMBEDDING,
            tensor_parallel=True,
        )
    ]
    if spec.position_embedding_type == "learned_absolute":
        name = "embedding.position_embeddings.weight"
        shape = (spec.max_position_embeddings, spec.hidden_size)
        tensors.append(TensorSpec(name, shape, Role.POSITION_EMBEDDING, unit=unit))
    return tensors


def head_tensors(spec: ModelSpec, stage: StageLayout) -> list[TensorSpec]:
    """The head of a stage; a tied one is a copy, and none where the embedding is at hand."""
    tied = not spec.untie_embeddings_and_output_weights
    if not stage.loss or (tied and stage.embedding):
        return []
    head = TensorSpec(
        OUTPUT_LAYER,
        (spec.padded_vocab_size, spec.hidden_size),
        Role.HEAD,
        unit="root",
        copy_of=WORD_EMBEDDING if tied else None,
        tensor_parallel=True,
    )
    return [head]


def holds_final_norm(spec: ModelSpec, layout: Layout, stage: StageLayout) -> bool:
    """Whether the norm after the decoder is on a stage.

    Megatron-Core puts it on the loss stage, and with MTP behind the last decoder layer, because
    MTP layers read the normed output of the decoder.
    """
    if spec.mtp_num_layers:
        return spec.num_layers - 1 in stage.layers
    return stage.loss


@lru_cache(maxsize=64)
def final_norm_tensors(spec: ModelSpec) -> tuple[TensorSpec, ...]:
    """The norm after the last decoder layer."""
    return tuple(replace(t, unit="root") for t in _norm(spec, "decoder.final_layernorm"))


@lru_cache(maxsize=64)
def layer_tensors(spec: ModelSpec, is_moe: bool) -> tuple[TensorSpec, ...]:
    """The tensors of one decoder layer of a kind, named from the layer down."""
    mlp = _experts(spec) if is_moe else _dense_mlp(spec)
    return (
        *_norm(spec, "input_layernorm"),
        *_attention(spec),
        *_norm(spec, "pre_mlp_layernorm"),
        *mlp,
    )


@lru_cache(maxsize=64)
def mtp_tensors(spec: ModelSpec) -> tuple[TensorSpec, ...]:
    """The tensors of one MTP layer: three norms, a projection, a decoder layer of the last kind."""
    hidden = spec.hidden_size
    projection = TensorSpec(
        "eh_proj.weight", (hidden, 2 * hidden), Role.MTP_PROJECTION, tensor_parallel=True
    )
    inner = layer_tensors(spec, spec.is_moe_layer(spec.num_layers - 1))
    return (
        *_norm(spec, "enorm"),
        *_norm(spec, "hnorm"),
        projection,
        *(replace(tensor, name=f"mtp_model_layer.{tensor.name}") for tensor in inner),
        *_norm(spec, "final_layernorm"),
    )


def _norm(spec: ModelSpec, name: str, width: int | None = None) -> list[TensorSpec]:
    shape = (width or spec.hidden_size,)
    tensors = [TensorSpec(f"{name}.weight", shape, Role.NORM)]
    if spec.normalization == "LayerNorm":
        tensors.append(TensorSpec(f"{name}.bias", shape, Role.NORM))
    return tensors


def _linear(
    name: str, rows: int, columns: int, role: Role, *, bias: bool = False, split: str = "rows"
) -> list[TensorSpec]:
    """A linear layer's weight ``(rows, columns)`` and bias ``(rows,)``.

    ``split`` says what tensor parallelism divides: the rows with the bias, the columns, none.
    """
    divided = split != "none"
    tensors = [TensorSpec(f"{name}.weight", (rows, columns), role, tensor_parallel=divided)]
    if bias:
        divided = split == "rows"
        tensors.append(TensorSpec(f"{name}.bias", (rows,), role, tensor_parallel=divided))
    return tensors


def _attention(spec: ModelSpec) -> list[TensorSpec]:
    if spec.latent_attention is not None:
        return _latent_attention(spec, spec.latent_attention)
    heads = spec.kv_channels * spec.num_attention_heads
    rows = heads + 2 * spec.kv_channels * spec.num_query_groups
    output_bias = spec.add_bias_linear or spec.add_attention_output_bias
    qkv_bias = spec.add_bias_linear or spec.add_qkv_bias
    path, role = "self_attention", Role.ATTENTION
    tensors = _linear(
        f"{path}.linear_proj", spec.hidden_size, heads, role, bias=output_bias, split="columns"
    )
    tensors += _linear(f"{path}.linear_qkv", rows, spec.hidden_size, role, bias=qkv_bias)
    if spec.qk_layernorm:
        tensors += _norm(spec, f"{path}.q_layernorm", spec.kv_channels)
        tensors += _norm(spec, f"{path}.k_layernorm", spec.kv_channels)
    return tensors


def _latent_attention(spec: ModelSpec, mla: LatentAttention) -> list[TensorSpec]:
    """MLA: low-rank queries (or direct ones), and keys and values from one shared latent."""
    hidden, heads, path, role = (
        spec.hidden_size,
        spec.num_attention_heads,
        "self_attention",
        Role.ATTENTION,
    )
    query = heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
    value, rank = heads * mla.v_head_dim, mla.kv_lora_rank
    bias = spec.add_bias_linear or spec.add_attention_output_bias
    tensors = _linear(f"{path}.linear_proj", hidden, value, role, bias=bias, split="columns")
    if mla.q_lora_rank is None:
        tensors += _linear(f"{path}.linear_q_proj", query, hidden, role)
    else:
        low = mla.q_lora_rank
        tensors += _linear(f"{path}.linear_q_down_proj", low, hidden, role, split="none")
        tensors += _linear(f"{path}.linear_q_up_proj", query, low, role)
    down, up = rank + mla.qk_pos_emb_head_dim, heads * mla.qk_head_dim + value
    tensors += _linear(f"{path}.linear_kv_down_proj", down, hidden, role, split="none")
    tensors += _linear(f"{path}.linear_kv_up_proj", up, rank, role)
    if spec.qk_layernorm:
        if mla.q_lora_rank is not None:
            tensors += _norm(spec, f"{path}.q_layernorm", mla.q_lora_rank)
        tensors += _norm(spec, f"{path}.kv_layernorm", rank)
    return tensors


def _mlp(spec: ModelSpec, path: str, width: int, role: Role, *, bias: bool) -> list[TensorSpec]:
    rows = 2 * width if spec.gated_linear_unit else width
    first = _linear(f"{path}.linear_fc1", rows, spec.hidden_size, role, bias=bias)
    second = _linear(
        f"{path}.linear_fc2", spec.hidden_size, width, role, bias=bias, split="columns"
    )
    return first + second


def _dense_mlp(spec: ModelSpec) -> list[TensorSpec]:
    bias = spec.add_bias_linear or spec.add_mlp_bias
    return _mlp(spec, "mlp", spec.ffn_hidden_size, Role.MLP, bias=bias)


def _experts(spec: ModelSpec) -> list[TensorSpec]:
    moe = spec.moe
    assert moe is not None
    bias = spec.add_bias_linear
    experts, path = moe.num_moe_experts, "mlp.router"
    tensors = _linear(path, experts, spec.hidden_size, Role.ROUTER, bias=bias, split="none")
    if moe.moe_router_enable_expert_bias:
        tensors.append(
            TensorSpec(f"{path}.expert_bias", (experts,), Role.ROUTER_BIAS, trainable=False)
        )
    width, role = moe.moe_ffn_hidden_size, Role.ROUTED_EXPERT
    for expert in range(experts):
        path = f"mlp.experts.local_experts.{expert}"
        tensors += _mlp(spec, path, width, role, bias=bias)
    if shared := moe.moe_shared_expert_intermediate_size:
        tensors += _mlp(spec, "mlp.shared_experts", shared, Role.SHARED_EXPERT, bias=False)
    return tensors
