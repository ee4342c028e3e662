from __future__ import annotations

import pytest

from mfsdp_cli.compare.plot import plot
from mfsdp_cli.compare.series import Series, SeriesBuilder


def series(*points: tuple[int, float]) -> Series:
    builder = SeriesBuilder()
    for step, value in points:
        builder.add(step, value)
    return builder.finish()


def test_two_lines_that_cross() -> None:
    a = series(*((s, float(s)) for s in range(9)))
    b = series(*((s, 8.0 - s) for s in range(9)))
    assert plot(a, b, ("A", "B"), 21) == [
        "        8 |B        A",
        "          | B      A",
        "          |  B    A",
        "          |   B  A",
        "          |   A* B",
        "          |  A    B",
        "          | A      B",
        "        0 |A        B",
        "           0        8",
    ]


@pytest.mark.parametrize("width", [20, 60, 200])
def test_no_line_is_wider_than_asked(width: int) -> None:
    a = series(*((s, 5.0 / s) for s in range(1, 1000)))
    lines = plot(a, a, ("A", "B"), width)
    assert len(lines) == 9
    assert max(map(len, lines)) <= max(width, 22)
    assert not {"A", "B"} & set("".join(lines))


def test_nothing_to_draw() -> None:
    one = series((1, 5.0))
    assert plot(one, one, ("A", "B"), 60) == []
    assert plot(Series(), Series(), ("A", "B"), 60) == []
    assert plot(series((1, 1.0), (2, 2.0)), Series(), ("A", "B"), 60) == []
    nan = float("nan")
    assert plot(series((1, nan), (2, nan)), series((1, nan), (2, nan)), ("A", "B"), 60) == []


def test_flat_huge_and_infinite_curves() -> None:
    flat = series((1, 5.0), (2, 5.0))
    assert len(plot(flat, flat, ("A", "B"), 60)) == 9
    huge = series((1, -1.7e308), (2, 1.7e308), (3, float("inf")))
    assert len(plot(huge, flat, ("A", "B"), 60)) == 9
