"""What a person should know beside the verdict: warnings about a comparison.

====== ============================================================
MF610  something about the reading of a run
MF611  steps that came more than once
MF612  batch sizes differ
MF613  settings differ
MF614  the runs end at different steps
MF615  evaluations without a counterpart
MF616  skipped steps
MF617  losses logged at different intervals
MF618  a run that did not complete
MF619  the logged names differ
MF620  points that have no place on the axis
MF621  NaN, infinite and missing values left out on request
MF622  a run compared with itself
====== ============================================================
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from mfsdp_cli.compare.judge import ENDS, Comparison
from mfsdp_cli.compare.names import normal
from mfsdp_cli.compare.run import Axis, Run
from mfsdp_cli.compare.values import ranges
from mfsdp_cli.errors import Finding, Severity

#: Settings that two runs of the same training may well have different, or that have a warning of
#: their own.
_NOT_COMPARED = frozenset({"engine", "backend", "trace", "keep_gradients", "global_batch_size"})


def warnings(comparison: Comparison) -> list[Finding]:
    """Every warning about the two runs; first what is wrong with one, then what is between."""
    a, b = comparison.letters
    allow_nan = comparison.policy.allow_nan
    return [
        *_of_run(comparison.a, a, allow_nan),
        *_of_run(comparison.b, b, allow_nan),
        *_of_settings(comparison),
        *_of_extent(comparison),
        *_of_axis(comparison),
    ]


def all_warnings(comparisons: Sequence[Comparison]) -> list[Finding]:
    """The warnings of every pair, each said once."""
    return list(dict.fromkeys(w for comparison in comparisons for w in warnings(comparison)))


def _warning(code: str, message: str, hint: str = "") -> Finding:
    return Finding(code, Severity.WARNING, message, hint)


def _of_run(run: Run, letter: str, allow_nan: bool) -> Iterator[Finding]:
    for note in dict.fromkeys(run.notes):
        yield _warning("MF610", f"{letter}: {note}")
    if run.repeated_steps:
        steps = ranges(sorted({*run.train.repeated, *run.eval.repeated}))
        yield _warning(
            "MF611",
            f"{letter}: {run.repeated_steps} steps came more than once ({steps}): "
            "the last value counts",
        )
    if run.skipped:
        yield _warning("MF616", f"{letter}: the optimizer skipped {run.skipped} steps")
    if run.status in ENDS:
        yield _warning("MF618", f"{letter}: the run {ENDS[run.status]}")
    left_out = run.nan + run.infinite + run.missing
    if allow_nan and left_out:
        yield _warning(
            "MF621", f"{letter}: {left_out} NaN, infinite or missing values are left out"
        )


def _of_settings(comparison: Comparison) -> Iterator[Finding]:
    one, other = comparison.a, comparison.b
    a, b = comparison.letters
    if os.path.realpath(one.path) == os.path.realpath(other.path):
        yield _warning("MF622", f"{a} and {b} are the same files")
    for name in sorted(one.settings.keys() & other.settings.keys() - _NOT_COMPARED):
        if one.settings[name] != other.settings[name]:
            yield _warning(
                "MF613",
                f"the runs differ in {name}: {a} {one.settings[name]}, {b} {other.settings[name]}",
            )
    yield from _of_batch(comparison)
    for left, right, what in (
        (one.train_name, other.train_name, "training loss"),
        (one.eval_name, other.eval_name, "evaluation"),
    ):
        if left and right and normal(left) != normal(right):
            yield _warning("MF619", f'the {what} is "{left}" in {a} and "{right}" in {b}')


def _of_batch(comparison: Comparison) -> Iterator[Finding]:
    one, other = comparison.a.batch_sizes, comparison.b.batch_sizes
    if not one or not other or one == other:
        return
    a, b = comparison.letters
    by_step = comparison.policy.axis is Axis.STEP
    yield _warning(
        "MF612",
        f"the global batch sizes differ: {a} {_sizes(one)}, {b} {_sizes(other)}"
        + ("; the same step is not the same number of samples" if by_step else ""),
        "align by what was seen with --x samples" if by_step else "",
    )


def _sizes(sizes: tuple[int, ...]) -> str:
    return f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"


def _of_extent(comparison: Comparison) -> Iterator[Finding]:
    one, other = comparison.a, comparison.b
    a, b = comparison.letters
    if None not in (one.last_step, other.last_step) and one.last_step != other.last_step:
        yield _warning("MF614", f"{a} ends at step {one.last_step}, {b} at step {other.last_step}")
    yield from _unmatched(comparison)
    left, right = one.train.interval(), other.train.interval()
    if not comparison.judges_eval and left and right and left != right:
        yield _warning(
            "MF617",
            f"{a} logs {_every(left)}, {b} {_every(right)}: where a logger writes means over "
            "the interval, the values are not the same thing",
        )


def _every(interval: int) -> str:
    return "every step" if interval == 1 else f"every {interval} steps"


def _unmatched(comparison: Comparison) -> Iterator[Finding]:
    """Evaluations that only one of the runs has."""
    found = comparison.eval.alignment
    a, b = comparison.letters
    if not comparison.judges_eval and (found.only_a or found.only_b):
        letter = a if found.only_a else b
        yield _warning("MF615", f"only {letter} has evaluations: the training losses are judged")
    elif found.only_a or found.only_b:
        yield _warning(
            "MF615",
            f"evaluations without a counterpart: {found.only_a} in {a}, {found.only_b} in {b}",
        )


def _of_axis(comparison: Comparison) -> Iterator[Finding]:
    axis = comparison.policy.axis
    for letter, lost in zip(
        comparison.letters,
        (
            comparison.train.lost_a + comparison.eval.lost_a,
            comparison.train.lost_b + comparison.eval.lost_b,
        ),
        strict=True,
    ):
        if lost:
            yield _warning(
                "MF620", f"{letter}: {lost} points have no known number of {axis}: left out"
            )
