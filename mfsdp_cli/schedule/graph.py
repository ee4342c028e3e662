"""The schedule as a directed graph over the actions of all ranks, and why one waits for another.

Kept in columns, not in objects: a node is a number, ``first[rank] + index`` in the rank's list,
and its kind, stage and microbatch stand in three lists. Edges are made on demand, one reason at a
time. :func:`mfsdp_cli.schedule.networkx_graph.to_networkx` makes a networkx graph for export.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise

from mfsdp_cli.schedule.actions import COMPUTE, RECEIVES, SENDS, Action, Kind

Edge = tuple[int, int]


class Reason(StrEnum):
    """Why the target of an edge waits for its source."""

    DATA = "data"
    HOST = "host order"
    STREAM = "stream order"
    MESSAGE = "matched communication"
    BUFFER = "buffer lifetime"


class Stream(StrEnum):
    """Where an action's work is queued on its device."""

    COMPUTE = "compute"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    FORWARD_P2P = "p2p forward"
    BACKWARD_P2P = "p2p backward"


_STREAMS = {
    Kind.UNSHARD: Stream.ALL_GATHER,
    Kind.REDUCE_GRAD: Stream.REDUCE_SCATTER,
    Kind.SEND_F: Stream.FORWARD_P2P,
    Kind.RECV_F: Stream.FORWARD_P2P,
    Kind.SEND_B: Stream.BACKWARD_P2P,
    Kind.RECV_B: Stream.BACKWARD_P2P,
}
_MESSAGES = SENDS | RECEIVES
_GRADIENT = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
_CONTRIBUTES = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
# What each kind's message comes from: the sender's kind, and the way to its stage.
_SENDER = {Kind.RECV_F: (Kind.SEND_F, -1), Kind.RECV_B: (Kind.SEND_B, 1)}


def stream_of(kind: Kind) -> Stream:
    """The stream an action of this kind works on."""
    return _STREAMS.get(kind, Stream.COMPUTE)


