"""A small plot of two curves in plain characters: ``A``, ``B``, and ``*`` where they meet."""

from __future__ import annotations

from mfsdp_cli.compare.series import Series
from mfsdp_cli.compare.values import short

_HEIGHT = 8


def plot(a: Series, b: Series, letters: tuple[str, str], width: int) -> list[str]:
    """Lines of a plot ``width`` characters wide; empty where there are under two points to draw.

    Each column shows the mean of the finite points that fall into it.
    """
    ends = [x for series in (a, b) for x in (*series.steps[:1], *series.steps[-1:])]
    first, last = min(ends, default=0), max(ends, default=0)
    columns = max(10, width - 12)
    curves = [_column_means(series, first, last, columns) for series in (a, b)]
    values = [value for curve in curves for value in curve.values()]
    if first == last or not all(curves):
        return []
    low, high = min(values), max(values)
    grid = [[" "] * columns for _ in range(_HEIGHT)]
    for letter, curve in zip(letters, curves, strict=True):
        for column, value in curve.items():
            row = grid[_row(value, low, high)]
            row[column] = letter if row[column] in (" ", letter) else "*"
    return [*_framed(grid, short(high), short(low)), _axis(first, last, columns)]


def _column_means(series: Series, first: int, last: int, columns: int) -> dict[int, float]:
    sums: dict[int, tuple[float, int]] = {}
    for step, value in series.finite():
        column = round((step - first) / max(1, last - first) * (columns - 1))
        total, count = sums.get(column, (0.0, 0))
        sums[column] = total + (value - total) / (count + 1), count + 1
    return {column: mean for column, (mean, _) in sums.items()}


def _row(value: float, low: float, high: float) -> int:
    """The row from the top; halves before the division keep huge ranges finite."""
    share = (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5
    return round((1 - share) * (_HEIGHT - 1))


def _framed(grid: list[list[str]], high: str, low: str) -> list[str]:
    labels = [high, *[""] * (len(grid) - 2), low]
    return [f"{label:>9} |{''.join(row).rstrip()}" for label, row in zip(labels, grid, strict=True)]


def _axis(first: int, last: int, columns: int) -> str:
    return " " * 11 + f"{first}{last:>{max(1, columns - len(str(first)))}}"
