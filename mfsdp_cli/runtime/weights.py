"""Initial weights that depend on the seed and a parameter's global name alone.

So every layout, every engine and every number of ranks starts from the same model, and copies of
a shared parameter start bit-equal without a collective. Values are drawn on the CPU in fp32,
then rounded and moved.

=============================================== ==========================================
parameter                                       value
=============================================== ==========================================
norm weights                                    1
biases                                          0
``linear_proj``, ``linear_fc2``                 normal(0, std / sqrt(2 * num_layers))
all other weights                               normal(0, std)
=============================================== ==========================================

The same distributions as Megatron-Core's ``init_method_normal`` and ``scaled_init_method_normal``.
"""

from __future__ import annotations

import hashlib
import math

import torch

from mfsdp_cli.model.spec import ModelSpec

_INTO_RESIDUAL = (".linear_proj.weight", ".linear_fc2.weight")


def initial_weight(spec: ModelSpec, name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """The initial value of a parameter of the model.

    Args:
        name: global name, layers counted from 0 over the whole model.
        shape: shape of the whole parameter.

    Returns:
        fp32 on the CPU, in ``shape``.
    """
    if name.endswith("bias"):
        return torch.zeros(shape)
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    std = spec.init_method_std
    if name.endswith(_INTO_RESIDUAL):
        std /= math.sqrt(2 * spec.num_layers)
    generator = torch.Generator().manual_seed(seed_of(seed, name))
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def seed_of(seed: int, name: str) -> int:
    """A 63-bit seed for a name, the same on every platform."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