@dataclass(frozen=True)
class StageCost:
    """What a stage's actions cost; used for node attributes alone.

    Args:
        forward_s, backward_s: seconds of one microbatch.
        output_bytes: the tensor that one microbatch sends to the next stage.
        parameter_bytes: the stage's parameters, gathered.
        gradient_bytes: its gradients, unsharded.
        units: names of the parameter groups that its actions cover.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    output_bytes: int = 0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    units: tuple[str, ...] = ()


class Graph:
    """Nodes and edges of a schedule.

    Args:
        lists: actions of each rank, in order.
        stage_ranks: rank of each stage.
        tied_pp_ranks: ranks of each shared-parameter group.
        messages: whether outputs for other ranks travel by send and receive; False where compute
            actions wait for one another directly; None: whether any message stands in the lists.
        costs: by stage, for the nodes' bytes and seconds.
    """

    def __init__(
        self,
        lists: Sequence[Sequence[Action]],
        stage_ranks: Mapping[int, int],
        *,
        tied_pp_ranks: Sequence[Sequence[int]] = (),
        messages: bool | None = None,
        costs: Mapping[int, StageCost] | None = None,
    ) -> None:
        self.lists = lists
        self.stage_ranks = stage_ranks
        self.tied_pp_ranks = tied_pp_ranks
        self.costs = costs or {}
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

    # -- look-ups --------------------------------------------------------------------------

    def rank(self, node: int) -> int:
        """The rank that runs a node."""
        return bisect_right(self.first, node) - 1

    def index(self, node: int) -> int:
        """The place of a node in its rank's list."""
        return node - self.first[self.rank(node)]

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

    # -- what a node waits for -------------------------------------------------------------

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

    # -- edges -----------------------------------------------------------------------------

    def edges(self, reason: Reason) -> Iterator[Edge]:
        """All edges of one reason, as (source, target)."""
        if reason is Reason.HOST:
            return self._host_edges()
        if reason is Reason.STREAM:
            return self._stream_edges()
        if reason is Reason.MESSAGE:
            return self._message_edges()
        return self._data_edges() if reason is Reason.DATA else self._buffer_edges()

    def _rank_nodes(self) -> Iterator[range]:
        return (range(start, end) for start, end in pairwise(self.first))

    def _host_edges(self) -> Iterator[Edge]:
        """A rank issues its actions one after another."""
        for nodes in self._rank_nodes():
            yield from pairwise(nodes)

    def _stream_edges(self) -> Iterator[Edge]:
        """Work on one stream of one rank runs in the order issued."""
        for nodes in self._rank_nodes():
            latest: dict[Stream, int] = {}
            for node in nodes:
                stream = stream_of(self.kinds[node])
                if stream in latest:
                    yield latest[stream], node
                latest[stream] = node

    def _message_edges(self) -> Iterator[Edge]:
        for node in range(len(self)):
            source = self.sender(node)
            if source is not None:
                yield source, node

    def _data_edges(self) -> Iterator[Edge]:
        """Activations and gradients, gathered parameters, reduced gradients, then the update."""
        for nodes in self._rank_nodes():
            gathered: dict[int, int] = {}
            contributors: dict[int, list[int]] = {}
            reduced: list[int] = []
            for node in nodes:
                kind, stage = self.kinds[node], self.stages[node]
                yield from ((source, node) for source in self.data_inputs(node))
                if kind is Kind.UNSHARD:
                    gathered[stage] = node
                elif kind in COMPUTE and stage in gathered:
                    yield gathered[stage], node
                elif kind is Kind.REDUCE_GRAD:
                    yield from ((source, node) for source in contributors.pop(stage, ()))
                    reduced.append(node)
                elif stage < 0:
                    yield from ((source, node) for source in reduced)
                    reduced = [node]
                if kind in _CONTRIBUTES:
                    contributors.setdefault(stage, []).append(node)

    def _buffer_edges(self) -> Iterator[Edge]:
        """A stage is freed after its last use; a gather takes the place that was freed."""
        for nodes in self._rank_nodes():
            used: dict[int, int] = {}
            freed: int | None = None
            for node in nodes:
                kind, stage = self.kinds[node], self.stages[node]
                if kind in COMPUTE:
                    used[stage] = node
                elif kind is Kind.RESHARD:
                    if stage in used:
                        yield used[stage], node
                    freed = node
                elif kind is Kind.UNSHARD and freed is not None:
                    yield freed, node
                    freed = None

    # -- attributes ------------------------------------------------------------------------

    def communicator(self, node: int) -> str:
        """The process group a node talks on; empty where it talks to nobody."""
        kind, rank = self.kinds[node], self.rank(node)
        if kind in (Kind.SEND_F, Kind.RECV_F):
            return "pipeline forward"
        if kind in (Kind.SEND_B, Kind.RECV_B):
            return "pipeline backward"
        if kind in (Kind.UNSHARD, Kind.REDUCE_GRAD, Kind.ROUTER_BIAS):
            return f"data parallel of pipeline rank {rank}"
        if kind is Kind.TIED_ALLREDUCE:
            groups = [ranks for ranks in self.tied_pp_ranks if rank in ranks]
            return "; ".join("copies on " + ",".join(map(str, ranks)) for ranks in groups)
        return "all ranks" if kind is Kind.GRAD_NORM else ""

    def bytes_of(self, node: int) -> int:
        """Bytes a node moves; 0 where it moves nothing or costs are unknown."""
        kind, stage = self.kinds[node], self.stages[node]
        if kind is Kind.UNSHARD:
            return self._cost(stage).parameter_bytes
        if kind is Kind.REDUCE_GRAD:
            return self._cost(stage).gradient_bytes
        if kind in (Kind.SEND_F, Kind.RECV_B):
            return self._cost(stage).output_bytes
        if kind in (Kind.RECV_F, Kind.SEND_B):
            return self._cost(stage - 1).output_bytes
        return 0

    def seconds_of(self, node: int) -> float:
        """Seconds a compute node takes; 0 for others or where costs are unknown."""
        kind, cost = self.kinds[node], self._cost(self.stages[node])
        if kind is Kind.FORWARD:
            return cost.forward_s
        if kind not in COMPUTE:
            return 0.0
        return cost.backward_s if kind is Kind.BACKWARD else cost.backward_s / 2

    def units_of(self, node: int) -> tuple[str, ...]:
        """The parameter groups that a node covers."""
        return self._cost(self.stages[node]).units

    def _cost(self, stage: int) -> StageCost:
        return self.costs.get(stage, StageCost())
