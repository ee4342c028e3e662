from __future__ import annotations

import math

import pytest

from mfsdp_cli.runtime.settings import TrainSettings


def test_the_learning_rate_warms_up_and_stays() -> None:
    settings = TrainSettings(lr=1e-3, lr_warmup_steps=10)
    assert [settings.learning_rate(step) for step in (1, 5, 10, 11, 500)] == [
        1e-4,
        5e-4,
        1e-3,
        1e-3,
        1e-3,
    ]
    assert TrainSettings(lr=1e-3, lr_warmup_steps=0).learning_rate(1) == 1e-3


@pytest.mark.parametrize(
    ("clip", "norm", "expected"),
    [
        (1.0, 28.284271, 0.035355),  # the tied matrix's norm, counted once
        (1.0, 0.5, 1.0),
        (0.0, 1e9, 1.0),
        (2.0, math.inf, 0.0),
    ],
)
def test_the_clip_coefficient_is_megatrons(clip: float, norm: float, expected: float) -> None:
    found = TrainSettings(clip_grad=clip).clip_coefficient(norm)
    assert found == pytest.approx(expected, abs=1e-6)


def test_a_norm_that_is_no_number_cuts_nothing() -> None:
    assert TrainSettings().clip_coefficient(math.nan) == 1.0


def test_norms_and_biases_do_not_decay() -> None:
    settings = TrainSettings()
    assert settings.decays("decoder.layers.0.mlp.linear_fc1.weight", 2)
    assert not settings.decays("decoder.final_layernorm.weight", 1)
    assert not settings.decays("decoder.layers.0.mlp.linear_fc1.bias", 1)
