"""The judge of numeric validation: what it passes, what it fails, and what it says first."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from mfsdp_cli.runtime.numeric.compare import (
    Comparison,
    Step,
    Tolerances,
    compare,
    constant_ratio,
    measure_floor,
    tensor_difference,
)
from mfsdp_cli.runtime.numeric.explain import explain


def step(loss: float = 2.0, norm: float = 3.0) -> Step:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(4, 3, generator=generator) for name in ("a.weight", "b.weight")}
    return Step(loss, norm, dict(tensors), {n: t + 1 for n, t in tensors.items()})


def judged(*steps: Step) -> Comparison:
    return compare(list(steps), [step() for _ in steps], Tolerances())


def test_equal_steps_pass() -> None:
    result = judged(step(), step())
    assert result.first_divergence is None
    assert result.to_json() == {
        "steps": 2,
        "max_loss_rel": 0.0,
        "max_grad_rel": 0.0,
        "max_later_grad_rel": 0.0,
        "max_norm_rel": 0.0,
        "max_weight_rel": 0.0,
        "grad_norm": 3.0,
        "noise_floor": 0.0,
        "reference_grad_norm": 3.0,
        "copies_bit_equal": True,
        "first_divergence": None,
    }


def test_bf16_accumulation_fails_and_another_summation_order_passes() -> None:
    # Case V16: 3.5e-5 on the norm is bf16 accumulation, 2.7e-8 another order in fp32.
    assert judged(step(norm=3.0 * (1 + 2.7e-8))).first_divergence is None
    coarse = judged(step(norm=3.0 * (1 + 3.5e-5))).first_divergence
    assert coarse is not None
    assert (coarse.step, coarse.phase, coarse.name) == (1, "norm", "grad_norm")


def test_a_doubled_gradient_is_named_with_its_ratio() -> None:
    faulty = step()
    faulty.gradients["b.weight"] = faulty.gradients["b.weight"] * 2
    first = judged(step(), faulty).first_divergence
    assert first is not None
    assert first.to_json() == {"step": 2, "phase": "gradient", "name": "b.weight", "ratio": 2.0}


def test_a_wrong_update_behind_equal_losses_and_gradients_fails() -> None:
    # Case V15: printed loss and gradients agree, the update does not.
    faulty = step()
    faulty.weights["a.weight"] = faulty.weights["a.weight"] + 1e-3
    first = judged(faulty).first_divergence
    assert first is not None
    assert first.phase == "update"
    assert judged(faulty).max_weight_rel > 1e-4


def test_a_gradient_128_times_too_large_fails_although_the_loss_agrees() -> None:
    faulty = step()
    faulty.gradients.update({name: g * 128 for name, g in faulty.gradients.items()})
    first = judged(faulty).first_divergence
    assert first is not None
    assert first.phase == "gradient"
    assert first.ratio == pytest.approx(128.0)


def test_copies_that_drift_fail() -> None:
    result = judged(replace(step(), differing_copies=("embedding",)))
    assert not result.copies_bit_equal
    assert result.first_divergence is not None
    assert result.first_divergence.phase == "copies"


def test_a_missing_tensor_and_nan_fail() -> None:
    missing = step()
    del missing.gradients["a.weight"]
    assert judged(missing).first_divergence is not None
    nan = step()
    nan.weights["a.weight"] = nan.weights["a.weight"] * float("nan")
    result = judged(nan)
    assert result.first_divergence is not None
    assert result.to_json()["max_weight_rel"] is None
    assert judged(step(loss=float("nan"))).first_divergence is not None


def test_a_loss_that_is_no_number_is_reported_in_strict_json() -> None:
    document = judged(step(loss=float("nan"), norm=float("inf"))).to_json()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    first = {"step": 1, "phase": "forward", "name": "loss", "ratio": None}
    assert document["first_divergence"] == first


def test_later_steps_are_judged_against_the_noise_floor() -> None:
    # The floor: another order of summation moved the norm of step 2 by 1e-5.
    floor = measure_floor([step(), step(norm=3.0 * (1 + 1e-5))], [step(), step()])
    assert floor.scalars[0] == 0.0
    assert floor.scalars[1] == pytest.approx(1e-5, rel=1e-3)

    def divergence(*steps: Step) -> str | None:
        reference = [step() for _ in steps]
        first = compare(list(steps), reference, Tolerances(), floor).first_divergence
        return None if first is None else f"{first.step} {first.phase}"

    assert divergence(step(), step(norm=3.0 * (1 + 9e-5))) is None
    assert divergence(step(), step(norm=3.0 * (1 + 2e-4))) == "2 norm"
    # The first step starts from equal weights: no floor excuses it.
    assert divergence(step(norm=3.0 * (1 + 3.5e-5)), step()) == "1 norm"


def test_no_noise_excuses_a_difference_of_a_percent() -> None:
    noisy = measure_floor([step(), step(norm=6.0)], [step(), step()])
    faulty = [step(), step(norm=3.0 * 1.02)]
    assert compare(faulty, [step(), step()], Tolerances(), noisy).first_divergence is not None


def test_helpers() -> None:
    a = torch.tensor([1.0, 2.0, 0.0])
    assert tensor_difference(a, a) == 0.0
    assert tensor_difference(a, a[:2]) == float("inf")
    assert tensor_difference(torch.full((2,), 1e-9), torch.zeros(2), floor=1e-6) < 2e-3
    assert constant_ratio(3 * a, a) == pytest.approx(3.0)
    assert constant_ratio(a + 1, a) is None
    assert constant_ratio(a, torch.zeros(3)) is None


@pytest.mark.parametrize(
    ("phase", "ratio", "said"),
    [
        ("gradient", 2.0, "counted on two stages"),
        ("gradient", 4.0, "mean over microbatches is a sum"),
        ("gradient", 0.25, "only one microbatch counts"),
        ("gradient", 3.0, "mean over data-parallel ranks is a sum"),
        ("gradient", 1.7, "a divisor or scale"),
        ("gradient", None, "contributions mixed"),
        ("norm", 1.4142, "counted twice"),
        ("update", None, "optimizer setting"),
        ("copies", None, "drifted apart"),
        ("forward", 1.1, "fed by the wrong stage"),
    ],
)
def test_explanations(phase: str, ratio: float | None, said: str) -> None:
    assert said in explain(phase, "embedding", ratio, microbatches=4, dp=3)
