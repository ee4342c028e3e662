"""Compare the captured numbers of two engines, step by step, and name what diverged first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Tolerances:
    """Relative differences that pass.

    Args:
        first: loss and norm of the first step, where both start from equal weights.
        gradient: every gradient tensor of the first step.
        later: loss, norm and weights of all steps; rounding grows with steps.
        later_gradient: every gradient tensor of later steps, where weights differ by rounding
            already and a tensor with a small gradient amplifies it.
    """

    first: float = 1e-6
    gradient: float = 1e-5
    later: float = 1e-5
    later_gradient: float = 1e-3

    @classmethod
    def at(cls, tolerance: float | None) -> Tolerances:
        """Tolerances from one number: it bounds all steps, the first a tenth of it."""
        if tolerance is None:
            return cls()
        return cls(tolerance / 10, tolerance, tolerance, 100 * tolerance)


#: A later difference may be this many times the noise floor, and never more than the cap.
FLOOR_FACTOR = 10.0
FLOOR_CAP = 1e-2


@dataclass(frozen=True)
class NoiseFloor:
    """What rounding alone does: largest differences up to each step (index 0: step 1) between two
    trainings of the reference that add up in different order.

    Deep, narrow models double a rounding difference every step or two; without the floor a sound
    layout would look wrong after ten steps.
    """

    scalars: tuple[float, ...] = ()
    gradients: tuple[float, ...] = ()

    def later(self, step: int, tolerance: float) -> float:
        """What loss, norm and weights of a step may differ by."""
        return _raised(tolerance, self.scalars, step)

    def later_gradient(self, step: int, tolerance: float) -> float:
        return _raised(tolerance, self.gradients, step)


def _raised(tolerance: float, floors: tuple[float, ...], step: int) -> float:
    floor = floors[step - 1] if step <= len(floors) else 0.0
    return max(tolerance, min(FLOOR_FACTOR * floor, FLOOR_CAP))


@dataclass(frozen=True)
class Step:
    """What an engine did in one step.

    Args:
        gradients: whole tensors by global name, after reduction, before clipping.
        weights: whole tensors by global name, after the update.
        differing_copies: names of shared parameters whose copies are not bit-equal.
    """

    loss: float
    grad_norm: float
    gradients: Tensors
    weights: Tensors
    differing_copies: tuple[str, ...] = ()


@dataclass(frozen=True)
class Divergence:
    """Where two engines first differ by more than the tolerance."""

    step: int
    phase: str
    name: str
    difference: float
    tolerance: float
    ratio: float | None

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "phase": self.phase, "name": self.name, "ratio": self.ratio}


@dataclass
class Comparison:
    """All differences of a run against the reference.

    ``max_grad_rel`` is the first step's, where both start from equal weights; the other maxima
    and ``max_later_grad_rel`` are over all steps. ``noise_floor`` is the largest relative
    difference of loss, norm or weights that rounding alone made in the reference.
    """

    steps: int = 0
    max_loss_rel: float = 0.0
    max_grad_rel: float = 0.0
    max_later_grad_rel: float = 0.0
    max_norm_rel: float = 0.0
    max_weight_rel: float = 0.0
    grad_norm: float = 0.0
    reference_grad_norm: float = 0.0
    copies_bit_equal: bool = True
    noise_floor: float = 0.0
    first_divergence: Divergence | None = None

    def to_json(self) -> dict[str, Any]:
        first = self.first_divergence
        return {
            "steps": self.steps,
            "max_loss_rel": _finite(self.max_loss_rel),
            "max_grad_rel": _finite(self.max_grad_rel),
            "max_later_grad_rel": _finite(self.max_later_grad_rel),
            "max_norm_rel": _finite(self.max_norm_rel),
            "max_weight_rel": _finite(self.max_weight_rel),
            "grad_norm": _finite(self.grad_norm),
            "reference_grad_norm": _finite(self.reference_grad_norm),
            "noise_floor": _finite(self.noise_floor),
            "copies_bit_equal": self.copies_bit_equal,
            "first_divergence": None if first is None else first.to_json(),
        }


def compare(
    mine: list[Step],
    reference: list[Step],
    tolerances: Tolerances,
    floor: NoiseFloor | None = None,
) -> Comparison:
    """Compare step by step; norms reported are those of the first step."""
    result = Comparison(
        steps=min(len(mine), len(reference)),
        grad_norm=mine[0].grad_norm,
        reference_grad_norm=reference[0].grad_norm,
        noise_floor=max(floor.scalars, default=0.0) if floor else 0.0,
    )
    for number, (ours, theirs) in enumerate(zip(mine, reference, strict=True), start=1):
        allowed = _allowed(tolerances, floor or NoiseFloor(), number)
        _compare_step(result, number, ours, theirs, allowed)
    return result


def measure_floor(one: list[Step], other: list[Step]) -> NoiseFloor:
    """The noise floor from two trainings of the reference."""
    scalars, gradients = [0.0], [0.0]
    for a, b in zip(one, other, strict=True):
        difference = compare([a], [b], Tolerances())
        scalars.append(
            max(
                scalars[-1],
                difference.max_loss_rel,
                difference.max_norm_rel,
                difference.max_weight_rel,
            )
        )
        gradients.append(max(gradients[-1], difference.max_grad_rel))
    return NoiseFloor(tuple(scalars[1:]), tuple(gradients[1:]))


def _allowed(tolerances: Tolerances, floor: NoiseFloor, number: int) -> Tolerances:
    """What a step may differ by: ``first`` for loss and norm, ``gradient``, ``later`` for weights.

    The first step starts from equal weights: nothing is added to its tolerances.
    """
    if number == 1:
        return tolerances
    later = floor.later(number, tolerances.later)
    gradient = floor.later_gradient(number, tolerances.later_gradient)
    return Tolerances(first=later, gradient=gradient, later=later)


def _compare_step(
    result: Comparison, number: int, ours: Step, theirs: Step, allowed: Tolerances
) -> None:
    loss = _relative(ours.loss, theirs.loss)
    result.max_loss_rel = max(result.max_loss_rel, loss)
    _note(result, number, "forward", "loss", loss, allowed.first, _ratio(ours.loss, theirs.loss))
    _compare_gradients(result, number, ours, theirs, allowed.gradient)
    norm = _relative(ours.grad_norm, theirs.grad_norm)
    result.max_norm_rel = max(result.max_norm_rel, norm)
    ratio = _ratio(ours.grad_norm, theirs.grad_norm)
    _note(result, number, "norm", "grad_norm", norm, allowed.first, ratio)
    weights = _compare_tensors(
        result, number, "update", ours.weights, theirs.weights, allowed.later
    )
    result.max_weight_rel = max(result.max_weight_rel, weights)
    if ours.differing_copies:
        result.copies_bit_equal = False
        _note(result, number, "copies", ours.differing_copies[0], float("inf"), 0.0, None)


def _compare_gradients(
    result: Comparison, number: int, ours: Step, theirs: Step, tolerance: float
) -> None:
    floor = 1e-6 * theirs.grad_norm  # a gradient that is truly zero is rounding alone
    worst = _compare_tensors(
        result, number, "gradient", ours.gradients, theirs.gradients, tolerance, floor
    )
    if number == 1:
        result.max_grad_rel = worst
    else:
        result.max_later_grad_rel = max(result.max_later_grad_rel, worst)


def _compare_tensors(
    result: Comparison,
    number: int,
    phase: str,
    ours: Tensors,
    theirs: Tensors,
    tolerance: float,
    floor: float = 0.0,
) -> float:
    """Note the worst tensor of a kind; returns its difference."""
    worst = (0.0, "")
    for name in sorted(theirs.keys() | ours.keys()):
        if name not in ours or name not in theirs:
            difference = float("inf")
        else:
            difference = tensor_difference(ours[name], theirs[name], floor)
        if difference > worst[0]:
            worst = (difference, name)
    difference, name = worst
    if name:
        ratio = constant_ratio(ours.get(name), theirs.get(name))
        _note(result, number, phase, name, difference, tolerance, ratio)
    return difference


def tensor_difference(a: torch.Tensor, b: torch.Tensor, floor: float = 0.0) -> float:
    """``‖a - b‖ / max(‖b‖, floor)``; infinite where shapes differ or a number is not finite."""
    if a.shape != b.shape:
        return float("inf")
    scale = max(float(b.double().norm()), floor)
    difference = float((a.double() - b.double()).norm())
    if difference == 0.0:
        return 0.0
    return _not_nan(difference / scale) if scale else float("inf")


def constant_ratio(a: torch.Tensor | None, b: torch.Tensor | None) -> float | None:
    """The factor between two tensors where it is one number, else None."""
    if a is None or b is None or a.shape != b.shape:
        return None
    large = b.abs() > 1e-3 * b.abs().max()
    if not bool(large.any()):
        return None
    ratios = a[large].double() / b[large].double()
    middle = float(ratios.median())
    spread = float((ratios - middle).abs().max())
    return middle if spread <= 1e-3 * abs(middle) else None


def _note(
    result: Comparison,
    step: int,
    phase: str,
    name: str,
    difference: float,
    tolerance: float,
    ratio: float | None,
) -> None:
    if result.first_divergence is None and difference > tolerance:
        result.first_divergence = Divergence(step, phase, name, difference, tolerance, ratio)


def _relative(a: float, b: float) -> float:
    if a == b:
        return 0.0
    return _not_nan(abs(a - b) / abs(b)) if b else float("inf")


def _not_nan(difference: float) -> float:
    """NaN is as far away as anything can be; as itself it would compare as nothing."""
    return float("inf") if math.isnan(difference) else difference


def _ratio(a: float, b: float) -> float | None:
    return _finite(a / b) if b else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
