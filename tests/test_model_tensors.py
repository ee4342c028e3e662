"""Names and shapes against Megatron-Core's own modules, built for small models of each kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mfsdp_cli.layout.grammar import parse_layout
from mfsdp_cli.model.presets import preset
from mfsdp_cli.model.spec import LatentAttention, MixtureOfExperts, ModelSpec
from mfsdp_cli.model.tensors import Role, model_tensors, stage_tensors
from tests.helpers.ranks import run_ranks

DENSE = ModelSpec(
    name="dense",
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=6,
    vocab_size=30,
    padded_vocab_size=32,
    max_position_embeddings=8,
)
EXPERTS = MixtureOfExperts(
    num_moe_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=12,
    moe_shared_expert_intermediate_size=20,
    moe_layer_pattern=(False, True),
    moe_router_enable_expert_bias=True,
    moe_router_score_function="sigmoid",
)
LATENT = replace(
    DENSE, qk_layernorm=True, num_query_groups=4, latent_attention=LatentAttention(8, 6, 4, 2, 3)
)
GPT = replace(
    DENSE,
    untie_embeddings_and_output_weights=False,
    gated_linear_unit=False,
    activation="gelu",
    normalization="LayerNorm",
    add_bias_linear=True,
    position_embedding_type="learned_absolute",
)
PLAIN_EXPERTS = replace(
    EXPERTS, moe_shared_expert_intermediate_size=0, moe_router_enable_expert_bias=False
)
MTP = replace(LATENT, moe=EXPERTS, mtp_num_layers=2)

MODELS = {
    "grouped queries": DENSE,
    "qkv bias and query norms": replace(DENSE, add_qkv_bias=True, qk_layernorm=True),
    "GPT-2": GPT,
    "biased experts": replace(GPT, qk_layernorm=True, moe=PLAIN_EXPERTS),
    "MLA and experts": replace(LATENT, moe=EXPERTS),
    "MLA, direct queries": replace(  # Megatron's local specs build it without norms alone
        LATENT, qk_layernorm=False, latent_attention=LatentAttention(None, 6, 4, 2, 3)
    ),
    "MLA without norms": replace(LATENT, qk_layernorm=False),
    "MTP": MTP,
    "MTP after a dense layer": replace(MTP, moe=replace(EXPERTS, moe_layer_pattern=(True, False))),
}
STAGES = {
    "untied": (DENSE, "E|tt|L"),
    "tied": (GPT, "Et|t|L"),
    "MTP with the loss": (MTP, "E|t|tmmL"),
    "MTP alone": (MTP, "Et|t|mm|L"),
    "tied, MTP alone": (replace(MTP, untie_embeddings_and_output_weights=False), "Ett|mm|L"),
    "tied, MTP with the loss": (replace(MTP, untie_embeddings_and_output_weights=False), "Ett|mmL"),
}

Named = list[tuple[str, tuple[int, ...]]]


@pytest.fixture(scope="module")
def megatron() -> dict[str, Named]:
    """What Megatron-Core builds for every model and every stage above."""
    return run_ranks(1, _build_all)[0]


@pytest.mark.parametrize("name", MODELS)
def test_unsplit_model_is_megatrons(megatron: dict[str, Named], name: str) -> None:
    ours = [(tensor.name, tensor.shape) for tensor in model_tensors(MODELS[name])]
    assert sorted(ours) == megatron[name]


@pytest.mark.parametrize("name", STAGES)
def test_stages_are_megatrons(megatron: dict[str, Named], name: str) -> None:
    spec, layout = STAGES[name][0], _layout(*STAGES[name])
    for stage in layout.stages:
        ours = [(tensor.name, tensor.shape) for tensor in stage_tensors(spec, layout, stage)]
        assert sorted(ours) == megatron[f"{name}/{stage.stage}"], stage


def test_units_cover_a_chunk() -> None:
    spec = MTP
    layout = _layout(spec, "Et|t|mm|L")
    units = [{t.unit for t in stage_tensors(spec, layout, stage)} for stage in layout.stages]
    assert units == [
        {"embedding", "decoder.layers.0"},
        {"decoder.layers.1", "root"},  # the final norm
        {"root", "mtp.layers.0", "mtp.layers.1"},  # MTP calls its embedding twice: no own unit
        {"root"},
    ]


def test_embedding_is_no_unit_beside_a_tied_head() -> None:
    assert {t.unit for t in model_tensors(GPT) if t.role is Role.EMBEDDING} == {"root"}
    assert {t.unit for t in model_tensors(DENSE) if t.role is Role.EMBEDDING} == {"embedding"}
    positions = [t.unit for t in model_tensors(GPT) if t.role is Role.POSITION_EMBEDDING]
    assert positions == ["root"]


def test_copies_name_their_owner() -> None:
    layout = _layout(GPT, "Et|t|L")
    copies = [
        (stage.stage, tensor.name, tensor.copy_of)
        for stage in layout.stages
        for tensor in stage_tensors(GPT, layout, stage)
        if tensor.copy_of
    ]
    assert copies == [(2, "output_layer.weight", "embedding.word_embeddings.weight")]


def test_router_bias_is_a_buffer() -> None:
    buffers = [t for t in model_tensors(preset("deepseek-v3-proxy-tiny")) if not t.trainable]
    assert [t.name for t in buffers] == [
        f"decoder.layers.{layer}.mlp.router.expert_bias" for layer in range(1, 8)
    ]


def _layout(spec: ModelSpec, text: str) -> Any:
    return parse_layout(
        text,
        num_layers=spec.num_layers,
        mtp_num_layers=spec.mtp_num_layers,
        pp=text.count("|") + 1,
        vpp=None,
    )


def _build_all(rank: int, world: int) -> dict[str, Named]:
    import torch
    from megatron.core import parallel_state

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign, assignment]
    parallel_state.initialize_model_parallel()
    built = {name: _build(spec, None, 0) for name, spec in MODELS.items()}
    for name, (spec, text) in STAGES.items():
        for stage in range(text.count("|") + 1):
            built[f"{name}/{stage}"] = _build(spec, text, stage)
    return built


def _build(spec: ModelSpec, layout: str | None, stage: int) -> Named:
    """Sorted names (global) and shapes of one chunk, without pipeline groups."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.process_groups_config import ProcessGroupCollection

    stages = layout.split("|") if layout else ["E" + "t" * spec.num_layers + "L"]
    parallel_state.set_pipeline_model_parallel_world_size(len(stages))
    parallel_state.set_pipeline_model_parallel_rank(stage)
    config = _config(spec, layout, len(stages))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.embd, groups.pp = None, _Place(stage, len(stages))
    block, last_kind = _block(config, spec)
    mtp = get_gpt_mtp_block_spec(config, last_kind, use_transformer_engine=False)
    with torch.device("meta"):
        model = GPTModel(
            config,
            block,
            vocab_size=spec.padded_vocab_size,
            max_sequence_length=spec.max_position_embeddings,
            position_embedding_type=spec.position_embedding_type,
            share_embeddings_and_output_weights=not spec.untie_embeddings_and_output_weights,
            pre_process="E" in stages[stage],
            post_process="L" in stages[stage],
            mtp_block_spec=mtp,
            pg_collection=groups,
        )
    first = "|".join(stages[:stage]).count("t")
    tensors = [(n, t) for n, t in model.named_parameters()]
    tensors += [(n, t) for n, t in model.named_buffers() if n.endswith("expert_bias")]
    return sorted((_global(name, first), tuple(tensor.shape)) for name, tensor in tensors)


