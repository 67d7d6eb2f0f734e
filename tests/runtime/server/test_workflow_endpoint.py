"""Workflows over HTTP: as runs with events and as models of chats, equal to `App.run`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jsonschema
import msgspec
import openai
import pytest

pytest.importorskip("faiss")

import dovetail
from dovetail import workflows
from dovetail.cli.workflow_files import read_graphs
from dovetail.compiler.write.index_build import IndexRequest, build_index_folder
from dovetail.ir.errors import WorkflowError
from dovetail.ir.index_file import EmbedderEntry, Passage
from dovetail.runtime.flows import service
from dovetail.runtime.flows.events import WorkflowResult
from dovetail.runtime.server.models import Models, ServedModel
from dovetail.runtime.server.served_workflow import add_workflows
from tests.runtime.server.live import Live, http, serving

TEXTS = ("Melkar is the capital of Zorvia.", "Zorvia lies on the river Ossa.", "Apples grow.")
QUESTION = "What is the capital of Zorvia?"
PAIR = """
name: pair
inputs: [left, right]
nodes:
  - {kind: generation, name: join, prompt: "Question: {left} {right}", output: reply,
     options: {max_tokens: 4}}
edges:
  - {from: START, to: join}
  - {from: join, to: END}
"""

TWICE = """
name: twice
inputs: [input]
nodes:
  - {kind: generation, name: answer, prompt: "{input} {input}", output: answer,
     options: {max_tokens: 4}}
edges:
  - {from: START, to: answer}
  - {from: answer, to: END}
"""
WIDE = f"""
name: wide
inputs: [input]
nodes:
  - {{kind: retrieval, name: search, query: input, output: docs, topk: 3}}
  - {{kind: generation, name: answer, prompt: "{"{docs} " * 99}Question: {{input}}",
     output: answer, options: {{max_tokens: 8}}}}
edges:
  - {{from: START, to: search}}
  - {{from: search, to: answer}}
  - {{from: answer, to: END}}
"""
"""Shows what it found so often that no prompt holds it."""
SHORT = """
name: short
inputs: [input]
nodes:
  - {kind: retrieval, name: search, query: input, output: docs, topk: 3}
  - {kind: generation, name: answer, prompt: "Documents:\n{docs}\nQuestion: {input}",
     output: answer, documents_tokens: 16, options: {max_tokens: 8}}
edges:
  - {from: START, to: search}
  - {from: search, to: answer}
  - {from: answer, to: END}
"""
FORMED = """
name: formed
inputs: [input]
nodes:
  - kind: generation
    name: person
    output: person
    prompt: [{role: system, content: Be brief.}, {role: user, content: "Who is {input}?"}]
    options:
      max_tokens: 120
      schema:
        type: object
        properties: {name: {type: string, maxLength: 20}, age: {$ref: "#/$defs/age"}}
        required: [name, age]
        additionalProperties: false
        $defs: {age: {type: integer}}
  - kind: generation
    name: answer
    output: answer
    prompt: "Is {person} old?"
    options: {max_tokens: 8, structured_outputs: {choice: ["yes", "no", "not at all"]}}
edges:
  - {from: START, to: person}
  - {from: person, to: answer}
  - {from: answer, to: END}
"""
ODD = """
from dovetail import END, START, RAGraph

