"""LangGraph itself, with our engine, our encoder and faiss as its nodes (extra `langgraph`).

In: a workflow and services. Out: a compiled graph of LangGraph that means the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

from langgraph.graph import END as LAST
from langgraph.graph import START as FIRST
from langgraph.graph import StateGraph

from dovetail.bound import Bound
from dovetail.ir.workflow import END, START, Edge, Node, Place, State, Workflow, targets
from dovetail.runtime.flows.services import Services

TERMINALS: dict[Place, str] = {START: FIRST, END: LAST}


def compile_graph(
    workflow: Workflow,
    services: Services | None,
    bind: Callable[[Node], Callable[..., Any]] | None = None,
) -> Any:
    """Return the workflow as LangGraph runs it; `bind` gives what it calls for a node."""
    names = [*workflow.inputs, *(node.output for node in workflow.nodes.values())]
    state = TypedDict("state", dict.fromkeys(names, Any), total=False)  # type: ignore[operator]
    graph = StateGraph(state)
    for name, node in workflow.nodes.items():
        graph.add_node(str(name), bind(node) if bind else Bound(node, services))
    for source, edges in workflow.edges.items():
        for number, edge in enumerate(edges):
            _connect(graph, workflow, source, edge, number)
    return graph.compile()


def _connect(graph: Any, workflow: Workflow, source: Place, edge: Edge, number: int) -> None:
    if edge.target is not None:
        graph.add_edge(_name(source), _name(edge.target))
        return

    def choose(state: State) -> list[str]:
        return [_name(place) for place in edge.next(state)]

    choose.__name__ = f"choice_{number}"
    graph.add_conditional_edges(
        _name(source), choose, [_name(place) for place in targets(edge, workflow.nodes)]
    )


def _name(place: Place) -> str:
    return TERMINALS.get(place, str(place))
