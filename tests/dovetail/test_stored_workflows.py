"""Workflows and indexes in artifacts: compiled, inspected, run and served without further flags."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

pytest.importorskip("faiss")

from dovetail import END, START, RAGraph, load, workflows
from dovetail.compiler.pipeline import compile_model
from dovetail.compiler.plan.division import Mix, bytes_scanned, divide_graph
from dovetail.compiler.plan.service import sample_trace
from dovetail.compiler.rules.workload import DEFAULT_WORKLOAD
from dovetail.compiler.write.index_build import IndexRequest, build_index_folder, describe_embedder
from dovetail.errors import ArtifactError, SpecError, WorkflowError
from dovetail.ir.artifact import SERVE
from dovetail.ir.graph import ExecutionGraph
from dovetail.ir.index_file import Passage
from dovetail.ir.plans import PlanChoice
from dovetail.ir.workflow_file import write_json
from dovetail.runtime.app import App
from dovetail.runtime.index.manifest import read_manifest
from dovetail.runtime.machine.seat import ENGINE_SLOT
from dovetail.runtime.server.models import Models, ServedModel
from dovetail.runtime.server.served_workflow import add_workflows
from dovetail.tiny_world import ENCODER, LLAMA
from dovetail.topology.division import DECODE, lend
from dovetail.topology.division import ENGINE as ENGINE_STAGES
from dovetail.topology.hardware import read_hardware
from tests.dovetail.commands import Result, assert_one_sentence, dovetail
from tests.runtime.server.live import http, serving

ENGINE, ENCODERS, SEARCHES = (
    f"dovetail.runtime.{name}" for name in ("hosting.worker", "embed.process", "retrieval.worker")
)
QUESTION, ANSWER = "What language is spoken in Zorvia?", "The language of Zorvia is Zorvish"
FILE = """
from dataclasses import dataclass

from dovetail import END, START, RAGraph

@dataclass
class Asked:
    text: "str"

g = RAGraph("twice", max_steps=3)
g.add_function("count", lambda state: state.get("tries", 0) + 1, "tries")
g.add_generation("answer", prompt="Question: {input}\\nAnswer:", max_tokens=8)
g.add_edge(START, "count")
g.add_edge("count", "answer")
g.add_edge("answer", lambda state: "count" if state["tries"] < 2 else END)
same, plain = g, RAGraph("plain", inputs=("input", "more"))
plain.add_generation(0, prompt="{input} {more}", output="text", max_tokens=4)
plain.add_edge(START, 0)
plain.add_edge(0, END)
Asked("x")
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `flows.py`, and with `app.dove`: two models, three workflows and an index."""
    work = tmp_path_factory.mktemp("stored")
    (work / "flows.py").write_text(FILE)
    compile_model(ENCODER, output=work / "encoder.dove", effort="none", weight_dtype="f32")
    texts = {
        "Zorvia": "Melkar is the capital of Zorvia. Its people speak Zorvish.",
        "Pelkan": "Pelkan is a river.",
    }
    passages = [Passage(key=name, title=name, text=text) for name, text in texts.items()]
    with load(work / "encoder.dove") as encoder:
        entry = describe_embedder("tiny", "", {}, None)
        build_index_folder(
            passages, encoder, entry, IndexRequest(output=work / "idx"), lambda *_: None
        )
    report = compile_model(
        {"llm": LLAMA, "embedder": ENCODER},
        output=work / "app.dove",
        effort="none",
        workflows=[workflows.one_shot(topk=1, max_tokens=24), work / "flows.py"],
        index=work / "idx",
        mix="2:8:1",
    )
    assert report.workflows == ("one-shot", "twice", "plain") and report.indexes == ("idx",)
    return work


@pytest.fixture(scope="module")
def app(work: Path) -> Iterator[App]:
    with load(work / "app.dove") as opened:
        yield opened


def test_an_artifact_knows_its_workflows_and_its_index(app: App) -> None:
    outputs = app.run("one-shot", {"input": QUESTION}).outputs
    assert outputs["answer"].strip().startswith(ANSWER)
    assert [found.title for found in outputs["docs"]] == ["Zorvia"]
    assert list(app.workflows) == ["one-shot", "twice", "plain"]
    assert app.find_workflow("one-shot") == workflows.one_shot(topk=1, max_tokens=24).workflow()
    result = app.run("twice", {"input": QUESTION})
    assert [ran.node for ran in result.timeline] == ["count", "answer"] * 2
    assert result.outputs["tries"] == 2
    with pytest.raises(WorkflowError, match="'one-shot', 'twice', 'plain'"):
        app.run("none", {"input": QUESTION})


def move(path: Path, cpus: dict[str | None, list[int]]) -> None:
    """Place what an artifact's graph says of each model, and of searches, a thread on each CPU."""
    serve, manifest = path / SERVE, path / "manifest.json"
    graph = json.loads(serve.read_text())
    for node in graph["nodes"]:
        there = cpus[node.get("model")]
        node["place"] |= {"threads": len(there), "cpus": there}
    data = json.dumps(graph).encode()
    serve.write_bytes(data)
    listed = json.loads(manifest.read_text())
    listed["files"][SERVE] = {"bytes": len(data), "sha256": sha256(data).hexdigest()}
    manifest.write_text(json.dumps(listed))