class _Place:
    """Stands for the pipeline group of a process that is alone: it says where a chunk is."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def _global(name: str, first: int) -> str:
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(int(parts[2]) + first)
    return ".".join(parts)


def _config(spec: ModelSpec, layout: str | None, pp: int) -> Any:
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    signs = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
    values: dict[str, Any] = {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": spec.ffn_hidden_size,
        "num_attention_heads": spec.num_attention_heads,
        "num_query_groups": spec.num_query_groups,
        "kv_channels": spec.kv_channels,
        "normalization": spec.normalization,
        "add_bias_linear": spec.add_bias_linear,
        "add_qkv_bias": spec.add_qkv_bias,
        "qk_layernorm": spec.qk_layernorm,
        "gated_linear_unit": spec.gated_linear_unit,
        "mtp_num_layers": spec.mtp_num_layers or None,
        "use_cpu_initialization": True,
        "transformer_impl": "local",
        "pipeline_model_parallel_size": pp,
    }
    if layout:
        stages = [[signs[sign] for sign in stage] for stage in layout.split("|")]
        values |= {"pipeline_model_parallel_layout": stages, "pipeline_dtype": "float32"}
    if spec.moe is not None:
        values |= {
            "num_moe_experts": spec.moe.num_moe_experts,
            "moe_router_topk": spec.moe.moe_router_topk,
            "moe_ffn_hidden_size": spec.moe.moe_ffn_hidden_size,
            "moe_shared_expert_intermediate_size": (
                spec.moe.moe_shared_expert_intermediate_size or None
            ),
            "moe_layer_freq": [int(is_moe) for is_moe in spec.moe.moe_layer_pattern],
            "moe_router_enable_expert_bias": spec.moe.moe_router_enable_expert_bias,
            "moe_router_score_function": spec.moe.moe_router_score_function,
            "moe_router_load_balancing_type": "none",
        }
    latent = spec.latent_attention
    if latent is None:
        return TransformerConfig(**values)
    return MLATransformerConfig(
        **values,
        q_lora_rank=latent.q_lora_rank,
        kv_lora_rank=latent.kv_lora_rank,
        qk_head_dim=latent.qk_head_dim,
        qk_pos_emb_head_dim=latent.qk_pos_emb_head_dim,
        v_head_dim=latent.v_head_dim,
        rope_type="rope",
    )


def _block(config: Any, spec: ModelSpec) -> Any:
    """Megatron's local layer specs of a chunk and its last kind of layer.

    The core attention, which has no tensors, is left out.
    """
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_decoder_layer_specs,
    )

    class NoAttention(torch.nn.Module):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()

    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    # A stage without decoder layers still tells MTP what a layer looks like.
    layers = block.layer_specs or get_gpt_decoder_layer_specs(
        config, use_transformer_engine=False, normalization=spec.normalization
    )
    for layer in layers:
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = NoAttention
    return block, layers[-1]
