"""Two series side by side: by step, never by position."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mfsdp_cli.compare.series import Series

#: Ratios this near to each other are one ratio printed with few digits.
_RATIO_SPREAD = 1e-3


@dataclass(frozen=True)
class Tolerance:
    """How far B may be from A: ``absolute``, or ``relative`` times \\|A\\|, the larger of both."""

    absolute: float = 0.02
    relative: float = 0.005

    def band(self, a: float) -> float:
        """The largest difference allowed at a value of A."""
        return max(self.absolute, self.relative * abs(a))

    def holds(self, a: float, b: float) -> bool:
        """Whether B is within the band around A.

        A difference of two decimals is off by an ulp or two (6.02 - 6.0 > 0.02 in floats): that
        much is granted.
        """
        return abs(b - a) <= self.band(a) + 4 * max(math.ulp(a), math.ulp(b))

    def __str__(self) -> str:
        parts = [f"{self.absolute:g}"] if self.absolute or not self.relative else []
        parts += [f"{self.relative * 100:g}%"] if self.relative else []
        return " or ".join(parts) + (", whichever is larger" if len(parts) == 2 else "")


@dataclass(frozen=True)
class Pair:
    """What two runs have at one step; None where a run has nothing there.

    A gap (a record without its value) is NaN with ``gap_a`` or ``gap_b`` set.
    """

    step: int
    a: float | None
    b: float | None
    gap_a: bool = False
    gap_b: bool = False

    @property
    def comparable(self) -> bool:
        """Whether both have a finite value."""
        if self.a is None or self.b is None:
            return False
        return math.isfinite(self.a) and math.isfinite(self.b)


def pairs(a: Series, b: Series) -> Iterator[Pair]:
    """Every step of either series, ascending."""
    i = j = 0
    while i < len(a) or j < len(b):
        step = min(s.steps[k] for s, k in ((a, i), (b, j)) if k < len(s))
        in_a = i < len(a) and a.steps[i] == step
        in_b = j < len(b) and b.steps[j] == step
        yield Pair(
            step,
            a.values[i] if in_a else None,
            b.values[j] if in_b else None,
            in_a and a.kinds[i] != 0,
            in_b and b.kinds[j] != 0,
        )
        i, j = i + in_a, j + in_b


@dataclass(frozen=True)
class Alignment:
    """The comparison of two series.

    Attributes:
        common: steps at which both are finite; all differences are B - A over these.
        only_a, only_b: steps that the other run has no record of.
        unequal: steps that both recorded but where a value is NaN, infinite or missing.
        beyond: common steps at which the difference is beyond tolerance.
        max_rel: largest difference relative to \\|A\\|, over steps with A other than 0.
        first_mismatch_step: the first step beyond tolerance or, unless NaN is allowed, unequal.
        first_common_step, last_common_step, last_a, last_b: the ends, and the values at the last.
        ratio: A / B where it is the same at every common step; None where it is not.
        pairs: every step, where they were to be kept.
    """

    common: int = 0
    only_a: int = 0
    only_b: int = 0
    unequal: int = 0
    beyond: int = 0
    max_abs: float | None = None
    max_abs_step: int | None = None
    mean_abs: float | None = None
    mean_signed: float | None = None
    max_rel: float | None = None
    first_mismatch_step: int | None = None
    first_common_step: int | None = None
    last_common_step: int | None = None
    last_a: float | None = None
    last_b: float | None = None
    ratio: float | None = None
    pairs: tuple[Pair, ...] = ()

    def to_json(self, *, points: bool = False) -> dict[str, Any]:
        """The contract's object under ``train`` or ``eval``; ``points`` are the common ones."""
        document: dict[str, Any] = {
            name: getattr(self, name)
            for name in (
                *("common", "only_a", "only_b", "max_abs", "max_abs_step", "mean_abs"),
                *("mean_signed", "max_rel", "first_mismatch_step"),
            )
        }
        if points:
            common = [pair for pair in self.pairs if pair.comparable]
            document["points"] = [{"step": p.step, "a": p.a, "b": p.b} for p in common]
        return document


