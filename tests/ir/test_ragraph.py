"""RAGraph: the paper's listing builds, and each mistake is one sentence that names the node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dovetail.ir.errors import WorkflowError
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.workflow import END, START


def hyde() -> RAGraph:
    """HedraRAG's Listing 1, first half."""
    g = RAGraph("hyde", inputs=["input", "query"])
    g.add_generation(0, prompt="Generate a hypothesis for {input}.", output="hypopara")
    g.add_retrieval(1, topk=5, query="hypopara", output="docs")
    g.add_generation(2, prompt="Answer {query} using {docs}.")
    g.add_edge(START, 0)
    g.add_edge(0, 1)
    g.add_edge(1, 2)
    g.add_edge(2, END)
    return g


def multistep() -> RAGraph:
    """The second half, as the design has it."""
    g = RAGraph("multistep")
    g.add_generation(0, prompt="Decompose {input} into subquestions.", output="subquestion")
    g.add_retrieval(1, topk=2, query="subquestion", output="docs")
    g.add_generation(2, prompt="Answer {subquestion} using {docs}.", output="answer")
    g.add_edge(START, 0)
    g.add_edge(0, 1)
    g.add_edge(1, 2)
    g.add_edge(2, lambda state: 1 if state.get("subquestion") else END)
    return g


def test_the_listing_builds() -> None:
    workflow = hyde().workflow()
    assert list(workflow.nodes) == [0, 1, 2] and workflow.inputs == ("input", "query")
    assert workflow.nodes[2].reads == ("query", "docs") and workflow.nodes[2].output == "answer"
    assert list(workflow.order) == [START, 0, 1, 2, END]
    loop = multistep().workflow()
    assert loop.away[2][1] == 1 and loop.away[0][2] == 0
    assert loop.away[2][2] == 1, "a node comes back to itself through one loop"


def test_options_of_a_generation_are_kept() -> None:
    g = RAGraph()
    g.add_generation("a", prompt="{input}", model="small", max_tokens=7, temperature=0.5)
    node = g._nodes["a"]
    assert node.options == {"max_tokens": 7, "temperature": 0.5} and node.model == "small"


def _unknown_target(g: RAGraph) -> None:
    g.add_edge(1, 7)


def _unknown_choice(g: RAGraph) -> None:
    g.add_edge(1, lambda state: 7, [7, END])


def _unknown_source(g: RAGraph) -> None:
    g.add_edge(7, 1)


def _undefined_placeholder(g: RAGraph) -> None:
    g.add_generation(3, prompt="Answer {nothing}.", output="third")
    g.add_edge(2, 3)
    g.add_edge(3, END)


def _undefined_query(g: RAGraph) -> None:
    g.add_retrieval(3, query="nothing", output="third")
    g.add_edge(2, 3)
    g.add_edge(3, END)


def _read_too_early(g: RAGraph) -> None:
    g.add_function(3, lambda state: 0, "late")
    g.add_generation(4, prompt="{late}", output="early")
    g.add_edge(START, 4)
    g.add_edge(4, END)
    g.add_edge(2, 3)
    g.add_edge(3, END)


def _unreachable(g: RAGraph) -> None:
    g.add_function(3, lambda state: 0, "third")
    g.add_edge(3, END)


def _dead_end(g: RAGraph) -> None:
    g.add_function(3, lambda state: 0, "third")
    g.add_edge(2, 3)


def _written_twice(g: RAGraph) -> None:
    g.add_function(3, lambda state: 0, "docs")
    g.add_edge(2, 3)
    g.add_edge(3, END)


def _writes_input(g: RAGraph) -> None:
    g.add_function(3, lambda state: 0, "input")
    g.add_edge(2, 3)
    g.add_edge(3, END)


def _endless(g: RAGraph) -> None:
    g.add_edge(2, 1)


