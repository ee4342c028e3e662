"""Exports: each form read back by what reads it elsewhere."""

import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from itertools import pairwise

import networkx as nx
import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.schedule.actions import COMPUTE, END_OF_STEP, RECEIVES, SENDS, Kind
from mfsdp_cli.schedule.attributes import StageCost
from mfsdp_cli.schedule.edges import Reason
from mfsdp_cli.schedule.export import render, suffix_of, write_graph
from mfsdp_cli.schedule.spec import ScheduleSpec
from mfsdp_cli.schedule.timing import step_times
from tests.helpers.schedules import schedule

BUILT = schedule(4, 2, 8, resident_chunks=2, tied_pp_ranks=((0, 3),), router_bias=True)
COSTS = {stage: StageCost(0.01 + stage / 1000, 0.03, 1 << 20, 1 << 22) for stage in range(8)}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("a.json", ".json"),
        ("a.b.JSON", ".json"),
        ("a.trace.json", ".trace.json"),
        ("dir/a.csv", ".csv"),
        ("a.graphml", ".graphml"),
        (".svg", ".svg"),
    ],
)
def test_suffixes(name, suffix):
    assert suffix_of(name) == suffix


@pytest.mark.parametrize("name", ["a", "a.txt", "a.json.gz", "csv", ""])
def test_unknown_suffixes(name):
    with pytest.raises(MfsdpError, match="MF309") as error:
        suffix_of(name)
    for suffix in (".json", ".csv", ".trace.json", ".graphml", ".svg"):
        assert suffix in error.value.finding.hint


@pytest.mark.parametrize("suffix", [".json", ".csv", ".trace.json", ".graphml", ".svg"])
def test_writes_what_it_renders(tmp_path, suffix):
    path = tmp_path / f"schedule{suffix}"
    write_graph(BUILT, path, COSTS)
    assert path.read_bytes().decode() == render(BUILT, suffix, COSTS)


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(MfsdpError, match="MF309"):
        write_graph(BUILT, tmp_path / "missing" / "a.csv")


def test_torch_reads_the_csv():
    lines = render(BUILT, ".csv").splitlines()
    assert len(lines) == 4
    parse = torch_schedules._Action.from_str
    for line, actions in zip(lines, BUILT.actions, strict=True):
        kept = [str(action) for action in actions if action.kind not in END_OF_STEP]
        assert [str(parse(cell)) for cell in line.split(",")] == kept


def test_json_holds_everything():
    document = json.loads(render(BUILT, ".json", COSTS))
    assert document["schema"] == "mfsdp.schedule/1"
    assert document["digest"] == BUILT.digest
    assert ScheduleSpec.from_json(document["spec"]) == BUILT.spec
    assert document["actions"] == [[str(a) for a in actions] for actions in BUILT.actions]
    nodes = document["nodes"]
    assert [node["id"] for node in nodes] == list(range(sum(BUILT.actions_per_rank)))
    [gather] = [node for node in nodes if node["action"] == "5UNSHARD"]
    assert (gather["rank"], gather["chunk"], gather["bytes"]) == (1, 1, 1 << 22)
    assert {edge["reason"] for edge in document["edges"]} == set(map(str, Reason))


def test_networkx_reads_the_graphml():
    graph = nx.parse_graphml(render(BUILT, ".graphml", COSTS), node_type=int)
    document = json.loads(render(BUILT, ".json", COSTS))
    assert graph.number_of_nodes() == len(document["nodes"])
    assert graph.number_of_edges() == len(document["edges"])
    assert graph.nodes[0]["action"] == "0UNSHARD"
    assert nx.is_directed_acyclic_graph(graph)


# -- times and trace -----------------------------------------------------------------------


@pytest.mark.parametrize("costs", [None, COSTS])
def test_times_follow_lists_and_messages(costs):
    graph = BUILT.graph()
    times = step_times(BUILT, graph, costs)
    assert times.measured == (costs is not None)
    for rank in range(4):
        compute = [n for n in graph.nodes_of_rank(rank) if graph.kinds[n] in COMPUTE]
        for before, after in pairwise(compute):
            assert times.ends[before] <= times.starts[after]
    for node, kind in enumerate(graph.kinds):
        assert times.starts[node] < times.ends[node]
        if kind in RECEIVES:
            assert times.starts[node] == times.starts[graph.sender(node)]
        for source in graph.data_inputs(node):
            if kind in COMPUTE and graph.kinds[source] in COMPUTE:
                assert times.ends[source] <= times.starts[node]
        if kind is Kind.GRAD_NORM:
            last = max(times.ends[n] for n, k in enumerate(graph.kinds) if k in COMPUTE)
            assert times.starts[node] >= last


