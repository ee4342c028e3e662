"""A series of values by step, small in memory: 17 bytes a point, whatever the length."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

#: What a point is. A gap is a training record without its loss; a gap that is UNSURE may also be
#: a record of a logger that writes the loss more rarely than other values.
VALUE, UNSURE_GAP, GAP = 0, 1, 2


@dataclass(frozen=True)
class Series:
    """Points in ascending order of step, each step once.

    Attributes:
        steps: the steps (or samples, or tokens: see ``Run.on_axis``).
        values: one value a step; NaN and infinities as the logger wrote them, NaN at gaps.
        kinds: ``VALUE`` or ``GAP`` a step.
        repeated: steps that came more than once, ascending; the last value counts.
        stale_after: the last step that the record reached after it went back, where older
            steps beyond it remain; None where there are none.
    """

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    kinds: bytearray = field(default_factory=bytearray)
    repeated: tuple[int, ...] = ()
    stale_after: int | None = None

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def points(self) -> int:
        """Steps with a value, NaN and infinities included, gaps not."""
        return self.kinds.count(VALUE)

    def missing(self) -> list[int]:
        """Steps whose record has no value."""
        return [s for s, kind in zip(self.steps, self.kinds, strict=True) if kind != VALUE]

    def nan(self) -> list[int]:
        """Steps whose value is NaN."""
        return [s for s, value in self._nonfinite() if math.isnan(value)]

    def infinite(self) -> list[int]:
        """Steps whose value is infinite."""
        return [s for s, value in self._nonfinite() if math.isinf(value)]

    def _nonfinite(self) -> Iterator[tuple[int, float]]:
        for step, value, kind in zip(self.steps, self.values, self.kinds, strict=True):
            if kind == VALUE and not math.isfinite(value):
                yield step, value

    def finite(self) -> Iterator[tuple[int, float]]:
        """The finite points, ascending."""
        for step, value in zip(self.steps, self.values, strict=True):
            if math.isfinite(value):
                yield step, value

    def interval(self) -> int | None:
        """The commonest distance between recorded steps; None below two steps."""
        counts: dict[int, int] = {}
        for left, right in pairwise(self.steps):
            counts[right - left] = counts.get(right - left, 0) + 1
        return max(counts, key=lambda gap: (counts[gap], -gap)) if counts else None


class SeriesBuilder:
    """Collects points in the order a file gives them and makes a :class:`Series` of them."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.values = array("d")
        self.kinds = bytearray()

    def add(self, step: int, value: float, kind: int = VALUE) -> None:
        """Append a point; a later point of the same step replaces an earlier one."""
        self.steps.append(step)
        self.values.append(value)
        self.kinds.append(kind)

    def add_gap(self, step: int, kind: int = GAP) -> None:
        """Append a record without a value."""
        self.add(step, math.nan, kind)

    def extend(self, other: SeriesBuilder) -> None:
        """Append another builder's points."""
        self.steps.extend(other.steps)
        self.values.extend(other.values)
        self.kinds.extend(other.kinds)

    def finish(self) -> Series:
        """The series: sorted, the last point of each step, gaps of another cadence dropped."""
        if self._in_order():
            return Series(self.steps, self.values, self.kinds)
        keep = self._last_of_each_step()
        order = self._without_other_cadence(sorted(keep.values(), key=self.steps.__getitem__))
        return Series(
            array("q", (self.steps[i] for i in order)),
            array("d", (self.values[i] for i in order)),
            bytearray(self.kinds[i] for i in order),
            self._repeated() if len(keep) < len(self.steps) else (),
            self._stale_after(),
        )

    def _in_order(self) -> bool:
        """Whether the points already are the series, as in any run that was never resumed."""
        if UNSURE_GAP in self.kinds:
            return False
        return all(left < right for left, right in pairwise(self.steps))

    def _last_of_each_step(self) -> dict[int, int]:
        """Step to the position of its last point; an unsure gap never replaces a value."""
        keep: dict[int, int] = {}
        for position, step in enumerate(self.steps):
            if self.kinds[position] != UNSURE_GAP or step not in keep:
                keep[step] = position
        return keep

    def _repeated(self) -> tuple[int, ...]:
        seen: set[int] = set()
        twice: set[int] = set()
        for step, kind in zip(self.steps, self.kinds, strict=True):
            if kind != UNSURE_GAP:
                (twice if step in seen else seen).add(step)
        return tuple(sorted(twice))

    def _without_other_cadence(self, order: list[int]) -> list[int]:
        """Drop unsure gaps at steps where this series is not due.

        A logger may write the gradient norm every step and the loss every tenth: the nine rows
        between are no missing losses. What is due follows from the distance of the values.
        """
        due = [self.steps[i] for i in order if self.kinds[i] == VALUE]
        if UNSURE_GAP not in self.kinds or len(due) < 2:
            return order
        cadence = min(right - left for left, right in pairwise(due))
        return [
            i
            for i in order
            if self.kinds[i] != UNSURE_GAP or (self.steps[i] - due[0]) % cadence == 0
        ]

    def _stale_after(self) -> int | None:
        """The last step written, where the record went back and never reached its old end."""
        if not self.steps or self.steps[-1] == max(self.steps):
            return None
        return self.steps[-1]
