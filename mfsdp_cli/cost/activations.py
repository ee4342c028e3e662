"""Bytes that one microbatch keeps between its forward and its backward, stage by stage.

What is counted is what autograd saves in Megatron-Core's local layers with a core attention that
keeps no attention matrix (scaled_dot_product_attention): docs/cost-model.md derives each line.
A saved tensor counts once however many operations read it. Widths are elements a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from mfsdp_cli.layout.layout import Layout, StageLayout
from mfsdp_cli.model.spec import LatentAttention, MixtureOfExperts, ModelSpec

FP32 = 4


@dataclass(frozen=True)
class Width:
    """Saved elements a token: in the compute dtype, and in fp32 whatever that is."""

    compute: float = 0
    fp32: float = 0

    def __add__(self, other: Width) -> Width:
        return Width(self.compute + other.compute, self.fp32 + other.fp32)

    def bytes(self, tokens: int, element: int) -> int:
        return round(tokens * (self.compute * element + self.fp32 * FP32))


@dataclass(frozen=True)
class Activations:
    """The activations of a model at a batch shape.

    Args:
        tokens: micro batch x sequence length (of one context-parallel rank).
        element: bytes of the compute dtype.
        recompute: ``none``, ``selective`` (core attention) or ``full`` (every layer).
    """

    spec: ModelSpec
    tokens: int
    element: int
    recompute: str = "none"

    def held(self, stage: StageLayout) -> int:
        """Bytes a stage keeps for each microbatch in flight."""
        spec = self.spec
        width = Width()
        for layer in stage.layers:
            width += self._layer(spec.is_moe_layer(layer))
        for _ in stage.mtp:
            width += _mtp_projection(spec) + self._layer(_mtp_is_moe(spec)) + _head(spec)
        if stage.loss:
            width += _head(spec)
        return width.bytes(self.tokens, self.element)

    def working(self, stage: StageLayout) -> int:
        """Bytes a backward of the stage needs beyond what is held.

        Full recomputation rebuilds one layer at a time; the loss stage holds the gradient of its
        logits.
        """
        kinds = [self.spec.is_moe_layer(layer) for layer in stage.layers]
        kinds += [_mtp_is_moe(self.spec) for _ in stage.mtp]
        rebuilt = 0
        if self.recompute == "full":
            rebuilt = max(
                (_layer(self.spec, kind).bytes(self.tokens, self.element) for kind in kinds),
                default=0,
            )
        logits = stage.loss or stage.mtp
        gradient = self.tokens * self.spec.padded_vocab_size * FP32 if logits else 0
        return rebuilt + gradient

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
        whole = _layer(self.spec, is_moe)
        if self.recompute == "selective":
            whole += _recomputed_core(self.spec)
        return whole


def sequences_after(layout: Layout) -> list[int]:
    """How many hidden states travel from each stage to the next.

    One, and one more for each MTP layer that was passed: later stages hand them all on to the
    loss.
    """
    return list(accumulate((len(stage.mtp) for stage in layout.stages), initial=1))[1:]


def _layer(spec: ModelSpec, is_moe: bool) -> Width:
    """Two residual inputs with their normed outputs, attention, and the MLP or the experts."""
    norms = Width(4 * spec.hidden_size)
    mlp = _experts(spec, spec.moe) if is_moe and spec.moe else _mlp(spec, spec.ffn_hidden_size)
    return norms + _attention(spec) + mlp


def _attention(spec: ModelSpec) -> Width:
    if spec.latent_attention is not None:
        return _latent(spec, spec.latent_attention)
    queries = spec.num_attention_heads * spec.kv_channels
    keys = spec.num_query_groups * spec.kv_channels
    normed = queries + keys if spec.qk_layernorm else 0
    # Queries, keys, values, the output; one log-sum-exp a head.
    return Width(queries + 2 * keys + queries + normed, spec.num_attention_heads)


def _latent(spec: ModelSpec, mla: LatentAttention) -> Width:
    heads = spec.num_attention_heads
    head = mla.qk_head_dim + mla.qk_pos_emb_head_dim
    latents = mla.kv_lora_rank + mla.qk_pos_emb_head_dim + (mla.q_lora_rank or 0)
    normed = mla.kv_lora_rank + (mla.q_lora_rank or 0)
    core = heads * (2 * head + 2 * mla.v_head_dim)
    return Width(latents + normed + core, heads)


def _recomputed_core(spec: ModelSpec) -> Width:
    """What selective recomputation saves: log-sum-exps; the output stays for the projection."""
    return Width(0, -spec.num_attention_heads)


def _mlp(spec: ModelSpec, inner: int) -> Width:
    """Gated: both halves, the activated half, the product. Else: before and after."""
    return Width((4 if spec.gated_linear_unit else 2) * inner)


def _experts(spec: ModelSpec, moe: MixtureOfExperts) -> Width:
    chosen = moe.moe_router_topk
    # Tokens sorted by expert, their outputs before they are weighted.
    dispatched = Width(2 * chosen * spec.hidden_size, chosen)
    routed = _mlp(spec, chosen * moe.moe_ffn_hidden_size)
    shared = _mlp(spec, moe.moe_shared_expert_intermediate_size)
    # Logits, scores and the routing map's probabilities.
    router = Width(0, 3 * moe.num_moe_experts)
    return dispatched + routed + shared + router


def _mtp_is_moe(spec: ModelSpec) -> bool:
    """MTP layers are of the kind of the last decoder layer."""
    return spec.is_moe_layer(spec.num_layers - 1)


def _mtp_projection(spec: ModelSpec) -> Width:
    """Two norms with inputs and outputs; the two outputs side by side are the projection's."""
    return Width(6 * spec.hidden_size)


def _head(spec: ModelSpec) -> Width:
    """The final norm's input and output, and the softmax of the logits in fp32."""
    return Width(2 * spec.hidden_size, spec.padded_vocab_size)