def workers(besides: Collection[psutil.Process]) -> dict[str, list[set[int]]]:
    """Return what CPUs each thread of each process that serves may use, by its module."""
    found = {}
    for child in set(psutil.Process().children(recursive=True)) - set(besides):
        for module in set(child.cmdline()) & {ENGINE, ENCODERS, SEARCHES}:
            found[module] = [os.sched_getaffinity(thread.id) for thread in child.threads()]
    return found


def test_workers_run_where_the_graph_of_the_artifact_places_them(
    work: Path, tmp_path: Path
) -> None:
    """The engine has all CPUs, as busy ones are left for others; their order says who is where."""
    cpus = sorted(os.sched_getaffinity(0), reverse=True)
    last = cpus[0]
    moved = shutil.copytree(work / "app.dove", tmp_path / "moved.dove")
    move(moved, {"llm": cpus, "embedder": [last], None: [last]})
    places = json.loads(dovetail("inspect", moved, "--json").out)["places"]
    told = {name: [n["place"]["cpus"] for n in nodes] for name, nodes in places["one-shot"].items()}
    assert told == {"search": [[last]], "answer": [cpus, cpus]} and places["twice"]["count"] == []
    others = psutil.Process().children(recursive=True)
    with load(moved, apart=True, trust=True) as app:
        said = app.run("one-shot", {"input": QUESTION}).outputs["answer"]
        assert said.strip().startswith(ANSWER)
        found = workers(besides=others)
    assert {last} in found[ENCODERS] and found[SEARCHES] == [{last}] * len(found[SEARCHES])
    pinned = [allowed for allowed in found[ENGINE] if len(allowed) == 1 < len(cpus)]
    assert sorted(pinned, key=min) == [{cpu} for cpu in cpus[:0:-1]], "the caller is on the first"


def test_the_cpu_is_divided_for_the_mix_given_and_the_index(app: App, work: Path) -> None:
    assert app.artifact is not None
    parts, hardware = app.artifact, read_hardware()
    choice = msgspec.json.decode(
        (work / "app.dove" / "plans" / "choice.json").read_bytes(), type=PlanChoice
    )
    trace = sample_trace(DEFAULT_WORKLOAD, parts.models["llm"].file.max_step_sequences)
    specs = (
        [part.file.spec for part in parts.models.values()],
        [part.file.spec for part in parts.encoders.values()],
    )
    mix = Mix(2, 8, 1, scanned=bytes_scanned(read_manifest(work / "app.dove" / "indexes" / "idx")))
    empty = ExecutionGraph(())
    _, divisions = divide_graph(empty, hardware, *specs, trace, choice, mix)
    assert choice.divisions == divisions


