"""RAGraph: what a user builds a workflow with (HedraRAG §4.1, Listing 1).

In: nodes and edges, one call each. Out: a checked, frozen `Workflow`, or a WorkflowError that names
the node at fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, Unpack

import msgspec
import networkx as nx  # type: ignore[import-untyped]

from dovetail.ir import workflow as wf
from dovetail.ir.errors import WorkflowError
from dovetail.ir.graph import ExecutionGraph
from dovetail.ir.options import SamplingOptions, check_names, check_types
from dovetail.ir.template import MAX_STEPS, lower
from dovetail.ir.workflow import END, START, targets
from dovetail.ir.workflow_draw import draw_mermaid, draw_svg
from dovetail.ir.workflow_order import count_loops, order_places

MOST = 2**31 - 1
"""Of documents or tokens that a node asks for."""
ANYWHERE = ("anywhere",)
"""Stands, in a graph of nodes, for what an edge may lead to that says nothing."""


class RAGraph:
    """A workflow under construction.

    Nodes are named by a number or a text. What a node writes (`output`) later nodes read by that
    name; each name is written by one node, as often as that node runs. Where several edges leave a
    node all are taken, side by side; a node that several lead to runs once all of them that were
    taken have arrived.
    """

    def __init__(
        self, name: str = "rag", *, inputs: Sequence[str] = ("input",), max_steps: int = MAX_STEPS
    ) -> None:
        """Start an empty graph.

        Args:
            name: what the workflow is called.
            inputs: the names that a run is given.
            max_steps: how often one node may run for one request; a loop ends there with an error.
        """
        hints = {"inputs": Sequence, "max_steps": int}
        check_types({"inputs": inputs, "max_steps": max_steps}, hints, WorkflowError)
        if max_steps < 1:
            raise WorkflowError(f"workflow {name!r}: max_steps must be at least 1, not {max_steps}")
        if isinstance(inputs, str):
            raise WorkflowError(f"workflow {name!r}: inputs is a list of names, as [{inputs!r}]")
        self.name, self.inputs, self.max_steps = name, tuple(inputs), max_steps
        self._nodes: dict[wf.Name, wf.Node] = {}
        self._edges: dict[wf.Place, list[wf.Edge]] = {}

    def add_generation(
        self,
        node: wf.Name,
        *,
        prompt: str | Sequence[wf.PromptMessage | Mapping[str, str]],
        output: str = "answer",
        model: str | None = None,
        documents_tokens: int | None = None,
        **options: Unpack[SamplingOptions],
    ) -> None:
        """Add a reply of the language model to `prompt`, in which `{name}` stands for a value.

        The prompt is a text, or a list of messages with `role` and `content`, which the model's
        chat template makes a text of. Lists, such as the documents of a retrieval, become lines
        with a dash. `options` are sampling parameters as for `App.generate` (`max_tokens`,
        `temperature`, `stop`, `schema` ...).

        Retrieved documents that are more than `documents_tokens` tokens of the model in all are
        cut: the first ones stay whole, the last one that has room in part. None: they are cut where
        the context ends.

        Raises WorkflowError for an option that there is not.
        """
        self.add_node(make_generation(node, prompt, output, model, options, documents_tokens))

    def add_retrieval(
        self,
        node: wf.Name,
        *,
        query: str,
        output: str,
        topk: int = 5,
        filters: Mapping[str, object] | None = None,
        index: str | None = None,
        order: Literal["nearest", "any"] = "nearest",
    ) -> None:
        """Add a search for the `topk` documents nearest to what `query` names: a text or a vector.

        Args:
            node: its name.
            query: what it asks, by name; a vector is an array, a tensor or a list of numbers.
            output: the name of what it finds, nearest first.
            topk: documents at most.
            filters: metadata field -> the value, or the list of values, that documents must have;
                `{name}` stands for what an input or another node gives, which may be a list.
            index: which one, None where there is one.
            order: in which a prompt shows documents: nearest first, or `any`: as their prompt
                shares the longest beginning with those before it, whose KV need not be computed
                again. The timeline has the prompts that were sent.
        """
        check_types({"filters": filters}, {"filters": Mapping | None}, WorkflowError)
        found = wf.Retrieval(node, query, output, topk, dict(filters or {}), index, order)
        self.add_node(found)

    def add_embedding(
        self, node: wf.Name, *, text: str, output: str, model: str | None = None
    ) -> None:
        """Add the vector of the text that `text` names."""
        self.add_node(wf.Embedding(node, text, output, model))

    def add_rerank(
        self,
        node: wf.Name,
        *,
        query: str,
        documents: str,
        output: str,
        topk: int = 5,
        model: str | None = None,
        instruction: str | None = None,
    ) -> None:
        """Add a cross-encoder that keeps the `topk` best of some documents.

        Args:
            node: its name.
            query: the text that documents are scored for, by name.
            documents: what a retrieval found, or a list of texts, by name.
            output: the name of what is kept, best first; the score of each is the cross-encoder's.
            topk: documents that are kept at most.
            model: which cross-encoder, None for the first one.
            instruction: what is looked for, for models that read it.
        """
        self.add_node(wf.Rerank(node, query, documents, output, topk, model, instruction))

    def add_function(
        self, node: wf.Name, function: Callable[[wf.State], object], output: str
    ) -> None:
        """Add a call of `function`, also an async one, with the state (not to be changed)."""
        self.add_node(wf.Function(node, function, output))

    def add_edge(
        self,
        source: wf.Place,
        target: wf.Place | Callable[[wf.State], wf.Choice],
        targets: Sequence[wf.Place] | None = None,
    ) -> None:
        """Have `target` run after `source`; a function of the state chooses one, or several.

        Args:
            source: a node, or START.
            target: a node, END, or a function, also an async one, that returns one of these or a
                list of them.
            targets: where the function may lead; anywhere if it is not said.
        """
        if callable(target):
            edge = wf.Edge(
                source, choose=target, targets=None if targets is None else tuple(targets)
            )
        elif targets is not None:
            raise WorkflowError(f"node {source!r}: targets are for functions; {target!r} is a node")
        else:
            edge = wf.Edge(source, target)
        self._edges.setdefault(source, []).append(edge)

    def workflow(self) -> wf.Workflow:
        """Return the graph as a checked value.

        Raises WorkflowError that names the node: an edge to or from a node that is not there, a
        placeholder that nothing writes, an output that two nodes write, a node that cannot be
        reached or that nothing follows, a loop that no function can leave.
        """
        for fault in self._faults():
            raise WorkflowError(f"workflow {self.name!r}: {fault}")
        names = tuple(self._nodes)
        edges = {source: tuple(found) for source, found in self._edges.items()}
        order = order_places(names, edges)
        made = wf.Workflow(
            name=self.name,
            nodes=dict(self._nodes),
            edges=edges,
            inputs=self.inputs,
            max_steps=self.max_steps,
            order=order,
            away=count_loops(names, edges, order),
            template=ExecutionGraph(()),
        )
        return replace(made, template=lower(made))

    def mermaid(self) -> str:
        """Return the workflow as a Mermaid flowchart; raises as `workflow`."""
        return draw_mermaid(self.workflow())

    def svg(self) -> str:
        """Return the workflow as an SVG picture; raises as `workflow`."""
        return draw_svg(self.workflow())

    def add_node(self, node: wf.Node) -> None:
        """Add a node that has been made, under its own name."""
        if isinstance(node.name, bool | wf.Terminal) or not isinstance(node.name, int | str):
            raise WorkflowError(f"node {node.name!r}: a node is named by a number or a text")
        if node.name in (START.value, END.value):
            raise WorkflowError(f"node {node.name!r}: START and END are the two ends of a workflow")
        if node.name in self._nodes:
            raise WorkflowError(f"node {node.name!r} is there already")
        if not isinstance(node.output, str) or not node.output.isidentifier():
            raise WorkflowError(f"node {node.name!r}: output {node.output!r} is no plain name")
        if isinstance(node, wf.Function) and not callable(node.function):
            raise WorkflowError(f"node {node.name!r}: {node.function!r} is no function")
        for name in ("topk", "documents_tokens"):
            value = getattr(node, name, None)
            if value is not None and (type(value) is not int or not 1 <= value <= MOST):
                said = f"{name} is a whole number from 1 to {MOST}, not {value!r}"
                raise WorkflowError(f"node {node.name!r}: {said}")
        for name in ("model", "index", "instruction"):
            value = getattr(node, name, None)
            if value is not None and not isinstance(value, str):
                raise WorkflowError(f"node {node.name!r}: {name} is a text, not {value!r}")
        if isinstance(node, wf.Retrieval) and node.order not in ("nearest", wf.ANY_ORDER):
            raise WorkflowError(f"node {node.name!r}: order is nearest or any, not {node.order!r}")
        try:
            node.reads  # noqa: B018 - a prompt is read here for the first time
        except WorkflowError as error:
            raise WorkflowError(f"node {node.name!r}: {error}") from None
        self._nodes[node.name] = node

    # ---- checks, in the order in which their sentences are most useful ----

    def _faults(self) -> Iterator[str]:
        if not self._nodes:
            yield "it has no node"
        yield from self._edge_faults()
        yield from self._write_faults()
        yield from self._reach_faults()
        yield from self._read_faults()
        yield from self._loop_faults()

    def _edge_faults(self) -> Iterator[str]:
        for source, edges in self._edges.items():
            if source is not START and source not in self._nodes:
                yield f"an edge leaves {source!r}, which is no node"
            for edge in edges:
                for target in targets(edge, self._nodes):
                    if target is not END and target not in self._nodes:
                        yield f"node {source!r}: an edge leads to {target!r}, which is no node"
        if START not in self._edges:
            yield "no edge leaves START"
        for name in self._nodes:
            if name not in self._edges:
                yield f"node {name!r}: no edge leaves it; end with add_edge({name!r}, END)"

    def _write_faults(self) -> Iterator[str]:
        written: dict[str, wf.Name] = {}
        for node in self._nodes.values():
            if node.output in self.inputs:
                yield f"node {node.name!r} writes {node.output!r}, which is an input"
            if (other := written.setdefault(node.output, node.name)) != node.name:
                yield f"node {node.name!r} writes {node.output!r}, which node {other!r} writes too"

    def _reach_faults(self) -> Iterator[str]:
        graph = self._graph()
        reached, ending = nx.descendants(graph, START), nx.ancestors(graph, END)
        for name in self._nodes:
            if name not in reached:
                yield f"node {name!r} cannot be reached from START"
        for name in self._nodes:
            if name not in ending:
                yield f"node {name!r}: no way leads from it to END"

    def _read_faults(self) -> Iterator[str]:
        graph = self._graph()
        writers = {node.output: node.name for node in self._nodes.values()}
        for node in self._nodes.values():
            before = nx.ancestors(graph, node.name) | {node.name}
            for name in node.reads:
                if name in self.inputs:
                    continue
                if name not in writers:
                    yield (
                        f"node {node.name!r} reads {name!r}, which no node writes; "
                        f"inputs are {', '.join(map(repr, self.inputs))}"
                    )
                elif writers[name] not in before:
                    yield f"node {node.name!r} reads {name!r}, which is only written after it"

    def _loop_faults(self) -> Iterator[str]:
        fixed = nx.DiGraph(
            [(source, e.target) for source, es in self._edges.items() for e in es if not e.choose]
        )
        for cycle in nx.simple_cycles(fixed):
            yield f"node {cycle[0]!r} is in a loop without end: have a function of the state end it"

    def _graph(self) -> nx.DiGraph:
        graph = nx.DiGraph()
        graph.add_nodes_from((START, END, *self._nodes))
        graph.add_edges_from((ANYWHERE, place) for place in (*self._nodes, END))
        for source, edges in self._edges.items():
            for edge in edges:
                places = [ANYWHERE] if wf.leads_anywhere(edge) else targets(edge, ())
                graph.add_edges_from((source, place) for place in places)
        return graph


def make_generation(
    node: wf.Name,
    prompt: str | Sequence[wf.PromptMessage | Mapping[str, str]],
    output: str,
    model: str | None,
    options: SamplingOptions,
    documents_tokens: int | None = None,
) -> wf.Generation:
    """Return a generation as `RAGraph.add_generation` is given it; raises as that does."""
    names = SamplingOptions.__annotations__
    check_names(f"the generation {node!r}", options, names, WorkflowError)
    schema = options.get("schema")
    if schema is not None and hasattr(schema, "model_json_schema"):  # files hold it as it is
        options = {**options, "schema": schema.model_json_schema()}
    read = _read_prompt(node, prompt)
    return wf.Generation(node, read, output, options, model, documents_tokens)


def _read_prompt(
    node: wf.Name, prompt: str | Sequence[wf.PromptMessage | Mapping[str, str]]
) -> str | tuple[wf.PromptMessage, ...]:
    if isinstance(prompt, str):
        return prompt
    try:
        found = msgspec.convert(msgspec.to_builtins(prompt), tuple[wf.PromptMessage, ...])
    except (TypeError, msgspec.ValidationError) as error:
        said = f"its prompt is neither a text nor messages: {error}"
        raise WorkflowError(f"node {node!r}: {said}") from None
    if not found:
        raise WorkflowError(f"node {node!r}: its prompt has no message")
    return found
