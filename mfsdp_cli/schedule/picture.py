"""A schedule as an SVG picture: ranks as rows, time as columns.

A bar is a forward (``F3``: microbatch 3) or a backward (``B3``), with its stage below where a rank
has several; the kind is told by letter, color and, for backwards, a heavy left edge. The thin
lines under a row are gathered chunks, one line a slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from mfsdp_cli.schedule.actions import COMPUTE, Kind
from mfsdp_cli.schedule.build import Schedule
from mfsdp_cli.schedule.graph import Graph
from mfsdp_cli.schedule.timing import StepTimes

LEFT, TOP, RIGHT, BOTTOM = 76, 64, 16, 34
BAR, LANE, GAP = 30, 4, 10
# Above this width labels no longer fit anyway and viewers become slow.
MAX_WIDTH = 24_000
MIN_LABEL = 13
# Forward and backward by chunk: two hues that stay apart without color vision, light to dark.
_FORWARD = ("#cfe3f7", "#a8cdf0", "#7fb4e6", "#5a9bd8")
_BACKWARD = ("#fde0b8", "#fbc983", "#f5ae4f", "#e6932a")
_WEIGHT = ("#dcefd3", "#bfe0af", "#a0cf8a", "#82bd68")
_COLORS = {
    Kind.FORWARD: _FORWARD,
    Kind.BACKWARD: _BACKWARD,
    Kind.BACKWARD_INPUT: _BACKWARD,
    Kind.BACKWARD_WEIGHT: _WEIGHT,
}


def to_svg(schedule: Schedule, graph: Graph, times: StepTimes) -> str:
    """The picture of a schedule as SVG text."""
    return _Picture(schedule, graph, times).text()


class _Picture:
    def __init__(self, schedule: Schedule, graph: Graph, times: StepTimes) -> None:
        self.schedule, self.graph, self.times = schedule, graph, times
        compute = [node for node in range(len(graph)) if graph.kinds[node] in COMPUTE]
        self.compute = compute
        self.whole = max(times.ends[node] for node in compute) or 1.0
        self.scale = self._scale()
        self.lanes = max(1, schedule.spec.resident_chunks)
        self.lanes = min(self.lanes, schedule.spec.vpp)
        self.row = BAR + LANE * self.lanes + GAP
        self.width = LEFT + self.whole * self.scale + RIGHT
        self.height = TOP + self.row * len(graph.lists) + BOTTOM

    def _scale(self) -> float:
        """Pixels of a unit of time: the shortest bar holds its label, as far as space allows."""
        digits = len(str(self.schedule.spec.num_microbatches - 1))
        spans = (self.times.ends[node] - self.times.starts[node] for node in self.compute)
        shortest = min((span for span in spans if span > 0), default=self.whole)
        return min((12 + 7 * digits) / shortest, MAX_WIDTH / self.whole)

    def text(self) -> str:
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:.0f}" '
            f'height="{self.height:.0f}" viewBox="0 0 {self.width:.0f} {self.height:.0f}" '
            'font-family="Helvetica, Arial, sans-serif">',
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *self._heading(),
            *self._axis(),
        ]
        for rank in range(len(self.graph.lists)):
            lines += self._row_of(rank)
        return "\n".join([*lines, "</svg>"]) + "\n"

    def _heading(self) -> Iterator[str]:
        spec, schedule = self.schedule.spec, self.schedule
        title = (
            f"{spec.name}, {spec.pp} pipeline ranks x {spec.vpp} chunks, "
            f"{spec.num_microbatches} microbatches, {spec.resident_chunks} resident chunks"
        )
        numbers = (
            f"bubble {schedule.bubble_fraction:.2%} of the step "
            f"({schedule.bubble_ratio:.2%} over ideal), equal chunks and free communication"
        )
        yield f"<title>{escape(title)}</title>"
        yield _text(12, 20, title, size=14, bold=True)
        yield _text(12, 37, numbers, size=11)
        yield from self._legend(12, 44)

    def _legend(self, x: float, y: float) -> Iterator[str]:
        entries = [("F", Kind.FORWARD, "forward"), ("B", Kind.BACKWARD, "backward")]
        for letter, kind, name in entries:
            yield _box(x, y, 16, 13, _COLORS[kind][1], heavy=kind is not Kind.FORWARD)
            yield _text(x + 8, y + 10, letter, size=9, middle=True)
            yield _text(x + 20, y + 10, name, size=10)
            x += 84
        yield f'<line x1="{x}" x2="{x + 16}" y1="{y + 7}" y2="{y + 7}" stroke="#666" '
        yield 'stroke-width="3"/>'
        yield _text(x + 20, y + 10, "chunk gathered", size=10)

    def _axis(self) -> Iterator[str]:
        bottom = self.height - BOTTOM + 4
        step = _tick(self.whole)
        unit = "seconds" if self.times.measured else "time in forwards of one chunk"
        for count in range(int(self.whole / step) + 1):
            x = LEFT + count * step * self.scale
            yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" stroke="#ececec"/>'
            yield _text(x, bottom + 12, f"{count * step:g}", size=9, middle=True, color="#555")
        yield _text(12, bottom + 25, unit, size=9, color="#555")

    def _row_of(self, rank: int) -> Iterator[str]:
        y = TOP + rank * self.row
        yield _text(12, y + BAR / 2 + 4, f"rank {rank}", size=12)
        for node in self.graph.nodes_of_rank(rank):
            if self.graph.kinds[node] in COMPUTE:
                yield from self._bar(node, y)
        yield from self._gathered(rank, y + BAR + 1)

    def _bar(self, node: int, y: float) -> Iterator[str]:
        graph = self.graph
        kind, stage, microbatch = graph.kinds[node], graph.stages[node], graph.microbatches[node]
        x = LEFT + self.times.starts[node] * self.scale
        width = (self.times.ends[node] - self.times.starts[node]) * self.scale
        color = _COLORS[kind][graph.chunk_of(stage) % len(_FORWARD)]
        box = _box(x, y, width, BAR, color, heavy=kind is not Kind.FORWARD)
        yield f"<g><title>{graph.actions[node]}, stage {stage}</title>{box}"
        if width >= MIN_LABEL:
            several = self.schedule.spec.vpp > 1
            top = y + (13 if several else BAR / 2 + 4)
            yield _text(x + width / 2, top, f"{kind}{microbatch}", size=10, middle=True)
            if several:
                yield _text(x + width / 2, y + 25, f"s{stage}", size=8, middle=True, color="#333")
        yield "</g>"

    def _gathered(self, rank: int, y: float) -> Iterator[str]:
        """A line from each gather to the freeing of its stage, in the lowest slot that is free."""
        slots: list[int | None] = [None] * self.lanes
        began: dict[int, float] = {}
        for node in self.graph.nodes_of_rank(rank):
            kind, stage = self.graph.kinds[node], self.graph.stages[node]
            if kind is Kind.UNSHARD:
                slots[slots.index(None)] = stage
                began[stage] = self.times.starts[node]
            elif kind is Kind.RESHARD:
                lane = slots.index(stage)
                slots[lane] = None
                yield self._line(stage, began[stage], self.times.starts[node], y + LANE * lane)

    def _line(self, stage: int, start: float, end: float, y: float) -> str:
        x1, x2 = LEFT + start * self.scale, LEFT + end * self.scale
        color = ("#555555", "#8a5fb0", "#2e8b7a", "#b0485f")[self.graph.chunk_of(stage) % 4]
        return (
            f'<line x1="{x1 + 1:.1f}" x2="{x2 - 1:.1f}" y1="{y + 2}" y2="{y + 2}" '
            f'stroke="{color}" stroke-width="3"><title>stage {stage} gathered</title></line>'
        )


def _tick(whole: float) -> float:
    """A round step of the time axis that gives 8 to 20 ticks."""
    step = 10.0**-12
    for factor in (1, 2, 5) * 24:
        if whole / (step * factor) <= 20:
            return step * factor
        step *= 10 if factor == 5 else 1
    return whole


def _box(x: float, y: float, width: float, height: float, color: str, *, heavy: bool) -> str:
    edge = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="3" height="{height}" fill="#7a4a00"/>'
        if heavy and width > 6
        else ""
    )
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{color}" '
        f'stroke="#444" stroke-width="0.5"/>{edge}'
    )


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int,
    middle: bool = False,
    bold: bool = False,
    color: str = "#111",
) -> str:
    anchor = ' text-anchor="middle"' if middle else ""
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}"{anchor}{weight}>'
        f"{escape(text)}</text>"
    )
