"""Adapters beside a model over HTTP: the field `model` chooses, by the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

import dovetail
from dovetail import END, START, RAGraph
from dovetail.errors import SpecError
from dovetail.runtime.server.models import Models, ServedModel
from dovetail.runtime.server.served_workflow import add_workflows
from dovetail.tiny_world import LLAMA
from tests.adapters import save_adapter
from tests.runtime.server.live import http, serving
from tests.runtime.server.openai_calls import MESSAGES, PROMPT, refused

ASKED = {"max_tokens": 12, "temperature": 0.0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {n: save_adapter(folder / n, LLAMA, 4, seed=i) for i, n in enumerate(("law", "code"))}


@pytest.fixture(scope="module")
def url(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a model directory, which is compiled with its adapters first."""
    flags = [f"--adapter={name}={path}" for name, path in folders.items()]
    log = tmp_path_factory.mktemp("log") / "serve.log"
    weights = ("--weight-dtype", "f32", "--served-model-name", "base", "--deterministic")
    with serving(LLAMA, *flags, *weights, log=log) as live:
        yield live.url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=200) as found:
        yield found


def test_adapters_are_models_with_a_parent(client: openai.OpenAI) -> None:
    listed = {card.id: card.to_dict() for card in client.models.list()}
    assert [*listed] == ["base", "law", "code"]
    assert listed["law"]["parent"] == "base" and "parent" not in listed["base"]
    assert listed["law"]["capabilities"] == listed["base"]["capabilities"]
    assert client.models.retrieve("code").id == "code"
    error = refused(client.completions.create, model="other", prompt="a")
    assert error.status_code == 404 and "'base', 'law', 'code'" in error.message


def test_each_model_answers_as_offline(
    client: openai.OpenAI, folders: dict[str, Path], tmp_path: Path
) -> None:
    options = {"effort": "none", "weight_dtype": "f32"}
    dovetail.compile(LLAMA, output=tmp_path / "all.dove", adapters=folders, **options)
    with dovetail.load(tmp_path / "all.dove", deterministic=True) as app:
        texts, scores = {}, {}
        for name in ("base", *folders):
            adapter = None if name == "base" else name
            found = app.generate(PROMPT, adapter=adapter, **ASKED)[0]
            texts[name] = found.text
            scores[name] = app.score(PROMPT, adapter=adapter)[0].logprobs
            chat = app.chat(MESSAGES, adapter=adapter, **ASKED)
            asked = client.chat.completions.create(model=name, messages=MESSAGES, **ASKED)
            assert asked.choices[0].message.content == chat.text and asked.model == name
    assert len(set(texts.values())) == 3
    for name, text in texts.items():
        one = client.completions.create(model=name, prompt=PROMPT, **ASKED)
        assert (one.choices[0].text, one.model) == (text, name)
        pieces = client.completions.create(model=name, prompt=PROMPT, stream=True, **ASKED)
        assert "".join(piece.choices[0].text for piece in pieces) == text
        echoed = client.completions.create(
            model=name, prompt=PROMPT, max_tokens=1, echo=True, logprobs=1
        ).choices[0]
        assert echoed.logprobs.token_logprobs[1:-1] == pytest.approx(scores[name][1:], abs=1e-6)
        response = client.responses.create(model=name, input=PROMPT, max_output_tokens=5)
        assert response.model == name


def test_figures_of_the_engine_are_told_once(url: str, client: openai.OpenAI) -> None:
    client.completions.create(model="law", prompt=PROMPT, **ASKED)
    lines = http.get(f"{url}/metrics").text.splitlines()
    usage = [line for line in lines if line.startswith("dovetail:kv_cache_usage_perc{")]
    assert len(usage) == 1 and 'model_name="base"' in usage[0]
    assert any("generation_tokens_total" in line and '"law"' in line for line in lines)


def test_an_adapter_may_not_have_the_name_of_a_model(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    dovetail.compile(LLAMA, output=tmp_path / "a.dove", adapters=folders, effort="none")
    with dovetail.load(tmp_path / "a.dove") as app:
        with pytest.raises(SpecError, match="an adapter of 'law' has the name of another model"):
            Models([ServedModel("law", app)])
        found = Models([ServedModel("a", app)])
        assert found.find("law").adapter == "law" and found.find(None).id == "a"
        with pytest.raises(SpecError, match="compile one of them with another name"):
            Models([ServedModel("a", app), ServedModel("b", app)])
        graph = RAGraph("pair")
        graph.add_generation("say", prompt="w1 w2", max_tokens=3, adapter="law")
        graph.add_edge(START, "say")
        graph.add_edge("say", END)
        served = add_workflows(found, [graph.workflow()], (), None)
        assert served["pair"].model.id == "a"
        replaced = found.exchange("a", app)
        assert [model.id for model in replaced] == ["a", "law", "code"]


def test_run_and_inspect(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from dovetail.cli import main

    output = tmp_path / "a.dove"
    flags = [f"--adapter={name}={path}" for name, path in folders.items()]
    told = {}
    for words in (
        ["compile", str(LLAMA), "-o", str(output), "--effort", "none", *flags],
        ["inspect", str(output)],
        ["run", str(output), "--adapter", "law", "--prompt-ids", "5,6", "--json"],
        ["run", str(output), "--prompt-ids", "5,6", "--json"],
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert not ended.value.code
        told[" ".join(words[2:])] = capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["run", str(output), "--workflow", "hyde", "--adapter", "law"])
    assert ended.value.code and "--adapter is for prompts" in capsys.readouterr().err
    _, inspected, law, base = told.values()
    assert "adapters law, code" in inspected
    assert json.loads(law) != json.loads(base)
    manifest = json.loads((output / "manifest.json").read_text())
    assert f"--adapter=law={folders['law']}" in manifest["command"]