def test_a_worker_keeps_to_its_share_while_another_one_works(work: Path) -> None:
    """Only the engine is said to work; the retrieval worker hears of it at its next search."""
    search = RAGraph("search")
    search.add_retrieval("search", query="input", output="docs", topk=1)
    search.add_edge(START, "search")
    search.add_edge("search", END)
    others = psutil.Process().children(recursive=True)
    with load(work / "app.dove", apart=True, trust=True) as app:
        assert app.board is not None
        choice = json.loads((work / "app.dove" / "plans" / "choice.json").read_text())
        planned = choice["divisions"][0]["shares"]
        assert {stage: list(cpus) for stage, cpus in app.board.shares.items()} == planned
        app.run(search, {"input": "Zorvia"})  # the first one has the engine measure a step
        app.board.begin(ENGINE_SLOT, DECODE)
        assert app.run(search, {"input": "Zorvia"}).outputs["docs"][0].title == "Zorvia"
        there = lend(app.board.shares, {DECODE, "searches"})["searches"]
        found = workers(besides=others)[SEARCHES]
    assert found == [set(there)] * len(found)
    with load(work / "app.dove", threads=1, trust=True) as app:
        assert app.board is None, "who gives threads divides the CPUs"


def test_shares_that_change_under_load_drop_no_request_and_change_no_answer(
    work: Path, app: App
) -> None:
    """Engine, encoder and searches at once, while the CPUs change hands all the time."""
    texts = [f"{QUESTION} {number}" for number in range(12)]
    words = [done.text for done in app.generate(texts, max_tokens=16)]
    vectors = app.embed(texts)
    asked = app.run("one-shot", {"input": QUESTION}).outputs["answer"]
    cpus, done = sorted(os.sched_getaffinity(0)), threading.Event()
    ways = [[cpus[:1], cpus[-1:], cpus[-1:]], [cpus[-1:], cpus[:1], cpus], [cpus, cpus, cpus[:1]]]
    with load(work / "app.dove", apart=True, trust=True) as shared:
        board = shared.board
        assert board is not None and shared.workflows

        def switch() -> None:
            for engine, searches, encoders in itertools.cycle(ways):
                both = dict.fromkeys(ENGINE_STAGES, tuple(engine))
                board.divide({**both, "searches": tuple(searches), "encoders": tuple(encoders)})
                if done.wait(0.002):
                    return

        switching = threading.Thread(target=switch)
        switching.start()
        with ThreadPoolExecutor(8) as pool:
            runs = [pool.submit(shared.run, "one-shot", {"input": QUESTION}) for _ in range(4)]
            embedded = [pool.submit(shared.embed, texts) for _ in range(4)]
            found = pool.submit(shared.generate, texts, max_tokens=16).result()
            assert [each.text for each in found] == words
            assert {run.result().outputs["answer"] for run in runs} == {asked}
            for each in embedded:
                np.testing.assert_array_equal(each.result(), vectors)
        done.set()
        switching.join()
        assert all(used > 0 for used in board.used.values())


def test_run_takes_a_workflow_and_its_inputs(work: Path) -> None:
    said = dovetail("run", work / "app.dove", "--workflow", "one-shot", "--input", QUESTION)
    assert said.code == 0 and said.out.startswith(ANSWER), said.err
    told = dovetail(
        "run", work / "app.dove", "--json", "--workflow", "plain", "--input", "input=One",
        "--input", "more=two=2",
    )  # fmt: skip
    report = json.loads(told.out)
    assert (report["workflow"], report["outputs"]["more"]) == ("plain", "two=2")
    assert [node["node"] for node in report["timeline"]] == [0]
    for wrong, told in (
        (("--workflow", "plain", "--input", "One"), "--input input=TEXT, --input more=TEXT"),
        (("--workflow", "one-shot"), "give --input TEXT once"),
        (("--workflow", "one-shot", "--input", "One", "--prompt", "One"), "omit --workflow"),
        (("--workflow", "other", "--input", "One"), "other"),
    ):
        refused = dovetail("run", work / "app.dove", *wrong)
        assert_one_sentence(refused)
        assert told in refused.err


