"""A compiled LangGraph graph as a RAGraph.

In: `StateGraph.compile()`, its nodes made by `dovetail.bound`. Out: a RAGraph with the same nodes,
edges and choices, or a WorkflowError that names what has no counterpart.

One difference: a node that several edges lead to runs once, when all that were taken have arrived;
LangGraph runs it once for each superstep in which one arrives, unless the edges are declared
together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec

from dovetail.bound import Bound
from dovetail.ir.errors import WorkflowError
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.template import MAX_STEPS
from dovetail.ir.workflow import END, START, Choice, Function, Node, Place, State

TERMINALS: dict[object, Place] = {"__start__": START, "__end__": END}
NODE_SETTINGS = ("retry_policy", "cache_policy", "error_handler_node", "timeout", "ends", "defer")
"""What LangGraph can attach to a node and a RAGraph cannot."""
GRAPH_SETTINGS = ("interrupt_before_nodes", "interrupt_after_nodes", "checkpointer", "store")


def from_langgraph(graph: Any, name: str = "langgraph", max_steps: int = MAX_STEPS) -> RAGraph:
    """Return the workflow of a compiled LangGraph graph.

    Its inputs are the keys of the graph's input schema that no node writes.

    Args:
        graph: what `StateGraph.compile()` returned; every node is one of `dovetail.bound`.
        name: what the workflow is called.
        max_steps: how often one node may run for one request.

    Raises:
        WorkflowError: it is no compiled graph, or a node, a key of the state or a setting of it
            has no counterpart; the sentence names it.
    """
    builder = getattr(graph, "builder", None)
    if builder is None or not hasattr(builder, "waiting_edges"):
        raise WorkflowError(f"{type(graph).__name__} is not a compiled graph; give graph.compile()")
    for fault in _faults(graph, builder):
        raise WorkflowError(f"workflow {name!r}: {fault}")
    nodes: dict[str, Bound] = {key: spec.runnable.func for key, spec in builder.nodes.items()}
    written = {bound.node.output for bound in nodes.values()}
    inputs = [key for key in builder.schemas[builder.input_schema] if key not in written]
    made = RAGraph(name, inputs=inputs, max_steps=max_steps)
    for key, bound in nodes.items():
        made.add_node(_rename(bound.node, key))
    for source, target in sorted(builder.edges):
        made.add_edge(_place(source), _place(target))
    for sources, target in sorted(builder.waiting_edges):
        for source in sources:
            made.add_edge(_place(source), _place(target))
    for source, branches in builder.branches.items():
        for branch in branches.values():
            ends = None if branch.ends is None else list(map(_place, branch.ends.values()))
            made.add_edge(_place(source), _choice(branch), ends)
    followed = _sources(builder)
    for last in (key for key in nodes if key not in followed):  # LangGraph ends there, too
        made.add_edge(last, END)
    made.workflow()
    return made


def _sources(builder: Any) -> set[str]:
    """Return the nodes that something follows."""
    awaited = (source for sources, _ in builder.waiting_edges for source in sources)
    return {*(source for source, _ in builder.edges), *awaited, *builder.branches}


def _faults(graph: Any, builder: Any) -> Iterator[str]:
    for setting in GRAPH_SETTINGS:
        if getattr(graph, setting, None):
            yield f"the graph has {setting}, which a RAGraph has not; compile it without"
    for key, spec in builder.nodes.items():
        bound = getattr(spec.runnable, "func", None)
        if not isinstance(bound, Bound):
            what = "a graph itself" if hasattr(spec.runnable, "builder") else "a plain function"
            yield (
                f"node {key!r} is {what}, and what it writes cannot be known; "
                "bind it with dovetail.bound.function, generation, retrieval, embedding or rerank"
            )
            continue
        for setting in NODE_SETTINGS:
            if getattr(spec, setting, None):
                yield f"node {key!r} has {setting}, which a node of a RAGraph has not"
        channel = builder.channels.get(bound.node.output)
        if channel is None:
            yield f"node {key!r} writes {bound.node.output!r}, which the graph's state has not"
        elif type(channel).__name__ != "LastValue":
            yield (
                f"node {key!r} writes {bound.node.output!r}, which the graph gathers with a "
                "reducer; here each name has one writer, so gather in a function"
            )


def _rename(node: Node, name: str) -> Node:
    if isinstance(node, Function):
        return replace(node, name=name)
    return msgspec.structs.replace(node, name=name)


def _place(key: Any) -> Place:
    place: Place = TERMINALS.get(key, key)
    return place


def _choice(branch: Any) -> Callable[[State], Choice]:
    def choose(state: State) -> Choice:
        found = branch.path.invoke(dict(state))
        chosen = found if isinstance(found, list | tuple) else [found]
        for each in chosen:
            if not branch.ends and not isinstance(each, str):
                raise WorkflowError(f"{type(each).__name__} is not the name of a node")
        return [_place(branch.ends[each] if branch.ends else each) for each in chosen]

    return choose
