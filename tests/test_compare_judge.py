from __future__ import annotations

import math

import pytest

from mfsdp_cli.compare.align import Tolerance
from mfsdp_cli.compare.judge import Comparison, Policy, compare, tolerance
from mfsdp_cli.compare.run import Axis, Run
from mfsdp_cli.compare.series import Series, SeriesBuilder
from mfsdp_cli.errors import MfsdpError


def series(values: dict[int, float | None]) -> Series:
    builder = SeriesBuilder()
    for step, value in values.items():
        if value is None:
            builder.add_gap(step)
        else:
            builder.add(step, value)
    return builder.finish()


def run(
    train: dict[int, float | None] | None = None,
    evaluations: dict[int, float | None] | None = None,
    **fields: object,
) -> Run:
    return Run(
        "x",
        "jsonl",
        series(train or {}),
        series(evaluations or {}),
        **fields,  # type: ignore[arg-type]
    )


def judge(a: Run, b: Run, **policy: object) -> Comparison:
    return compare(a, b, Policy(**policy))  # type: ignore[arg-type]


def test_tolerances_of_the_options() -> None:
    assert tolerance(None, None) == Tolerance(0.02, 0.005)
    assert tolerance(0.002, None) == Tolerance(0.002, 0.0)
    assert tolerance(None, 0.01) == Tolerance(0.0, 0.01)
    assert tolerance(0.002, 0.0) == Tolerance(0.002, 0.0)
    assert tolerance(0.0, None) == Tolerance(0.0, 0.0)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_tolerances_that_are_none(value: float) -> None:
    with pytest.raises(MfsdpError, match="MF606"):
        tolerance(value, None)
    with pytest.raises(MfsdpError, match="MF606"):
        tolerance(None, value)


def test_evaluations_decide_where_both_have_them() -> None:
    found = judge(run({1: 5.0, 2: 4.0}, {2: 4.0}), run({1: 9.0, 2: 9.0}, {2: 4.01}))
    assert found.judges_eval
    assert found.verdict.passed
    assert found.verdict.reasons == (
        "within tolerance (0.02 or 0.5%, whichever is larger): 1 of 1 common evaluations, "
        "the largest difference is 0.01 at step 2",
    )


def test_the_training_loss_decides_where_a_run_has_no_evaluations() -> None:
    found = judge(run({1: 5.0}, {1: 4.0}), run({1: 5.1}))
    assert not found.judges_eval
    assert not found.verdict.passed
    assert found.verdict.reasons[0].startswith("beyond tolerance")
    assert "1 of 1 common training losses" in found.verdict.reasons[0]


def test_both_tolerances_are_of_the_larger_kind() -> None:
    assert judge(run({1: 10.0}), run({1: 10.05})).verdict.passed
    assert not judge(run({1: 10.0}), run({1: 10.051})).verdict.passed
    assert judge(run({1: 1.0}), run({1: 1.02})).verdict.passed
    assert not judge(run({1: 1.0}), run({1: 1.021})).verdict.passed


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
@pytest.mark.parametrize("place", ["train", "evaluations"])
@pytest.mark.parametrize("both", [False, True])
def test_what_is_not_finite_fails_wherever_it_is(bad: float | None, place: str, both: bool) -> None:
    good: dict[str, dict[int, float | None]] = {
        "train": {1: 5.0, 2: 4.0},
        "evaluations": {1: 5.0, 2: 4.0},
    }
    faulty = {**good, place: {1: 5.0, 2: bad}}
    found = judge(run(**(faulty if both else good)), run(**faulty))
    assert not found.verdict.passed
    noun = "training losses" if place == "train" else "evaluations"
    word = "missing" if bad is None else "NaN" if math.isnan(bad) else "infinite"
    assert f"B: 1 of 2 {noun} are {word} (step 2)" in found.verdict.reasons
    assert judge(run(**good), run(**faulty), allow_nan=True).verdict.passed


@pytest.mark.parametrize("allow_nan", [False, True])
def test_nothing_finite_in_common_is_never_a_pass(allow_nan: bool) -> None:
    found = judge(run({1: math.nan}), run({1: math.nan}), allow_nan=allow_nan)
    assert not found.verdict.passed
    assert found.verdict.reasons[0] == (
        "nothing to compare: no step at which both runs have finite training losses"
    )


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        (run(), run(), "nothing to compare: A has no training losses"),
        (run({1: 5.0}), run(), "nothing to compare: B has no training losses"),
        (run({}, {1: 5.0}), run(), "nothing to compare: B has no evaluations"),
        (run({}, {1: 5.0}), run({1: 5.0}), "nothing to compare: A has no training losses"),
        (
            run({1: 5.0}, {1: 5.0}),
            run({1: 5.0}, {2: 5.0}),
            "no common step of the evaluations: A has 1 from 1 to 1 and B has 1 from 2 to 2",
        ),
    ],
)
def test_nothing_to_compare_says_why(a: Run, b: Run, reason: str) -> None:
    found = judge(a, b)
    assert not found.verdict.passed
    assert found.verdict.reasons == (reason,)


def test_nothing_at_all_is_never_a_pass() -> None:
    assert not judge(run(), run()).verdict.passed


def test_nan_iterations_damage_and_a_bad_end_fail() -> None:
    good = run({1: 5.0})
    for fields, reason in (
        ({"nan_iterations": 2}, "B: the logger counted 2 NaN iterations"),
        ({"damaged": 3}, "B: 3 records could not be read"),
        ({"status": "nan"}, "B: the run ended in NaN"),
        ({"status": "failed"}, "B: the run failed"),
    ):
        found = judge(good, run({1: 5.0}, **fields))
        assert (found.verdict.passed, found.verdict.reasons) == (False, (reason,))
    assert judge(good, run({1: 5.0}, status="nan"), allow_nan=True).verdict.passed
    assert not judge(good, run({1: 5.0}, status="failed"), allow_nan=True).verdict.passed


@pytest.mark.parametrize("status", ["interrupted", "running", "completed", None])
def test_other_ends_do_not_fail(status: str | None) -> None:
    assert judge(run({1: 5.0}), run({1: 5.0}, status=status)).verdict.passed


def test_a_ratio_is_a_reason_only_where_the_runs_differ() -> None:
    assert (
        judge(run({1: 5.0, 2: 4.0}), run({1: 5.0, 2: 4.0})).verdict.reasons[0].startswith("within")
    )
    reasons = judge(run({1: 5.0, 2: 4.0}), run({1: 40.0, 2: 32.0})).verdict.reasons
    assert "A / B is 0.125 at every common point" in reasons[1]


def test_an_axis_that_a_run_knows_nothing_of() -> None:
    found = judge(run({1: 5.0}), run({1: 5.0}), axis=Axis.TOKENS)
    assert found.verdict.reasons == (
        "nothing to compare: A does not say how many tokens a step takes",
    )
    a, b = run({1: 5.0, 2: 4.0}), run({1: 4.0})
    a.tokens.growth, b.tokens.growth = 512, 1024
    found = judge(a, b, axis=Axis.TOKENS)
    assert found.verdict.passed
    assert found.verdict.reasons[0].endswith("the largest difference is 0 at 1024 tokens")
    b.tokens.growth = 999
    assert judge(a, b, axis=Axis.TOKENS).verdict.reasons[0].startswith("no common number of tokens")


def test_a_metric_is_called_by_its_name() -> None:
    found = judge(run({1: 1.0}), run({1: 2.0}), metric="grad_norm")
    assert "1 of 1 common values of grad_norm" in found.verdict.reasons[0]
