"""Whether run B is the same run as A, and why.

Where both runs have evaluations, these are judged; otherwise the training loss is. NaN, infinite
and missing values anywhere are never equal to anything. Nothing to compare is never a pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mfsdp_cli.compare.align import Alignment, Tolerance, align
from mfsdp_cli.compare.run import Axis, Run
from mfsdp_cli.compare.series import Series
from mfsdp_cli.compare.values import ranges, short
from mfsdp_cli.errors import MfsdpError

#: How a run that did not complete ended, in words.
ENDS = {
    "nan": "ended in NaN",
    "failed": "failed",
    "interrupted": "was interrupted",
    "running": "has no end: it still runs or was killed",
}


@dataclass(frozen=True)
class Policy:
    """What is asked of the runs; ``metric`` None means the two losses."""

    tolerance: Tolerance = field(default_factory=Tolerance)
    allow_nan: bool = False
    axis: Axis = Axis.STEP
    metric: str | None = None

    def noun(self, evaluations: bool) -> str:
        """What is compared, in words (plural)."""
        if self.metric is not None:
            return f"values of {self.metric}"
        return "evaluations" if evaluations else "training losses"

    def at(self, place: int | None) -> str:
        """A place on the axis in words: ``step 5`` or ``1024 samples``."""
        return f"step {place}" if self.axis is Axis.STEP else f"{place} {self.axis.value}"


def tolerance(absolute: float | None, relative: float | None) -> Tolerance:
    """The tolerance of two options: neither gives the default, one sets the other to 0.

    Raises:
        MfsdpError: MF606 for a tolerance that is negative or not finite.
    """
    for flag, value in (("--abs-tolerance", absolute), ("--rel-tolerance", relative)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise MfsdpError(
                "MF606",
                f"a tolerance is a finite number from 0 up, got {value}",
                where=flag,
                hint=f"for example {flag} 0.01",
            )
    if absolute is None and relative is None:
        return Tolerance()
    return Tolerance(absolute or 0.0, relative or 0.0)


@dataclass(frozen=True)
class Verdict:
    """``passed`` and the sentences that say why (also where it passed)."""

    passed: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Judged:
    """One series of a run on the axis of the comparison.

    ``lost`` counts points that have no place on the axis.
    """

    a: Series
    b: Series
    lost_a: int
    lost_b: int
    alignment: Alignment


@dataclass(frozen=True)
class Comparison:
    """Run ``b`` against run ``a``.

    Attributes:
        letters: what the two are called in texts, such as ``("A", "B")``.
        judges_eval: whether the evaluations decide, not the training loss.
    """

    a: Run
    b: Run
    letters: tuple[str, str]
    policy: Policy
    train: Judged
    eval: Judged
    judges_eval: bool
    verdict: Verdict

    @property
    def judged(self) -> Judged:
        """The series that decides."""
        return self.eval if self.judges_eval else self.train

    @property
    def noun(self) -> str:
        """What decides, in words (plural)."""
        return self.policy.noun(self.judges_eval)


def compare(a: Run, b: Run, policy: Policy, letters: tuple[str, str] = ("A", "B")) -> Comparison:
    """Judge run ``b`` against run ``a``."""
    train = _judged(a, a.train, b, b.train, policy, keep=False)
    evaluations = _judged(a, a.eval, b, b.eval, policy, keep=True)
    judges_eval = _evaluations_decide(a, b)
    subject, noun = evaluations if judges_eval else train, policy.noun(judges_eval)
    reasons = [
        *_tolerance_reasons(subject, policy, letters, noun),
        *_run_reasons(a, letters[0], policy),
        *_run_reasons(b, letters[1], policy),
    ]
    passed = not reasons
    if passed:
        reasons = [_pass_reason(subject.alignment, policy, noun)]
    verdict = Verdict(passed, tuple(reasons))
    return Comparison(a, b, letters, policy, train, evaluations, judges_eval, verdict)


def _evaluations_decide(a: Run, b: Run) -> bool:
    """Whether both runs have evaluations, or neither has anything else."""
    if len(a.train) or len(b.train):
        return bool(len(a.eval) and len(b.eval))
    return bool(len(a.eval) or len(b.eval))


def _judged(a: Run, of_a: Series, b: Run, of_b: Series, policy: Policy, *, keep: bool) -> Judged:
    placed_a, lost_a = a.on_axis(policy.axis, of_a)
    placed_b, lost_b = b.on_axis(policy.axis, of_b)
    alignment = align(
        placed_a, placed_b, policy.tolerance, allow_nan=policy.allow_nan, keep_pairs=keep
    )
    return Judged(placed_a, placed_b, lost_a, lost_b, alignment)


def _tolerance_reasons(
    judged: Judged, policy: Policy, letters: tuple[str, str], noun: str
) -> list[str]:
    """Why the series that decides does not pass; empty if it does."""
    found = judged.alignment
    if not found.common:
        return [_nothing_common(judged, policy, letters, noun)]
    if not found.beyond:
        return []
    reasons = [
        f"beyond tolerance ({policy.tolerance}): {found.beyond} of {found.common} common {noun}, "
        + _largest(found, policy)
    ]
    return reasons + _ratio_reason(found, letters)


def _nothing_common(judged: Judged, policy: Policy, letters: tuple[str, str], noun: str) -> str:
    """Why there is no point to compare."""
    for series, lost, letter in (
        (judged.a, judged.lost_a, letters[0]),
        (judged.b, judged.lost_b, letters[1]),
    ):
        if lost and not len(series):
            return f"nothing to compare: {letter} does not say how many {policy.axis} a step takes"
        if not len(series):
            return f"nothing to compare: {letter} has no {noun}"
    if judged.alignment.unequal:
        return f"nothing to compare: no {policy.axis} at which both runs have finite {noun}"
    spans = " and ".join(
        f"{letter} has {_span(series)}"
        for series, letter in zip((judged.a, judged.b), letters, strict=True)
    )
    place = "step" if policy.axis is Axis.STEP else f"number of {policy.axis}"
    return f"no common {place} of the {noun}: {spans}"


def _span(series: Series) -> str:
    return f"{len(series)} from {series.steps[0]} to {series.steps[-1]}"


def _ratio_reason(found: Alignment, letters: tuple[str, str]) -> list[str]:
    ratio = found.ratio
    if ratio is None or abs(ratio - 1) < 0.01:
        return []
    return [
        f"constant ratio: {letters[0]} / {letters[1]} is {short(ratio)} at every common point "
        "(a loss that is scaled, summed or averaged differently)"
    ]


def _run_reasons(run: Run, letter: str, policy: Policy) -> list[str]:
    """Why a run cannot pass, whatever the other one is."""
    reasons = []
    if not policy.allow_nan:
        for noun, series in ((policy.noun(False), run.train), (policy.noun(True), run.eval)):
            reasons += [f"{letter}: {text}" for text in _bad_points(series, noun)]
        if run.nan_iterations:
            reasons.append(f"{letter}: the logger counted {run.nan_iterations} NaN iterations")
        if run.damaged:
            reasons.append(f"{letter}: {run.damaged} records could not be read")
    if run.status == "failed" or (run.status == "nan" and not policy.allow_nan):
        reasons.append(f"{letter}: the run {ENDS[run.status]}")
    return reasons


def _bad_points(series: Series, noun: str) -> list[str]:
    """NaN, infinite and missing values in words, with their steps."""
    kinds = (("NaN", series.nan()), ("infinite", series.infinite()), ("missing", series.missing()))
    return [
        f"{len(steps)} of {len(series)} {noun} are {kind} (step {ranges(steps)})"
        for kind, steps in kinds
        if steps
    ]


def _pass_reason(found: Alignment, policy: Policy, noun: str) -> str:
    return (
        f"within tolerance ({policy.tolerance}): {found.common} of {found.common} common {noun}, "
        + _largest(found, policy)
    )


def _largest(found: Alignment, policy: Policy) -> str:
    size = math.inf if found.max_abs is None else found.max_abs
    return f"the largest difference is {short(size)} at {policy.at(found.max_abs_step)}"
