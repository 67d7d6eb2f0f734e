"""The five library workflows on the tiny world: real models, through `App.run`, many at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("faiss")

from dovetail import END, START, RAGraph, load, workflows
from dovetail.compiler.pipeline import compile_model
from dovetail.compiler.write.index_build import IndexRequest, build_index_folder, describe_embedder
from dovetail.ir.index_file import Passage
from dovetail.ir.workflow import Embedding, Generation, PromptMessage, Retrieval, Workflow
from dovetail.runtime.app import App
from dovetail.runtime.flows.control.settings import WavefrontSettings
from dovetail.runtime.flows.control.transformations import REGISTRY
from dovetail.runtime.flows.events import NodeText
from dovetail.runtime.flows.service import FlowSettings
from dovetail.runtime.flows.services import perform
from dovetail.runtime.flows.workflow_run import run_in_order
from dovetail.runtime.index.documents import Document
from dovetail.runtime.retrieval.collection import Collection
from dovetail.runtime.retrieval.folder import open_index
from dovetail.tiny_world import ENCODER, LLAMA, corpus
from dovetail.tiny_world.questions import SINGLE, TWO_HOP, Question

OPTIONS: dict[str, Any] = {"topk": 3, "max_tokens": 48}


def make_graphs(*, chat: bool) -> dict[str, RAGraph]:
    options = {**OPTIONS, "chat": chat}
    return {
        "one-shot": workflows.one_shot(**options),
        "hyde": workflows.hyde(**options),
        "recomp": workflows.recomp(**options),
        "irg": workflows.irg(**options, rounds=2),
        "multistep": workflows.multistep(**options, rounds=3),
    }


GRAPHS, CHATS = make_graphs(chat=False), make_graphs(chat=True)
SHOWN = "user: {}\n"
"""A prompt of one message as a timeline shows it."""
PASSAGES, NPROBE = 400, 8


def test_with_chat_each_prompt_is_a_message_of_the_user() -> None:
    for name, graph in GRAPHS.items():
        plain, chats = graph.workflow().nodes, CHATS[name].workflow().nodes
        for node in (node for node in plain.values() if isinstance(node, Generation)):
            asked = chats[node.name]
            assert isinstance(asked, Generation)
            message = PromptMessage("user", str(node.prompt))
            assert asked == msgspec.structs.replace(node, prompt=(message,))


@dataclass(frozen=True)
class World:
    """The apps, the index, and questions whose passages are in it."""

    app: App
    encoder: App
    folder: Path
    questions: tuple[Question, ...]


@pytest.fixture(scope="module")
def world(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    work = tmp_path_factory.mktemp("world")
    compile_model(ENCODER, output=work / "encoder.dove", effort="none", weight_dtype="f32")
    found = corpus.questions("dev")
    asked = tuple(
        question for kind in (SINGLE, TWO_HOP) for question in [q for q in found if q.kind == kind]
    )
    questions = (asked[0], asked[1], next(q for q in asked if q.kind == TWO_HOP))
    gold = {name for question in questions for name in question.gold}
    every = corpus.passages()
    kept = [p for p in every if p.id in gold] + [p for p in every if p.id not in gold][:PASSAGES]
    passages = [Passage(key=p.id, title=p.title, text=p.text) for p in kept]
    with load(artifact, deterministic=True) as app, load(work / "encoder.dove") as encoder:
        folder = work / "idx"
        entry = describe_embedder("tiny", "", {}, None)
        request = IndexRequest(output=folder, clusters=16)
        build_index_folder(passages, encoder, entry, request, lambda *_: None)
        app.add_index(folder, nprobe=NPROBE, embed=encoder.embed)
        yield World(app, encoder, folder, questions)


def reply_alone(app: App, prompt: str, node: Generation) -> str:
    """Return what the model says to a prompt of a node, of messages by `App.chat`."""
    if isinstance(node.prompt, str):
        return app.generate(prompt, **node.options)[0].text or ""
    before, after = SHOWN.split("{}")
    assert prompt.startswith(before) and prompt.endswith(after)
    message = {"role": "user", "content": prompt[len(before) : -len(after)]}
    return app.chat([message], **node.options).text or ""


@dataclass(frozen=True)
class PlainServices:
    """What nodes call, one call at a time."""

    world: World
    collection: Collection

    def generate(self, prompt: str, node: Generation) -> str:
        return reply_alone(self.world.app, prompt, node)

    def retrieve(self, query: str | np.ndarray, node: Retrieval) -> list[Document]:
        assert isinstance(query, str)
        return self.collection.find(self.world.encoder.embed(query)[0], node.topk, NPROBE)

    def embed(self, text: str, node: Embedding) -> np.ndarray:
        raise AssertionError("no library workflow embeds")


def comparable(outputs: dict[str, Any]) -> dict[str, Any]:
    """Documents by their ids: scores may differ in the last bit by who was embedded beside."""
    return {
        name: [d.id for d in value]
        if value and isinstance(value, list) and name != "known"
        else value
        for name, value in outputs.items()
    }


@pytest.mark.parametrize("graphs", [GRAPHS, CHATS], ids=["texts", "messages"])
def test_answers_are_those_of_the_plain_order(graphs: dict[str, RAGraph], world: World) -> None:
    services = PlainServices(world, open_index(world.folder))
    cases = [(graph, {"input": q.question}) for q in world.questions for graph in graphs.values()]
    jobs = [world.app.submit_workflow(*case) for case in cases]
    results = [dict(job.result().outputs) for job in jobs]
    for (graph, inputs), got in zip(cases, results, strict=True):
        wanted = run_in_order(graph.workflow(), inputs, lambda call: perform(call, services))
        assert comparable(got) == comparable(wanted)
    one_shot = results[0]["answer"], world.questions[0].statement
    assert one_shot[0].strip() == one_shot[1]


@pytest.mark.long
def test_an_artifact_with_an_encoder_embeds_its_own_queries(world: World, tmp_path: Path) -> None:
    models = {"llm": LLAMA, "embedder": ENCODER}
    compile_model(models, output=tmp_path / "app.dove", effort="none")
    graph = RAGraph("by vector")
    graph.add_embedding("embed", text="input", output="vector", model="embedder")
    graph.add_retrieval("search", query="vector", output="docs", topk=3, index="idx")
    for source, target in ((START, "embed"), ("embed", "search"), ("search", END)):
        graph.add_edge(source, target)
    inputs = {"input": world.questions[0].question}
    with load(tmp_path / "app.dove", deterministic=True) as app:
        app.add_index(world.folder, nprobe=NPROBE)
        got = app.run(graph, inputs).outputs
        by_text = app.run(GRAPHS["one-shot"], inputs).outputs
        np.testing.assert_allclose(got["vector"], app.embed(inputs["input"])[0], atol=1e-5)
    assert [d.id for d in got["docs"]] == [d.id for d in by_text["docs"]]
    assert got["docs"][0].title and got["docs"][0].metadata["key"] in world.questions[0].gold
    assert by_text["answer"] == world.app.run(GRAPHS["one-shot"], inputs).outputs["answer"]


def changed(graph: RAGraph, **fields: Any) -> Workflow:
    """Return a workflow whose nodes have other values in those fields that they have."""
    workflow, nodes = graph.workflow(), dict[Any, Any]()
    for name, node in workflow.nodes.items():
        own = {key: value for key, value in fields.items() if hasattr(node, key)}
        nodes[name] = msgspec.structs.replace(node, **own) if own else node
    return replace(workflow, nodes=nodes)


WHEREVER = WavefrontSettings(generation_load=64, fixed_clusters=2)
"""Searches have parts, and the engine always has room."""
ANY = {"order": "any"}
EVERY = tuple(name for name in REGISTRY if name not in ("prefetch", "put"))
"""Transformations that need no device."""


@pytest.mark.parametrize(
    ("of", "names", "fields", "kinds"),
    [
        pytest.param(GRAPHS, EVERY, ANY | {"documents_tokens": 60}, ("one-shot", "hyde"), id="all"),
        pytest.param(CHATS, EVERY, ANY, ("one-shot", "hyde"), id="all messages"),
        *(
            pytest.param(graphs, names, fields, tuple(GRAPHS), marks=pytest.mark.long)
            for graphs in (GRAPHS, CHATS)
            for names in ((), EVERY, *((name, "split") for name in EVERY))
            for fields in ({}, ANY)
        ),
    ],
)
def test_an_answer_is_that_of_the_prompt_that_was_sent(
    world: World,
    artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    of: dict[str, RAGraph],
    names: tuple[str, ...],
    fields: dict[str, Any],
    kinds: tuple[str, ...],
) -> None:
    """Wherever transformations fit, before a restart and after it, with KV from a file."""
    for name in names:
        monkeypatch.setattr(REGISTRY[name], "gain", lambda self, costs: 1.0)
    settings = replace(WHEREVER, transformations=frozenset(names))
    flows, answers = FlowSettings(wavefront=settings), list[list[Any]]()
    graphs = [changed(of[kind], **fields) for kind in kinds]
    options: dict[str, Any] = {"kv_file": str(tmp_path / "kv"), "deterministic": True}
    for _ in range(2):
        with load(artifact, workflows=flows, **options) as app:
            app.add_index(world.folder, nprobe=NPROBE, embed=world.encoder.embed)
            cases = [(graph, {"input": q.question}) for graph in graphs for q in world.questions]
            jobs = [app.submit_workflow(*case) for case in cases]
            for (workflow, _), job in zip(cases, jobs, strict=True):
                result = job.result()
                last = {ran.node: ran.prompt for ran in result.timeline if ran.prompt}
                for node, prompt in last.items():  # of loops the last round
                    made = workflow.nodes[node]
                    assert isinstance(made, Generation)
                    alone = reply_alone(world.app, prompt, made)
                    assert alone == result.outputs[made.output], (workflow.name, node)
            answers.append([job.result().outputs["answer"] for job in jobs])
    if not fields and "stop" not in names:  # which may find others
        assert answers[0] == answers[1]


def test_text_streams_as_it_is_written(world: World) -> None:
    job = world.app.submit_workflow(GRAPHS["recomp"], {"input": world.questions[0].question})
    texts: dict[object, str] = {}
    for event in job:
        if isinstance(event, NodeText):
            texts[event.node] = texts.get(event.node, "") + event.text
    outputs = job.result().outputs
    assert texts == {"compress": outputs["relevant"], "answer": outputs["answer"]}
