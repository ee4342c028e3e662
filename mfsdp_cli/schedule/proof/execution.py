"""Runs the lists of all ranks against what their actions wait for, and says who is stuck.

Each rank is one thread that takes its actions in order. An action waits for its inputs, and, where
it has a *party*, until every member of the party is reached: a send and its receive under
rendezvous, the members of a collective. Work is linear in the number of actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mfsdp_cli.schedule.graph import Graph

Party = Sequence[int]


@dataclass(frozen=True)
class Wait:
    """A rank stands at ``node`` and waits for ``needs``, which is never done or reached."""

    node: int
    needs: int


def stuck(graph: Graph, parties: Iterable[Party] = (), *, buffered: bool = False) -> list[Wait]:
    """The ranks that never end their lists; empty where all do.

    Args:
        parties: nodes that go on together only.
        buffered: whether a receive waits for its send (which does not wait for it).
    """
    run = _Execution(graph, parties, buffered)
    run.finish()
    return run.waits()


def shortest_cycle(graph: Graph, waits: Sequence[Wait]) -> list[Wait]:
    """The fewest waits that close a ring; every stuck rank waits for a stuck rank."""
    by_rank = {graph.rank(wait.node): wait for wait in waits}
    next_rank = {rank: graph.rank(wait.needs) for rank, wait in by_rank.items()}
    cycles = [_cycle_from(rank, next_rank) for rank in sorted(next_rank)]
    return [by_rank[rank] for rank in min(cycles, key=len)]


def _cycle_from(rank: int, next_rank: dict[int, int]) -> list[int]:
    seen: dict[int, int] = {}
    path: list[int] = []
    while rank not in seen:
        seen[rank] = len(path)
        path.append(rank)
        rank = next_rank[rank]
    cycle = path[seen[rank] :]
    start = cycle.index(min(cycle))
    return cycle[start:] + cycle[:start]


class _Execution:
    def __init__(self, graph: Graph, parties: Iterable[Party], buffered: bool) -> None:
        self.graph = graph
        self.buffered = buffered
        self.heads = list(graph.first[:-1])
        self.done = bytearray(len(graph))
        self.reached = bytearray(len(graph))
        self.party: dict[int, Party] = {node: party for party in parties for node in party}
        self.waiting: dict[int, list[int]] = {}

    def finish(self) -> None:
        self.awake = list(range(len(self.heads)))
        while self.awake:
            self._advance(self.awake.pop())

    def _advance(self, rank: int) -> None:
        end = self.graph.first[rank + 1]
        while self.heads[rank] < end:
            node = self.heads[rank]
            missing = self._missing_input(node)
            if missing is not None:
                self.waiting.setdefault(missing, []).append(rank)
                return
            self.reached[node] = 1
            party = self.party.get(node)
            if party is None:
                self._complete(node, rank)
            elif all(self.reached[member] for member in party):
                self._complete_party(party)
            else:
                return

    def _complete_party(self, party: Party) -> None:
        for member in party:
            rank = self.graph.rank(member)
            self._complete(member, rank)
            self.awake.append(rank)

    def _complete(self, node: int, rank: int) -> None:
        self.done[node] = 1
        self.heads[rank] = node + 1
        self.awake += self.waiting.pop(node, ())

    def _missing_input(self, node: int) -> int | None:
        for source in self.graph.data_inputs(node):
            if not self.done[source]:
                return source
        if self.buffered:
            sender = self.graph.sender(node)
            if sender is not None and not self.done[sender]:
                return sender
        return None

    def waits(self) -> list[Wait]:
        heads = zip(self.heads, self.graph.first[1:], strict=True)
        return [Wait(node, self._needs(node)) for node, end in heads if node < end]

    def _needs(self, node: int) -> int:
        missing = self._missing_input(node)
        if missing is not None:
            return missing
        return next(member for member in self.party[node] if not self.reached[member])
