"""Relative differences of numbers and tensors, and the factor between them where it is one."""

from __future__ import annotations

import math

import torch

Tensors = dict[str, torch.Tensor]


def relative(a: float, b: float) -> float:
    """``|a - b| / |b|``; infinite where one of them is no number."""
    if a == b:
        return 0.0
    return not_nan(abs(a - b) / abs(b)) if b else float("inf")


def ratio_of(a: float, b: float) -> float | None:
    """``a / b`` where that is a finite number."""
    return finite(a / b) if b else None


def finite(value: float) -> float | None:
    """The number, None where it is NaN or infinite: strict JSON has neither."""
    return value if math.isfinite(value) else None


def not_nan(difference: float) -> float:
    """NaN is as far away as anything can be; as itself it would compare as nothing."""
    return float("inf") if math.isnan(difference) else difference


def tensor_difference(a: torch.Tensor, b: torch.Tensor, floor: float = 0.0) -> float:
    """``‖a - b‖ / max(‖b‖, floor)``; infinite where shapes differ or a number is not finite."""
    if a.shape != b.shape:
        return float("inf")
    scale = max(float(b.double().norm()), floor)
    difference = float((a.double() - b.double()).norm())
    if difference == 0.0:
        return 0.0
    return not_nan(difference / scale) if scale else float("inf")


def constant_ratio(
    a: torch.Tensor | None, b: torch.Tensor | None, *, spread: float = 1e-3, share: float = 1.0
) -> float | None:
    """The factor between two tensors where it is one number, else None.

    Args:
        spread: how far factors of single elements may be from it, relative.
        share: of the elements that must be that near; elements that are small are left out.
    """
    if a is None or b is None or a.shape != b.shape:
        return None
    large = b.abs() > 1e-3 * b.abs().max()
    if not bool(large.any()):
        return None
    ratios = a[large].double() / b[large].double()
    middle = float(ratios.median())
    near = (ratios - middle).abs() <= spread * abs(middle)
    return finite(middle) if float(near.double().mean()) >= share else None


def worst_difference(ours: Tensors, theirs: Tensors, floor: float = 0.0) -> tuple[float, str]:
    """The largest difference of a tensor, and its name; ``(0.0, "")`` where all are equal.

    A tensor that one side does not have is infinitely far away.
    """
    worst = (0.0, "")
    for name in sorted(theirs.keys() | ours.keys()):
        if name not in ours or name not in theirs:
            difference = float("inf")
        else:
            difference = tensor_difference(ours[name], theirs[name], floor)
        if difference > worst[0]:
            worst = (difference, name)
    return worst
