"""Graphs for tests: a live one of which no node has begun, and one that was written as JSON."""

from __future__ import annotations

import msgspec

from dovetail.ir.graph import ExecutionGraph, GraphFile, make_graph
from dovetail.ir.live_graph import LiveGraph, LiveNode


def live_of(plain: ExecutionGraph) -> LiveGraph:
    found, nodes = LiveGraph(plain), dict[str, LiveNode]()
    for node in plain.nodes:
        made = LiveNode(node.name, node.kind, node.model, clusters=node.clusters, place=node.place)
        nodes[node.name] = found.add(made)
    for edge in plain.edges:
        found.link(nodes[edge.source], nodes[edge.target], edge.kind)
    return found


def read_graph(data: bytes) -> ExecutionGraph:
    return make_graph(msgspec.json.decode(data, type=GraphFile))
