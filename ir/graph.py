"""ExecutionGraph: what one run of a workflow consists of, and what waits for what.

In: frozen nodes and edges in a stable order. Out: a checked, immutable graph with a JSON form and a
content hash. Transformations (`dovetail.ir.place`) are functions from graph to graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import msgspec
import networkx as nx  # type: ignore[import-untyped]

from dovetail.ir.errors import WorkflowError

GENERATION, RETRIEVAL, EMBEDDING = "generation", "retrieval", "embedding"
FUNCTION, MERGE, VALIDATE = "function", "merge", "validate"
KINDS = (GENERATION, RETRIEVAL, EMBEDDING, FUNCTION, MERGE, VALIDATE)
DATA, PHASE_SWITCH, ALL_REDUCE = "data", "phase_switch", "all_reduce"
ORDERS = {DATA: True, PHASE_SWITCH: True, ALL_REDUCE: False}
"""Kinds of edge, and whether the target starts after the source; else the two run side by side."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where a sub-node runs: one process in one phase. node: of memory, None = those of `cpus`."""

    process: int
    phase: str  # prefill | decode
    threads: int
    cpus: tuple[int, ...]
    node: int | None = None


class GraphNode(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of work. origin: the node that a transformation made it from."""

    name: str
    kind: str
    model: str | None = None
    origin: str | None = None
    place: Placement | None = None


class GraphEdge(msgspec.Struct, frozen=True, kw_only=True):
    """Data or a sum that goes from one node to another; `kind` is a key of ORDERS."""

    source: str
    target: str
    kind: str = DATA


class GraphFile(msgspec.Struct, frozen=True, kw_only=True):
    """`graph/<name>.json`."""

    schema: int = 1
    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...] = ()


class ExecutionGraph:
    """A checked graph. Nodes and edges keep the order they were given in; equal by content."""

    def __init__(self, nodes: Iterable[GraphNode], edges: Iterable[GraphEdge] = ()) -> None:
        """Raises WorkflowError naming the node: twice there, unknown, of no kind, in a cycle."""
        self.file = GraphFile(nodes=tuple(nodes), edges=tuple(edges))
        self._graph: nx.DiGraph = nx.DiGraph()
        self._graph.add_nodes_from((node.name, {"node": node}) for node in self.file.nodes)
        self._graph.add_edges_from(
            (edge.source, edge.target, {"edge": edge}) for edge in self.file.edges
        )
        for fault in self._faults():
            raise WorkflowError(f"the execution graph is wrong: {fault}")

    @property
    def nodes(self) -> tuple[GraphNode, ...]:
        """All nodes."""
        return self.file.nodes

    @property
    def edges(self) -> tuple[GraphEdge, ...]:
        """All edges."""
        return self.file.edges

    def node(self, name: str) -> GraphNode:
        """Return a node; KeyError where there is none of that name."""
        found: GraphNode = self._graph.nodes[name]["node"]
        return found

    def parents(self, name: str, kind: str = DATA) -> tuple[str, ...]:
        """Return the names of the nodes that edges of `kind` come from."""
        edges = self._graph.in_edges(name, data="edge")
        return tuple(source for source, _, edge in edges if edge.kind == kind)

    def ordered(self) -> tuple[str, ...]:
        """Return the names so that each comes after all it waits for; ties as they were given."""
        place = {node.name: i for i, node in enumerate(self.nodes)}
        return tuple(nx.lexicographical_topological_sort(self._waits(), key=place.__getitem__))

    def to_json(self) -> bytes:
        """Return the graph as JSON, which `read_graph` reads back to an equal one."""
        return msgspec.json.encode(self.file)

    def digest(self) -> str:
        """Return a sha256 of nodes and edges."""
        return hashlib.sha256(self.to_json()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExecutionGraph) and self.file == other.file

    def __hash__(self) -> int:
        return hash(self.file)

    def _waits(self) -> nx.DiGraph:
        """Return the graph without edges between nodes that run side by side."""
        return nx.subgraph_view(
            self._graph, filter_edge=lambda a, b: ORDERS[self._graph.edges[a, b]["edge"].kind]
        )

    def _faults(self) -> Iterator[str]:
        names = [node.name for node in self.nodes]
        yield from (f"{n!r} is there twice" for n in dict.fromkeys(names) if names.count(n) > 1)
        for node in self.nodes:
            if node.kind not in KINDS:
                yield f"{node.name!r} is of no known kind but {node.kind!r}"
        for edge in self.edges:
            if edge.kind not in ORDERS:
                yield f"an edge at {edge.source!r} is of no known kind but {edge.kind!r}"
            if unknown := {edge.source, edge.target} - set(names):
                yield f"an edge leads to or from {min(unknown)!r}, which is no node"
        if self._graph.number_of_edges() < len(self.edges):
            yield "two edges join the same nodes"
        try:
            cycle = nx.find_cycle(self._waits())
        except nx.NetworkXNoCycle:
            return
        yield f"{cycle[0][0]!r} waits for itself"


def read_graph(data: bytes) -> ExecutionGraph:
    """Return the graph that JSON describes; WorkflowError where it describes none."""
    try:
        file = msgspec.json.decode(data, type=GraphFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WorkflowError(f"this is no execution graph: {error}") from None
    return ExecutionGraph(file.nodes, file.edges)
