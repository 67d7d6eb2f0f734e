"""Workflows that rerank: the answers made by hand, whatever is cut, cancelled or killed."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

pytest.importorskip("faiss")

from dovetail import END, START, RAGraph, load
from dovetail.compiler.pipeline import compile_model
from dovetail.compiler.write.index_build import IndexRequest, build_index_folder, describe_embedder
from dovetail.ir.errors import WorkflowError
from dovetail.ir.graph import RERANK, contract
from dovetail.ir.index_file import Passage
from dovetail.ir.workflow import render
from dovetail.runtime.app import App
from dovetail.runtime.flows import reranks
from dovetail.runtime.flows.control.settings import WavefrontSettings
from dovetail.runtime.flows.events import NodeStarted
from dovetail.runtime.flows.service import FlowSettings
from dovetail.runtime.index.documents import Document
from dovetail.runtime.server.app import make_app
from dovetail.runtime.server.context import ServerContext, ServeSettings
from dovetail.runtime.server.models import Models, ServedModel
from dovetail.runtime.server.served_workflow import add_workflows
from dovetail.tiny_world import ENCODER, LLAMA, corpus
from tests.encoders import save_encoder

PROMPT = "Documents:\n{best}\nQuestion: {input}\nAnswer:"
FOUND, KEPT = 12, 3
QUESTIONS = tuple({"input": one.question} for one in corpus.questions("dev")[:3])


def search(model: str | None = None, order: Any = "nearest") -> RAGraph:
    """Return a graph that finds many documents, keeps few, and answers from these."""
    g = RAGraph("reranked")
    g.add_retrieval("search", query="input", output="docs", topk=FOUND, order=order)
    g.add_rerank("rank", query="input", documents="docs", output="best", topk=KEPT, model=model)
    g.add_generation("answer", prompt=PROMPT, output="answer", max_tokens=8)
    return chain(g, "search", "rank", "answer")


def rank(**options: Any) -> RAGraph:
    """Return a graph that ranks a list that it is given."""
    g = RAGraph("rank", inputs=("input", "texts"))
    g.add_rerank("rank", query="input", documents="texts", output="best", **options)
    return chain(g, "rank")


def chain(graph: RAGraph, *names: str) -> RAGraph:
    for source, target in zip([START, *names], [*names, END], strict=True):
        graph.add_edge(source, target)
    return graph


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with cross-encoders, an index, and `app.dove`, which has all and a workflow."""
    folder = tmp_path_factory.mktemp("reranks")
    for name, labels in (("ranker", 1), ("classes", 3)):
        options = {"vocab_size": 3000, "num_labels": labels}
        save_encoder(folder / name, "bert", head="ForSequenceClassification", **options)
        shutil.copy(ENCODER / "tokenizer.json", folder / name)
    compile_model(ENCODER, output=folder / "encoder.dove", effort="none", threads=1)
    passages = [Passage(key=p.id, title=p.title, text=p.text) for p in corpus.passages()[:100]]
    with load(folder / "encoder.dove") as encoder:
        entry = describe_embedder("tiny", encoder.artifact.manifest.model_fingerprint, {}, None)
        request = IndexRequest(output=folder / "idx", clusters=8)
        build_index_folder(passages, encoder, entry, request, lambda *_: None)
    compiled(folder, "app.dove", search(), index=folder / "idx")
    return folder


def compiled(folder: Path, name: str, graph: RAGraph, **options: Any) -> Path:
    beside = {"small": ENCODER, "classes": folder / "classes", "ranker": folder / "ranker"}
    models = {"llm": LLAMA, **beside}
    options = {"effort": "none", "threads": 1, "weight_dtype": "f32", **options}
    compile_model(models, output=folder / name, workflows=[graph], **options)
    return folder / name


@pytest.fixture(scope="module")
def app(folder: Path) -> Iterator[App]:
    with load(folder / "app.dove", deterministic=True) as app:
        yield app


def by_hand(app: App, inputs: dict[str, str]) -> dict[str, Any]:
    """Return what each node writes, each call made by itself."""
    g = RAGraph("only-search")
    g.add_retrieval("search", query="input", output="docs", topk=FOUND)
    docs = app.run(chain(g, "search"), inputs).outputs["docs"]
    ranked = app.rerank(inputs["input"], [str(each) for each in docs], model="ranker", top_n=KEPT)
    best = [msgspec.structs.replace(docs[one.index], score=one.score) for one in ranked]
    prompt = render(PROMPT, {**inputs, "best": best})
    (answer,) = app.generate([prompt], max_tokens=8)
    return {**inputs, "docs": docs, "best": best, "answer": answer.text}


