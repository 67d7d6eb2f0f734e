"""The execution graph: order, JSON, content hash, and what it refuses."""

from __future__ import annotations

import pytest

from dovetail.ir.errors import WorkflowError
from dovetail.ir.graph import ALL_REDUCE, ExecutionGraph, GraphEdge, GraphNode
from tests.ir.live import read_graph


def nodes(*names: str, kind: str = "function") -> list[GraphNode]:
    return [GraphNode(name=name, kind=kind) for name in names]


def edge(source: str, target: str, kind: str = "data") -> GraphEdge:
    return GraphEdge(source=source, target=target, kind=kind)


def test_nodes_come_after_what_they_wait_for_else_as_given() -> None:
    graph = ExecutionGraph(nodes("d", "b", "a", "c"), [edge("a", "b"), edge("b", "c")])
    assert graph.ordered() == ("d", "a", "b", "c")
    assert graph.parents("c") == ("b",) and graph.parents("a") == ()
    assert graph.node("a").kind == "function"


def test_ranks_that_run_side_by_side_are_no_cycle() -> None:
    ring = [edge("a", "b", ALL_REDUCE), edge("b", "a", ALL_REDUCE)]
    graph = ExecutionGraph(nodes("a", "b"), ring)
    assert set(graph.ordered()) == {"a", "b"} and graph.parents("b", ALL_REDUCE) == ("a",)


def test_json_keeps_content_and_digest() -> None:
    graph = ExecutionGraph(nodes("a", "b"), [edge("a", "b")])
    again = read_graph(graph.to_json())
    assert again == graph and again.digest() == graph.digest() and hash(again) == hash(graph)
    other = ExecutionGraph(nodes("b", "a"), [edge("a", "b")])
    assert other != graph and other.digest() != graph.digest()


@pytest.mark.parametrize(
    ("names", "edges", "said"),
    [
        (["a", "a"], [], "'a' is there twice"),
        (["a"], [edge("a", "x")], "'x', which is no node"),
        (["a", "b"], [edge("a", "b"), edge("b", "a")], "waits for itself"),
        (["a"], [edge("a", "a")], "'a' waits for itself"),
        (["a", "b"], [edge("a", "b", "rumour")], "'rumour'"),
        (["a", "b"], [edge("a", "b"), edge("a", "b", ALL_REDUCE)], "two edges"),
    ],
)
def test_wrong_graphs_are_refused(names: list[str], edges: list[GraphEdge], said: str) -> None:
    with pytest.raises(WorkflowError, match=said):
        ExecutionGraph(nodes(*names), edges)


def test_what_is_provisional_leads_to_its_own_node_alone() -> None:
    guess = GraphNode(name="a/guess", kind="generation", origin="a", provisional=True)
    check = GraphNode(name="a/check", kind="validate", origin="a")
    ExecutionGraph([guess, check], [edge("a/guess", "a/check")])
    with pytest.raises(WorkflowError, match="'b' takes it for the truth"):
        ExecutionGraph([guess, *nodes("b")], [edge("a/guess", "b")])


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(WorkflowError, match="'dream'"):
        ExecutionGraph(nodes("a", kind="dream"))
