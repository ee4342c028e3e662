"""Core attention on torch's ``scaled_dot_product_attention``, the same on CPU and GPU.

Plugged into Megatron-Core through its module specs. Megatron's own choices are Transformer
Engine's kernels, which need a GPU, and an unfused one that keeps all scores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class ScaledDotProductAttention(nn.Module):
    """Causal attention; grouped queries and value heads of another width included.

    Takes what Megatron-Core's builders pass and ignores what only other kernels need.
    """

    def __init__(
        self, config: Any, layer_number: int, *_: Any, softmax_scale: float | None = None, **__: Any
    ) -> None:
        super().__init__()
        self.config = config
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: (sequence, batch, heads, head width).
            key: (sequence, batch, query groups, head width).
            value: (sequence, batch, query groups, value head width).
            attention_mask: must be None; the mask is causal.

        Returns:
            (sequence, batch, heads * value head width).
        """
        if (
            attention_mask is not None
            or attention_bias is not None
            or packed_seq_params is not None
        ):
            raise ValueError("Expected causal attention without mask, bias or packing, got one")
        sequence, batch, heads, _width = query.shape
        context = functional.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=key.shape[2] != heads,
        )
        return context.permute(2, 0, 1, 3).reshape(sequence, batch, -1)
