from __future__ import annotations

import pytest
import torch

from mfsdp_cli.runtime.attention import ScaledDotProductAttention


def _reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention position by position, head by head: (s, b, h, d) -> (s, b, h * dv)."""
    length, batch, heads, _ = query.shape
    share = heads // key.shape[2]
    out = torch.zeros(length, batch, heads, value.shape[3], dtype=query.dtype)
    for t in range(length):
        for b in range(batch):
            for h in range(heads):
                scores = key[: t + 1, b, h // share] @ query[t, b, h] * scale
                out[t, b, h] = torch.softmax(scores, 0) @ value[: t + 1, b, h // share]
    return out.reshape(length, batch, -1)


@pytest.mark.parametrize(
    ("heads", "groups", "width", "value_width"),
    [(4, 4, 8, 8), (4, 2, 8, 8), (4, 1, 8, 8), (4, 4, 12, 8)],
    ids=["multi-head", "grouped", "multi-query", "latent"],
)
def test_it_is_causal_softmax_attention(
    heads: int, groups: int, width: int, value_width: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(7, 2, heads, width, generator=generator, dtype=torch.float64)
    key = torch.randn(7, 2, groups, width, generator=generator, dtype=torch.float64)
    value = torch.randn(7, 2, groups, value_width, generator=generator, dtype=torch.float64)
    attention = ScaledDotProductAttention(None, 1, softmax_scale=0.3, k_channels=width)
    torch.testing.assert_close(
        attention(query, key, value, None), _reference(query, key, value, 0.3)
    )


def test_the_default_scale_is_one_over_the_root_of_the_head_width() -> None:
    query = torch.randn(3, 1, 2, 16)
    torch.testing.assert_close(
        ScaledDotProductAttention(None, 1)(query, query, query),
        _reference(query, query, query, 0.25),
    )


def test_a_mask_is_refused() -> None:
    query = torch.randn(3, 1, 2, 16)
    with pytest.raises(ValueError, match="Expected causal attention"):
        ScaledDotProductAttention(None, 1)(query, query, query, torch.ones(3, 3))
