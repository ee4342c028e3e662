"""Writes a schedule to a file; the suffix decides in which form.

============== ===========================================================================
``.json``      specification, lists, nodes with attributes and edges with reasons
``.csv``       torch pipelining's CSV, which torch loads; it knows no end of step, so those
               actions are left out
``.trace.json`` Chrome's and Perfetto's trace: a process a rank, a thread a stream
``.graphml``   the graph for Gephi, yEd, networkx
``.svg``       a picture: ranks as rows, time as columns
============== ===========================================================================
"""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.files import write_whole
from mfsdp_cli.schedule.actions import END_OF_STEP
from mfsdp_cli.schedule.attributes import StageCost, node_attributes
from mfsdp_cli.schedule.build import Schedule, canonical_text
from mfsdp_cli.schedule.edges import Reason, edges
from mfsdp_cli.schedule.graph import Graph
from mfsdp_cli.schedule.networkx_graph import to_networkx
from mfsdp_cli.schedule.picture import to_svg
from mfsdp_cli.schedule.timing import step_times
from mfsdp_cli.schedule.trace_export import to_trace

Costs = dict[int, StageCost]
SCHEMA = "mfsdp.schedule/1"


def write_graph(schedule: Schedule, path: str | Path, costs: Costs | None = None) -> None:
    """Write a schedule to ``path``, in the form that its suffix names.

    Args:
        costs: by stage; without them chunks take equal time and communication none.

    Raises:
        MfsdpError: MF309 for a suffix that is none of the five, or a file that cannot be written.
    """
    text = render(schedule, suffix_of(path), costs)
    try:
        write_whole(Path(path), text)
    except OSError as error:
        reason = error.strerror or str(error)
        raise MfsdpError(
            "MF309", f"cannot write the schedule graph: {reason}", where=str(path)
        ) from error


def suffix_of(path: str | Path) -> str:
    """The export suffix of a file name, in lower case; MF309 where there is none."""
    name = Path(path).name.lower()
    # Longest first: `.trace.json` is not `.json`.
    for suffix in sorted(_RENDER, key=len, reverse=True):
        if name.endswith(suffix):
            return suffix
    raise MfsdpError(
        "MF309",
        f"cannot tell the form of the schedule graph from the name {Path(path).name!r}",
        where=f"--graph {path}",
        hint=f"let it end in one of {', '.join(_RENDER)}",
    )


def render(schedule: Schedule, suffix: str, costs: Costs | None = None) -> str:
    """The text of one export form; ``suffix`` as :func:`suffix_of` gives it."""
    return _RENDER[suffix](schedule, costs or {})


def to_torch_csv(schedule: Schedule, _costs: Costs) -> str:
    """A row a rank, without the actions at the end of the step."""
    return canonical_text(
        [action for action in actions if action.kind not in END_OF_STEP]
        for actions in schedule.actions
    )


def to_json(schedule: Schedule, costs: Costs) -> str:
    """One JSON document; nodes are numbered by rank and place, edges name (source, target)."""
    graph = schedule.graph()
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "spec": schedule.spec.to_json(),
        "digest": schedule.digest,
        "actions": [[str(action) for action in actions] for actions in schedule.actions],
        "nodes": [
            {"id": node, **node_attributes(graph, node, costs)} for node in range(len(graph))
        ],
        "edges": _edges(graph),
    }
    return json.dumps(document, allow_nan=False, separators=(",", ":")) + "\n"


def _edges(graph: Graph) -> list[dict[str, Any]]:
    return [
        {"source": source, "target": target, "reason": str(reason)}
        for reason in Reason
        for source, target in edges(graph, reason)
    ]


def _graphml(schedule: Schedule, costs: Costs) -> str:
    import networkx as nx

    buffer = BytesIO()
    nx.write_graphml_xml(to_networkx(schedule.graph(), costs), buffer)
    return buffer.getvalue().decode()


def _trace(schedule: Schedule, costs: Costs) -> str:
    graph = schedule.graph()
    return to_trace(graph, step_times(schedule, graph, costs), costs)


def _svg(schedule: Schedule, costs: Costs) -> str:
    graph = schedule.graph()
    return to_svg(schedule, graph, step_times(schedule, graph, costs))


_RENDER: dict[str, Callable[[Schedule, Costs], str]] = {
    ".json": to_json,
    ".csv": to_torch_csv,
    ".trace.json": _trace,
    ".graphml": _graphml,
    ".svg": _svg,
}
