"""ExecutionGraph: what serves, what a workflow may come to, and what one run of it came to.

In: frozen nodes and edges in a stable order. Out: a checked, immutable graph with a JSON form and a
content hash. `contract` undoes what `ir/place.py` and `ir/transform.py` make of it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import networkx as nx  # type: ignore[import-untyped]
from msgspec.structs import replace

from dovetail.ir.artifact import Amount, Number, Parts, Spins
from dovetail.ir.errors import WorkflowError

GENERATION, RETRIEVAL, EMBEDDING = "generation", "retrieval", "embedding"
RERANK, FUNCTION, MERGE, VALIDATE = "rerank", "function", "merge", "validate"
START, CHOICE, END = "start", "choice", "end"
KINDS = (GENERATION, RETRIEVAL, EMBEDDING, RERANK, FUNCTION, MERGE, VALIDATE, START, CHOICE, END)
DATA, PHASE_SWITCH, ALL_REDUCE = "data", "phase_switch", "all_reduce"
SPECULATIVE, HISTORY, PREFETCH = "speculative", "history", "prefetch"
THEN, ELSE, MAY = "then", "else", "may"
ORDERS = {
    DATA: True,
    PHASE_SWITCH: True,
    ALL_REDUCE: False,
    SPECULATIVE: True,  # what is known so far
    HISTORY: False,  # where to look first, if it is known in time
    PREFETCH: False,  # clusters, if they are there in time
    THEN: False,  # of a choice: where it leads if it holds, if not, or if its function says so
    ELSE: False,
    MAY: False,
}
"""Kinds of edge, and whether the target starts after the source; else the two run side by side."""
CPU, GPU = "cpu", "gpu"


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where a node runs: on threads of one process, in one phase where it has several.

    cpus: those of the threads, () = any. share: those that no other worker has while this one
    works, () = nothing is agreed. node: of memory, None = those of `cpus`. spin: rounds in which a
    thread looks for work before it sleeps. kv_blocks: 0 = by the memory free at load.
    """

    device: str = CPU
    process: Number = 0
    phase: str = ""  # prefill | decode
    threads: Parts = 1
    cpus: tuple[Number, ...] = ()
    share: tuple[Number, ...] = ()
    node: Number | None = None
    spin: Spins = 2000
    kv_blocks: Amount = 0


class GraphNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One piece of work.

    origin: the node that a transformation made it from. clusters: that a retrieval scans, in this
    order, or that are copied. steps: that a generation decodes, None = to its end. provisional:
    nobody sees what comes of it but nodes of the same origin. work: what a workflow asks of it, see
    `ir/template.py`.
    """

    name: str
    kind: str
    model: str | None = None
    origin: str | None = None
    place: Placement | None = None
    clusters: tuple[int, ...] = ()
    steps: int | None = None
    provisional: bool = False
    work: dict[str, Any] = {}

    def __hash__(self) -> int:
        return hash((self.name, self.kind, self.clusters))

    @property
    def device(self) -> str | None:
        """What it runs on, None = any."""
        return None if self.place is None else self.place.device

    @property
    def root(self) -> str:
        """The node that it stands for, or is a part of."""
        return self.origin or self.name


class GraphEdge(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Data or a sum that goes from one node to another; `kind` is a key of ORDERS.

    tokens: of a phase switch: prompt tokens from which a step counts as prefill.
    """

    source: str
    target: str
    kind: str = DATA
    tokens: Amount = 0


