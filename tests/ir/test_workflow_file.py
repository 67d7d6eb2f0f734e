"""Workflows as JSON and YAML: what is written is read back, and no file holds code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.ir.errors import WorkflowError
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.workflow import END, START, Branch, State
from dovetail.ir.workflow_file import read_workflow, write_json, write_yaml

TEXT = """
name: multistep
max_steps: 4
nodes:
  - {kind: generation, name: 0, prompt: "Split {input}.", output: part, options: {max_tokens: 8}}
  - {kind: retrieval, name: find, query: part, output: docs, topk: 2, filters: {lang: [en, de]}}
  - {kind: embedding, name: vec, text: part, output: vector}
  - {kind: function, name: pick, function: shorten, output: few}
  - {kind: generation, name: last, prompt: "Answer from {few}."}
edges:
  - {from: START, to: 0}
  - {from: 0, to: {if: part, then: find}}
  - {from: find, to: vec}
  - {from: vec, to: pick}
  - {from: pick, choose: again, targets: [0, last]}
  - {from: last, to: END}
"""


def shorten(state: State) -> object:
    return state["docs"][:1]


def again(state: State) -> str:
    return "last"


FUNCTIONS: dict[str, Callable[..., Any]] = {"shorten": shorten, "again": again}


def test_yaml_of_a_person_is_the_graph_it_says() -> None:
    workflow = read_workflow(TEXT, FUNCTIONS).workflow()
    assert list(workflow.nodes) == [0, "find", "vec", "pick", "last"]
    assert workflow.nodes[0].options == {"max_tokens": 8}  # type: ignore[union-attr]
    assert workflow.nodes["find"].filters == {"lang": ["en", "de"]}  # type: ignore[union-attr]
    assert workflow.nodes["pick"].function is shorten  # type: ignore[union-attr]
    assert workflow.edges[0][0].choose == Branch("part", "find", END)
    assert workflow.edges["pick"][0].targets == (0, "last") and workflow.max_steps == 4
    assert workflow.edges["last"][0].target is END and START in workflow.edges


@pytest.mark.parametrize("write", [write_json, write_yaml])
def test_what_is_written_is_read_back(write: Callable[..., bytes]) -> None:
    workflow = read_workflow(TEXT, FUNCTIONS).workflow()
    assert read_workflow(write(workflow, FUNCTIONS), FUNCTIONS).workflow() == workflow


NAMES = st.integers() | st.text(max_size=5).filter(lambda t: t not in ("START", "END"))


@given(names=st.lists(NAMES, min_size=1, max_size=5, unique=True), prompt=st.text(max_size=9))
def test_any_names_and_prompts_survive(names: list[int | str], prompt: str) -> None:
    graph = RAGraph("t")
    for i, name in enumerate(names):
        text = prompt.replace("{", "{{").replace("}", "}}")
        graph.add_generation(name, prompt=text, output=f"o{i}", stop=[prompt])
    for source, target in zip([START, *names], [*names, END], strict=True):
        graph.add_edge(source, target)
    workflow = graph.workflow()
    for write in (write_json, write_yaml):
        assert read_workflow(write(workflow)).workflow() == workflow


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no workflow"),
        ("[1, 2]", "no workflow"),
        ("name: {", "no workflow"),
        (b"\xff\xfe\x00", "no workflow"),
        ("!!python/object/apply:os.system ['true']", "no workflow"),
        (TEXT.replace("kind: embedding", "kind: dream"), "no workflow"),
        (TEXT.replace("topk: 2", "topk: two"), "no workflow"),
        (TEXT.replace("topk: 2", "top: 2"), "no workflow"),
        (TEXT.replace("name: find", "name: 0"), "node 0 is there already"),
        (
            TEXT.replace("function: shorten", "function: len"),
            "node 'pick' names the function 'len'",
        ),
        (TEXT.replace("choose: again", "choose: x"), "the edge from 'pick' names the function 'x'"),
        (TEXT.replace("choose: again", "to: 0, choose: again"), "needs either"),
        ("[" * 100_000, "no workflow"),
        ("a: &a [1]\nb: [*a, *a]", "aliases are not read"),
    ],
)
def test_other_texts_are_refused_in_a_sentence(text: str | bytes, said: str) -> None:
    with pytest.raises(WorkflowError, match=said):
        read_workflow(text, FUNCTIONS)


def test_a_function_without_a_name_cannot_be_written() -> None:
    workflow = read_workflow(TEXT, FUNCTIONS).workflow()
    with pytest.raises(WorkflowError, match="node 'pick' has a function that no name was given"):
        write_json(workflow, {"again": again})
    with pytest.raises(WorkflowError, match="the edge from 'pick' has a function"):
        write_json(workflow, {"shorten": shorten})
