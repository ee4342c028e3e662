"""A piece of a schedule as text: ranks as rows, places in their lists as columns."""

from __future__ import annotations

from collections.abc import Sequence

RADIUS = 3
MAX_ROWS = 8
MAX_WIDTH = 14


def grid(rows: Sequence[Sequence[object]], marks: Sequence[tuple[int, int]]) -> str:
    """The cells around marked ones, each mark between ``>`` and ``<``.

    Every row is cut around its own mark, so that cells under one another are not at one time;
    a row without a mark is cut around the first mark.

    Args:
        marks: (row, index) of the cells to mark; their rows are shown, and as many others as fit.
    """
    marked = dict(reversed(marks))
    shown = _rows_to_show(len(rows), marks)
    cut = [_cells(rows[row], marked.get(row), marks[0][1]) for row in shown]
    widths = [max(map(len, column)) for column in zip(*_padded(cut), strict=True)]
    lines = []
    for row, cells in zip(shown, cut, strict=True):
        text = " ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=False))
        lines.append(f"    rank {row:<3} {text}".rstrip())
    return "\n".join(lines)


def _rows_to_show(count: int, marks: Sequence[tuple[int, int]]) -> list[int]:
    """The marked rows first, then those nearest to the first mark."""
    first = marks[0][0]
    nearby = range(max(0, first - MAX_ROWS), min(count, first + MAX_ROWS + 1))
    nearest = sorted(nearby, key=lambda row: abs(row - first))
    return sorted(list(dict.fromkeys([row for row, _ in marks] + nearest))[:MAX_ROWS])


def _cells(row: Sequence[object], mark: int | None, middle: int) -> list[str]:
    """A row's cells around its mark, with dots where more follow on either side."""
    around = middle if mark is None else mark
    low, high = max(0, around - RADIUS), min(len(row), around + RADIUS + 1)
    cells = [_cell(row[index], marked=index == mark) for index in range(low, high)]
    return ["..." if low > 0 else "", *cells, "..." if high < len(row) else ""]


def _cell(value: object, *, marked: bool) -> str:
    text = "".join(sign if sign.isprintable() else "?" for sign in str(value).strip())
    text = text if len(text) <= MAX_WIDTH else text[: MAX_WIDTH - 3] + "..."
    return f">{text}<" if marked else f" {text} "


def _padded(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    longest = max(map(len, rows))
    return [[*row, *[""] * (longest - len(row))] for row in rows]
