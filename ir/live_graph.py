"""LiveGraph: the execution graph of one request while it runs.

In: a template, whose nodes are appended as the request comes to them; rewrites (`ir/transform.py`);
what begins and what ends. Out: which nodes are ready, and at any moment a picture, which is an
ExecutionGraph.

A node is ready once all that it waits for is over. That is counted edge by edge, never searched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import networkx as nx  # type: ignore[import-untyped]
from msgspec import Struct

from dovetail.ir.graph import DATA, ORDERS, ExecutionGraph, GraphEdge, GraphNode, Placement

GUESS, CHECK, SCOUT, READ, COPY = "guess", "check", "scout", "read", "copy"
PROVISIONAL = (GUESS, SCOUT, READ, COPY)
"""Parts that nobody sees but nodes of the same root."""


_Edges: TypeAlias = "dict[LiveNode, dict[LiveNode, dict[str, str]]]"
"""Node -> the nodes at its edges -> what an edge has."""


class State(Enum):
    """How far a node has got."""

    WAITING, RUNNING, OVER = "waiting", "running", "over"


class LiveNode(Struct, eq=False):
    """One piece of work of a request. Fields as of GraphNode, whose name is made of these.

    root: the call that it stands for, or is a part of. part: what it does for that, "" for the work
    itself. stage: which sub-stage it is, None for the whole. side: of a scan on two devices. work:
    what whoever runs it keeps with it; its parts share it. waits: how many edges it waits for.
    """

    root: str
    kind: str
    model: str | None = None
    part: str = ""
    stage: int | None = None
    side: str = ""
    clusters: tuple[int, ...] = ()
    steps: int | None = None
    place: Placement | None = None
    work: Any = None
    state: State = State.WAITING
    waits: int = 0

    @property
    def name(self) -> str:
        """Its name in a picture."""
        name = f"{self.root}/{self.part}" if self.part else self.root
        if self.stage is not None:
            name = f"{name}/{self.stage}"
        return f"{name}/{self.side}" if self.side else name

    @property
    def device(self) -> str | None:
        """What it runs on, None = any."""
        return None if self.place is None else self.place.device

    @property
    def provisional(self) -> bool:
        """Whether it is only a guess."""
        return self.part in PROVISIONAL

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
            provisional=self.provisional,
        )


class Rewrite(NamedTuple):
    """A transformation that was applied: its name, at which node, the seconds it was to gain."""

    transformation: str
    node: str
    gain: float


class Left(NamedTuple):
    """Why a transformation was not applied: a word by which this is counted, a sentence."""

    reason: str
    said: str


class Ready(dict[LiveNode, "LiveGraph"]):
    """The nodes of some graphs that may begin, each with its graph; the first ones came first.

    fresh: those that have come since whoever begins them looked last; some may have gone again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fresh: deque[LiveNode] = deque()


