"""The judge of numeric validation: what it passes, what it fails, and what it says first."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from mfsdp_cli.runtime.numeric.captured import Step
from mfsdp_cli.runtime.numeric.compare import Comparison, compare, measure_floor
from mfsdp_cli.runtime.numeric.differences import constant_ratio, tensor_difference
from mfsdp_cli.runtime.numeric.explain import Setup, explain
from mfsdp_cli.runtime.numeric.run import judge
from mfsdp_cli.runtime.numeric.tolerances import NoiseFloor, Tolerances
from tests.helpers.plans import plan_of


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
        "judged_steps": 2,
        "max_forward_rel": 0.0,
        "max_evaluation_rel": 0.0,
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
    floor = measure_floor([step(), step()], [step(), step(norm=3.0 * (1 + 1e-5))])
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
    noisy = measure_floor([step(), step()], [step(), step(norm=3.0 * (1 + 9e-4))])
    for error, found in ((0.008, False), (0.012, True)):
        faulty = [step(), step(norm=3.0 * (1 + error))]
        result = compare(faulty, [step(), step()], Tolerances(), noisy)
        assert result.judged_steps == 2
        assert (result.first_divergence is not None) == found


def test_the_floor_is_the_largest_of_several_orders() -> None:
    orders = [[step(), step(norm=3.0 * (1 + error))] for error in (1e-6, -4e-5, 2e-5)]
    assert measure_floor([step(), step()], *orders).scalars[1] == pytest.approx(4e-5, rel=1e-3)


def test_steps_that_rounding_decides_are_not_judged() -> None:
    # Steps 1 to 3 agree to 1e-6 in any order; from step 4 on the reference differs from itself.
    floor = NoiseFloor((0.0, 1e-6, 1e-6, 1.9e-2, 0.3), (0.0,) * 5)
    chaos = [step(), step(), step(), step(loss=2.1), step(loss=9.0)]
    result = compare(chaos, [step() for _ in chaos], Tolerances(), floor)
    assert result.first_divergence is None
    assert (result.steps, result.judged_steps) == (5, 3)
    assert "reference differ as much" in result.unjudged
    # What is wrong before stays wrong.
    chaos[2] = step(loss=2.001)
    first = compare(chaos, [step() for _ in chaos], Tolerances(), floor).first_divergence
    assert first is not None
    assert (first.step, first.name) == (3, "loss")


def test_too_few_steps_to_judge_are_no_pass() -> None:
    plan = plan_of("gpt2-tiny")
    sound = [step(), step(), step()]
    wild = [step(), step(loss=3.0), step(loss=4.0)]
    result = judge(plan, sound, sound, None, wild)
    assert result.document["judged_steps"] == 1
    (finding,) = result.findings
    assert finding.code == "MF524"
    assert "only 1 of 3 steps" in finding.message
    # One step was asked for, and one was judged.
    assert judge(plan, sound[:1], sound[:1], None, wild[:1]).findings == ()


def test_helpers() -> None:
    a = torch.tensor([1.0, 2.0, 0.0])
    assert tensor_difference(a, a) == 0.0
    assert tensor_difference(a, a[:2]) == float("inf")
    assert tensor_difference(torch.full((2,), 1e-9), torch.zeros(2), floor=1e-6) < 2e-3
    assert constant_ratio(3 * a, a) == pytest.approx(3.0)
    assert constant_ratio(a + 1, a) is None
    assert constant_ratio(a, torch.zeros(3)) is None


# -- what else a step is compared by -------------------------------------------------------------


def test_initial_weights_must_be_equal_to_the_bit() -> None:
    weights = step().weights
    moved = {**weights, "b.weight": torch.nextafter(weights["b.weight"], torch.tensor(9.0))}
    ours = replace(step(), weights_before=moved)
    theirs = replace(step(), weights_before=weights)
    first = compare([ours], [theirs], Tolerances()).first_divergence
    assert first is not None
    assert (first.step, str(first.phase), first.name) == (0, "initial weights", "b.weight")


def test_evaluation_losses_are_compared() -> None:
    theirs = replace(step(), evaluation_before=5.0, evaluation_after=4.0)
    for field, number in (("evaluation_before", 0), ("evaluation_after", 1)):
        ours = replace(theirs, **{field: getattr(theirs, field) * 1.001})
        first = compare([ours], [theirs], Tolerances()).first_divergence
        assert first is not None
        assert (first.step, str(first.phase)) == (number, "evaluation")


def test_router_biases_are_compared() -> None:
    theirs = replace(step(), router_biases={"r.expert_bias": torch.tensor([1e-3, -1e-3])})
    ours = replace(step(), router_biases={"r.expert_bias": torch.tensor([1e-3, 1e-3])})
    first = compare([ours], [theirs], Tolerances()).first_divergence
    assert first is not None
    assert (str(first.phase), first.name) == ("router bias", "r.expert_bias")


def test_a_step_without_clipping_is_told_from_another_update() -> None:
    theirs = step()
    theirs = replace(theirs, clipped={n: g / 3 for n, g in theirs.gradients.items()})
    ours = replace(step(), clipped=dict(step().gradients))
    first = compare([ours], [theirs], Tolerances()).first_divergence
    assert first is not None
    assert str(first.phase) == "clip"
    assert first.ratio == pytest.approx(3.0)
    assert "nothing was clipped (the factor is 0.3333)" in explain(first, Setup(4, 2))