class GraphFile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`graph/<name>.json`. Of a workflow: its name and inputs, how often a node may run."""

    schema: int = 2
    name: str = ""
    inputs: tuple[str, ...] = ()
    max_steps: int = 0
    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...] = ()


class ExecutionGraph:
    """A checked graph. Nodes and edges keep the order they were given in; equal by content."""

    def __init__(
        self, nodes: Iterable[GraphNode], edges: Iterable[GraphEdge] = (), **workflow: Any
    ) -> None:
        """`workflow`: the other fields of GraphFile.

        Raises WorkflowError for the first fault, naming the node: it is there twice, unknown, of no
        kind, in a cycle, or takes what is provisional for true.
        """
        self.file = GraphFile(nodes=tuple(nodes), edges=tuple(edges), **workflow)
        self.named = {node.name: node for node in self.file.nodes}
        self._graph: nx.DiGraph = nx.DiGraph()
        self._graph.add_nodes_from(self.named)
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
        return self.named[name]

    def parents(self, name: str, kind: str = DATA) -> tuple[str, ...]:
        """Return the names of the nodes that edges of `kind` come from."""
        edges = self._graph.in_edges(name, data="edge")
        return tuple(source for source, _, edge in edges if edge.kind == kind)

    def parts(self, root: str) -> tuple[GraphNode, ...]:
        """Return the nodes that stand for a node: itself, or its parts in order."""
        return tuple(node for name in self.ordered() if (node := self.node(name)).root == root)

    def __contains__(self, name: object) -> bool:
        return name in self._graph

    def ordered(self) -> tuple[str, ...]:
        """Return the names so that each comes after all it waits for; ties as they were given."""
        place = {node.name: i for i, node in enumerate(self.nodes)}
        return tuple(nx.lexicographical_topological_sort(self._waits(), key=place.__getitem__))

    def to_json(self) -> bytes:
        """Return the graph as JSON, of which `make_graph` makes an equal one again."""
        return msgspec.json.encode(self.file)

    def digest(self) -> str:
        """Return a sha256 of nodes and edges."""
        return hashlib.sha256(self.to_json()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExecutionGraph) and self.file == other.file

    def __hash__(self) -> int:
        return hash((self.nodes, self.edges))

    def _waits(self) -> nx.DiGraph:
        """Return the graph without edges between nodes that run side by side."""
        return nx.subgraph_view(
            self._graph, filter_edge=lambda a, b: ORDERS[self._graph.edges[a, b]["edge"].kind]
        )

    def _faults(self) -> Iterator[str]:
        names = [node.name for node in self.nodes]
        yield from (f"{n!r} is there twice" for n, count in Counter(names).items() if count > 1)
        for node in self.nodes:
            if node.kind not in KINDS:
                yield f"{node.name!r} is of no known kind but {node.kind!r}"
        known = set(names)
        for edge in self.edges:
            if edge.kind not in ORDERS:
                yield f"an edge at {edge.source!r} is of no known kind but {edge.kind!r}"
            if unknown := {edge.source, edge.target} - known:
                yield f"an edge leads to or from {min(unknown)!r}, which is no node"
            source, target = self.named[edge.source], self.named[edge.target]
            if edge.kind == DATA and source.provisional and source.root != target.root:
                yield f"{edge.source!r} is provisional, and {edge.target!r} takes it for the truth"
        if self._graph.number_of_edges() < len(self.edges):
            yield "two edges join the same nodes"
        try:
            cycle = nx.find_cycle(self._waits())
        except nx.NetworkXNoCycle:
            return
        yield f"{cycle[0][0]!r} waits for itself"


def contract(graph: ExecutionGraph) -> ExecutionGraph:
    """Return the graph with the parts of each node put together again, and nothing provisional.

    It says what is computed, whatever was placed, split, reordered or guessed: every transformation
    keeps it.
    """
    real = [node for node in graph.nodes if not node.provisional]
    parts: dict[str, list[GraphNode]] = {}
    for node in real:
        parts.setdefault(node.root, []).append(node)
    root = {node.name: node.root for node in real}
    edges = {
        replace(edge, source=root[edge.source], target=root[edge.target]): None
        for edge in graph.edges
        if edge.source in root and edge.target in root and root[edge.source] != root[edge.target]
    }
    return ExecutionGraph((_whole(name, found) for name, found in parts.items()), edges)


_WHOLE = {MERGE: RETRIEVAL, VALIDATE: GENERATION}
"""What parts of these kinds are parts of."""


def _whole(name: str, parts: list[GraphNode]) -> GraphNode:
    node = parts[0]
    return GraphNode(
        name=name,
        kind=node.kind if node.origin is None else _WHOLE.get(node.kind, node.kind),
        model=node.model,
        clusters=tuple(sorted(cluster for part in parts for cluster in part.clusters)),
    )


def make_graph(file: GraphFile) -> ExecutionGraph:
    """Return the graph of a file that has been decoded; raises as ExecutionGraph."""
    return ExecutionGraph(**{name: getattr(file, name) for name in file.__struct_fields__})
