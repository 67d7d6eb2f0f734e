"""Workflows as JSON and YAML: what is written is read back, and no file holds code."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.ir.errors import WorkflowError
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.template import find_functions
from dovetail.ir.workflow import END, START, Branch, Collect, Join, State
from dovetail.ir.workflow_file import read_workflow, write_json, write_yaml
from dovetail.workflows import BUNDLED

TEXT = """
name: multistep
max_steps: 4
nodes:
  - {kind: generation, name: 0, prompt: "Split {input}.", output: part, options: {max_tokens: 8}}
  - {kind: retrieval, name: find, query: part, output: docs, topk: 2, filters: {lang: [en, de]}}
  - {kind: embedding, name: vec, text: part, output: vector}
  - {kind: rerank, name: best, query: part, documents: docs, output: kept, topk: 1, model: r}
  - {kind: function, name: pick, function: shorten, output: few}
  - {kind: generation, name: last, prompt: "Answer from {few}."}
edges:
  - {from: START, to: 0}
  - {from: 0, to: {if: part, then: find}}
  - {from: find, to: vec}
  - {from: vec, to: best}
  - {from: best, to: pick}
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
    assert list(workflow.nodes) == [0, "find", "vec", "best", "pick", "last"]
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
        (
            TEXT.replace("kind: generation,", "kind: generation, documents_tokens: few,"),
            "documents",
        ),
        (TEXT.replace("kind: generation,", "kind: generation, documents_tokens: 0,"), "from 1 to"),
        (TEXT.replace("topk: 2", "top: 2"), "no workflow"),
        (TEXT.replace("name: find", "name: 0"), "node 0 is there already"),
        (
            TEXT.replace("function: shorten", "function: len"),
            "node 'pick' names the function 'len'",
        ),
        (TEXT.replace("choose: again", "choose: x"), "the edge from 'pick' names the function 'x'"),
        (TEXT.replace("choose: again", "to: 0, choose: again"), "needs either"),
        ("[" * 100_000, "no workflow"),
        ("name: !!int ''", "no workflow"),
        ("name: !!bool x", "no workflow"),
        ("name: !!timestamp x", "no workflow"),
        ("a: &a [1]\nb: [*a, *a]", "aliases are not read"),
    ],
)
def test_other_texts_are_refused_in_a_sentence(text: str | bytes, said: str) -> None:
    with pytest.raises(WorkflowError, match=said):
        read_workflow(text, FUNCTIONS)


@pytest.mark.parametrize("option", ["node", "self", "prompt", "model", "tempreature"])
def test_what_is_no_option_of_a_generation_is_none_in_a_file(option: str) -> None:
    nodes = [{"kind": "generation", "name": 1, "prompt": "a", "options": {option: 3}}]
    edges = [{"from": "START", "to": 1}, {"from": 1, "to": "END"}]
    with pytest.raises(WorkflowError, match=f"the generation 1 has no option '{option}'"):
        read_workflow(json.dumps({"name": "x", "nodes": nodes, "edges": edges}))


def test_a_function_without_a_name_cannot_be_written() -> None:
    workflow = read_workflow(TEXT, FUNCTIONS).workflow()
    with pytest.raises(WorkflowError, match="node 'pick' has a function that no name was given"):
        write_json(workflow, {"again": again})
    with pytest.raises(WorkflowError, match="the edge from 'pick' has a function"):
        write_json(workflow, {"shorten": shorten})


@pytest.mark.parametrize("name", BUNDLED)
def test_the_five_workflows_hold_no_code(name: str) -> None:
    workflow = BUNDLED[name](topk=3, max_tokens=8).workflow()
    assert find_functions(workflow) == {}
    for write in (write_json, write_yaml):
        again = read_workflow(write(workflow)).workflow()
        assert again == workflow and write(again) == write(workflow)


def test_functions_of_data_do_what_they_say() -> None:
    assert Join(("a", "b"))({"a": " x ", "b": 2}) == "x 2"
    collect = Collect("reply", "known")
    assert collect({}) == [] and collect({"known": ["a"]}) == ["a"]
    assert collect({"known": ["a"], "reply": " b\n"}) == ["a", "b"]
    choose = Branch("step", "on", "off", ("", "none"), {"known": 2})
    cases = [(" None. ", [], "off"), ("", [], "off"), ("B?", ["a"], "on"), ("B?", ["a"] * 2, "off")]
    for step, known, wanted in cases:
        assert choose({"step": step, "known": known}) == wanted
    assert choose({"step": "B?"}) == "on" and choose({}) == "off"


def test_code_is_found_under_names_of_its_own() -> None:
    graph = RAGraph("coded")
    for i in (1, 2):
        graph.add_function(i, lambda state: state, f"o{i}")
    graph.add_function(3, shorten, "o3")
    graph.add_edge(START, 1)
    graph.add_edge(1, again, [2])
    graph.add_edge(2, 3)
    graph.add_edge(3, END)
    found = find_functions(graph.workflow())
    lambdas = [name for name in found if "<lambda>" in name]
    assert len(found) == 4 and len(lambdas) == 2 and {"shorten", "again"} < set(found)
    assert read_workflow(write_json(graph.workflow(), found), found).workflow() == graph.workflow()
