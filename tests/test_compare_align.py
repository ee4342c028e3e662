from __future__ import annotations

import math

import pytest

from mfsdp_cli.compare.align import Tolerance, align, pairs
from mfsdp_cli.compare.series import Series, SeriesBuilder

EXACT = Tolerance(0.0, 0.0)


def series(**values: float | None) -> Series:
    """``series(s1=5.0, s2=None)``: None is a gap."""
    builder = SeriesBuilder()
    for name, value in values.items():
        if value is None:
            builder.add_gap(int(name[1:]))
        else:
            builder.add(int(name[1:]), value)
    return builder.finish()


def test_pairs_meet_by_step_and_never_by_position() -> None:
    a, b = series(s1=1.0, s3=3.0, s5=5.0), series(s2=1.0, s3=3.5, s9=5.0)
    assert [(p.step, p.a, p.b) for p in pairs(a, b)] == [
        (1, 1.0, None),
        (2, None, 1.0),
        (3, 3.0, 3.5),
        (5, 5.0, None),
        (9, None, 5.0),
    ]


def test_statistics_are_of_b_minus_a() -> None:
    found = align(series(s1=4.0, s2=2.0, s3=1.0), series(s1=3.0, s2=2.5, s4=9.0), EXACT)
    assert (found.common, found.only_a, found.only_b, found.unequal) == (2, 1, 1, 0)
    assert (found.max_abs, found.max_abs_step) == (1.0, 1)
    assert (found.mean_abs, found.mean_signed, found.max_rel) == (0.75, -0.25, 0.25)
    assert (found.first_mismatch_step, found.beyond) == (1, 2)
    assert (found.last_common_step, found.last_a, found.last_b) == (2, 2.0, 2.5)


def test_nan_infinite_and_missing_are_equal_to_nothing() -> None:
    a = series(s1=math.nan, s2=math.inf, s3=None, s4=1.0, s5=1.0, s6=1.0, s7=1.0)
    b = series(s1=math.nan, s2=math.inf, s3=None, s4=math.nan, s5=-math.inf, s6=None, s7=1.0)
    found = align(a, b, EXACT)
    assert (found.common, found.unequal, found.beyond) == (1, 6, 0)
    assert (found.only_a, found.only_b, found.first_mismatch_step) == (0, 0, 1)
    assert align(a, b, EXACT, allow_nan=True).first_mismatch_step is None


def test_a_zero_in_a_has_no_relative_difference() -> None:
    assert align(series(s1=0.0), series(s1=1.0), EXACT).max_rel is None
    assert align(series(s1=0.0, s2=2.0), series(s1=1.0, s2=1.0), EXACT).max_rel == 0.5


def test_nothing_common_has_no_numbers() -> None:
    document = align(series(s1=1.0), series(s2=1.0), EXACT).to_json(points=True)
    assert document == {
        "common": 0,
        "only_a": 1,
        "only_b": 1,
        "max_abs": None,
        "max_abs_step": None,
        "mean_abs": None,
        "mean_signed": None,
        "max_rel": None,
        "first_mismatch_step": None,
        "points": [],
    }


@pytest.mark.parametrize(
    ("tolerance", "a", "b", "holds"),
    [
        (Tolerance(), 6.0, 6.02, True),  # 6.02 - 6.0 is 0.02 and an ulp more
        (Tolerance(), 6.0, 6.03, True),  # 0.5% of 6
        (Tolerance(), 6.0, 6.0301, False),
        (Tolerance(), 2.0, 2.02, True),
        (Tolerance(), 2.0, 2.0201, False),
        (Tolerance(), -2.0, -2.02, True),
        (Tolerance(0.002, 0.0), 2.0, 2.002, True),
        (Tolerance(0.002, 0.0), 2.0, 2.0021, False),
        (Tolerance(0.0, 0.01), 2.0, 2.02, True),
        (Tolerance(0.0, 0.01), 0.0, 1e-9, False),
        (EXACT, 2.0, 2.0, True),
        (EXACT, 2.0, 2.0 + 1e-9, False),
    ],
)
def test_tolerances(tolerance: Tolerance, a: float, b: float, holds: bool) -> None:
    assert tolerance.holds(a, b) is holds


def test_tolerances_in_words() -> None:
    assert str(Tolerance()) == "0.02 or 0.5%, whichever is larger"
    assert str(Tolerance(0.002, 0.0)) == "0.002"
    assert str(Tolerance(0.0, 0.01)) == "1%"
    assert str(EXACT) == "0"


def test_a_constant_ratio_is_found_and_only_then() -> None:
    a = series(s1=2.9, s2=2.8, s3=2.7)
    assert align(a, series(s1=0.725, s2=0.7, s3=0.675), EXACT).ratio == pytest.approx(4.0)
    assert align(a, series(s1=0.73, s2=0.7, s3=0.675), EXACT).ratio is None
    assert align(a, series(s1=0.725), EXACT).ratio is None
    assert align(series(s1=0.0, s2=0.0), series(s1=0.0, s2=0.0), EXACT).ratio is None


def test_huge_values_make_no_infinity_in_the_document() -> None:
    found = align(series(s1=1e308, s2=1.0), series(s1=-1e308, s2=1.0), EXACT)
    assert (found.common, found.beyond, found.max_abs, found.mean_abs) == (2, 1, None, None)
    tiny = align(series(s1=5e-324, s2=1.0), series(s1=1e308, s2=2.0), EXACT)
    assert tiny.max_rel is None
