"""A misspelt option fails in mypy before anything runs, and where it runs as one of our errors."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import dovetail
from dovetail import bound, workflows
from dovetail.compiler.request import CompileOptions, CompileRequest, ModelOptions, ModelRequest
from dovetail.compiler.tune.model import TuneOptions, TuneRequest
from dovetail.ir.options import ChatOptions, GenerateOptions, SamplingOptions
from dovetail.runtime.engine.options import EngineKeywords, EngineOptions
from dovetail.runtime.schedule.request import SamplingParams
from tests.repository import ROOT

GIVEN = {"model", "output", "spare_cpu"}
"""Fields that are arguments of their own, or that no caller sets."""
WRONG = """\
import dovetail
from dovetail import workflows

async def ask(app: dovetail.App) -> None:
    await app.agenerate("x", max_tokes=3)  # wrong
    app.astream("x", max_tokes=3)  # wrong
    await app.achat([], max_tokes=3)  # wrong
    await app.aembed(["x"], modl="m")  # wrong
    await app.arun("w", {}, topk=3)  # wrong

with dovetail.load("app.dove", thread=2) as app:  # wrong
    app.generate("x", max_tokes=3)  # wrong
    app.generate("x", max_tokens="3")  # wrong
    app.stream("x", max_tokes=3)  # wrong
    app.submit("x", max_tokes=3)  # wrong
    app.submit_all(["x"], max_tokes=3)  # wrong
    app.chat([], max_tokes=3)  # wrong
    app.chat_stream([], temprature=3)  # wrong
    app.score("x", tops=3)  # wrong
    app.embed(["x"], modl="m")  # wrong
    app.rerank("x", ["y"], topn=1)  # wrong
    app.run("w", {}, topk=3)  # wrong
    app.submit_workflow("w", {}, topk=3)  # wrong
    app.add_index("idx", nprob=3)  # wrong
    app.generate("x", max_tokens=3, stop=["a"], logit_bias={7: -1.0}, priority=-1, schema={})
    app.chat([{"role": "user", "content": "x"}], max_tokens=3, chat_template_kwargs={"tools": []})
    app.embed("x", model="m", wait=True)
