"""A live graph with all nodes of a plain one, none of which has begun."""

from __future__ import annotations

from dovetail.ir.graph import ExecutionGraph
from dovetail.ir.live_graph import LiveGraph, LiveNode


def live_of(plain: ExecutionGraph) -> LiveGraph:
    found, nodes = LiveGraph(plain), dict[str, LiveNode]()
    for node in plain.nodes:
        made = LiveNode(node.name, node.kind, node.model, clusters=node.clusters, place=node.place)
        nodes[node.name] = found.add(made)
    for edge in plain.edges:
        found.link(nodes[edge.source], nodes[edge.target], edge.kind)
    return found
