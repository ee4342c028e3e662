"""Passes that turn compute orders into what a rank executes.

Each pass is a pure function from action lists (one a pipeline rank) to action lists:
gathers (:mod:`mfsdp_cli.schedule.residency`), :func:`add_reduce_grad`, :func:`add_send_receive`,
:func:`add_end_of_step`, in this order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from mfsdp_cli.schedule.actions import COMPUTE, Action, Kind
from mfsdp_cli.schedule.simulate import Timeline

_CONTRIBUTES = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
_PASSES_GRADIENT = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


def last_backwards(orders: Iterable[Sequence[Action]]) -> dict[int, int]:
    """Microbatch of each stage's last backward: where ``is_last_microbatch`` is true."""
    return {
        action.stage: action.microbatch
        for order in orders
        for action in order
        if action.kind in _CONTRIBUTES
        and action.stage is not None
        and action.microbatch is not None
    }


def add_reduce_grad(lists: Sequence[Sequence[Action]], when: str) -> list[list[Action]]:
    """Add ``REDUCE_GRAD`` after every backward of a stage, or after its last one only.

    Args:
        when: ``microbatch`` or ``last``.
    """
    last = last_backwards(lists)
    lowered = []
    for actions in lists:
        row: list[Action] = []
        for action in actions:
            row.append(action)
            if action.kind in _CONTRIBUTES and (
                when == "microbatch" or last[action.stage] == action.microbatch  # type: ignore[index]
            ):
                row.append(Action(Kind.REDUCE_GRAD, action.stage))
        lowered.append(row)
    return lowered


def add_send_receive(
    lists: Sequence[Sequence[Action]],
    timeline: Timeline,
    *,
    rank_of: Callable[[int], int],
    num_stages: int,
) -> list[list[Action]]:
    """Add a send after each action whose output another rank needs, and its receive there.

    Works through simulated time. When an action ends, its ``SEND`` goes behind it and in the same
    moment its ``RECV`` goes behind whatever the receiver has begun by then. So there is one
    sequence of all actions in which every receive directly follows its send. That has two
    consequences: nothing deadlocks even when each rank is one thread and a send waits for its
    receive, and on every (source, destination, direction) messages arrive in the order sent.

    No message goes between stages of one rank.

    Args:
        timeline: of the compute actions in ``lists``, in the same order.
    """
    rows = [
        _Row(actions, starts, ends)
        for actions, starts, ends in zip(lists, timeline.starts, timeline.ends, strict=True)
    ]
    for time, source, action in _by_end(timeline):
        message = _message(action, num_stages)
        if message is None:
            continue
        send, receive = message
        destination = rank_of(receive.stage)  # type: ignore[arg-type]
        if destination == source:
            continue
        rows[source].append(send, time)
        rows[destination].append(receive, time)
    return [row.finished() for row in rows]


def _by_end(timeline: Timeline) -> list[tuple[float, int, Action]]:
    """All compute actions by time of ending; at equal times by rank."""
    ended = [
        (end, rank, action)
        for rank, (order, ends) in enumerate(zip(timeline.orders, timeline.ends, strict=True))
        for action, end in zip(order, ends, strict=True)
    ]
    ended.sort(key=lambda entry: (entry[0], entry[1]))
    return ended


def _message(action: Action, num_stages: int) -> tuple[Action, Action] | None:
    """The send and the receive that carry an action's output; None where it goes nowhere."""
    stage, microbatch = action.stage, action.microbatch
    assert stage is not None
    if action.kind is Kind.FORWARD and stage + 1 < num_stages:
        return Action(Kind.SEND_F, stage, microbatch), Action(Kind.RECV_F, stage + 1, microbatch)
    if action.kind in _PASSES_GRADIENT and stage > 0:
        return Action(Kind.SEND_B, stage, microbatch), Action(Kind.RECV_B, stage - 1, microbatch)
    return None


class _Row:
    """A rank's list while messages are put into it.

    Every action has a time: a compute action its start, another one the end of the compute action
    before it. A message at time t goes behind all actions with a time below t.
    """

    def __init__(
        self, actions: Sequence[Action], starts: Sequence[float], ends: Sequence[float]
    ) -> None:
        self._actions = actions
        self._times: list[float] = []
        self._cursor = 0
        self._lowered: list[Action] = []
        begun = 0
        for action in actions:
            if action.kind in COMPUTE:
                self._times.append(starts[begun])
                begun += 1
            else:
                self._times.append(ends[begun - 1] if begun else -1)

    def append(self, message: Action, time: float) -> None:
        position = bisect_left(self._times, time, self._cursor)
        self._lowered += self._actions[self._cursor : position]
        self._lowered.append(message)
        self._cursor = position

    def finished(self) -> list[Action]:
        return self._lowered + list(self._actions[self._cursor :])


def add_end_of_step(
    lists: Sequence[Sequence[Action]],
    *,
    tied_pp_ranks: Sequence[Sequence[int]],
    router_bias: bool,
) -> list[list[Action]]:
    """Add what follows the last backward.

    The sum over copies of a shared parameter comes after the gradient reductions and before the
    norm, and only on ranks that hold a copy.
    """
    tied = {rank for ranks in tied_pp_ranks for rank in ranks}
    bias = [Action(Kind.ROUTER_BIAS)] if router_bias else []
    update = [Action(kind) for kind in UPDATE]
    return [
        [*actions, *bias, *([Action(Kind.TIED_ALLREDUCE)] if rank in tied else []), *update]
        for rank, actions in enumerate(lists)
    ]


UPDATE = (Kind.GRAD_NORM, Kind.CLIP, Kind.OPTIMIZER, Kind.REFRESH_WEIGHTS)
