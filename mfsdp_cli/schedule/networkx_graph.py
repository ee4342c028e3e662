"""The schedule graph as a networkx graph: for export, and for questions asked of small ones.

networkx takes seconds to hold a million nodes; the proof works on the columns of
:class:`mfsdp_cli.schedule.graph.Graph`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mfsdp_cli.schedule.attributes import StageCost, node_attributes
from mfsdp_cli.schedule.edges import Reason, edges
from mfsdp_cli.schedule.graph import Graph

if TYPE_CHECKING:
    import networkx


def to_networkx(
    graph: Graph, costs: dict[int, StageCost] | None = None
) -> networkx.MultiDiGraph[int]:
    """All nodes with their attributes, all edges with their ``reason``.

    A multigraph: one action may wait for another for several reasons.
    """
    import networkx as nx

    exported: networkx.MultiDiGraph[int] = nx.MultiDiGraph()
    for node in range(len(graph)):
        exported.add_node(node, **node_attributes(graph, node, costs or {}))
    for reason in Reason:
        exported.add_edges_from(edges(graph, reason), reason=str(reason))
    return exported