class LiveGraph:
    """Nodes and edges of one request. Not for several threads at once.

    number: of the request. rewrites: what has been done to it by transformations. left: why those
    that fitted somewhere were not applied there, the last time of each.
    """

    def __init__(
        self, template: ExecutionGraph, ready: Ready | None = None, number: int = 0
    ) -> None:
        """Begin with no node; several graphs may share `ready`."""
        self.template, self.number = template, number
        self.ready = Ready() if ready is None else ready
        self.rewrites: list[Rewrite] = []
        self.left: dict[str, Left] = {}
        self._graph: nx.DiGraph = nx.DiGraph()
        self._before: _Edges = self._graph._pred  # its views are slow
        self._after: _Edges = self._graph._succ

    # ---- what there is ----

    @property
    def workflow(self) -> str:
        """The name of the workflow that it is of."""
        return self.template.file.name

    def __contains__(self, node: object) -> bool:
        return node in self._after

    def __iter__(self) -> Iterator[LiveNode]:
        return iter(self._after)

    def before(self, node: LiveNode) -> list[tuple[LiveNode, str]]:
        """Return what leads to a node, each with the kind of its edge."""
        return [(source, edge["kind"]) for source, edge in self._before[node].items()]

    def after(self, node: LiveNode) -> list[tuple[LiveNode, str]]:
        """Return what a node leads to, each with the kind of its edge."""
        return [(target, edge["kind"]) for target, edge in self._after[node].items()]

    def rest(self, node: LiveNode) -> LiveNode | None:
        """Return the part of the same work that comes next behind this one, if it is cut."""
        for other in self._after[node]:
            if other.root == node.root and other.part == node.part:
                return other
        return None

    def freeze(self) -> ExecutionGraph:
        """Return the graph as it is now."""
        edges = (
            GraphEdge(source=source.name, target=target.name, kind=kind)
            for source in self
            for target, kind in self.after(source)
        )
        return ExecutionGraph((node.frozen() for node in self), edges)

    # ---- what happens ----

    def append(self, name: str, round_: int, after: Iterable[LiveNode]) -> LiveNode:
        """Put the run of a template's node in a round of its loops behind what it reads."""
        node = self.template.named[name]
        live = LiveNode(f"{name}#{round_}", node.kind, node.model, place=node.place)
        return self.add(live, [(source, DATA) for source in after])

    def begin(self, node: LiveNode) -> None:
        """Take that a node begins; it must be ready."""
        assert node in self.ready, f"{node.name!r} is not ready"
        del self.ready[node]
        node.state = State.RUNNING

    def finish(self, node: LiveNode) -> None:
        """Take that a node is over."""
        assert node.state is State.RUNNING, f"{node.name!r} is not under way"
        node.state = State.OVER
        for target, kind in self.after(node):
            self._wait(target, -ORDERS[kind])

    def close(self) -> None:
        """Take that nothing of it is to begin any more; of what was done the picture is left."""
        for node in self:
            self.ready.pop(node, None)
            node.work = None
        self.ready = Ready()

    # ---- how it changes ----

    def add(self, node: LiveNode, after: Iterable[tuple[LiveNode, str]] = ()) -> LiveNode:
        """Put a node behind others, each with the kind of its edge; return the node."""
        assert node not in self, f"{node.name!r} is there already"
        self._graph.add_node(node)
        for source, kind in after:
            self.link(source, node, kind)
        self._wait(node, 0)
        return node

    def link(self, source: LiveNode, target: LiveNode, kind: str = DATA) -> None:
        """Have a node that has not begun wait for another, as the kind of edge says."""
        assert target.state is State.WAITING, f"{target.name!r} has begun"
        if target not in self._after[source]:
            self._graph.add_edge(source, target, kind=kind)
            self._wait(target, _holds(source, kind))

    def move(self, old: LiveNode, new: LiveNode) -> None:
        """Have all that waits for one node wait for another instead."""
        for target, kind in self.after(old):
            if target is not new:
                self.link(new, target, kind)
                self._unlink(old, target, kind)

    def remove(self, node: LiveNode) -> None:
        """Take a node out; what waits for it does no longer."""
        for target, kind in self.after(node):
            self._unlink(node, target, kind)
        self._graph.remove_node(node)
        self.ready.pop(node, None)

    def _unlink(self, source: LiveNode, target: LiveNode, kind: str) -> None:
        self._graph.remove_edge(source, target)
        self._wait(target, -_holds(source, kind))

    def _wait(self, node: LiveNode, more: int) -> None:
        """Have a node wait for so many edges more, and be ready where it waits for none."""
        node.waits += more
        if node.state is not State.WAITING or node.waits:
            self.ready.pop(node, None)
        elif node not in self.ready:
            self.ready[node] = self
            self.ready.fresh.append(node)


def _holds(source: LiveNode, kind: str) -> bool:
    return ORDERS[kind] and source.state is not State.OVER
