"""When each compute action starts and ends, and how much of the step is idle.

A rank runs its actions in order; an action waits for the output of its neighbour stage, and for a
point-to-point transfer where the neighbour is on another rank. Times may be any numbers; integers
stay exact.

Two ratios, never mixed: the *bubble fraction* is idle / whole, the *bubble ratio* idle / ideal.
Both are taken over all ranks and the whole step, with equal chunks and free communication.
:data:`EQUAL_FORWARD` and :data:`EQUAL_BACKWARD` say how long a chunk takes. The ratio between them
changes neither number for 1F1B nor for full groups of interleaved 1F1B, where they are
(p-1)/(v*m+p-1) and (p-1)/(v*m).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.schedule.actions import COMPUTE, Action, Kind

# A backward is two matrix products for each one of the forward.
EQUAL_FORWARD = 1
EQUAL_BACKWARD = 2

_BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


@dataclass(frozen=True)
class Timeline:
    """Start and end of every compute action, indexed as ``orders[rank][index]``."""

    orders: list[list[Action]]
    starts: list[list[float]]
    ends: list[list[float]]

    @property
    def makespan(self) -> float:
        """From 0 to the end of the last action of any rank."""
        return max((ends[-1] for ends in self.ends if ends), default=0)

    @property
    def busy(self) -> float:
        """Time all ranks spend computing, summed over ranks."""
        pairs = zip(self.starts, self.ends, strict=True)
        return sum(sum(ends) - sum(starts) for starts, ends in pairs)

    @property
    def bubble_fraction(self) -> float:
        """Idle / whole, over all ranks."""
        whole = self.makespan * len(self.orders)
        return (whole - self.busy) / whole if whole else 0.0

    @property
    def bubble_ratio(self) -> float:
        """Idle / ideal, over all ranks: by how much the step is longer than without idling."""
        busy = self.busy
        return (self.makespan * len(self.orders) - busy) / busy if busy else 0.0


def simulate(
    orders: Sequence[Sequence[Action]],
    *,
    rank_of: Callable[[int], int],
    num_stages: int,
    forward: Sequence[float] | None = None,
    backward: Sequence[float] | None = None,
    p2p: float = 0,
) -> Timeline:
    """Run compute orders against their data dependencies.

    Args:
        orders: actions of each rank; others than compute are left out.
        rank_of: rank of a stage.
        forward: seconds of each stage's forward; equal chunks if not given.
        backward: seconds of each stage's full backward; split backwards take half of it each.
        p2p: seconds from the end of an action until a neighbour rank has its output.

    Raises:
        MfsdpError: MF312 where ranks wait for each other for ever.
    """
    compute = [[action for action in order if action.kind in COMPUTE] for order in orders]
    seconds = _seconds(num_stages, forward, backward)
    run = _Run(compute, seconds, [rank_of(stage) for stage in range(num_stages)], p2p)
    return run.finish()


def _seconds(
    num_stages: int, forward: Sequence[float] | None, backward: Sequence[float] | None
) -> dict[Kind, Sequence[float]]:
    full = [EQUAL_BACKWARD] * num_stages if backward is None else backward
    half = [seconds / 2 for seconds in full]
    return {
        Kind.FORWARD: [EQUAL_FORWARD] * num_stages if forward is None else forward,
        Kind.BACKWARD: full,
        Kind.BACKWARD_INPUT: half,
        Kind.BACKWARD_WEIGHT: half,
    }


class _Run:
    """One pass over all ranks; a rank that waits is taken up again when its input is there."""

    def __init__(
        self,
        orders: list[list[Action]],
        seconds: dict[Kind, Sequence[float]],
        ranks: list[int],
        p2p: float,
    ) -> None:
        self.orders, self.seconds, self.ranks, self.p2p = orders, seconds, ranks, p2p
        self.starts: list[list[float]] = [[] for _ in orders]
        self.ends: list[list[float]] = [[] for _ in orders]
        # Ends by (stage, microbatch); who waits, by (backward?, stage, microbatch).
        self.done: tuple[_Ends, _Ends] = ({}, {})
        self.waiting: dict[tuple[bool, int, int], int] = {}

    def finish(self) -> Timeline:
        awake = list(range(len(self.orders)))
        while awake:
            self._advance(awake.pop(), awake)
        for rank, (order, ends) in enumerate(zip(self.orders, self.ends, strict=True)):
            if len(ends) < len(order):
                raise MfsdpError(
                    "MF312", f"the schedule never ends: rank {rank} waits in {order[len(ends)]}"
                )
        return Timeline(self.orders, self.starts, self.ends)

    def _advance(self, rank: int, awake: list[int]) -> None:
        """Run a rank until it has to wait; ranks that its outputs wake go to ``awake``."""
        order, starts, ends = self.orders[rank], self.starts[rank], self.ends[rank]
        now = ends[-1] if ends else 0
        while len(ends) < len(order):
            action = order[len(ends)]
            arrival = self._arrival(action, rank)
            if arrival is None:
                return
            start = max(now, arrival)
            now = start + self.seconds[action.kind][action.stage]  # type: ignore[index, operator]
            starts.append(start)
            ends.append(now)
            self._announce(action, now, awake)

    def _arrival(self, action: Action, rank: int) -> float | None:
        """When the neighbour's output is here; None, and noted as waiting, if it is not known."""
        stage, microbatch = action.stage, action.microbatch
        assert stage is not None
        assert microbatch is not None
        backward = action.kind in _BACKWARDS
        if action.kind is Kind.BACKWARD_WEIGHT:
            return 0
        source = stage + 1 if backward else stage - 1
        if not 0 <= source < len(self.ranks):
            return 0
        end = self.done[backward].get((source, microbatch))
        if end is None:
            self.waiting[(backward, source, microbatch)] = rank
            return None
        return end if self.ranks[source] == rank else end + self.p2p

    def _announce(self, action: Action, now: float, awake: list[int]) -> None:
        if action.kind is Kind.BACKWARD_WEIGHT:
            return
        backward = action.kind in _BACKWARDS
        key = (action.stage, action.microbatch)
        self.done[backward][key] = now  # type: ignore[index]
        waiter = self.waiting.pop((backward, *key), None)  # type: ignore[arg-type]
        if waiter is not None:
            awake.append(waiter)


_Ends = dict[tuple[int, int], float]


def peak_in_flight(orders: Sequence[Sequence[Action]]) -> list[int]:
    """Most forwards of a rank, all its chunks together, that wait for their backward at once.

    With split backwards a chunk's activations live until its weight gradient is done.
    """
    return [_peak(order) for order in orders]


def _peak(order: Sequence[Action]) -> int:
    live = peak = 0
    for action in order:
        if action.kind is Kind.FORWARD:
            live += 1
            peak = max(peak, live)
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            live -= 1
    return peak
