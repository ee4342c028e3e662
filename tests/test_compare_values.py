from __future__ import annotations

import math

import pytest

from mfsdp_cli.compare.values import MAX_STEP, number, ranges, short, step_number


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2, 2.0),
        (2.5, 2.5),
        ("2.5", 2.5),
        (" -1.5E-03 ", -0.0015),
        (".5", 0.5),
        ("5.", 5.0),
        (math.inf, math.inf),
        ("Infinity", math.inf),
        ("-inf", -math.inf),
        ("+inf", math.inf),
        (True, None),
        (None, None),
        ("", None),
        ("1_000", None),
        ("0x10", None),
        ("abc", None),
        ([1.0], None),
        ({"a": 1}, None),
        (10**400, None),
    ],
)
def test_number(value: object, expected: float | None) -> None:
    assert number(value) == expected


@pytest.mark.parametrize("value", [math.nan, "nan", "NaN", "nan.0", "-nan", "NAN"])
def test_number_keeps_nan_as_nan(value: object) -> None:
    found = number(value)
    assert found is not None
    assert math.isnan(found)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0),
        (601, 601),
        (601.0, 601),
        ("601", 601),
        ("601/2161", 601),
        (" 601 / 2161 ", 601),
        ("1.000", 1),
        (MAX_STEP, MAX_STEP),
        (MAX_STEP + 1, None),
        (-1, None),
        ("-1", None),
        (1.5, None),
        ("0.18", None),
        (math.nan, None),
        (math.inf, None),
        (True, None),
        (None, None),
        ("9" * 5000, None),
        (10**400, None),
        ("step", None),
    ],
)
def test_step_number(value: object, expected: int | None) -> None:
    assert step_number(value) == expected


def test_ranges_draw_consecutive_steps_together() -> None:
    assert ranges([4, 5, 6, 9]) == "4-6, 9"
    assert ranges([]) == ""
    assert ranges([1, 3, 5, 7, 9, 10, 11], limit=4) == "1, 3, 5, 7 and 3 more"


def test_short_drops_digits_that_nobody_reads() -> None:
    assert short(0.000359052) == "0.0003591"
    assert short(0.5) == "0.5"
    assert short(2.175) == "2.175"
