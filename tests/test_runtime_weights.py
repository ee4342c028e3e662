from __future__ import annotations

import math

import pytest
import torch

from mfsdp_cli.model.presets import preset
from mfsdp_cli.runtime.weights import initial_weight, seed_of

SPEC = preset("llama-tiny")
SHAPE = torch.Size((256, 128))


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("embedding.word_embeddings.weight", 0.02),
        ("decoder.layers.0.mlp.linear_fc1.weight", 0.02),
        ("decoder.layers.0.mlp.router.weight", 0.02),
        ("decoder.layers.0.self_attention.linear_proj.weight", 0.02 / math.sqrt(16)),
        ("decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight", 0.02 / math.sqrt(16)),
    ],
)
def test_weights_are_normal_with_megatrons_deviation(name: str, std: float) -> None:
    weight = initial_weight(SPEC, name, SHAPE, seed=1)
    assert weight.dtype == torch.float32
    assert weight.std().item() == pytest.approx(std, rel=0.02)
    assert abs(weight.mean().item()) < std / 50


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("decoder.layers.0.input_layernorm.weight", 1.0),
        ("decoder.layers.0.self_attention.kv_layernorm.weight", 1.0),
        ("decoder.final_layernorm.weight", 1.0),
        ("decoder.final_layernorm.bias", 0.0),
        ("decoder.layers.0.self_attention.linear_qkv.bias", 0.0),
    ],
)
def test_norms_are_one_and_biases_zero(name: str, value: float) -> None:
    assert torch.equal(initial_weight(SPEC, name, SHAPE, seed=1), torch.full(SHAPE, value))


def test_values_depend_on_seed_and_name_alone() -> None:
    name = "decoder.layers.5.mlp.linear_fc1.weight"
    first = initial_weight(SPEC, name, SHAPE, seed=1)
    torch.randn(3)  # the global generator plays no part
    assert torch.equal(first, initial_weight(SPEC, name, SHAPE, seed=1))
    assert not torch.equal(first, initial_weight(SPEC, name, SHAPE, seed=2))
    other = initial_weight(SPEC, name.replace("5", "6"), SHAPE, seed=1)
    assert not torch.equal(first, other)


def test_the_seed_of_a_name_is_frozen() -> None:
    # Another value would silently change every run there is. By hand: the first 16 digits of
    # `printf 1234/embedding.word_embeddings.weight | sha256sum`, shifted right by one bit.
    assert seed_of(1234, "embedding.word_embeddings.weight") == 2609483196068751514
