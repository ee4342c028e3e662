"""The common record of a run, whichever logger wrote it."""

from __future__ import annotations

import bisect
from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from mfsdp_cli.compare.series import Series, SeriesBuilder


class Axis(StrEnum):
    """What runs are aligned by."""

    STEP = "step"
    SAMPLES = "samples"
    TOKENS = "tokens"


@dataclass
class Progress:
    """How far a run had come, in samples or tokens, at the steps that say so.

    Attributes:
        steps, totals: what the records say, ascending.
        growth: the growth a step where it is the same all along; steps between records are then
            placed exactly.
        usable: False where the numbers do not grow, so that they count one step each.
    """

    steps: array[int] = field(default_factory=lambda: array("q"))
    totals: array[int] = field(default_factory=lambda: array("q"))
    growth: int | None = None
    usable: bool = True

    def add(self, step: int, total: int) -> None:
        """Note a total; records at or after ``step`` are of a run that was resumed before them."""
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.totals.pop()
        if self.totals and self.totals[-1] >= total:
            self.usable = False
        self.steps.append(step)
        self.totals.append(total)

    def growths(self) -> set[int]:
        """Every growth a step between neighbouring records; whole numbers only."""
        found: set[int] = set()
        for i in range(1, len(self.steps) if self.usable else 0):
            steps = self.steps[i] - self.steps[i - 1]
            growth, rest = divmod(self.totals[i] - self.totals[i - 1], steps)
            if rest == 0:
                found.add(growth)
        return found

    def at(self, step: int) -> int | None:
        """The total after ``step``; None where nothing says it."""
        if not self.usable:
            return None
        place = bisect.bisect_left(self.steps, step)
        if place < len(self.steps) and self.steps[place] == step:
            return self.totals[place]
        if self.growth is None:
            return None
        if not self.steps:
            return step * self.growth
        return self.totals[0] + (step - self.steps[0]) * self.growth


@dataclass
class Run:
    """One run as read.

    Attributes:
        path: as the user gave it.
        format: what was recognized, such as ``run-folder`` or ``megatron-log``.
        train, eval: the two losses by step (or the one metric that was asked for).
        train_name, eval_name: what the logger calls them; None where there is none.
        skipped: steps that the optimizer skipped (Megatron's counter).
        nan_iterations: steps whose loss was NaN, beside those seen as points (Megatron's counter).
        damaged: records that could not be read; they count as missing.
        status: how the run ended, or ``running``; None where the logger does not say.
        settings: flat ``name: value`` settings that can be compared between runs.
        batch_sizes: every global batch size seen, ascending.
        notes: what a person should know about the reading.
    """

    path: str
    format: str
    train: Series = field(default_factory=Series)
    eval: Series = field(default_factory=Series)
    train_name: str | None = None
    eval_name: str | None = None
    skipped: int = 0
    nan_iterations: int = 0
    damaged: int = 0
    status: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    batch_sizes: tuple[int, ...] = ()
    samples: Progress = field(default_factory=Progress)
    tokens: Progress = field(default_factory=Progress)
    notes: list[str] = field(default_factory=list)

    @property
    def nan(self) -> int:
        """NaN points and NaN iterations that the logger counted."""
        return len(self.train.nan()) + len(self.eval.nan()) + self.nan_iterations

    @property
    def infinite(self) -> int:
        return len(self.train.infinite()) + len(self.eval.infinite())

    @property
    def missing(self) -> int:
        """Records without their value, and records that could not be read."""
        return len(self.train.missing()) + len(self.eval.missing()) + self.damaged

    @property
    def repeated_steps(self) -> int:
        return len({*self.train.repeated, *self.eval.repeated})

    @property
    def first_step(self) -> int | None:
        """The first step recorded in either series."""
        return min((s.steps[0] for s in (self.train, self.eval) if len(s)), default=None)

    @property
    def last_step(self) -> int | None:
        return max((s.steps[-1] for s in (self.train, self.eval) if len(s)), default=None)

    def to_json(self) -> dict[str, Any]:
        """The contract's entry under ``runs``."""
        return {
            "path": self.path,
            "format": self.format,
            "train_points": self.train.points,
            "eval_points": self.eval.points,
            "nan": self.nan,
            "inf": self.infinite,
            "missing": self.missing,
            "skipped": self.skipped,
            "repeated_steps": self.repeated_steps,
            "first_step": self.first_step,
            "last_step": self.last_step,
        }

    def on_axis(self, axis: Axis, series: Series) -> tuple[Series, int]:
        """``series`` by samples or tokens, and how many of its points have no place there."""
        if axis is Axis.STEP:
            return series, 0
        progress = self.samples if axis is Axis.SAMPLES else self.tokens
        placed, lost = SeriesBuilder(), 0
        for step, value, kind in zip(series.steps, series.values, series.kinds, strict=True):
            total = progress.at(step)
            if total is None:
                lost += 1
            else:
                placed.add(total, value, kind)
        return placed.finish(), lost