def test_measured_times_are_seconds():
    graph = BUILT.graph()
    times = step_times(BUILT, graph, COSTS)
    first = graph.find(Kind.FORWARD, 3, 0)
    assert times.ends[first] - times.starts[first] == pytest.approx(0.013)


def test_trace():
    graph = BUILT.graph()
    events = json.loads(render(BUILT, ".trace.json", COSTS))["traceEvents"]
    phases = Counter(event["ph"] for event in events)
    messages = sum(kind in SENDS for kind in graph.kinds)
    assert phases["X"] == len(graph)
    assert phases["s"] == phases["f"] == messages == 2 * 7 * 8
    names = {e["args"]["name"] for e in events if e.get("name") == "process_name"}
    assert names == {f"pipeline rank {rank}" for rank in range(4)}
    [forward] = [e for e in events if e["ph"] == "X" and e["name"] == "3F0"]
    assert (forward["pid"], forward["args"]["stage"]) == (3, 3)
    assert forward["dur"] == pytest.approx(13_000)


def test_slices_of_a_thread_do_not_overlap():
    events = json.loads(render(BUILT, ".trace.json"))["traceEvents"]
    threads = {}
    for event in events:
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for slices in threads.values():
        slices.sort(key=lambda event: event["ts"])
        for before, after in pairwise(slices):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6


def test_an_arrow_begins_in_a_send_and_ends_in_its_receive():
    events = json.loads(render(BUILT, ".trace.json"))["traceEvents"]
    slices = {(e["pid"], e["tid"], e["ts"]): e["name"] for e in events if e["ph"] == "X"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    for start in (e for e in events if e["ph"] == "s"):
        sent = slices[start["pid"], start["tid"], start["ts"]]
        end = ends[start["id"]]
        received = slices[end["pid"], end["tid"], end["ts"]]
        assert (sent[1:5], received[1:5]) == ("SEND", "RECV")
        assert sent[5:] == received[5:]


# -- picture -------------------------------------------------------------------------------


def bars(text):
    """(name, left, width) of each bar with a title, and the labels inside."""
    found = []
    for group in ElementTree.fromstring(text).iter(f"{SVG}g"):
        box = group.find(f"{SVG}rect")
        labels = [label.text for label in group.findall(f"{SVG}text")]
        title = group.find(f"{SVG}title").text
        found.append((title, float(box.get("x")), float(box.get("width")), labels))
    return found


@pytest.mark.parametrize("costs", [None, COSTS])
def test_picture_has_a_labelled_bar_for_every_compute_action(costs):
    found = bars(render(BUILT, ".svg", costs))
    compute = [a for actions in BUILT.actions for a in actions if a.kind in COMPUTE]
    assert len(found) == len(compute) == 2 * 8 * 8
    for (title, _, width, labels), action in zip(found, compute, strict=True):
        assert title.startswith(f"{action},")
        assert labels == [f"{action.kind}{action.microbatch}", f"s{action.stage}"]
        assert width > 0


def test_bars_of_a_rank_stand_beside_one_another():
    found = bars(render(schedule(1, 1, 3), ".svg"))
    for (_, left, width, _), (_, following, _, _) in pairwise(found):
        assert left + width <= following + 0.1


@pytest.mark.parametrize(
    ("sizes", "resident"),
    [((1, 1, 1), 1), ((2, 2, 4), 0), ((2, 4, 8), 2), ((4, 2, 8), 9), ((16, 2, 64), 1)],
)
def test_pictures_of_all_sizes(sizes, resident):
    built = schedule(*sizes, resident_chunks=resident)
    root = ElementTree.fromstring(render(built, ".svg"))
    assert float(root.get("width")) <= 24_100
    gathered = [line for line in root.iter(f"{SVG}line") if line.find(f"{SVG}title") is not None]
    assert len(gathered) == sum(built.gathers_per_step)
