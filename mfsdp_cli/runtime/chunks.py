"""Megatron-Core models, chunk by chunk, exactly as a layout says.

A *chunk* is the part of the model that one stage holds: a ``GPTModel`` with its layers, with the
embedding where the layout puts it, with MTP layers (and the embedding that they call) where it
puts those, and with final norm and head on the loss stage. Weights come
from :mod:`mfsdp_cli.runtime.weights`, never from Megatron's initialization, and copies of the
word embedding are not synchronized by Megatron's collective: one rank would reach it only after
building its later chunks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mfsdp_cli.layout.layout import Layout, StageLayout
from mfsdp_cli.model.spec import ModelSpec
from mfsdp_cli.runtime import transformer_config
from mfsdp_cli.runtime.attention import ScaledDotProductAttention
from mfsdp_cli.runtime.weights import initial_weight

WORD_EMBEDDING = "embedding.word_embeddings.weight"
_HEAD = "output_layer.weight"
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(\.mlp\.experts\.local_experts\.)(\d+)(\.)")


@dataclass(frozen=True)
class Chunk:
    """What one stage holds.

    Args:
        first_expert: global number of the first routed expert here (expert parallelism).
    """

    spec: ModelSpec
    stage: StageLayout
    module: nn.Module
    first_expert: int = 0


def build_chunks(
    spec: ModelSpec,
    layout: Layout,
    pp_rank: int,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    ep: int = 1,
    ep_rank: int = 0,
    recompute: str = "none",
    per_token_loss: bool = False,
) -> list[Chunk]:
    """The chunks of this pipeline rank, by vp_stage, with initial weights.

    Needs Megatron's parallel state (:func:`mfsdp_cli.runtime.topology.connect`) with the layout's
    sizes.

    Args:
        seed: what the weights depend on, with their names.
        dtype: dtype of the parameters.
        ep, ep_rank: expert-parallel size, and which of the parts this rank holds.
        recompute: granularity of activation recomputation: none, selective or full.
        per_token_loss: as in :func:`.transformer_config.make`.

    Raises:
        MfsdpError: MF502 naming what cannot be built.
    """
    config = transformer_config.make(
        spec, layout, dtype=dtype, ep=ep, recompute=recompute, per_token_loss=per_token_loss
    )
    first_expert = 0 if spec.moe is None else ep_rank * (spec.moe.num_moe_experts // ep)
    chunks = [
        Chunk(spec, stage, _build_module(spec, stage, layout.vpp, config).to(device), first_expert)
        for stage in layout.stages_of(pp_rank)
    ]
    for chunk in chunks:
        _use_dtype(chunk.module, dtype)
        set_initial_weights(chunk, seed)
    return chunks


def _use_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    """Bring every parameter to the compute dtype, as Megatron's Float16Module does.

    torch's norms are made in fp32 whatever the configuration says. Buffers (a router's expert
    bias, rotary frequencies) keep theirs.
    """
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def build_unsplit(
    spec: ModelSpec,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    per_token_loss: bool = False,
) -> Chunk:
    """The whole model as one chunk (needs a parallel state with PP 1)."""
    layout = unsplit_layout(spec)
    return build_chunks(
        spec, layout, 0, seed=seed, dtype=dtype, device=device, per_token_loss=per_token_loss
    )[0]


def unsplit_layout(spec: ModelSpec) -> Layout:
    """The layout of one stage that holds everything."""
    layers = tuple(range(spec.num_layers))
    mtp = tuple(range(spec.mtp_num_layers))
    return Layout(1, 1, (StageLayout(0, 0, 0, layers, embedding=True, loss=True, mtp=mtp),))


def global_names(chunk: Chunk) -> dict[str, str]:
    """Local parameter name -> its name in the unsplit model (0-based layers).

    A tied head is a copy of the word embedding and has the embedding's name: the unsplit model
    has no other.
    """
    return {name: global_name(chunk, name) for name, _ in chunk.module.named_parameters()}


def global_name(chunk: Chunk, name: str) -> str:
    """The name in the unsplit model of one parameter or buffer of a chunk."""
    if name == _HEAD and not chunk.spec.untie_embeddings_and_output_weights:
        return WORD_EMBEDDING
    name = global_experts(chunk, name)
    match = _LAYER.match(name)
    if match is None:
        return name
    return f"decoder.layers.{chunk.stage.layers[int(match[1])]}.{name[match.end() :]}"


def global_experts(chunk: Chunk, name: str) -> str:
    """A name within a chunk with its routed expert numbered over the whole layer."""
    if not chunk.first_expert:
        return name
    return _EXPERT.sub(lambda m: f"{m[1]}{int(m[2]) + chunk.first_expert}{m[3]}", name)


def set_initial_weights(chunk: Chunk, seed: int) -> None:
    """Give every parameter of a chunk its initial value."""
    with torch.no_grad():
        for name, parameter in chunk.module.named_parameters():
            value = initial_weight(chunk.spec, global_name(chunk, name), parameter.shape, seed)
            parameter.copy_(value)


def routers_with_bias(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The MoE routers that carry an expert bias, with their local names."""
    for name, child in module.named_modules():
        if getattr(child, "expert_bias", None) is not None:
            yield name, child


def router_biases(chunk: Chunk) -> dict[str, torch.Tensor]:
    """A copy of every router's expert bias by global name, fp32, on the CPU."""
    return {
        global_name(chunk, f"{name}.expert_bias"): router.expert_bias.detach().float().cpu().clone()
        for name, router in routers_with_bias(chunk.module)
    }


def _build_module(spec: ModelSpec, stage: StageLayout, vpp: int, config: Any) -> nn.Module:
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection

    vp_stage = stage.vp_stage if vpp > 1 else None
    place = _Place(vp_stage, stage.pp_rank)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.embd = None  # no collective at construction; see the module's docstring
    return GPTModel(
        config=config,
        transformer_layer_spec=_block_spec(config, spec, place),
        mtp_block_spec=_mtp_spec(config, spec, place) if stage.mtp else None,
        vocab_size=spec.padded_vocab_size,
        max_sequence_length=spec.max_position_embeddings,
        pre_process=stage.embedding,
        post_process=stage.loss,
        share_embeddings_and_output_weights=not spec.untie_embeddings_and_output_weights,
        position_embedding_type=spec.position_embedding_type,
        rotary_base=spec.rotary_base,
        pg_collection=groups,
        vp_stage=vp_stage,
    )


@dataclass(frozen=True)
class _Place:
    """Where a chunk is, for Megatron's functions; vp_stage is None without virtual stages."""

    vp_stage: int | None
    pp_rank: int


def _block_spec(config: Any, spec: ModelSpec, place: _Place) -> Any:
    """Megatron's local (not Transformer Engine) layer specs with our core attention."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=False,
        normalization=spec.normalization,
        vp_stage=place.vp_stage,
        pp_rank=place.pp_rank,
    )
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = ScaledDotProductAttention
    return block


def _mtp_spec(config: Any, spec: ModelSpec, place: _Place) -> Any:
    """Megatron's MTP block; its layers are of the last decoder layer's kind, wherever that is."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_layer_specs,
        get_gpt_mtp_block_spec,
    )

    last = get_gpt_decoder_layer_specs(
        config, use_transformer_engine=False, normalization=spec.normalization
    )[-1]
    last.submodules.self_attention.submodules.core_attention = ScaledDotProductAttention
    return get_gpt_mtp_block_spec(
        config, last, use_transformer_engine=False, vp_stage=place.vp_stage, pp_rank=place.pp_rank
    )