def assert_same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Values are the same, but for the last bits of scores, which a batch may change."""
    scores = [each.score for each in wanted["best"]]
    assert [each.score for each in found["best"]] == pytest.approx(scores, abs=1e-5)
    plain = [
        {**each, "best": [msgspec.structs.replace(one, score=0.0) for one in each["best"]]}
        for each in (found, wanted)
    ]
    assert plain[0] == plain[1]


@pytest.mark.parametrize("chosen", [None, (), ("split", "speculate_generation")])
def test_the_best_of_what_is_found_is_what_the_calls_give_one_by_one(
    folder: Path, app: App, chosen: tuple[str, ...] | None
) -> None:
    wanted = [by_hand(app, inputs) for inputs in QUESTIONS]
    names = None if chosen is None else frozenset(chosen)
    flows = FlowSettings(wavefront=WavefrontSettings(transformations=names, fixed_clusters=2))
    with load(folder / "app.dove", deterministic=True, workflows=flows) as other:
        stored = "reranked", search("ranker", "any")
        for graph in stored:
            jobs = [other.submit_workflow(graph, inputs) for inputs in QUESTIONS]
            for job, outputs in zip(jobs, wanted, strict=True):
                result = job.result()
                assert_same(result.outputs, outputs)
                kinds = [(node.node, node.kind) for node in result.timeline]
                assert kinds[1] == ("rank", RERANK) and len(kinds) == 3
                assert [n.kind for n in contract(result.graph).nodes][1] == RERANK
                # a prompt of what is found in part would not have been ranked
                assert "speculate_generation" not in {r.transformation for r in result.rewrites}
                scores = [each.score for each in result.outputs["best"]]
                assert len(scores) == KEPT and scores == sorted(scores, reverse=True)


def test_it_is_served_and_drawn(app: App, tmp_path: Path) -> None:
    models = Models([ServedModel("app", app)])
    served = add_workflows(models, [search()], [], None)
    server = ServerContext(models, ServeSettings(log_requests=False), served)
    wanted = by_hand(app, QUESTIONS[0])

    async def ask() -> Any:
        transport = httpx.ASGITransport(app=make_app(server))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            path, body = "/v1/workflows/reranked/runs", {"inputs": QUESTIONS[0]}
            reply = await client.post(path, json=body)
            assert reply.status_code == 200, reply.text
            return reply.json()

    with app.record() as timeline:
        found = asyncio.run(ask())
    assert found["outputs"]["answer"] == wanted["answer"]
    assert [one["id"] for one in found["outputs"]["best"]] == [one.id for one in wanted["best"]]
    assert [node["kind"] for node in found["timeline"]] == ["retrieval", RERANK, "generation"]
    timeline.write(tmp_path / "trace.json")
    events = msgspec.json.decode((tmp_path / "trace.json").read_bytes())["traceEvents"]
    assert [e["args"]["texts"] for e in events if e["name"] == RERANK] == [FOUND]


def test_lists_of_texts_are_ranked_and_other_values_refused(app: App) -> None:
    texts = ["The mayor lives in Elm.", "x", "Ada built the harbour."]
    given = {"input": "Who lives in Elm?", "texts": texts}
    wanted = app.rerank(given["input"], texts, model="ranker")
    found = app.run(rank(), given).outputs["best"]
    one_by_one = [Document(id=r.index, text=r.document, score=r.score) for r in wanted]
    assert_same({"best": found}, {"best": one_by_one})
    (first,) = app.run(rank(topk=1), {**given, "texts": tuple(texts)}).outputs["best"]
    assert first.id == found[0].id
    assert app.run(rank(), {**given, "texts": []}).outputs["best"] == []
    for wrong, words in (("x", "is no list"), ([1], "must be a text"), ({"a": 1}, "is no list")):
        with pytest.raises(WorkflowError, match=f"node 'rank' failed: .*{words}"):
            app.run(rank(), {**given, "texts": wrong})
    for model in (None, "ranker"):
        with pytest.raises(WorkflowError, match=r"'rank': the cross-encoder 'ranker' takes no ins"):
            app.add_workflow(rank(model=model, instruction="Find builders"))
    with pytest.raises(WorkflowError, match="topk is a whole number"):
        rank(topk=0)


def test_a_list_that_is_changed_meanwhile_is_ranked_as_it_was(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["The mayor lives in Elm.", "x", "Ada built the harbour."]
    given = {"input": "Who lives in Elm?", "texts": [*texts]}
    wanted = app.run(rank(), given).outputs["best"]
    service = app.embeddings.choose("ranker", labels=True).service
    ((models,),) = service._instances.values()
    embed, gate = models["ranker"].embed_tokens, Event()
    monkeypatch.setattr(
        models["ranker"], "embed_tokens", lambda *given: gate.wait() and embed(*given)
    )

    def change(state: Mapping[str, Any]) -> None:
        state["texts"].clear()
        gate.set()

    graph = rank()
    graph.add_function("change", change, "changed")
    graph.add_edge(START, "change")
    graph.add_edge("change", END)
    found = app.submit_workflow(graph, given).result(timeout=60).outputs
    assert_same(found, {"best": wanted, **given, "changed": None})


def test_a_rerank_whose_result_cannot_be_made_fails(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reranks, "find_best", lambda documents, ranked: documents[len(ranked)])
    job = app.submit_workflow(rank(), {"input": "Who?", "texts": ["Ada."]})
    with pytest.raises(WorkflowError, match=r"node 'rank' failed: .*index out of range"):
        job.result(timeout=60)


def test_a_model_that_does_not_rank_is_refused(folder: Path, app: App) -> None:
    before = set(folder.iterdir())
    for name in ("small", "classes", "llm", "nobody"):
        words = f"node 'rank': no model '{name}' for rerank; there are: 'ranker'"
        with pytest.raises(WorkflowError, match=words):
            app.add_workflow(search(name))
        with pytest.raises(WorkflowError, match=f"node 'rank': no model '{name}' for rerank"):
            compiled(folder, "wrong.dove", search(name))
    assert set(folder.iterdir()) == before
    with (
        load(folder / "encoder.dove") as encoder,
        pytest.raises(WorkflowError, match=r"node 'rank': there is no cross-encoder; compile one"),
    ):
        encoder.run(rank(), {"input": "x", "texts": []})


def test_a_cancelled_run_takes_its_pairs_out_of_the_queues(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = app.embeddings.choose("ranker", labels=True).service
    ((models,),) = service._instances.values()
    embed, gate = models["ranker"].embed_tokens, Event()
    monkeypatch.setattr(
        models["ranker"], "embed_tokens", lambda *given: gate.wait() and embed(*given)
    )
    texts = [f"Ada has {n} boats." for n in range(4000)]
    given = {"input": "Who?", "texts": texts}
    jobs = [
        app.submit_workflow(rank(), {**given, "texts": texts[:5]}),
        app.submit_workflow(rank(), given),
    ]
    while len(asked := [q.payload[0] for q in service.manager.live()]) < 4005:
        os.sched_yield()
    many = max(asked, key=lambda job: len(job.queries))
    jobs[1].cancel()
    with pytest.raises(WorkflowError, match="cancelled"):
        jobs[1].result()
    while not many.future.cancelled():
        os.sched_yield()
    gate.set()
    assert len(jobs[0].result().outputs["best"]) == 5
    assert np.isnan(many.seconds).any() and not service.manager.live()


def test_a_rerank_outlives_an_encoder_that_is_killed_under_it(folder: Path, app: App) -> None:
    wanted = by_hand(app, QUESTIONS[0])
    with load(folder / "app.dove", deterministic=True, apart=True) as other:
        service = other.embeddings.choose("ranker", labels=True).service
        ((models,),) = service._instances.values()
        pid = models["ranker"].pid
        os.kill(pid, signal.SIGSTOP)
        job = other.submit_workflow("reranked", QUESTIONS[0])
        events = (e for e in job if isinstance(e, NodeStarted))
        assert next(e for e in events if e.node == "rank").kind == RERANK
        while not service.manager.live():
            os.sched_yield()
        os.kill(pid, signal.SIGKILL)
        assert_same(job.result().outputs, wanted)
