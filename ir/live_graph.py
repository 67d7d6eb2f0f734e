"""LiveGraph: the execution graph of one request while it runs.

In: nodes as the request comes to them, rewrites of them (`ir/transform.py`), what begins and what
ends. Out: whether a node is ready, and at any moment a picture, which is an ExecutionGraph.

A node is ready once all that it waits for is over. That is counted edge by edge, never searched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

import networkx as nx  # type: ignore[import-untyped]

from dovetail.ir.graph import DATA, ORDERS, ExecutionGraph, GraphEdge, GraphNode, Placement

GUESS, CHECK, SCOUT, COPY = "guess", "check", "scout", "copy"
PROVISIONAL = (GUESS, SCOUT, COPY)
"""Parts that nobody sees but nodes of the same root."""


class State(Enum):
    """How far a node has got."""

    WAITING, RUNNING, OVER = "waiting", "running", "over"


@dataclass(slots=True, eq=False)
class LiveNode:
    """One piece of work of a request. Fields as of GraphNode, whose name is made of these.

    root: the call that it stands for, or is a part of. part: what it does for that, "" for the work
    itself. stage: which sub-stage it is, None for the whole. side: of a scan on two devices. waits:
    how many edges it waits for.
    """

    root: str
    kind: str
    model: str | None = None
    part: str = ""
    stage: int | None = None
    side: str = ""
    clusters: tuple[int, ...] = ()
    steps: int | None = None
    device: str | None = None
    place: Placement | None = None
    state: State = State.WAITING
    waits: int = 0

    @property
    def name(self) -> str:
        """Its name in a picture."""
        stage = "" if self.stage is None else str(self.stage)
        return "/".join(filter(None, (self.root, self.part, stage, self.side)))

    @property
    def provisional(self) -> bool:
        """Whether it is only a guess."""
        return self.part in PROVISIONAL

    @property
    def ready(self) -> bool:
        """Whether it may begin: it has not, and nothing that it waits for is under way."""
        return self.state is State.WAITING and not self.waits

    def frozen(self) -> GraphNode:
        """Return it as a node of a picture."""
        name = self.name
        return GraphNode(
            name=name,
            kind=self.kind,
            model=self.model,
            origin=None if name == self.root else self.root,
            place=self.place,
            clusters=self.clusters,
            steps=self.steps,
            device=self.device,
            provisional=self.provisional,
        )


class LiveGraph:
    """Nodes and edges of one request. Not for several threads at once."""

    def __init__(self) -> None:
        self._graph: nx.DiGraph = nx.DiGraph()

    @classmethod
    def of(cls, template: ExecutionGraph) -> LiveGraph:
        """Return a graph with the nodes of a template, none of which has begun."""
        found, nodes = cls(), dict[str, LiveNode]()
        for node in template.nodes:
            nodes[node.name] = LiveNode(
                node.name, node.kind, node.model, clusters=node.clusters, place=node.place
            )
            found.add(nodes[node.name])
        for edge in template.edges:
            found.link(nodes[edge.source], nodes[edge.target], edge.kind)
        return found

    # ---- what there is ----

    def __contains__(self, node: object) -> bool:
        return node in self._graph

    def __iter__(self) -> Iterator[LiveNode]:
        return iter(self._graph)

    def before(self, node: LiveNode) -> list[tuple[LiveNode, str]]:
        """Return what leads to a node, each with the kind of its edge."""
        return [(source, kind) for source, _, kind in self._graph.in_edges(node, data="kind")]

    def after(self, node: LiveNode) -> list[tuple[LiveNode, str]]:
        """Return what a node leads to, each with the kind of its edge."""
        return [(target, kind) for _, target, kind in self._graph.out_edges(node, data="kind")]

    def freeze(self) -> ExecutionGraph:
        """Return the graph as it is now."""
        edges = self._graph.edges(data="kind")
        return ExecutionGraph(
            [node.frozen() for node in self],
            [GraphEdge(source=a.name, target=b.name, kind=kind) for a, b, kind in edges],
        )

    # ---- what happens ----

    def begin(self, node: LiveNode) -> None:
        """Take that a node begins; it must be ready."""
        assert node in self and node.ready, f"{node.name!r} is not ready"
        node.state = State.RUNNING

    def finish(self, node: LiveNode) -> None:
        """Take that a node is over."""
        assert node.state is State.RUNNING, f"{node.name!r} is not under way"
        for target, kind in self.after(node):
            target.waits -= ORDERS[kind]
        node.state = State.OVER

    # ---- how it changes ----

    def add(self, node: LiveNode, after: Iterable[tuple[LiveNode, str]] = ()) -> LiveNode:
        """Put a node behind others, each with the kind of its edge; return the node."""
        assert node not in self, f"{node.name!r} is there already"
        self._graph.add_node(node)
        for source, kind in after:
            self.link(source, node, kind)
        return node

    def link(self, source: LiveNode, target: LiveNode, kind: str = DATA) -> None:
        """Have a node that has not begun wait for another, as the kind of edge says."""
        assert target.state is State.WAITING, f"{target.name!r} has begun"
        if not self._graph.has_edge(source, target):
            self._graph.add_edge(source, target, kind=kind)
            target.waits += _holds(source, kind)

    def move(self, old: LiveNode, new: LiveNode) -> None:
        """Have all that waits for one node wait for another instead."""
        for target, kind in self.after(old):
            if target is not new:
                self._unlink(old, target, kind)
                self.link(new, target, kind)

    def remove(self, node: LiveNode) -> None:
        """Take a node out; what waits for it does no longer."""
        for target, kind in self.after(node):
            self._unlink(node, target, kind)
        self._graph.remove_node(node)

    def _unlink(self, source: LiveNode, target: LiveNode, kind: str) -> None:
        self._graph.remove_edge(source, target)
        target.waits -= _holds(source, kind)


def _holds(source: LiveNode, kind: str) -> bool:
    return ORDERS[kind] and source.state is not State.OVER
