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
    lines = [_line(rows[row], row, marked.get(row), marks[0][1]) for row in shown]
    return "\n".join(lines)


def _rows_to_show(count: int, marks: Sequence[tuple[int, int]]) -> list[int]:
    first = marks[0][0]
    wanted = list(dict.fromkeys(row for row, _ in marks))
    nearest = sorted(range(max(0, first - MAX_ROWS), min(count, first + MAX_ROWS)))
    nearest.sort(key=lambda row: abs(row - first))
    return sorted(dict.fromkeys((wanted + nearest)[: max(MAX_ROWS, 1)]))


def _line(cells: Sequence[object], row: int, mark: int | None, middle: int) -> str:
    around = middle if mark is None else mark
    low, high = max(0, around - RADIUS), min(len(cells), around + RADIUS + 1)
    texts = [_cell(cells[index], index == mark) for index in range(low, high)]
    if mark is not None and mark >= len(cells):
        texts.append("> <")
    left = "..." if low > 0 else ""
    right = "..." if high < len(cells) else ""
    return f"    rank {row:<3} {left:>3} {' '.join(texts)} {right}".rstrip()


def _cell(value: object, marked: bool) -> str:
    text = str(value).strip()
    text = text if len(text) <= MAX_WIDTH else text[: MAX_WIDTH - 3] + "..."
    return f">{text}<" if marked else f" {text} "
