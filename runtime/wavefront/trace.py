"""What was done for one request, as an execution graph before and after its transformations.

In: calls as they begin, searches and replies as they end. Out: the plain graph of the run, and the
steps (`ir/transform.py`) that make the graph that ran of it. Recording costs a few tuples; graphs
are made when they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from msgspec.structs import replace

from dovetail.ir.graph import ExecutionGraph, GraphEdge, GraphNode
from dovetail.ir.transform import Step, transform
from dovetail.ir.workflow import Embedding, Function, Generation, Name, Workflow
from dovetail.runtime.wavefront.replies import Reply
from dovetail.runtime.wavefront.search import Search
from dovetail.runtime.workflow_run import Call

ORDER = (
    "reorder",
    "prefetch",
    "split_search",
    "speculate_generation",
    "split_reply",
    "speculate_retrieval",
    "split_devices",
)
"""How steps are applied: what is guessed names sub-stages, what is on two devices is named last."""


def label(node: Name, round_: int) -> str:
    """Return the name in a graph of one run of a node; a text of digits is no number."""
    digits = isinstance(node, str) and node.lstrip("-").isdigit()
    return f"{node!r}#{round_}" if digits else f"{node}#{round_}"


@dataclass(slots=True)
class Trace:
    """Calls of a request by name, what reads what, and what was done to them."""

    workflow: Workflow
    nodes: dict[str, GraphNode] = field(default_factory=dict)
    edges: dict[tuple[str, str], None] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    guesses: dict[str, int] = field(default_factory=dict)

    def plain(self) -> ExecutionGraph:
        """Return what was computed: a node for each call, edges from what it read."""
        edges = [GraphEdge(source=a, target=b) for a, b in self.edges]
        return ExecutionGraph(self.nodes.values(), edges)

    def graph(self) -> ExecutionGraph:
        """Return what ran: split, reordered, guessed, on its devices. The run must be over."""
        return self.stages()[-1][1]

    def stages(self) -> list[tuple[str, ExecutionGraph]]:
        """Return the plain graph, and what each kind of step that was taken makes of it in turn."""
        found = [("plain", self.plain())]
        for name in ORDER:
            if steps := [step for step in self.steps if step.name == name]:
                found.append((name, transform(found[-1][1], steps)))
        return found

    def begin(self, call: Call) -> None:
        """Take a call that begins."""
        name = label(call.node.name, call.round)
        node = call.node
        model = node.model if isinstance(node, Generation | Embedding) else None
        self.nodes[name] = GraphNode(name=name, kind=node.kind, model=model)
        writers = {node.output: node.name for node in self.workflow.nodes.values()}
        read = call.rounds if isinstance(node, Function) else node.reads
        for value in read:
            if (written := call.rounds[value]) >= 0:
                self.edges[label(writers[value], written), name] = None

    def end_search(self, search: Search) -> None:
        """Take a search that is over: how its clusters were ordered, cut and shared."""
        name, steps = label(search.source.node, search.source.round), search.steps
        scanned = steps.clusters[: steps.position]
        kept = frozenset(scanned)
        found = tuple(cluster for cluster in search.centroids if cluster in kept)
        self.nodes[name] = replace(self.nodes[name], clusters=found)
        if scanned != found:
            self._add("reorder", name, scanned)
        if search.copied:
            self._add("prefetch", name, search.copied)
        cut = len(search.counts) > 1
        if cut:
            self._add("split_search", name, tuple(search.counts))
        for stage, clusters in search.on_device.items():
            self._add("split_devices", f"{name}/{stage}" if cut else name, clusters)

    def begin_guesses(self, call: Call, sub_stages: Sequence[str]) -> None:
        """Take the sub-stages of a search on which a call that begins was begun before."""
        name = label(call.node.name, call.round)
        for at in sub_stages:
            if (at.rpartition("/")[0], name) in self.edges:  # else it reads nothing of the search
                self.steps.append(Step(name="speculate_generation", node=at, target=name))
                self.guesses[name] = self.guesses.get(name, 0) + 1

    def end_reply(self, reply: Reply) -> None:
        """Take a reply that is over."""
        writer, cut = self._writer(reply)
        if cut and reply.marks:
            counts = tuple(b - a for a, b in pairwise((0, *reply.marks)))
            self._add("split_reply", writer, counts)

    def sub_stage(self, reply: Reply) -> str:
        """Return the last sub-stage of a reply that is over by now."""
        writer, cut = self._writer(reply)
        return f"{writer}/{len(reply.marks) - 1}" if cut else writer

    def _writer(self, reply: Reply) -> tuple[str, bool]:
        """Return the node that writes a reply, and whether it is cut: what a check writes is not.

        It is the call's own, the guess that held, or the check that let none count.
        """
        name = label(reply.source.node, reply.source.round)
        guesses = self.guesses.get(name, 0)
        if not guesses:
            return name, True
        return (f"{name}/guess/{guesses - 1}", True) if reply.guessed else (f"{name}/check", False)

    def use_scout(self, scout: Search, call: Call) -> None:
        """Take a scout, and the search that it was for."""
        name = label(call.node.name, call.round)
        self.steps.append(Step(name="speculate_retrieval", node=scout.sent_from, target=name))

    def _add(self, name: str, node: str, numbers: tuple[int, ...]) -> None:
        self.steps.append(Step(name=name, node=node, numbers=numbers))
