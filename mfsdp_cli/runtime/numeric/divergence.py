"""Where two engines first differ, and what else is known of it. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    """What is compared, in the order in which a step does it."""

    WEIGHTS = "initial weights"
    FORWARD = "forward"
    GRADIENT = "gradient"
    NORM = "norm"
    CLIP = "clip"
    UPDATE = "update"
    COPIES = "copies"
    ROUTER_BIAS = "router bias"
    EVALUATION = "evaluation"


class Forward(StrEnum):
    """What is wrong with a layer's forward pass."""

    TAKEN = "took something else"
    GIVEN = "took the same and gave something else"
    CHOSEN = "took the same and chose other experts"
    MISSING = "did not run"
    TWICE = "ran twice"
    STRANGE = "is not in the reference"


@dataclass(frozen=True)
class Evidence:
    """What tells causes of one divergence apart.

    Args:
        forward: what is wrong with a layer.
        taken_from: the microbatch whose input in the reference a layer took instead of its own.
        microbatch: which microbatch a layer ran.
        everywhere: the same ratio on every gradient.
        counts: how often each microbatch of the global batch counts in the gradient (1 each in
            the reference); empty where the gradient is no such sum.
        is_bf16: every element of the gradient is a number that bf16 holds.
        members_add_up: a shared parameter's copies have gradients of their own whose sum is the
            reference's.
        squares: squared norm of every gradient of the reference.
        expected_clip: the factor that the reference's gradients were clipped with.
    """

    forward: Forward | None = None
    taken_from: int | None = None
    microbatch: int | None = None
    everywhere: bool = False
    counts: tuple[float, ...] = ()
    is_bf16: bool = False
    members_add_up: bool = False
    squares: Mapping[str, float] = field(default_factory=dict)
    expected_clip: float | None = None


@dataclass(frozen=True)
class Divergence:
    """Where two engines first differ by more than the tolerance.

    Args:
        step: from 1; 0: before the first.
        ratio: ours / reference where it is constant.
    """

    step: int
    phase: Phase
    name: str
    difference: float
    tolerance: float
    ratio: float | None
    evidence: Evidence = field(default_factory=Evidence)

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "phase": str(self.phase),
            "name": self.name,
            "ratio": self.ratio,
        }