def _no_way_out(g: RAGraph) -> None:
    g.add_function(3, lambda state: 0, "third")
    g.add_edge(2, 3)
    g.add_edge(3, lambda state: 3, [3])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_unknown_target, "node 1: an edge leads to 7, which is no node"),
        (_unknown_choice, "node 1: an edge leads to 7, which is no node"),
        (_unknown_source, "an edge leaves 7, which is no node"),
        (_undefined_placeholder, "node 3 reads 'nothing', which no node writes"),
        (_undefined_query, "node 3 reads 'nothing', which no node writes"),
        (_read_too_early, "node 4 reads 'late', which is only written after it"),
        (_unreachable, "node 3 cannot be reached"),
        (_dead_end, "node 3: no edge leaves it"),
        (_written_twice, "node 3 writes 'docs', which node 1 writes too"),
        (_writes_input, "node 3 writes 'input', which is an input"),
        (_endless, "is in a loop without end"),
        (_no_way_out, "node 3: no way leads from it to END"),
    ],
)
def test_mistakes_name_the_node(spoil: Callable[[RAGraph], None], said: str) -> None:
    g = hyde()
    spoil(g)
    with pytest.raises(WorkflowError, match=said):
        g.workflow()


def test_a_choice_without_targets_may_lead_anywhere() -> None:
    g = RAGraph()
    g.add_function(0, lambda state: 1, "a")
    g.add_function(1, lambda state: 1, "b")
    g.add_edge(START, 0)
    g.add_edge(0, lambda state: 1)
    g.add_edge(1, END)
    assert g.workflow().away[0] == {1: 0, END: 0, 0: 1}


def ranked(graph: RAGraph, **given: Any) -> None:
    graph.add_rerank(5, query="input", documents="docs", output="best", **given)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda g: g.add_generation(0, prompt="{input}"), "node 0 is there already"),
        (lambda g: g.add_generation(5, prompt="{input"), "node 5: prompt"),
        (lambda g: g.add_generation(5, prompt="{0}"), "must hold a plain name"),
        (lambda g: g.add_generation(5, prompt="{input.__class__}"), "must hold a plain name"),
        (lambda g: g.add_generation(5, prompt="{input!r}"), "must hold a plain name"),
        (lambda g: g.add_generation(5, prompt="{input:>9}"), "must hold a plain name"),
        (lambda g: g.add_retrieval(5, query="input", output="d", topk=0), "node 5: topk"),
        (lambda g: g.add_retrieval(5, query="input", output="d", topk="5"), "node 5: topk .* '5'"),
        (
            lambda g: g.add_retrieval(5, query="input", output="d", topk=10**30),
            f"node 5: topk is a whole number from 1 to {2**31 - 1}, not 10{{30}}",
        ),
        (lambda g: g.add_retrieval(5, query="input", output="d", index=7), "5: index is .* not 7"),
        (lambda g: ranked(g, model=3), "node 5: model is a text, not 3"),
        (lambda g: ranked(g, instruction=["x"]), r"5: instruction is a text, not \['x'\]"),
        (lambda g: g.add_generation(5, prompt="", documents_tokens=0), "5: documents_tokens .* 0"),
        (lambda g: g.add_generation(5, prompt="", documents_tokens=True), "whole .* not True"),
        (lambda g: g.add_retrieval(5, query="input", output=7), "node 5: output 7"),
        (lambda g: g.add_function(5, "no code", "d"), "node 5: 'no code' is no function"),
        (lambda g: RAGraph(inputs="input"), "inputs is a list of names"),
        (lambda g: RAGraph(inputs=None), "inputs must be a list, not None"),
        (lambda g: g.add_function(5, len, "no name"), "node 5: output 'no name'"),
        (lambda g: g.add_function("END", len, "x"), "node 'END': START and END are the two ends"),
        (lambda g: g.add_function(END, len, "x"), "named by a number or a text"),
        (lambda g: g.add_function(True, len, "x"), "named by a number or a text"),
        (lambda g: g.add_edge(0, 1, [1]), "targets are for functions"),
        (lambda g: RAGraph("x", max_steps=0), "max_steps must be at least 1"),
        (lambda g: RAGraph("x", max_steps="9"), "max_steps must be a whole number, not '9'"),
        (lambda g: g.add_retrieval(5, query="input", output="d", filters=3), "filters must be"),
        (
            lambda g: (
                g.add_retrieval(5, query="input", output="d", filters={"a": "{b}"})
                or g.add_edge(START, 5)
                or g.add_edge(5, END)
                or g.workflow()
            ),
            "node 5 reads 'b', which no node writes",
        ),
        (lambda g: RAGraph("x").workflow(), "it has no node"),
    ],
)
def test_wrong_calls_are_refused_at_once(make: Callable[[RAGraph], object], said: str) -> None:
    with pytest.raises(WorkflowError, match=said):
        make(hyde())
