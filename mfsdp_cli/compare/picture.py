"""The picture of a comparison: both curves, and their difference within the tolerance band.

Colors are from the Okabe-Ito palette, which color-blind people can tell apart; line styles and
markers tell the runs apart without any color. matplotlib is imported when a picture is drawn.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from mfsdp_cli.compare.align import pairs
from mfsdp_cli.compare.document import verdict_of
from mfsdp_cli.compare.judge import Comparison, Judged
from mfsdp_cli.compare.series import Series
from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.files import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: A run's look: color, line style, marker. Repeats after so many runs.
_LOOKS = (
    ("#0072B2", "-", "o"),
    ("#D55E00", (0, (4, 2)), "s"),
    ("#009E73", (0, (1, 1.5)), "^"),
    ("#CC79A7", (0, (6, 2, 1, 2)), "D"),
    ("#56B4E9", (0, (8, 3)), "v"),
    ("#E69F00", (0, (2, 1)), "P"),
)
_INK, _PALE = "#333333", "#999999"
#: A curve of more points is drawn by the extremes of so many pieces.
_PIECES = 1500

Points = list[tuple[int, float]]


def draw(comparisons: Sequence[Comparison], path: Path) -> None:
    """Write the picture as PNG.

    Raises:
        MfsdpError: MF609 if the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 6.6), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2.1, 1))
    _curves(upper, comparisons)
    _differences(lower, comparisons)
    _titles(upper, comparisons)
    picture = BytesIO()
    figure.savefig(picture, format="png")
    try:
        write_whole(path, picture.getvalue())
    except OSError as error:
        raise MfsdpError(
            "MF609",
            f"the picture cannot be written: {error.strerror}",
            where=f"--png {path}",
            hint="name a file in a folder that exists",
        ) from None


def _titles(axes: Axes, comparisons: Sequence[Comparison]) -> None:
    """The verdict as the title, the reasons below it."""
    verdict = verdict_of(comparisons)
    reasons = textwrap.shorten("; ".join(verdict.reasons), 250, placeholder=" ...")
    text = textwrap.fill(reasons, 128)
    word = "Same" if verdict.passed else "Different"
    what = comparisons[0].policy.metric or "loss"
    joint = " and " if len(comparisons) == 1 else ", "
    names = textwrap.shorten(joint.join(_short_names(comparisons)), 90, placeholder=" ...")
    title = f"{word}: {what} of {names}"
    pad = 12 + 12 * (text.count("\n") + 1)
    axes.set_title(_plain(title), loc="left", fontsize=13, fontweight="bold", color=_INK, pad=pad)
    axes.annotate(
        _plain(text),
        (0, 1),
        xytext=(0, 7),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=9,
        color=_INK,
        linespacing=1.25,
    )


def _plain(text: str) -> str:
    """Text as it is: matplotlib would take what is between two dollar signs for mathematics."""
    return text.replace("$", r"\$")


def _short_names(comparisons: Sequence[Comparison]) -> list[str]:
    """The shortest ends of the paths that tell the runs apart."""
    runs = [comparisons[0].a, *(c.b for c in comparisons)]
    parts = [Path(run.path).absolute().parts for run in runs]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [run.path for run in runs]


def _curves(axes: Axes, comparisons: Sequence[Comparison]) -> None:
    """Training losses as thin lines, evaluations as marked ones."""
    first = comparisons[0]
    runs = [(first.train.a, first.eval.a), *((c.train.b, c.eval.b) for c in comparisons)]
    letters = [first.letters[0], *(c.letters[1] for c in comparisons)]
    names = _short_names(comparisons)
    for i, (train, evaluations) in enumerate(runs):
        color, style, marker = _LOOKS[i % len(_LOOKS)]
        label = _plain(f"{letters[i]}  {names[i]}")
        _line(axes, _thinned(_broken(train)), color, style, 1.0, f"{label}: {_plain(_noun(first))}")
        points = list(evaluations.finite())
        if points:
            axes.plot(
                *zip(*points, strict=True),
                color=color,
                linestyle=style if not len(train) else "none",
                marker=marker,
                # The first run's markers are filled; later ones are larger rings around them.
                markersize=5 if i == 0 else 8 + i,
                markerfacecolor=color if i == 0 else "none",
                markeredgewidth=1.4,
                label=f"{label}: evaluations" if first.policy.metric is None else label,
                zorder=4,
                clip_on=False,
            )
    _dress(axes, first.policy.metric or "loss")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            fontsize=9, labelcolor=_INK, facecolor="white", edgecolor="none", framealpha=0.9
        )


def _noun(comparison: Comparison) -> str:
    return comparison.policy.metric or "training loss"


def _line(
    axes: Axes, points: Points, color: str, style: object, width: float, label: str | None
) -> None:
    if points:
        axes.plot(
            *zip(*points, strict=True),
            color=color,
            linestyle=style,
            linewidth=width,
            marker="." if len(points) == 1 else "",
            label=label,
        )


