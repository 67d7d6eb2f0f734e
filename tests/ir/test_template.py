"""Templates: a workflow lowered into an execution graph is the same workflow when it is read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.ir.errors import WorkflowError
from dovetail.ir.graph import (
    CHOICE,
    ELSE,
    MAY,
    THEN,
    ExecutionGraph,
    GraphEdge,
    GraphNode,
)
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.template import describe_workflow, lower, raise_file
from dovetail.ir.workflow import END, START, Branch, label
from dovetail.ir.workflow_file import make_graph, read_workflow
from dovetail.workflows import BUNDLED
from tests.ir.live import read_graph
from tests.ir.test_workflow_file import FUNCTIONS, NAMES, TEXT


def read_again(template: ExecutionGraph) -> RAGraph:
    return make_graph(raise_file(read_graph(template.to_json())), FUNCTIONS)


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_workflows_come_back_whole(name: str) -> None:
    workflow = BUNDLED[name]().workflow()
    again = read_again(workflow.template).workflow()
    assert again == workflow and again.template == lower(workflow, strict=True)


def test_choices_are_nodes_and_their_ways_edges() -> None:
    workflow = read_workflow(TEXT, FUNCTIONS).workflow()
    template = workflow.template
    assert [node.name for node in template.nodes if node.kind == CHOICE] == ["0?", "pick?"]
    ways = {(e.source, e.target): e.kind for e in template.edges if e.source.endswith("?")}
    assert ways == {
        ("0?", "find"): THEN,
        ("0?", "END"): ELSE,
        ("pick?", "0"): MAY,
        ("pick?", "last"): MAY,
    }
    assert template.node("0").work["prompt"] == "Split {input}."
    assert template.node("pick").work == {"function": "shorten", "output": "few"}
    assert read_again(template).workflow() == workflow


def test_a_choice_is_called_as_no_node_is() -> None:
    g = RAGraph("asks")
    for name in ("ask", "ask?", "ask??"):
        g.add_function(name, lambda state: "", name.replace("?", "_"))
        g.add_edge(name, END)
    g.add_edge(START, "ask?")
    g.add_edge(START, "ask??")
    g.add_edge(START, lambda state: "ask", ["ask"])
    g.add_edge("ask?", lambda state: "ask??", ["ask??"])
    template = g.workflow().template
    choices = [node.name for node in template.nodes if node.kind == CHOICE]
    assert choices == ["ask???", "START?"]


def test_a_choice_that_may_lead_anywhere_or_to_one_place_comes_back() -> None:
    graph = RAGraph("ways")
    graph.add_generation(1, prompt="{input}", output="one")
    graph.add_generation("1", prompt="{input}", output="other")
    graph.add_edge(START, Branch("input", 1, 1), [1, 1])
    graph.add_edge(1, FUNCTIONS["again"])
    graph.add_edge(1, Branch("input", "1", END), ["1", END])
    graph.add_edge("1", END)
    workflow = graph.workflow()
    functions = {"again": FUNCTIONS["again"]}
    found = raise_file(workflow.template)
    assert found == describe_workflow(workflow, functions)
    assert make_graph(found, functions).workflow() == workflow


@given(names=st.lists(NAMES, min_size=1, max_size=5, unique=True))
def test_names_keep_their_type(names: list[int | str]) -> None:
    assert len({label(name) for name in names}) == len(names)
    graph = RAGraph("named")
    for number, name in enumerate(names):
        graph.add_generation(name, prompt="{input}", output=f"text{number}")
        graph.add_edge(START, name)
        graph.add_edge(name, END)
    assert list(read_again(graph.workflow().template).workflow().nodes) == names


def test_values_that_no_file_holds_are_refused_where_a_file_is_made() -> None:
    graph = RAGraph("odd")
    graph.add_generation("a", prompt="{input}", schema=object())  # type: ignore[arg-type]
    graph.add_edge(START, "a")
    graph.add_edge("a", END)
    workflow = graph.workflow()
    with pytest.raises(WorkflowError, match="node 'a' has what no file can hold"):
        lower(workflow, strict=True)


@pytest.mark.parametrize(
    ("node", "edge"),
    [
        (GraphNode(name="a", kind="generation"), GraphEdge(source="START", target="a")),
        (GraphNode(name="a", kind="merge"), GraphEdge(source="START", target="a")),
        (GraphNode(name="a?", kind=CHOICE), GraphEdge(source="START", target="a?")),
    ],
)
def test_other_graphs_are_no_templates(node: GraphNode, edge: GraphEdge) -> None:
    graph = ExecutionGraph([GraphNode(name="START", kind="start"), node], [edge], name="x")
    with pytest.raises(WorkflowError, match="'x' is no template"):
        raise_file(graph)
