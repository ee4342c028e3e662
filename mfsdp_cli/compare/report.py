"""What a person sees in the terminal: the runs, values side by side, a plot, the verdict.

Everything is said in words; color only repeats it. rich is imported when something is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mfsdp_cli.compare.align import Pair, Tolerance, pairs
from mfsdp_cli.compare.document import verdict_of
from mfsdp_cli.compare.judge import Comparison
from mfsdp_cli.compare.plot import plot
from mfsdp_cli.compare.run import Run
from mfsdp_cli.compare.values import short

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

#: More rows than a person reads are thinned to about so many.
_ROWS = 16


def report(comparisons: Sequence[Comparison], width: int) -> list[RenderableType]:
    """All but the verdict: runs, values, training summary and plot, for ``width`` columns."""
    from rich.text import Text

    first, two = comparisons[0], len(comparisons) == 1
    parts: list[RenderableType] = [_runs(comparisons), ""]
    parts.append(Text(f"{first.noun}:" if two else f"against {first.letters[0]}:"))
    parts.append(_side_by_side(first) if two else _differences(comparisons))
    parts += _training(comparisons)
    series = first.train if len(first.train.a) and len(first.train.b) else first.judged
    if drawn := plot(series.a, series.b, first.letters, min(width, 100)):
        a, b = first.letters
        noun = first.policy.noun(series is first.eval)
        title = Text(f"{noun} ({a}, {b}, * both)")
        parts += ["", title, Text("\n".join(drawn), no_wrap=True)]
    return parts


def verdict_lines(comparisons: Sequence[Comparison]) -> list[RenderableType]:
    """The verdict, ``same`` or ``different``, and why."""
    from rich.text import Text

    verdict = verdict_of(comparisons)
    word = Text("same" if verdict.passed else "different")
    word.stylize("bold green" if verdict.passed else "bold red")
    if len(verdict.reasons) == 1:
        return [Text.assemble(word, ": ", verdict.reasons[0])]
    return [Text.assemble(word, ":"), *(Text(f"- {reason}") for reason in verdict.reasons)]


def _table() -> Table:
    from rich.table import Table

    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")


def _runs(comparisons: Sequence[Comparison]) -> Table:
    from rich.text import Text  # names and paths are text, not rich's markup

    table = _table()
    table.add_column("")
    table.add_column("run", overflow="fold")
    table.add_column("format")
    table.add_column("train", justify="right")
    table.add_column("eval", justify="right")
    table.add_column("steps", justify="right")
    first = comparisons[0]
    entries = [(first.letters[0], first.a), *((c.letters[1], c.b) for c in comparisons)]
    for letter, run in entries:
        table.add_row(letter, Text(run.path), run.format, *_extent(run))
    return table


def _extent(run: Run) -> tuple[str, str, str]:
    steps = "none" if run.first_step is None else f"{run.first_step}-{run.last_step}"
    return str(run.train.points), str(run.eval.points), steps


def _side_by_side(comparison: Comparison) -> RenderableType:
    """Step, A, B, difference, share of the tolerance used, in words whether it holds."""
    from rich.text import Text

    rows, left_out = _chosen(comparison)
    a, b = comparison.letters
    table = _table()
    table.add_column(comparison.policy.axis.value, justify="right")
    for name in (a, b, f"{b} - {a}", "of tolerance"):
        table.add_column(name, justify="right")
    table.add_column("")
    tolerance = comparison.policy.tolerance
    for pair in rows:
        mark = _mark(pair, tolerance, comparison.letters)
        style = "red" if mark not in ("ok", f"only {a}", f"only {b}") else None
        table.add_row(
            str(pair.step),
            _value(pair.a, pair.gap_a),
            _value(pair.b, pair.gap_b),
            _difference(pair),
            _share(pair, tolerance),
            mark,
            style=style,
        )
    if left_out:
        table.caption = f"{left_out} rows are left out"
    return table if rows else Text(f"no {comparison.noun} in either run")


def _chosen(comparison: Comparison) -> tuple[list[Pair], int]:
    """The rows to show, and how many are left out.

    All, if they are few; else a selection of the steps that both runs have, with the ends, the
    largest difference and the first mismatch in it.
    """
    judged, found = comparison.judged, comparison.judged.alignment
    both = found.common + found.unequal
    union = len(judged.a) + len(judged.b) - both
    if union <= _ROWS + 4:
        return list(pairs(judged.a, judged.b)), 0
    count, marked = both or union, {found.max_abs_step, found.first_mismatch_step}
    every = max(1, -(-count // _ROWS))
    shown = (p for p in pairs(judged.a, judged.b) if not both or None not in (p.a, p.b))
    rows = [
        pair
        for i, pair in enumerate(shown)
        if i % every == 0 or i == count - 1 or pair.step in marked
    ]
    return rows, union - len(rows)


def _differences(comparisons: Sequence[Comparison]) -> RenderableType:
    """More than two runs: how each differs from the first, one row a run."""
    table = _table()
    for name in ("run", "common", "largest", "at", "mean", "signed"):
        table.add_column(name, justify="left" if name == "run" else "right")
    table.add_column("verdict")
    for comparison in comparisons:
        found = comparison.judged.alignment
        table.add_row(
            f"{comparison.letters[1]} - {comparison.letters[0]}",
            str(found.common),
            _statistic(found.max_abs),
            "-" if found.max_abs_step is None else str(found.max_abs_step),
            _statistic(found.mean_abs),
            _statistic(found.mean_signed),
            "same" if comparison.verdict.passed else "different",
        )
    return table


def _statistic(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _training(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """One line a pair on the training losses, where the evaluations decide."""
    for comparison in comparisons:
        found = comparison.train.alignment
        if not comparison.judges_eval or not found.common:
            continue
        a, b = comparison.letters
        yield ""
        yield (
            f"training loss, {b} - {a}: {found.common} common, "
            f"largest {_statistic(found.max_abs)} at {comparison.policy.at(found.max_abs_step)}, "
            f"mean {_statistic(found.mean_abs)}, signed {_statistic(found.mean_signed)}; "
            f"last {a} {_value(found.last_a, False)}, {b} {_value(found.last_b, False)}"
        )


def _value(value: float | None, gap: bool) -> str:
    if value is None:
        return "-"
    return "missing" if gap else f"{value:.5f}" if 1e-3 <= abs(value) < 1e6 else short(value)


def _difference(pair: Pair) -> str:
    if not pair.comparable or pair.a is None or pair.b is None:
        return "-"
    return f"{pair.b - pair.a:+.3g}" if pair.a != pair.b else "0"


def _share(pair: Pair, tolerance: Tolerance) -> str:
    """How much of the tolerance the difference takes."""
    if not pair.comparable or pair.a is None or pair.b is None:
        return "-"
    difference, band = abs(pair.b - pair.a), tolerance.band(pair.a)
    if not difference or not band:
        return "-" if difference else "0%"
    share = 100 * difference / band
    return f"{share:.0f}%" if share < 1000 else ">999%"


def _mark(pair: Pair, tolerance: Tolerance, letters: tuple[str, str]) -> str:
    if pair.a is None or pair.b is None:
        return f"only {letters[0] if pair.b is None else letters[1]}"
    if pair.gap_a or pair.gap_b:
        return "missing"
    if not pair.comparable:
        return "nan" if math.isnan(pair.a) or math.isnan(pair.b) else "infinite"
    return "ok" if tolerance.holds(pair.a, pair.b) else "beyond"
