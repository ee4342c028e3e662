"""Floating-point operations of a microbatch, stage by stage.

A matrix product of an (m, k) by a (k, n) matrix counts 2mkn. The backward of each costs twice its
forward (one product for each of its two gradients). Norms, activations and softmax are left out.
Attention is causal: half of the s x s products.
"""

from __future__ import annotations

from dataclasses import dataclass

from mfsdp_cli.layout.layout import StageLayout
from mfsdp_cli.model.parameters import layer_roles, mtp_roles
from mfsdp_cli.model.spec import ModelSpec
from mfsdp_cli.model.tensors import Role

BACKWARD = 2
_NO_PRODUCT = frozenset(
    {Role.NORM, Role.ROUTER_BIAS, Role.EMBEDDING, Role.POSITION_EMBEDDING, Role.ROUTED_EXPERT}
)


@dataclass(frozen=True)
class Flops:
    """Forward operations of a model at a batch shape (``micro_batch`` sequences of ``length``)."""

    spec: ModelSpec
    micro_batch: int
    length: int

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.length

    def forward(self, stage: StageLayout) -> float:
        """Forward operations of a stage for one microbatch."""
        total = sum(self.layer(self.spec.is_moe_layer(layer)) for layer in stage.layers)
        for _ in stage.mtp:
            total += self.mtp_layer() + self._head()
        return total + (self._head() if stage.loss else 0.0)

    def recomputed(self, stage: StageLayout, granularity: str) -> float:
        """Operations a backward repeats: every layer, the core attention, or none."""
        layers = len(stage.layers) + len(stage.mtp)
        if granularity == "selective":
            return layers * self._attention()
        if granularity == "none":
            return 0.0
        head = self._head() * (len(stage.mtp) + stage.loss)
        return self.forward(stage) - head

    def layer(self, is_moe: bool) -> float:
        """Forward operations of one decoder layer."""
        return self._products(layer_roles(self.spec, is_moe)) + self._attention()

    def mtp_layer(self) -> float:
        """Forward operations of one MTP layer without the head it calls."""
        return self._products(mtp_roles(self.spec)) + self._attention()

    def _products(self, roles: dict[Role, int]) -> float:
        """Every weight multiplies every token once; of the routed experts, the chosen ones."""
        weights = float(sum(count for role, count in roles.items() if role not in _NO_PRODUCT))
        if self.spec.moe is not None:
            share = self.spec.moe.moe_router_topk / self.spec.moe.num_moe_experts
            weights += roles.get(Role.ROUTED_EXPERT, 0) * share
        return 2.0 * self.tokens * weights

    def _attention(self) -> float:
        """Queries times keys, and weights times values, over half of the positions."""
        spec, mla = self.spec, self.spec.latent_attention
        if mla is not None:
            width = mla.qk_head_dim + mla.qk_pos_emb_head_dim + mla.v_head_dim
        else:
            width = 2 * spec.kv_channels
        return 2.0 * self.tokens * self.length / 2 * spec.num_attention_heads * width

    def _head(self) -> float:
        return 2.0 * self.tokens * self.spec.hidden_size * self.spec.padded_vocab_size
