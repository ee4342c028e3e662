"""The schedule as a directed graph over the actions of all ranks.

Kept in columns, not in objects: a node is a number, ``first[rank] + index`` in the rank's list,
and its kind, stage and microbatch stand in three lists. Edges, and why one action waits for
another, are made on demand by :mod:`mfsdp_cli.schedule.edges`; what else is known of a node by
:mod:`mfsdp_cli.schedule.attributes`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property

from mfsdp_cli.schedule.actions import RECEIVES, SENDS, Action, Kind

_MESSAGES = SENDS | RECEIVES
_GRADIENT = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
CONTRIBUTES = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
# What each kind's message comes from: the sender's kind, and the way to its stage.
_SENDER = {Kind.RECV_F: (Kind.SEND_F, -1), Kind.RECV_B: (Kind.SEND_B, 1)}


class Graph:
    """Nodes and edges of a schedule.

    Args:
        lists: actions of each rank, in order.
        stage_ranks: rank of each stage.
        tied_pp_ranks: ranks of each shared-parameter group.
        messages: whether outputs for other ranks travel by send and receive; False where compute
            actions wait for one another directly; None: whether any message stands in the lists.
    """

    def __init__(
        self,
        lists: Sequence[Sequence[Action]],
        stage_ranks: Mapping[int, int],
        *,
        tied_pp_ranks: Sequence[Sequence[int]] = (),
        messages: bool | None = None,
    ) -> None:
        self.lists = lists
        self.stage_ranks = stage_ranks
        self.tied_pp_ranks = tied_pp_ranks
        self.first = [0]
        for actions in lists:
            self.first.append(self.first[-1] + len(actions))
        self.actions = [action for actions in lists for action in actions]
        self.kinds = [action.kind for action in self.actions]
        self.stages = [-1 if a.stage is None else a.stage for a in self.actions]
        self.microbatches = [-1 if a.microbatch is None else a.microbatch for a in self.actions]
        if messages is None:
            messages = any(kind in _MESSAGES for kind in self.kinds)
        self.has_messages = messages

    def __len__(self) -> int:
        return len(self.actions)

    def rank(self, node: int) -> int:
        """The rank that runs a node."""
        return bisect_right(self.first, node) - 1

    def nodes_of_rank(self, rank: int) -> range:
        """A rank's nodes, in its list's order."""
        return range(self.first[rank], self.first[rank + 1])

    def index(self, node: int) -> int:
        """The place of a node in its rank's list."""
        return node - self.first[self.rank(node)]

    def chunk_of(self, stage: int) -> int:
        """Which of its rank's stages a stage is, counted from 0 (its vp_stage)."""
        return self._chunks[stage]

    @cached_property
    def _chunks(self) -> dict[int, int]:
        held: Counter[int] = Counter()
        chunks = {}
        for stage in sorted(self.stage_ranks):
            rank = self.stage_ranks[stage]
            chunks[stage] = held[rank]
            held[rank] += 1
        return chunks

    @cached_property
    def _places(self) -> dict[Kind, dict[tuple[int, int], int]]:
        """Node by kind, then (stage, microbatch): the first where it stands several times."""
        places: dict[Kind, dict[tuple[int, int], int]] = {kind: {} for kind in Kind}
        columns = zip(self.kinds, self.stages, self.microbatches, strict=True)
        for node, (kind, stage, microbatch) in enumerate(columns):
            places[kind].setdefault((stage, microbatch), node)
        return places

    def find(self, kind: Kind, stage: int, microbatch: int) -> int | None:
        """The node of an action, the first if there are several; None if there is none."""
        return self._places[kind].get((stage, microbatch))

    def backward(self, stage: int, microbatch: int) -> int | None:
        """The node whose end gives the gradient of a stage's input: full or split backward."""
        full = self.find(Kind.BACKWARD, stage, microbatch)
        return self.find(Kind.BACKWARD_INPUT, stage, microbatch) if full is None else full

    @cached_property
    def _by_kind(self) -> dict[Kind, list[int]]:
        nodes: dict[Kind, list[int]] = {kind: [] for kind in Kind}
        for node, kind in enumerate(self.kinds):
            nodes[kind].append(node)
        return nodes

    def nodes_of(self, kind: Kind) -> list[int]:
        """All nodes of a kind, by rank and place."""
        return self._by_kind[kind]

    def data_inputs(self, node: int) -> list[int]:
        """Compute and receive nodes whose result this node reads; missing ones left out."""
        kind, stage, microbatch = self.kinds[node], self.stages[node], self.microbatches[node]
        if kind is Kind.FORWARD:
            found = [self._arrival(Kind.RECV_F, stage, stage - 1, microbatch)]
        elif kind in _GRADIENT:
            arrival = self._arrival(Kind.RECV_B, stage, stage + 1, microbatch)
            found = [self.find(Kind.FORWARD, stage, microbatch), arrival]
        elif kind is Kind.SEND_F:
            found = [self.find(Kind.FORWARD, stage, microbatch)]
        elif kind is Kind.SEND_B:
            found = [self.backward(stage, microbatch)]
        elif kind is Kind.BACKWARD_WEIGHT:
            found = [self.find(Kind.BACKWARD_INPUT, stage, microbatch)]
        else:
            return []
        return [source for source in found if source is not None]

    def _arrival(self, receive: Kind, stage: int, source: int, microbatch: int) -> int | None:
        """What brings a neighbour's output: a receive, or its compute node where none is due."""
        received = self.find(receive, stage, microbatch)
        if received is not None:
            return received
        if self.needs_message(source, stage):
            return None
        if receive is Kind.RECV_F:
            return self.find(Kind.FORWARD, source, microbatch)
        return self.backward(source, microbatch)

    def needs_message(self, source: int, stage: int) -> bool:
        """Whether a neighbour's output has to be sent: it is on another rank."""
        ranks = self.stage_ranks
        return self.has_messages and source in ranks and ranks[source] != ranks.get(stage)

    def sender(self, node: int) -> int | None:
        """The send that a receive belongs to; None for other nodes and lonely receives."""
        if self.kinds[node] not in _SENDER:
            return None
        kind, way = _SENDER[self.kinds[node]]
        return self.find(kind, self.stages[node] + way, self.microbatches[node])