dovetail.compile("m", output="o", efort="none")  # wrong
dovetail.compile("m", output="o", effort="none", index="idx", workflows=["one-shot"])
dovetail.tune("m", worker=2)  # wrong
dovetail.tune("m", workers=2, budget=3.0)
dovetail.RAGraph("g").add_generation(0, prompt="x", max_tokes=3)  # wrong
dovetail.RAGraph("g").add_retrieval(0, query="input", output="docs", top_k=3)  # wrong
workflows.hyde(max_tokes=3)  # wrong
workflows.hyde(max_tokens=3)
"""


def test_mypy_finds_every_misspelt_option_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(WRONG)
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", str(file)]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "typecheck")}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    found = {int(line) for line in re.findall(r"wrong\.py:(\d+): error", done.stdout)}
    wanted = {i for i, line in enumerate(WRONG.splitlines(), 1) if line.endswith("# wrong")}
    assert found == wanted, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("options", "values"),
    [
        (ModelOptions, ModelRequest),
        (CompileOptions, CompileRequest),
        (TuneOptions, TuneRequest),
        (EngineKeywords, EngineOptions),
    ],
)
def test_names_for_mypy_are_those_that_are_read(options: type, values: type) -> None:
    names = {field.name for field in fields(values)} - GIVEN
    assert set(options.__annotations__) == names


def test_every_sampling_option_is_read() -> None:
    made = {field.name for field in fields(SamplingParams)}
    assert set(SamplingOptions.__annotations__) == made - {"bad_word_ids", "grammar"} | {"schema"}
    assert set(GenerateOptions.__annotations__) - set(SamplingOptions.__annotations__) == {
        "priority"
    }
    assert set(ChatOptions.__annotations__) - set(GenerateOptions.__annotations__) == {
        "chat_template_kwargs"
    }


@pytest.fixture(scope="module")
def app(artifact: Path) -> Iterator[dovetail.App]:
    with dovetail.load(artifact) as opened:
        yield opened


@pytest.mark.parametrize(
    "call",
    [
        lambda app: app.generate("x", max_tokes=3),
        lambda app: app.stream("x", max_tokes=3),
        lambda app: app.submit("x", max_tokes=3),
        lambda app: app.chat([{"role": "user", "content": "x"}], max_tokes=3),
        lambda _: dovetail.load("nowhere.dove", max_tokes=3),
        lambda _: dovetail.compile("nowhere", output="x", max_tokes=3),
        lambda _: dovetail.tune("nowhere", max_tokes=3),
        lambda _: dovetail.RAGraph("g").add_generation(0, prompt="x", max_tokes=3),
        lambda _: workflows.one_shot(max_tokes=3),
        lambda _: bound.generation(prompt="x", max_tokes=3),
    ],
)
def test_misspelt_options_are_errors_of_ours_when_they_run(
    call: Callable[[object], object], app: dovetail.App
) -> None:
    with pytest.raises(dovetail.DovetailError, match="has no option 'max_tokes'"):
        call(app)


def test_the_option_that_is_meant_is_named(app: Any) -> None:
    with pytest.raises(dovetail.RequestError, match="did you mean 'max_tokens'"):
        app.generate("x", max_tokes=3)
    with pytest.raises(dovetail.RequestError, match="embed has no option 'modl'; did you mean"):
        app.embed("x", modl="m")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"path": 3}, "path must be a text or a path, not 3"),
        ({"threads": "two"}, "threads must be a whole number or None, not 'two'"),
        ({"device": 3}, "device must be a text, not 3"),
        ({"offload": True}, "offload must be a text, not True"),
        ({"deterministic": "no"}, "deterministic must be True or False, not 'no'"),
        ({"gpu_memory_utilization": "half"}, "must be a number, not 'half'"),
        ({"plan": "two"}, "plan must be ServicePlan or None, not 'two'"),
        ({"embedding": 0.3}, "embedding must be EmbeddingSettings or None, not 0.3"),
        ({"speculative_config": 3}, "must be a dictionary or a text or None, not 3"),
    ],
)
def test_values_of_a_wrong_type_are_errors_of_ours(options: dict[str, Any], said: str) -> None:
    with pytest.raises(dovetail.RequestError, match=said):
        dovetail.load(**{"path": "nowhere.dove", **options})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": None}, "model must be a text or a path, not None"),
        ({"output": 3}, "output must be a text or a path, not 3"),
        ({"budget": "soon"}, "budget must be a number or None, not 'soon'"),
        ({"threads": "two"}, "threads must be a whole number or None, not 'two'"),
        ({"beside": ["x"]}, r"beside must be a dictionary, not \['x'\]"),
        ({"workflows": 3}, "workflows must be a list, not 3"),
    ],
)
def test_so_are_those_of_a_compile(options: dict[str, Any], said: str) -> None:
    with pytest.raises(dovetail.SpecError, match=said):
        dovetail.compile(**{"model": "nowhere", "output": "x.dove", **options})


@pytest.mark.parametrize(
    ("settings", "options", "said"),
    [
        (dovetail.FlowSettings, {"threads": "x"}, "must be a whole number or None, not 'x'"),
        (dovetail.FlowSettings, {"wavefront": 3}, "must be WavefrontSettings, not 3"),
        (dovetail.WavefrontSettings, {"refresh": "x"}, "must be a whole number, not 'x'"),
        (dovetail.WavefrontSettings, {"patience": 0.5}, "number or a text or None, not 0.5"),
        (dovetail.EmbeddingSettings, {"slo": "x"}, "must be a number, not 'x'"),
    ],
)
def test_so_are_those_of_settings(settings: type, options: dict[str, Any], said: str) -> None:
    with pytest.raises(dovetail.SpecError, match=f"{next(iter(options))} .*{said}"):
        settings(**options)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda app: app.cancel(None), "job must be Job, not None"),
        (lambda app: asyncio.run(app.acancel(None)), "job must be Job, not None"),
        (lambda app: app.add_index(None), "path must be a text or a path, not None"),
        (lambda app: app.add_index("idx", name=3), "name must be a text or None, not 3"),
    ],
)
def test_so_are_those_of_an_app(call: Callable[[object], object], said: str, app: Any) -> None:
    with pytest.raises(dovetail.DovetailError, match=said):
        call(app)
