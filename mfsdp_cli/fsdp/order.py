"""The order in which units are used during a step, planned or traced, and what comes next.

A use is (unit, orientation): the same unit has different successors in forward and backward. A
planned order is followed from the first step; without one the first step is recorded and replayed
from the second. A use that is not the expected one ends the replay: what was recorded so far is
kept as the start of a new trace, nothing is prefetched for the rest of the step, and the next
step replays the new trace. The successor of a step's last use is the next step's first; it is
prefetched only when the weights have changed (:attr:`UseOrder.first`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Orientation(StrEnum):
    """Whether a unit runs forward or backward."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a unit, by the unit's index in its context."""

    unit: int
    orientation: Orientation


class UseOrder:
    """Follows the uses of one step after another."""

    def __init__(self, planned: Sequence[Use] | None = None) -> None:
        self._expected: list[Use] | None = None if planned is None else list(planned)
        self._latest: dict[int, int] = {}
        self._seen: list[Use] = []
        self.divergences = 0

    @property
    def expected(self) -> list[Use]:
        """The uses of a step as far as they are known; empty while they are being traced."""
        return list(self._expected or ())

    @property
    def first(self) -> Use | None:
        """The first use of the next step, where it is known."""
        return self._expected[0] if self._expected and not self._seen else None

    def position_of(self, unit: int) -> int | None:
        """Where in this step a unit was used last; None before, and once the order is left."""
        return None if self._expected is None else self._latest.get(unit)

    def advance(self, use: Use) -> Use | None:
        """Note a use; returns the use expected after it, None where none is known."""
        position = len(self._seen)
        self._seen.append(use)
        self._latest[use.unit] = position
        if self._expected is None:
            return None
        if position >= len(self._expected) or self._expected[position] != use:
            self._expected = None
            self.divergences += 1
            return None
        following = position + 1
        return self._expected[following] if following < len(self._expected) else None

    def restart(self) -> None:
        """Forget the uses of a step that was given up."""
        self._seen.clear()
        self._latest.clear()

    def end_step(self) -> None:
        """Close the step: a trace becomes the order of the steps to come."""
        if self._expected is not None and len(self._seen) < len(self._expected):
            self._expected = None  # a shorter step: what was seen is the new trace
            self.divergences += 1
        if self._expected is None and self._seen:
            self._expected = list(self._seen)
        self.restart()
