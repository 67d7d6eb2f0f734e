"""Every script in examples/ runs as its docstring says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail import load
from dovetail.compiler.pipeline import compile_model
from dovetail.compiler.write.index_build import IndexRequest, build_index_folder, describe_embedder
from dovetail.ir.index_file import Passage
from dovetail.tiny_world import ENCODER, LLAMA, corpus
from dovetail.tiny_world.questions import SINGLE
from dovetail.workflows import one_shot
from tests.dovetail.commands import dovetail
from tests.repository import ROOT

EXAMPLES = ROOT / "examples"


def run_example(name: str, *arguments: object, given: str = "") -> list[str]:
    """Return the lines an example prints; `given` is its input."""
    command = [sys.executable, "-P", str(EXAMPLES / name), *map(str, arguments)]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        command, input=given, capture_output=True, encoding="utf-8", env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_every_example_is_tested() -> None:
    assert {p.name for p in EXAMPLES.iterdir() if p.is_file()} == {
        "call_kernel.py",
        "chat.py",
        "execution_graphs.py",  # by tests/ir/test_graph_draw.py
        "generate.py",
        "langchain_rag.py",  # by tests/runtime/server/test_langchain.py
        "langgraph_workflow.py",
        "own_transformation.py",
        "rag.py",
        "rag_folder.py",  # by tests/test_readme.py
        "saxpy.dk",
        "tune_on_ray.py",  # by tests/compiler/tune/test_ray_jobs.py
    }


def test_call_kernel(tmp_path: Path) -> None:
    pytest.importorskip("tvm_ffi")
    built = dovetail("kernel", "build", EXAMPLES / "saxpy.dk", "-o", tmp_path / "saxpy")
    assert built.code == 0, built.err
    assert run_example("call_kernel.py", tmp_path / "saxpy") == ["largest error: 0.0"]


def test_generate_compiles_once(tmp_path: Path) -> None:
    artifact = tmp_path / "app.dove"
    first = run_example("generate.py", LLAMA, artifact, "Once", "The sea")
    assert first[0].startswith("compiled ") and first[-1].startswith("'The sea': ")
    second = run_example("generate.py", LLAMA, artifact, "Once", "The sea")
    assert second == first[1:]


def test_chat_remembers_what_was_said() -> None:
    asked = "What is the capital of Zorvia?", "And of Gror?"
    answers = run_example("chat.py", LLAMA, given="\n".join(asked))
    with load(LLAMA) as app:
        messages = [{"role": "user", "content": asked[0]}]
        first = app.chat(messages, max_tokens=256).message
        messages += [first, {"role": "user", "content": asked[1]}]
        second = app.chat(messages, max_tokens=256).message
    assert answers == [*first.content.splitlines(), *second.content.splitlines()]


def test_a_graph_of_langgraph_runs_here(app: Path) -> None:
    pytest.importorskip("langgraph")
    kept = {p.id for p in corpus.passages()[:80]}
    known = (q for q in corpus.questions("train") if set(q.gold) <= kept and q.kind == SINGLE)
    question = next(known)
    (answer,) = run_example("langgraph_workflow.py", app, question.question)
    assert answer == question.statement


def test_own_transformation_is_applied(app: Path) -> None:
    told = run_example("own_transformation.py", app, "one-shot", "What language do they speak?")
    assert told == ["look_first at search#0, to gain 2.000 ms"]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with a workflow and an index of some passages of the tiny world."""
    pytest.importorskip("faiss")
    work = tmp_path_factory.mktemp("app")
    compile_model(ENCODER, output=work / "encoder.dove", effort="none")
    passages = [Passage(key=p.id, text=p.document) for p in corpus.passages()[:80]]
    with load(work / "encoder.dove") as encoder:
        entry = describe_embedder("tiny", "", {}, None)
        request = IndexRequest(output=work / "idx", clusters=8)
        build_index_folder(passages, encoder, entry, request, lambda *_: None)
    compile_model(
        {"llm": LLAMA, "embedder": ENCODER},
        output=work / "app.dove",
        effort="none",
        workflows=[one_shot(topk=1, max_tokens=8)],
        index=work / "idx",
    )
    return work / "app.dove"


@pytest.mark.long
def test_rag_writes_its_page(tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    page = tmp_path / "rag.md"
    (*_, told) = run_example("rag.py", page)
    assert told == "Who is the founder of Komosburg? The founder of Komosburg is Copa Grorsky."
    kept = (ROOT / "docs" / "rag.md").read_text(encoding="utf-8")
    built = page.read_text(encoding="utf-8")
    begin, end = "`result.graph` is what ran", "## What it gains"  # between: what is measured
    assert built.partition(begin)[0] == kept.partition(begin)[0]
    assert built.partition(end)[2] == kept.partition(end)[2]
    assert "search#0/1" in built, "a search is cut into sub-stages"
    found = re.search(r"both searches: (\d+) of (\d+) clusters", built)
    end = built.partition("## End searches early")[2]
    assert set(re.findall(r"nprobe=(\w+)", end)) == {"nprobe"}, "it is chosen for what is searched"
    assert found and 0 < int(found[1]) < int(found[2]), "the patience that was found took no effect"
    assert built.count("```mermaid") == 4
