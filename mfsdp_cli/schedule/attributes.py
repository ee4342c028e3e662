"""What is known of a node of the schedule graph: stream, communicator, bytes, seconds, units."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mfsdp_cli.schedule.actions import COMPUTE, Kind
from mfsdp_cli.schedule.graph import Graph


class Stream(StrEnum):
    """Where an action's work is queued: on its device, or with the host that frees memory."""

    COMPUTE = "compute"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    FORWARD_P2P = "p2p forward"
    BACKWARD_P2P = "p2p backward"
    HOST = "host"


_STREAMS = {
    Kind.UNSHARD: Stream.ALL_GATHER,
    Kind.RESHARD: Stream.HOST,
    Kind.REDUCE_GRAD: Stream.REDUCE_SCATTER,
    Kind.SEND_F: Stream.FORWARD_P2P,
    Kind.RECV_F: Stream.FORWARD_P2P,
    Kind.SEND_B: Stream.BACKWARD_P2P,
    Kind.RECV_B: Stream.BACKWARD_P2P,
}


def stream_of(kind: Kind) -> Stream:
    """The stream an action of this kind works on."""
    return _STREAMS.get(kind, Stream.COMPUTE)


@dataclass(frozen=True)
class StageCost:
    """What a stage's actions cost.

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


_FREE = StageCost()


def communicator(graph: Graph, node: int) -> str:
    """The process group a node talks on; empty where it talks to nobody."""
    kind, rank = graph.kinds[node], graph.rank(node)
    if kind in (Kind.SEND_F, Kind.RECV_F):
        return "pipeline forward"
    if kind in (Kind.SEND_B, Kind.RECV_B):
        return "pipeline backward"
    if kind in (Kind.UNSHARD, Kind.REDUCE_GRAD, Kind.ROUTER_BIAS):
        return f"data parallel of pipeline rank {rank}"
    if kind is Kind.TIED_ALLREDUCE:
        groups = [ranks for ranks in graph.tied_pp_ranks if rank in ranks]
        return "; ".join("copies on " + ",".join(map(str, ranks)) for ranks in groups)
    return "all ranks" if kind is Kind.GRAD_NORM else ""


def node_bytes(graph: Graph, node: int, costs: dict[int, StageCost]) -> int:
    """Bytes a node moves; 0 where it moves nothing or costs are unknown."""
    kind, stage = graph.kinds[node], graph.stages[node]
    if kind is Kind.UNSHARD:
        return costs.get(stage, _FREE).parameter_bytes
    if kind is Kind.REDUCE_GRAD:
        return costs.get(stage, _FREE).gradient_bytes
    if kind in (Kind.SEND_F, Kind.RECV_B):
        return costs.get(stage, _FREE).output_bytes
    if kind in (Kind.RECV_F, Kind.SEND_B):
        return costs.get(stage - 1, _FREE).output_bytes
    return 0


def node_seconds(graph: Graph, node: int, costs: dict[int, StageCost]) -> float:
    """Seconds a compute node takes; 0 for others or where costs are unknown."""
    kind, cost = graph.kinds[node], costs.get(graph.stages[node], _FREE)
    if kind is Kind.FORWARD:
        return cost.forward_s
    if kind not in COMPUTE:
        return 0.0
    return cost.backward_s if kind is Kind.BACKWARD else cost.backward_s / 2


def node_attributes(graph: Graph, node: int, costs: dict[int, StageCost]) -> dict[str, Any]:
    """All of it as plain values; a stage or microbatch that a node has not is left out.

    Args:
        costs: by stage; empty where they are unknown.
    """
    stage, microbatch = graph.stages[node], graph.microbatches[node]
    attributes: dict[str, Any] = {
        "action": str(graph.actions[node]),
        "kind": str(graph.kinds[node]),
        "rank": graph.rank(node),
        "index": graph.index(node),
        "stream": str(stream_of(graph.kinds[node])),
        "communicator": communicator(graph, node),
        "bytes": node_bytes(graph, node, costs),
        "seconds": node_seconds(graph, node, costs),
        "units": ",".join(costs.get(stage, _FREE).units),
    }
    if stage >= 0:
        attributes["stage"] = stage
        attributes["chunk"] = graph.chunk_of(stage)
    if microbatch >= 0:
        attributes["microbatch"] = microbatch
    return attributes