@dataclass
class _Tally:
    """Counts and differences gathered over the pairs."""

    tolerance: Tolerance
    nan_mismatches: bool
    only_a: int = 0
    only_b: int = 0
    unequal: int = 0
    beyond: int = 0
    first_mismatch: int | None = None
    steps: array[int] = field(default_factory=lambda: array("q"))
    a: array[float] = field(default_factory=lambda: array("d"))
    b: array[float] = field(default_factory=lambda: array("d"))

    def take(self, pair: Pair) -> None:
        if pair.a is None or pair.b is None:
            self.only_a += pair.b is None
            self.only_b += pair.a is None
        elif not pair.comparable:
            self.unequal += 1
            if self.nan_mismatches:
                self._mismatch(pair.step)
        else:
            self.steps.append(pair.step)
            self.a.append(pair.a)
            self.b.append(pair.b)
            if not self.tolerance.holds(pair.a, pair.b):
                self.beyond += 1
                self._mismatch(pair.step)

    def _mismatch(self, step: int) -> None:
        if self.first_mismatch is None:
            self.first_mismatch = step


def align(
    a: Series,
    b: Series,
    tolerance: Tolerance,
    *,
    allow_nan: bool = False,
    keep_pairs: bool = False,
) -> Alignment:
    """Compare two series at every step that both have.

    Args:
        a, b: by step, samples or tokens, both by the same.
        tolerance: what counts as beyond.
        allow_nan: NaN, infinities and gaps are no mismatches.
        keep_pairs: keep every step's values in the result.
    """
    tally, kept = _Tally(tolerance, not allow_nan), []
    for pair in pairs(a, b):
        tally.take(pair)
        if keep_pairs:
            kept.append(pair)
    counts: dict[str, Any] = {
        "only_a": tally.only_a,
        "only_b": tally.only_b,
        "unequal": tally.unequal,
        "beyond": tally.beyond,
        "first_mismatch_step": tally.first_mismatch,
        "pairs": tuple(kept),
    }
    return Alignment(common=len(tally.steps), **counts, **_statistics(tally))


def _statistics(tally: _Tally) -> dict[str, Any]:
    """Largest, mean and relative differences over the common steps."""
    if not tally.steps:
        return {}
    differences = array("d", (b - a for a, b in zip(tally.a, tally.b, strict=True)))
    size = max(range(len(differences)), key=lambda i: abs(differences[i]))
    relative = (abs(d) / abs(a) for d, a in zip(differences, tally.a, strict=True) if a)
    return {
        "max_abs": _finite(abs(differences[size])),
        "max_abs_step": tally.steps[size],
        "mean_abs": _mean(map(abs, differences), len(differences)),
        "mean_signed": _mean(differences, len(differences)),
        "max_rel": _finite(max(relative, default=None)),
        "first_common_step": tally.steps[0],
        "last_common_step": tally.steps[-1],
        "last_a": tally.a[-1],
        "last_b": tally.b[-1],
        "ratio": _constant_ratio(tally.a, tally.b),
    }


def _finite(value: float | None) -> float | None:
    """Null for what overflowed: strict JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None


def _mean(values: Any, count: int) -> float | None:
    try:
        return _finite(math.fsum(values) / count)
    except OverflowError:
        return None


def _constant_ratio(a: array[float], b: array[float]) -> float | None:
    """A / B if it is the same at every step, to the few digits that logs print."""
    if len(a) < 2 or not all(b) or not all(a):
        return None
    ratios = [left / right for left, right in zip(a, b, strict=True)]
    low, high = min(ratios), max(ratios)
    if not math.isfinite(low + high) or high - low > _RATIO_SPREAD * abs(low):
        return None
    return math.fsum(ratios) / len(ratios)