@pytest.mark.parametrize(
    "option",
    [
        ("--max-tokens", 5), ("--temperature", 0), ("--stop", "x"), ("--n", 2), ("--ignore-eos",),
        ("--system", "Be brief."), ("--raw",),
    ],
)  # fmt: skip
def test_run_refuses_options_that_a_workflow_would_not_heed(
    work: Path, option: tuple[object, ...]
) -> None:
    asked = "--workflow", "one-shot", "--input", QUESTION
    refused = dovetail("run", work / "app.dove", *asked, *option)
    assert_one_sentence(refused)
    assert f"omit {option[0]}, or --workflow" in refused.err


def test_run_shows_vectors_of_a_workflow_as_json(work: Path, tmp_path: Path) -> None:
    graph = RAGraph("vectors")
    graph.add_embedding("embed", text="input", output="vector")
    graph.add_edge(START, "embed")
    graph.add_edge("embed", END)
    (tmp_path / "vectors.json").write_bytes(write_json(graph.workflow()))
    asked = "--workflow", tmp_path / "vectors.json", "--input", QUESTION
    said = dovetail("run", work / "app.dove", *asked, "--json")
    assert said.code == 0, said.err
    with load(work / "app.dove", trust=True) as app:
        (wanted,) = app.embed([QUESTION])
    np.testing.assert_allclose(json.loads(said.out)["outputs"]["vector"], wanted, rtol=1e-5)


def test_run_takes_the_workflows_that_serve_takes(work: Path, tmp_path: Path) -> None:
    """A bundled one or a file, on an artifact that holds none and on a model."""
    graph = RAGraph("alone")
    graph.add_generation(0, prompt="{input}", max_tokens=3)
    graph.add_edge(START, 0)
    graph.add_edge(0, END)
    (tmp_path / "alone.json").write_bytes(write_json(graph.workflow()))
    asked = "--workflow", tmp_path / "alone.json", "--input", "One"
    stored, model = (dovetail("run", of, *asked) for of in (work / "app.dove", LLAMA))
    assert stored.code == model.code == 0 and stored.out == model.out, model.err
    asked = "--workflow", "one-shot-chat", "--input", QUESTION
    said = dovetail("run", work / "app.dove", *asked, "--json")
    report = json.loads(said.out)
    assert report["workflow"] == "one-shot-chat"
    assert report["outputs"]["answer"].startswith(ANSWER)
    (prompt,) = [ran["prompt"] for ran in report["timeline"] if ran.get("prompt")]
    assert prompt.startswith("user: Documents:")
    search = "--workflow", "one-shot", "--input", QUESTION
    missing = dovetail("run", LLAMA, *search)
    assert_one_sentence(Result(missing.code, missing.out, missing.err.splitlines()[-1] + "\n"))
    assert "index" in missing.err
    for wrong in ("other", work / "flows.py"):
        refused = dovetail("run", LLAMA, "--workflow", wrong, "--input", "One")
        assert_one_sentence(refused)  # nothing is compiled before


def test_run_and_serve_take_an_encoder_beside_a_model(work: Path) -> None:
    asked = "--workflow", "one-shot", "--index", work / "idx", "--input", QUESTION
    found = dovetail("run", LLAMA, "--model", f"embedder={ENCODER}", *asked)
    assert found.code == 0 and found.out.startswith(ANSWER), found.err
    stored = dovetail("run", work / "app.dove", "--model", f"embedder={ENCODER}", *asked)
    assert_one_sentence(stored)
    assert "takes no --model" in stored.err
    flags = "--model", f"embedder={ENCODER}", "--workflow", "one-shot", "--index", work / "idx"
    with serving(LLAMA, *flags, log=work / "serve.log") as live:
        runs = f"{live.v1}/workflows/one-shot/runs"
        reply = http.post(runs, json={"inputs": {"input": QUESTION}})
    assert ANSWER in reply.json()["outputs"]["answer"], reply.text
    assert "one-shot-chat asks in messages" in (work / "serve.log").read_text()


