"""One request: its run, the graph of it, what its searches leave each other, and its guesses."""

from __future__ import annotations

from dataclasses import dataclass, field

from dovetail.ir.graph import DATA
from dovetail.ir.live_graph import LiveGraph, LiveNode
from dovetail.ir.workflow import Embedding, Function, Generation, Name, Retrieval
from dovetail.runtime.flows.control.messages import Source
from dovetail.runtime.flows.control.replies import Key, PendingReply
from dovetail.runtime.flows.control.search import Search
from dovetail.runtime.flows.workflow_run import Call, WorkflowRun
from dovetail.runtime.index.cursor import SearchHistory


def label(node: Name, round_: int) -> str:
    """Return the name in a graph of one run of a node; a text of digits is no number."""
    digits = isinstance(node, str) and node.lstrip("-").isdigit()
    return f"{node!r}#{round_}" if digits else f"{node}#{round_}"


@dataclass(slots=True, eq=False)
class Ticket:
    """A request under way. histories: of its last search of each index.

    nodes: of calls that came or will come, the last part of each. guesses: by the call they are
    for. scouts: searches ahead of the node that they prepare. searched: how many searches are over.
    """

    number: int
    run: WorkflowRun
    graph: LiveGraph = field(default_factory=LiveGraph)
    nodes: dict[Key, LiveNode] = field(default_factory=dict)
    histories: dict[str | None, SearchHistory] = field(default_factory=dict)
    guesses: dict[Key, PendingReply] = field(default_factory=dict)
    scouts: dict[Name, Search] = field(default_factory=dict)
    searched: int = 0
    over: bool = False

    def source(self, call: Call) -> Source:
        """Return what a piece of work for a call is marked with."""
        return Source(self.number, call.node.name, call.round)

    def node(self, call: Call) -> LiveNode:
        """Return the node of a call, which is put behind what it reads if it is new."""
        key = call.node.name, call.round
        if key not in self.nodes:
            model = call.node.model if isinstance(call.node, Generation | Embedding) else None
            found = LiveNode(label(*key), call.node.kind, model)
            self.nodes[key] = self.graph.add(found, [(node, DATA) for node in self._read(call)])
        return self.nodes[key]

    def _read(self, call: Call) -> list[LiveNode]:
        """Return the nodes that have written what a call reads, or will have."""
        writers = {node.output: node.name for node in self.run.workflow.nodes.values()}
        names = call.rounds if isinstance(call.node, Function) else call.node.reads
        written = [(writers[n], call.rounds[n]) for n in names if call.rounds[n] >= 0]
        return [self.nodes[key] for key in dict.fromkeys(written)]

    def history(self, node: Retrieval) -> SearchHistory | None:
        """Return what the next search can use: of its scout if there was one, or of the last."""
        scout = self.scouts.get(node.name)
        if scout is not None and scout.cursor is not None and scout.cursor.position:
            return scout.history()
        return self.histories.get(node.index)
