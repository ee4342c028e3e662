"""Bytes that one microbatch keeps between its forward and its backward, stage by stage.

What is counted is what autograd saves in Megatron-Core's local layers with a core attention that
keeps no attention matrix (scaled_dot_product_attention) and torch's fused norms. Each line of the
sums below is derived in docs/cost-model.md and measured by a test. A tensor counts once however
many operations read it, and a view counts as the whole tensor it keeps alive.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from mfsdp_cli.layout.layout import Layout, StageLayout
from mfsdp_cli.model.spec import LatentAttention, MixtureOfExperts, ModelSpec

FP32 = 4


@dataclass(frozen=True)
class Width:
    """Saved elements.

    Args:
        compute: a token, in the compute dtype.
        fp32: a token, in four bytes whatever the compute dtype (statistics, scores, indices).
        position: a position, whatever the micro batch, in the compute dtype.
    """

    compute: float = 0
    fp32: float = 0
    position: float = 0

    def __add__(self, other: Width) -> Width:
        return Width(
            self.compute + other.compute,
            self.fp32 + other.fp32,
            self.position + other.position,
        )

    def bytes(self, micro_batch: int, length: int, element: int) -> int:
        tokens = micro_batch * length
        return round(
            tokens * (self.compute * element + self.fp32 * FP32) + length * self.position * element
        )


@dataclass(frozen=True)
class Activations:
    """The activations of a model at a batch shape.

    Args:
        micro_batch: sequences a microbatch.
        length: tokens of a sequence on one context-parallel rank.
        element: bytes of the compute dtype.
        recompute: ``none``, ``selective`` (core attention) or ``full`` (every layer).
    """

    spec: ModelSpec
    micro_batch: int
    length: int
    element: int
    recompute: str = "none"

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.length

    def held(self, stage: StageLayout) -> int:
        """Bytes a stage keeps for each microbatch in flight."""
        width = Width()
        for is_moe in _kinds(self.spec, stage):
            width += self._layer(is_moe)
        for _ in stage.mtp:
            width += mtp_projection_width(self.spec) + head_width(self.spec)
        if stage.loss:
            width += head_width(self.spec)
        return self._bytes(width)

    def working(self, stage: StageLayout) -> int:
        """Bytes a backward of the stage needs beyond what is held.

        Full recomputation rebuilds one layer at a time; the loss stage holds the gradient of its
        logits.
        """
        rebuilt = 0
        if self.recompute == "full":
            widths = {kind: layer_width(self.spec, kind) for kind in _kinds(self.spec, stage)}
            rebuilt = max(map(self._bytes, widths.values()), default=0)
        logits = stage.loss or stage.mtp
        return rebuilt + (self.tokens * self.spec.padded_vocab_size * FP32 if logits else 0)

    def boundaries(self, layout: Layout) -> list[int]:
        """Bytes of the tensor each stage passes on, by stage; the last passes nothing on."""
        sent = [
            self.tokens * self.spec.hidden_size * self.element * sequences
            for sequences in sequences_after(layout)
        ]
        return [*sent[:-1], 0]

    def _layer(self, is_moe: bool) -> Width:
        if self.recompute == "full":
            return Width(self.spec.hidden_size)
        width = layer_width(self.spec, is_moe)
        if self.recompute == "selective":
            # Queries, keys, values and the output stay; the log-sum-exps are made again.
            width += Width(fp32=-self.spec.num_attention_heads)
        return width

    def _bytes(self, width: Width) -> int:
        return width.bytes(self.micro_batch, self.length, self.element)


def sequences_after(layout: Layout) -> list[int]:
    """How many hidden states travel from each stage to the next.

    One, and one more for each MTP layer that was passed: later stages hand them all on to the
    loss.
    """
    return list(accumulate((len(stage.mtp) for stage in layout.stages), initial=1))[1:]


def layer_width(spec: ModelSpec, is_moe: bool) -> Width:
    """One decoder layer: two norms (input, output, a statistic), attention, MLP or experts."""
    norms = Width(4 * spec.hidden_size, 2)
    moe = spec.moe if is_moe else None
    mlp = mlp_width(spec, spec.ffn_hidden_size) if moe is None else experts_width(spec, moe)
    return norms + attention_width(spec) + mlp


def attention_width(spec: ModelSpec) -> Width:
    """Projected queries, keys and values (one tensor that the values keep alive), those turned by
    the rotary embedding, the output; a log-sum-exp a head.
    """
    if spec.latent_attention is not None:
        return _latent_width(spec, spec.latent_attention)
    queries = spec.num_attention_heads * spec.kv_channels
    keys = spec.num_query_groups * spec.kv_channels
    heads = spec.num_attention_heads
    width = Width(queries + 2 * keys + queries, heads)
    if spec.qk_layernorm:
        width += Width(fp32=heads + spec.num_query_groups)
    if spec.position_embedding_type == "rope":
        return width + Width(queries + keys, position=4 * spec.kv_channels)
    return width + Width(queries + keys) if spec.qk_layernorm else width


def _latent_width(spec: ModelSpec, mla: LatentAttention) -> Width:
    """Latents before and after their norms, queries and keys with their rotary part joined, the
    up-projection that the values are a view of, the output.
    """
    heads = spec.num_attention_heads
    head = mla.qk_head_dim + mla.qk_pos_emb_head_dim
    queries = 2 * (mla.q_lora_rank or 0)
    latents = queries + 2 * mla.kv_lora_rank + mla.qk_pos_emb_head_dim
    core = heads * (2 * head + mla.qk_head_dim + 2 * mla.v_head_dim)
    return Width(latents + core, heads + 2, 4 * mla.qk_pos_emb_head_dim)


def mlp_width(spec: ModelSpec, inner: int) -> Width:
    """Gated: both halves, the second one shifted (Megatron's offset), the activated half, the
    product. Otherwise: before and after the activation.
    """
    return Width((5 if spec.gated_linear_unit else 2) * inner)


def experts_width(spec: ModelSpec, moe: MixtureOfExperts) -> Width:
    """Tokens sorted by expert, the experts (their product once more before it is weighted), the
    shared expert, the router's scores and indices.
    """
    chosen = moe.moe_router_topk
    routed = chosen * moe.moe_ffn_hidden_size
    width = Width(chosen * spec.hidden_size + routed) + mlp_width(spec, routed)
    width += mlp_width(spec, moe.moe_shared_expert_intermediate_size)
    return width + Width(fp32=3.25 * moe.num_moe_experts + 8 * chosen + 2)


def mtp_projection_width(spec: ModelSpec) -> Width:
    """Two norms with inputs and outputs, and the outputs side by side."""
    return Width(6 * spec.hidden_size, 2)


def head_width(spec: ModelSpec) -> Width:
    """The final norm's input and output, and the softmax of the logits in fp32."""
    return Width(2 * spec.hidden_size, spec.padded_vocab_size + 1)


def _kinds(spec: ModelSpec, stage: StageLayout) -> Iterable[bool]:
    """Whether each layer of a stage is MoE; MTP layers are of the last decoder layer's kind."""
    yield from (spec.is_moe_layer(layer) for layer in stage.layers)
    yield from (spec.is_moe_layer(spec.num_layers - 1) for _ in stage.mtp)
