"""A time for every action of a schedule, for pictures and traces.

Compute actions are simulated. Other work takes no time in that simulation: gathers begin when the
rank issues them and are drawn as short slices, one after another on their stream; a receive begins
with its send. Bars of the end of the step begin when all ranks are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mfsdp_cli.schedule.actions import COMPUTE, END_OF_STEP, RECEIVES
from mfsdp_cli.schedule.attributes import StageCost, Stream, stream_of
from mfsdp_cli.schedule.build import Schedule
from mfsdp_cli.schedule.graph import Graph
from mfsdp_cli.schedule.simulate import Timeline, simulate

# Slice of an action whose time is not known, as a share of the shortest forward.
SHARE = 0.05


@dataclass(frozen=True)
class StepTimes:
    """Start and end of every node of the graph.

    Args:
        measured: whether the times are seconds; if not, a forward takes 1 and a backward 2.
    """

    starts: list[float]
    ends: list[float]
    measured: bool

    @property
    def whole(self) -> float:
        """When the last action ends."""
        return max(self.ends, default=0.0)


def step_times(
    schedule: Schedule, graph: Graph, costs: Mapping[int, StageCost] | None = None
) -> StepTimes:
    """Times of all actions; with costs in seconds, else in units of an equal chunk's forward."""
    timeline, shortest = _timeline(schedule, costs or {})
    slice_ = SHARE * shortest
    starts, ends = [0.0] * len(graph), [0.0] * len(graph)
    for rank in range(len(graph.lists)):
        _place_rank(graph, rank, timeline, slice_, (starts, ends))
    for node in range(len(graph)):
        sender = graph.sender(node) if graph.kinds[node] in RECEIVES else None
        if sender is not None:
            starts[node] = starts[sender]
            ends[node] = ends[sender]
    return StepTimes(starts, ends, bool(costs))


def _timeline(schedule: Schedule, costs: Mapping[int, StageCost]) -> tuple[Timeline, float]:
    if not costs:
        return schedule.timeline, 1.0
    spec = schedule.spec
    of_stage = [costs[stage] for stage in range(spec.num_stages)]
    timeline = simulate(
        schedule.timeline.orders,
        rank_of=spec.rank_of,
        num_stages=spec.num_stages,
        forward=[cost.forward_s for cost in of_stage],
        backward=[cost.backward_s for cost in of_stage],
    )
    return timeline, min(cost.forward_s for cost in of_stage)


def _place_rank(
    graph: Graph,
    rank: int,
    timeline: Timeline,
    slice_: float,
    times: tuple[list[float], list[float]],
) -> None:
    starts, ends = times
    now = 0.0
    free: dict[Stream, float] = {}
    computed = 0
    for node in graph.nodes_of_rank(rank):
        kind = graph.kinds[node]
        if kind in RECEIVES:
            continue
        stream = stream_of(kind)
        if kind in COMPUTE:
            starts[node] = timeline.starts[rank][computed]
            ends[node] = now = timeline.ends[rank][computed]
            computed += 1
        else:
            issued = max(now, timeline.makespan) if kind in END_OF_STEP else now
            starts[node] = max(issued, free.get(stream, 0.0))
            ends[node] = starts[node] + slice_
        free[stream] = ends[node]
