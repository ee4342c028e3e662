"""How far two engines may be apart, and how many steps can be judged at all. Knows no torch.

[Note: rounding grows]
Training amplifies rounding. In a deep, narrow mixture of experts a difference in the last place of
step 1 can send a token to another expert in step 7, and the two trainings have little in common
from there on although neither is wrong. How fast that goes is measured, not guessed: the reference
trains several times, each time adding up its microbatches in another order. What these trainings
differ by is the *noise floor*. A step can be judged as long as the floor, with a margin, is below
what a fault would make; later steps prove nothing and are left out. The first step starts from
equal weights: there no floor excuses anything.
"""

from __future__ import annotations

from dataclasses import dataclass

#: A later difference may be this many times the noise floor: the floor is the largest of a few
#: samples.
FLOOR_FACTOR = 10.0
#: What may differ at most in a step that is judged.
FLOOR_CAP = 1e-2
#: A floor from which on it is measured by more trainings.
MUCH = 1e-4
#: Fewer steps than this prove too little: wrong updates show in step 2.
LEAST_STEPS = 2


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


@dataclass(frozen=True)
class NoiseFloor:
    """What rounding alone does: largest differences up to each step (index 0: step 1) between
    trainings of the reference that add up in different orders.

    Args:
        scalars: of loss, norm and weights.
        gradients: of single gradients, and of what layers take and give.
    """

    scalars: tuple[float, ...] = ()
    gradients: tuple[float, ...] = ()

    def later(self, step: int, tolerance: float) -> float:
        """What loss, norm and weights of a step may differ by."""
        return _raised(tolerance, self.scalars, step)

    def later_gradient(self, step: int, tolerance: float) -> float:
        return _raised(tolerance, self.gradients, step)

    def judged_steps(self, steps: int) -> int:
        """How many of the first steps rounding lets anybody judge; the first always."""
        for step in range(2, steps + 1):
            if FLOOR_FACTOR * _at(self.scalars, step) > FLOOR_CAP:
                return step - 1
        return steps

    def largest(self, steps: int) -> float:
        """The floor of loss, norm and weights within the first steps."""
        return max(self.scalars[:steps], default=0.0)


def join_floors(floors: list[NoiseFloor]) -> NoiseFloor:
    """The largest of several floors, step by step."""
    return NoiseFloor(
        tuple(max(of_step) for of_step in zip(*(f.scalars for f in floors), strict=True)),
        tuple(max(of_step) for of_step in zip(*(f.gradients for f in floors), strict=True)),
    )


def _at(floors: tuple[float, ...], step: int) -> float:
    return floors[step - 1] if step <= len(floors) else 0.0


def _raised(tolerance: float, floors: tuple[float, ...], step: int) -> float:
    return max(tolerance, min(FLOOR_FACTOR * _at(floors, step), FLOOR_CAP))