circle = []
circle.append(circle)
VALUES = {"half": "\\ud800", "circle": circle, "plain": {1, 2}}
g = RAGraph("odd")
g.add_function("make", lambda state: VALUES[state["input"]], "made")
g.add_edge(START, "make")
g.add_edge("make", END)
"""


@pytest.fixture(scope="module")
def index(artifacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index") / "idx"
    passages = [Passage(key=str(i), text=text) for i, text in enumerate(TEXTS)]
    entry = EmbedderEntry(name="encoder", fingerprint="")
    with dovetail.load(artifacts["encoder"]) as app:
        build_index_folder(passages, app, entry, IndexRequest(output=folder), lambda *_: None)
    return folder


@pytest.fixture(scope="module")
def flows(
    artifacts: dict[str, Path], index: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("flows")
    (folder / "pair.yaml").write_text(PAIR)
    (folder / "wide.yaml").write_text(WIDE)
    (folder / "twice.yaml").write_text(TWICE)
    (folder / "short.yaml").write_text(SHORT)
    (folder / "formed.yaml").write_text(FORMED)
    (folder / "odd.py").write_text(ODD)
    files = [*sorted(folder.glob("*.yaml")), folder / "odd.py"]
    names = ("one-shot", "hyde", "multistep", *files)
    graphs = [part for name in names for part in ("--workflow", name)]
    with serving(*artifacts.values(), *graphs, "--index", index, log=folder / "log") as server:
        yield server


@pytest.fixture(scope="module")
def expected(artifacts: dict[str, Path], index: Path) -> WorkflowResult:
    """The same run in this process."""
    with (
        dovetail.load(artifacts["encoder"]) as encoder,
        dovetail.load(artifacts["llama"]) as app,
    ):
        app.add_index(index, embed=encoder.embed)
        return app.run(workflows.one_shot(max_tokens=64), {"input": QUESTION})


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [msgspec.json.decode(line) for line in lines]


def test_nodes_answer_in_the_form_that_they_ask_for(
    flows: Live, artifacts: dict[str, Path], tmp_path: Path
) -> None:
    """Through messages or a text, at once, in a stream, as a model of chats, or in Python."""
    (tmp_path / "formed.yaml").write_text(FORMED)
    (graph,) = read_graphs(str(tmp_path / "formed.yaml"))
    schema: Any = graph.nodes["person"].options["schema"]
    with dovetail.load(artifacts["llama"]) as app:
        wanted = app.run(graph, {"input": "Zed"}).outputs
    jsonschema.validate(json.loads(wanted["person"]), schema)
    assert wanted["answer"] in ("yes", "no", "not at all")
    url, inputs = f"{flows.v1}/workflows/formed/runs", {"input": "Zed"}
    assert http.post(url, json={"inputs": inputs}).json()["outputs"] == wanted
    streamed = http.post(url, json={"inputs": inputs, "stream": True}).text
    assert events(streamed)[-1]["outputs"] == wanted
    asked = {"model": "formed", "messages": [{"role": "user", "content": "Zed"}]}
    chat = http.post(f"{flows.v1}/chat/completions", json=asked).json()
    assert chat["choices"][0]["message"]["content"] == wanted["answer"]


def test_what_json_cannot_hold_is_told_as_the_workflows_fault(flows: Live) -> None:
    url, said = f"{flows.v1}/workflows/odd/runs", "what the workflow wrote cannot be sent as JSON"
    for given in ("half", "circle"):
        for stream in (False, True):
            reply = http.post(url, json={"inputs": {"input": given}, "stream": stream})
            assert said in reply.text and "fault of its own" not in reply.text
        chat = {"model": "odd", "messages": [{"role": "user", "content": given}]}
        assert said in http.post(f"{flows.v1}/chat/completions", json=chat).text
    found = http.post(url, json={"inputs": {"input": "plain"}}).json()
    assert found["outputs"]["made"] == [1, 2]


def test_a_run_gives_what_was_written_and_when(flows: Live, expected: WorkflowResult) -> None:
    url = f"{flows.v1}/workflows/one-shot/runs"
    found = http.post(url, json={"inputs": {"input": QUESTION}}).json()
    assert found["object"] == "workflow.run" and found["workflow"] == "one-shot"
    assert "too short to be cut" in found["left"]["speculate_generation"]
    counted = 'transformations_left_total{reason="whole",transformation="speculate_generation"}'
    assert counted in http.get(f"{flows.url}/metrics").text
    assert found["outputs"]["answer"] == expected.outputs["answer"]
    assert found["outputs"]["docs"][0]["text"] == TEXTS[0]
    assert [ran["node"] for ran in found["timeline"]] == ["search", "answer"]
    assert all(0 <= ran["start"] <= ran["end"] <= found["seconds"] for ran in found["timeline"])


def test_a_streamed_run_tells_of_its_nodes(flows: Live, expected: WorkflowResult) -> None:
    url = f"{flows.v1}/workflows/one-shot/runs"
    reply = http.post(url, json={"inputs": {"input": QUESTION}, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    found = events(reply.text)
    finished = [one["node"] for one in found if one["type"] == "node_finished"]
    assert finished == ["search", "answer"] and found[-1]["type"] == "run_finished"
    assert {"node_started", "sub_stage", "node_text"} <= {one["type"] for one in found}
    text = "".join(one["text"] for one in found if one["type"] == "node_text")
    assert text == found[-1]["outputs"]["answer"] == expected.outputs["answer"]


def test_workflows_are_models_of_chats(flows: Live, expected: WorkflowResult) -> None:
    messages: Any = [{"role": "system", "content": "x"}, {"role": "user", "content": QUESTION}]
    with openai.OpenAI(base_url=flows.v1, api_key="x", timeout=200) as client:
        assert {"one-shot", "pair"} <= {model.id for model in client.models.list()}
        assert client.models.retrieve("pair").owned_by == "workflow"
        whole = client.chat.completions.create(model="one-shot", messages=messages)
        assert whole.choices[0].message.content == expected.outputs["answer"]
        assert whole.choices[0].finish_reason == "stop" and whole.usage is not None
        stream = client.chat.completions.create(
            model="one-shot", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
        assert text == expected.outputs["answer"] and chunks[-1].usage is not None
        with pytest.raises(openai.BadRequestError, match="has the inputs left, right"):
            client.chat.completions.create(model="pair", messages=messages)
        refused: dict[str, Any] = {"logprobs": True, "prompt_logprobs": 1, "guided_regex": "a"}
        refused |= {"tool_choice": "required", "top_logprobs": 2, "logit_bias": {"5": 1}}
        refused |= {"stop": ["."], "stop_token_ids": [5], "continue_final_message": True}
        for field, value in refused.items():
            with pytest.raises(openai.BadRequestError, match=f"leave out `{field}`") as error:
                client.chat.completions.create(
                    model="one-shot", messages=messages, extra_body={field: value}
                )
            assert error.value.param == field


def test_files_run_with_all_their_inputs(flows: Live) -> None:
    url = f"{flows.v1}/workflows/pair/runs"
    inputs = {"left": "Where", "right": "is Melkar?"}
    assert http.post(url, json={"inputs": inputs}).json()["outputs"]["reply"]
    missing = http.post(url, json={"inputs": {"left": "a"}})
    assert missing.status_code == 400 and "'right'" in missing.json()["error"]["message"]
    unknown = http.post(f"{flows.v1}/workflows/none/runs", json={"inputs": {}})
    assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "workflow_not_found"


def test_an_unknown_model_is_told_of_with_all_ids_there_are(flows: Live) -> None:
    for reply in (
        http.post(f"{flows.v1}/completions", json={"model": "none", "prompt": "a"}),
        http.get(f"{flows.v1}/models/none"),
    ):
        assert reply.status_code == 404
        message = reply.json()["error"]["message"]
        assert all(
            f"{card['id']!r}" in message for card in http.get(f"{flows.v1}/models").json()["data"]
        )
        assert "'one-shot'" in message and "'llama'" in message
    reply = http.post(f"{flows.v1}/responses", json={"model": "one-shot", "input": "a"})
    said = "'one-shot' is a workflow; use /v1/chat/completions"
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, said)


LENGTHS = {
    3000: ("inputs", "node 'join' failed: "),
    500_000: ("inputs.left", "'left' has 1000000 letters"),
    5_000_000: ("inputs.left", "'left' has 10000000 letters"),
}


@pytest.mark.parametrize("words", LENGTHS)
def test_inputs_that_are_too_long_are_the_clients_fault(flows: Live, words: int) -> None:
    """A node that they are too long for is named, or they are before any node has begun."""
    param, said = LENGTHS[words]
    inputs = {"left": "a " * words, "right": "b"}
    url = f"{flows.v1}/workflows/pair/runs"
    for stream in (False, True):
        reply = http.post(url, json={"inputs": inputs, "stream": stream})
        error = reply.json()["error"] if reply.status_code != 200 else events(reply.text)[-1]
        error = error.get("error", error)
        assert reply.status_code == (200 if stream and words == 3000 else 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert said in error["message"] and "1024 tokens" in error["message"]
        assert reply.headers.get("x-should-retry") != "true"


@pytest.mark.parametrize("words", [3000, 500_000])
@pytest.mark.parametrize("stream", [False, True])
def test_a_question_too_long_for_a_workflow_is_refused(
    flows: Live, words: int, stream: bool
) -> None:
    messages = [{"role": "user", "content": "a " * words}]
    body = {"model": "one-shot", "messages": messages, "stream": stream}
    reply = http.post(f"{flows.v1}/chat/completions", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "messages"), error
    assert "1024 tokens" in error["message"] and reply.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("stream", [False, True])
def test_a_question_too_long_for_a_node_is_refused_by_status(flows: Live, stream: bool) -> None:
    """It fits into the context, but not twice: its node finds that."""
    messages = [{"role": "user", "content": "a " * 600}]
    body = {"model": "twice", "messages": messages, "stream": stream}
    reply = http.post(f"{flows.v1}/chat/completions", json=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert error["message"].startswith("node 'answer' failed")


def test_documents_are_cut_to_what_a_prompt_holds(flows: Live) -> None:
    url = f"{flows.v1}/workflows/wide/runs"
    reply = http.post(url, json={"inputs": {"input": QUESTION}})
    found = reply.json()
    assert reply.status_code == 200, found
    (note,) = found["notes"]
    assert note.startswith("node 'answer': of 297 retrieved documents")
    assert "left out" in note and "1024 tokens" in note and len(found["outputs"]["docs"]) == 3
    streamed = events(http.post(url, json={"inputs": {"input": QUESTION}, "stream": True}).text)
    assert streamed[-1]["notes"] == [note]
    assert streamed[-1]["outputs"]["answer"] == found["outputs"]["answer"]
    plain = http.post(f"{flows.v1}/workflows/one-shot/runs", json={"inputs": {"input": QUESTION}})
    assert plain.json()["notes"] == []


def test_documents_are_cut_to_the_tokens_that_a_node_asks_for(flows: Live) -> None:
    url = f"{flows.v1}/workflows/short/runs"
    found = http.post(url, json={"inputs": {"input": QUESTION}}).json()
    (note,) = found["notes"]
    assert "of 3 retrieved documents" in note and note.endswith("documents_tokens is 16")
    (prompt,) = (node["prompt"] for node in found["timeline"] if node["node"] == "answer")
    first = found["outputs"]["docs"][0]["text"]
    assert first in prompt and prompt.endswith(QUESTION)
    assert not any(document["text"] in prompt for document in found["outputs"]["docs"][1:])
    body = {"model": "llama", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    alone = http.post(f"{flows.v1}/completions", json=body).json()
    assert alone["choices"][0]["text"] == found["outputs"]["answer"], "this prompt was sent"


@pytest.mark.parametrize("name", ["hyde", "multistep"])
def test_workflows_together_give_what_each_gives_alone(flows: Live, name: str) -> None:
    """HedraRAG's test A6.10; `multistep` has a loop that ends by what was written.

    That they take no longer than stage by stage is shown on a virtual clock, in test_rag.py.
    """
    questions = [QUESTION, "Which river flows through Zorvia?", "Where do apples grow?"]

    def run(case: tuple[str, str]) -> dict[str, Any]:
        url = f"{flows.v1}/workflows/{case[0]}/runs"
        reply = http.post(url, json={"inputs": {"input": case[1]}})
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    alone = [run((name, question)) for question in questions]
    cases = [(other, q) for q in questions for other in (name, "one-shot")]
    with ThreadPoolExecutor(len(cases)) as threads:
        together = list(threads.map(run, cases))[::2]
    for one, beside in zip(alone, together, strict=True):
        assert one["outputs"] == beside["outputs"]
        ran = [[(n["node"], n["round"]) for n in each["timeline"]] for each in (one, beside)]
        assert sorted(ran[0]) == sorted(ran[1]) and ran[0][-1][0] == "answer"


WRONG_GRAPHS = {
    "node 'join': an edge leads to 'nowhere'": ("to: END}", "to: nowhere}"),
    "node 'join' reads 'middle'": ("{left} {right}", "{left} {middle}"),
    "'lost'": (
        "edges:",
        "  - {kind: generation, name: lost, prompt: x, output: other}\nedges:",
    ),
}


@pytest.mark.parametrize("said", WRONG_GRAPHS)
def test_a_malformed_graph_is_refused_before_anything_is_served(tmp_path: Path, said: str) -> None:
    (tmp_path / "wrong.yaml").write_text(PAIR.replace(*WRONG_GRAPHS[said]))
    with pytest.raises(WorkflowError, match=said):
        read_graphs(str(tmp_path / "wrong.yaml"))


def test_a_workflow_without_its_index_is_refused_at_the_start(artifacts: dict[str, Path]) -> None:
    with dovetail.load(artifacts["llama"]) as app:
        with pytest.raises(WorkflowError, match=r"node 'search': no index.*--index"):
            add_workflows(Models([ServedModel("llama", app)]), read_graphs("hyde"), (), None)


def test_a_workflow_is_checked_once_before_it_is_served(
    artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pair.yaml").write_text(PAIR)
    checked = Mock(wraps=service.check_workflow)
    monkeypatch.setattr(service, "check_workflow", checked)
    graphs = read_graphs(str(tmp_path / "pair.yaml"))
    with dovetail.load(artifacts["llama"]) as app:
        add_workflows(Models([ServedModel("llama", app)]), graphs, (), None)
    assert checked.call_count == 1


def test_runs_are_counted(flows: Live) -> None:
    inputs = {"left": "Where", "right": "is Melkar?"}
    http.post(f"{flows.v1}/workflows/pair/runs", json={"inputs": inputs})
    text = http.get(f"{flows.url}/metrics").text
    assert 'dovetail:workflow_latency_seconds_count{node="join",workflow="pair"}' in text