def test_inspect_shows_workflows_and_indexes(work: Path) -> None:
    text = dovetail("inspect", work / "app.dove", "--all").out
    for words in (
        "workflow one-shot of input",
        "topk: 1",
        "index idx",
        "<lambda>",
        "twice",
        "runs as",
        "llm/prefill/0 on PUs",
    ):
        assert words in text, text
    found = json.loads(dovetail("inspect", work / "app.dove", "--json").out)
    assert [w["name"] for w in found["workflows"]] == ["one-shot", "plain", "twice"]
    assert found["indexes"]["idx"]["documents"] == 2 and list(found["graphs"]) == ["serve"]
    assert json.loads(dovetail("verify", work / "app.dove", "--json").out)["ok"]


def test_inspect_shows_how_the_memory_of_a_gpu_would_be_divided(work: Path) -> None:
    pytest.importorskip("torch")
    asked = "inspect", work / "app.dove", "--gpu", "torch:cpu", "--rate", "20"
    text = dovetail(*asked).out
    for words in ("memory of the GPU", "20 workflows/s", "measured on torch:cpu", "chosen"):
        assert words in text and "assumed" not in text, text
    found = json.loads(dovetail(*asked, "--nprobe", "1", "--json").out)["gpu_memory"]
    plan = found["plan"]
    assert plan in found["tried"] and found["share"]["nprobe"] == 1
    assert plan["kv_bytes"] + plan["cluster_bytes"] == found["budget"]
    assert plan["workflows"] == max(tried["workflows"] for tried in found["tried"])
    assert found["host"]["fixed"] > 0 and found["device"]["fixed"] > 0
    assert json.loads(dovetail("inspect", work / "app.dove", "--json").out)["gpu_memory"] is None
    for wrong in (("--gpu", "abacus"), ("--gpu", "torch:cpu", "--rate", "0")):
        assert_one_sentence(result := dovetail("inspect", work / "app.dove", *wrong))
        assert "rate" in result.err or "'abacus' is not a device of this machine" in result.err


def test_a_server_offers_them_without_flags(app: App) -> None:
    models = Models([ServedModel("app", app)])
    served = add_workflows(models, [], [], None)
    assert set(served) == {"one-shot", "twice", "plain"}
    inputs = served["one-shot"].ask(QUESTION)
    answer = served["one-shot"].answer(served["one-shot"].start(inputs).result())
    assert answer.strip().startswith(ANSWER)


