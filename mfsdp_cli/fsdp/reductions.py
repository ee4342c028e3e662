"""Reductions under way: first in, first out, few at a time.

At most :data:`IN_FLIGHT` reduce-scatters run at once: one while the next is being filled. That
bounds what they hold, however many chunks a rank has. The replicas' sums of hybrid sharding come
once a step and hold shards only; they are waited for at the end of the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from mfsdp_cli.fsdp.parameter_group import Reduction
from mfsdp_cli.fsdp.unit import Unit

IN_FLIGHT = 2
#: Told of every communication: operation, unit, bytes.
Record = Callable[[str, str, int], None]


class Reductions:
    """The reductions of one context.

    Args:
        record: told ``reduce`` for a reduce-scatter, ``replicate`` for the replicas' sum.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._scatters: deque[tuple[str, Reduction]] = deque()
        self._replications: deque[Reduction] = deque()

    def start(self, unit: Unit, *, is_last: bool) -> None:
        """Reduce the unsharded gradients of a unit, which are given up.

        Args:
            is_last: whether this is the step's last reduction of the unit.
        """
        for group in unit.groups:
            if not group.requires_grad:
                continue
            while len(self._scatters) >= IN_FLIGHT:
                self._finish_oldest()
            reduction = group.start_reduce(is_last=is_last)
            self._record("reduce", unit.name, reduction.bytes)
            self._scatters.append((unit.name, reduction))

    def _finish_oldest(self) -> None:
        name, reduction = self._scatters.popleft()
        reduction.finish_scatter()
        if reduction.replicated_bytes:
            self._record("replicate", name, reduction.replicated_bytes)
            self._replications.append(reduction)
        else:
            reduction.finish()

    def finish(self) -> None:
        """Wait for all of them; every ``main_grad`` is complete afterwards."""
        while self._scatters:
            self._finish_oldest()
        while self._replications:
            self._replications.popleft().finish()