def _thinned(points: Points) -> Points:
    """A long curve by its lowest and highest point in each piece: no spike is lost."""
    if len(points) <= 4 * _PIECES:
        return points
    size = -(-len(points) // _PIECES)
    pieces = (points[start : start + size] for start in range(0, len(points), size))
    return [point for piece in pieces for point in _extremes(piece)]


def _extremes(piece: Points) -> Points:
    finite = [point for point in piece if math.isfinite(point[1])]
    gaps = [point for point in piece if not math.isfinite(point[1])][:1]
    ends = {f(finite, key=lambda point: point[1]) for f in (min, max)} if finite else set()
    return sorted([*ends, *gaps])


def _broken(series: Series) -> Points:
    """All points, NaN where the value is not finite: the line breaks there."""
    values = (value if math.isfinite(value) else math.nan for value in series.values)
    return list(zip(series.steps, values, strict=True))


def _differences(axes: Axes, comparisons: Sequence[Comparison]) -> None:
    """B - A and the tolerance band around zero."""
    first = comparisons[0]
    axes.axhline(0, color=_PALE, linewidth=0.8, zorder=1)
    reach = _band(axes, first)
    for i, comparison in enumerate(comparisons, start=1):
        color, _, marker = _LOOKS[i % len(_LOOKS)]
        train, evaluations = _gaps(comparison.train), _gaps(comparison.eval)
        pale = comparison.judges_eval and bool(evaluations)
        if not pale or len(comparisons) == 1:
            _line(axes, _thinned(train), _PALE if pale else color, "-", 0.8, None)
        if evaluations:
            axes.plot(
                *zip(*evaluations, strict=True),
                color=color,
                marker=marker,
                markersize=6,
                linewidth=1.2,
                zorder=4,
            )
        judged = evaluations if comparison.judges_eval else train
        reach = max([reach, *(abs(gap) for _, gap in judged)])
        _point_out(axes, comparison)
    if reach > 0:
        axes.set_ylim(-1.3 * reach, 1.3 * reach)
    names = ", ".join(comparison.letters[1] for comparison in comparisons)
    _dress(axes, f"{names} - {first.letters[0]}")
    axes.set_title(_plain(_explained(comparisons)), loc="left", fontsize=9, color=_INK)
    axes.set_xlabel(first.policy.axis.value, color=_INK)


def _explained(comparisons: Sequence[Comparison]) -> str:
    """What the lower panel shows."""
    first = comparisons[0]
    thin = len(comparisons) == 1 and first.judges_eval and first.train.alignment.common
    marks = f"marked: {first.noun}; thin: training losses; " if thin else ""
    return f"difference; {marks}shaded: tolerance {first.policy.tolerance}"


def _band(axes: Axes, comparison: Comparison) -> float:
    """Shade the tolerance along A over the whole width; returns its largest half width."""
    base = _thinned(list(comparison.judged.a.finite()))
    if not base:
        return 0.0
    half = [(step, comparison.policy.tolerance.band(value)) for step, value in base]
    left, right = _extent(comparison)
    half = [(left, half[0][1]), *half, (right, half[-1][1])]
    steps, upper = [step for step, _ in half], [value for _, value in half]
    lower = [-value for value in upper]
    axes.fill_between(steps, lower, upper, color="#DDDDDD", alpha=0.6, linewidth=0, zorder=0)
    for edge in (lower, upper):
        axes.plot(steps, edge, color=_PALE, linewidth=0.8, linestyle="--")
    return max(upper)


def _extent(comparison: Comparison) -> tuple[int, int]:
    """The first and the last place on the axis in any of the series."""
    every = (*vars(comparison.train).values(), *vars(comparison.eval).values())
    filled = [series for series in every if isinstance(series, Series) and len(series)]
    return min(s.steps[0] for s in filled), max(s.steps[-1] for s in filled)


def _gaps(judged: Judged) -> Points:
    return [
        (pair.step, pair.b - pair.a)
        for pair in pairs(judged.a, judged.b)
        if pair.comparable and pair.a is not None and pair.b is not None
    ]


def _point_out(axes: Axes, comparison: Comparison) -> None:
    """Ring the largest difference where it is beyond tolerance."""
    found = comparison.judged.alignment
    if not found.beyond or found.max_abs_step is None:
        return
    gap = dict(_gaps(comparison.judged))[found.max_abs_step]
    axes.plot(
        [found.max_abs_step],
        [gap],
        marker="o",
        markersize=13,
        markerfacecolor="none",
        markeredgecolor=_INK,
        markeredgewidth=1.3,
        zorder=5,
    )
    axes.annotate(
        f"{gap:+.3g}",
        (found.max_abs_step, gap),
        xytext=(0, 11 if gap < 0 else -16),
        textcoords="offset points",
        ha="center",
        fontsize=9,
        color=_INK,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1},
        zorder=6,
    )


def _dress(axes: Axes, label: str) -> None:
    axes.set_ylabel(_plain(label), color=_INK)
    axes.margins(x=0.015)
    axes.grid(color="#E6E6E6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_PALE)