def test_a_workflow_of_an_artifact_that_cannot_run_is_not_served(
    work: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graph = RAGraph("lost")
    graph.add_retrieval("search", query="input", output="docs", index="gone")
    graph.add_edge(START, "search")
    graph.add_edge("search", END)
    with load(work / "app.dove") as app:
        app.add_workflow(graph)
        served = add_workflows(Models([ServedModel("app", app)]), [], [], None)
    assert set(served) == {"one-shot", "twice", "plain"}
    assert "'lost': node 'search': no index 'gone'" in caplog.text


class Turned:
    """An encoder that is as long as the one of `work`, and another."""

    def __init__(self, app: App) -> None:
        self._app = app

    def embed(self, texts: Sequence[str], /, *, prompt: str | None = None) -> np.ndarray:
        return self._app.embed(list(texts), prompt=prompt)[:, ::-1]


def test_an_index_of_another_encoder_is_refused_as_it_would_be_when_served(
    work: Path, tmp_path: Path
) -> None:
    passages, entry = [Passage(key="a", text="Pelkan")], describe_embedder("other", "", {}, None)
    request, output = IndexRequest(output=tmp_path / "turned"), tmp_path / "app.dove"
    with load(work / "encoder.dove") as encoder:
        build_index_folder(passages, Turned(encoder), entry, request, lambda *_: None)
    with pytest.raises(SpecError, match="'turned' was made with another encoder than this one"):
        compile_model(ENCODER, output=output, effort="none", index=tmp_path / "turned")
    assert not output.exists()


@pytest.mark.parametrize("verb", ["verify", "inspect"])
def test_an_index_is_not_taken_for_an_artifact(work: Path, verb: str) -> None:
    told = dovetail(verb, work / "idx")
    assert "is an index, not an artifact" in told.out + told.err and told.code
    assert "dovetail compile" not in told.out + told.err


@pytest.mark.parametrize("name", ["graph/twice.py", "graph/one-shot.json"])
def test_changed_workflows_are_refused(work: Path, tmp_path: Path, name: str) -> None:
    copy = shutil.copytree(work / "app.dove", tmp_path / "app.dove")
    (copy / name).write_bytes((copy / name).read_bytes() + b"\n")
    with pytest.raises(ArtifactError, match=name):
        load(copy)


def test_damage_in_an_index_is_found_by_verify(work: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(work / "app.dove", tmp_path / "app.dove")
    lines = copy / "indexes/idx/documents.jsonl"
    lines.write_bytes(lines.read_bytes().replace(b"Melkar", b"Melkor"))
    checked = dovetail("verify", copy)
    assert checked.code == 1 and "documents.jsonl" in checked.out
    assert b"Melkar" in (work / "idx/documents.jsonl").read_bytes()


def test_a_file_that_makes_something_else_now_is_refused(work: Path, tmp_path: Path) -> None:
    path = tmp_path / "flows.py"
    path.write_text(FILE + "\nimport os\nif 'DOVETAIL_TEST' in os.environ: g.max_steps = 2\n")
    out = tmp_path / "app.dove"
    compile_model(LLAMA, output=out, effort="none", workflows=[path])
    with load(out) as app, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOVETAIL_TEST", "1")
        with pytest.raises(ArtifactError, match="compile the artifact again"):
            app.run("twice", {"input": "x"})
        assert app.run("plain", {"input": "x", "more": "y"}).outputs["text"]


def test_an_unknown_adapter_is_told_before_a_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail.compiler.pipeline.read_inputs", None)
    graph = workflows.one_shot(adapter="law")
    with pytest.raises(WorkflowError, match="law"):
        compile_model(LLAMA, output=tmp_path / "app.dove", effort="none", workflows=[graph])


def test_what_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    coded, wrong = RAGraph("coded"), RAGraph("wrong")
    coded.add_function(0, lambda state: 1, "one")
    wrong.add_generation(0, prompt="{input}", model="other")
    for graph in (coded, wrong):
        graph.add_edge(START, 0)
        graph.add_edge(0, END)
    broken, empty = tmp_path / "broken.py", tmp_path / "empty.py"
    broken.write_text("import no_such_package_of_anybody\n")
    empty.write_text("x = 1\n")
    plain = workflows.one_shot()
    cases: list[tuple[list[object], type[Exception], str]] = [
        ([coded], WorkflowError, "<lambda>.*Python file"),
        ([wrong], WorkflowError, "no model 'other'"),
        ([plain, plain], SpecError, "two workflows"),
        ([tmp_path / "none.py"], SpecError, "no workflow file"),
        ([3], SpecError, "a workflow must be a text or a path or RAGraph or Workflow, not 3"),
        ([broken], WorkflowError, "no_such_package"),
        ([empty], SpecError, "makes no RAGraph"),
    ]
    for given, kind, words in cases:
        with pytest.raises(kind, match=words):
            compile_model(LLAMA, output=tmp_path / "app.dove", effort="none", workflows=given)
    with pytest.raises(WorkflowError, match="no model that generates"):
        compile_model(ENCODER, output=tmp_path / "app.dove", effort="none", workflows=[plain])
    with pytest.raises(ArtifactError, match="is not an index"):
        compile_model(LLAMA, output=tmp_path / "app.dove", effort="none", index=tmp_path)
    assert not (tmp_path / "app.dove").exists()
