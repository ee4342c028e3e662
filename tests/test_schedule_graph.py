"""Nodes, edges and attributes of the schedule graph."""

import networkx as nx
import pytest

from mfsdp_cli.schedule.actions import COMPUTE, Kind, parse_action
from mfsdp_cli.schedule.attributes import StageCost, Stream, node_attributes, stream_of
from mfsdp_cli.schedule.edges import Reason, edges
from mfsdp_cli.schedule.networkx_graph import to_networkx
from tests.helpers.schedules import schedule

BUILT = schedule(2, 2, 4, resident_chunks=1, tied_pp_ranks=((0, 1),), router_bias=True)
GRAPH = BUILT.graph()


def node(text):
    action = parse_action(text)
    found = GRAPH.find(
        action.kind,
        -1 if action.stage is None else action.stage,
        -1 if action.microbatch is None else action.microbatch,
    )
    assert found is not None
    return found


def named(reason):
    names = GRAPH.actions
    return {(str(names[source]), str(names[target])) for source, target in edges(GRAPH, reason)}


def test_nodes_are_the_actions_of_all_ranks_in_order():
    assert len(GRAPH) == sum(BUILT.actions_per_rank)
    for rank, actions in enumerate(BUILT.actions):
        nodes = GRAPH.nodes_of_rank(rank)
        assert [GRAPH.actions[n] for n in nodes] == actions
        assert {GRAPH.rank(n) for n in nodes} == {rank}
        assert [GRAPH.index(n) for n in nodes] == list(range(len(actions)))


def test_data_edges():
    found = named(Reason.DATA)
    assert {
        ("0UNSHARD", "0F0"),
        ("0F0", "0SEND_F0"),
        ("1RECV_F0", "1F0"),
        ("3F0", "3B0"),
        ("3B0", "3SEND_B0"),
        ("2RECV_B0", "2B0"),
        ("2B0", "2REDUCE_GRAD"),
        ("0REDUCE_GRAD", "ROUTER_BIAS"),
        ("ROUTER_BIAS", "TIED_ALLREDUCE"),
        ("TIED_ALLREDUCE", "GRAD_NORM"),
        ("GRAD_NORM", "CLIP"),
        ("CLIP", "OPTIMIZER"),
        ("OPTIMIZER", "REFRESH_WEIGHTS"),
    } <= found
    assert ("0F0", "1F0") not in found


def test_each_message_edge_goes_from_a_send_to_its_receive():
    found = named(Reason.MESSAGE)
    assert len(found) == 2 * 3 * 4
    assert ("0SEND_F3", "1RECV_F3") in found
    assert ("2SEND_B1", "1RECV_B1") in found


def test_buffer_edges():
    """With one slot a stage is gathered once another one is freed."""
    found = named(Reason.BUFFER)
    assert ("0F1", "0RESHARD") in found
    assert ("0RESHARD", "2UNSHARD") in found


def test_host_and_stream_edges():
    host, stream = named(Reason.HOST), named(Reason.STREAM)
    assert len(list(edges(GRAPH, Reason.HOST))) == len(GRAPH) - 2
    assert ("0UNSHARD", "0F0") in host
    assert ("0UNSHARD", "0F0") not in stream
    assert ("0F0", "0F1") in stream
    assert ("0UNSHARD", "2UNSHARD") in stream


def test_all_edges_together_have_no_cycle():
    exported = to_networkx(GRAPH)
    assert exported.number_of_nodes() == len(GRAPH)
    assert nx.is_directed_acyclic_graph(exported)
    reasons = {reason for *_, reason in exported.edges(data="reason")}
    assert reasons == set(map(str, Reason))


def test_every_compute_action_waits_for_what_it_reads():
    """Whatever order edges allow, a forward follows the forward of the stage before."""
    exported = nx.DiGraph(to_networkx(GRAPH))
    for microbatch in range(4):
        for stage in range(3):
            before, after = node(f"{stage}F{microbatch}"), node(f"{stage + 1}F{microbatch}")
            assert nx.has_path(exported, before, after)
            back = node(f"{stage + 1}B{microbatch}"), node(f"{stage}B{microbatch}")
            assert nx.has_path(exported, *back)


def test_attributes():
    costs = {stage: StageCost(0.5, 1.5, 10 + stage, 100, 200, ("root",)) for stage in range(4)}
    assert node_attributes(GRAPH, node("2F3"), costs) == {
        "action": "2F3",
        "kind": "F",
        "rank": 0,
        "index": GRAPH.index(node("2F3")),
        "stream": "compute",
        "communicator": "",
        "bytes": 0,
        "seconds": 0.5,
        "units": "root",
        "stage": 2,
        "chunk": 1,
        "microbatch": 3,
    }


@pytest.mark.parametrize(
    ("text", "communicator", "size"),
    [
        ("1UNSHARD", "data parallel of pipeline rank 1", 100),
        ("1REDUCE_GRAD", "data parallel of pipeline rank 1", 200),
        ("1SEND_F0", "pipeline forward", 11),
        ("2RECV_F0", "pipeline forward", 11),
        ("2SEND_B0", "pipeline backward", 11),
        ("1RECV_B0", "pipeline backward", 11),
        ("TIED_ALLREDUCE", "copies on 0,1", 0),
        ("GRAD_NORM", "all ranks", 0),
        ("CLIP", "", 0),
    ],
)
def test_communicators_and_bytes(text, communicator, size):
    costs = {stage: StageCost(0.5, 1.5, 10 + stage, 100, 200) for stage in range(4)}
    attributes = node_attributes(GRAPH, node(text), costs)
    assert (attributes["communicator"], attributes["bytes"]) == (communicator, size)


def test_streams():
    assert {stream_of(kind) for kind in COMPUTE} == {Stream.COMPUTE}
    assert stream_of(Kind.UNSHARD) is Stream.ALL_GATHER
    assert stream_of(Kind.REDUCE_GRAD) is Stream.REDUCE_SCATTER
    assert stream_of(Kind.RECV_B) is Stream.BACKWARD_P2P
