"""`dovetail bench perplexity`: what transformers makes of the same windows, and bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.compiler.pipeline import compile_model
from dovetail.tiny_world import LLAMA, corpus
from tests.dovetail.commands import assert_one_sentence, dovetail

BEGIN = "<|user|>"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled Llama in float32: products in pairs of bfloat16 would round."""
    path = tmp_path_factory.mktemp("artifact") / "app.dove"
    compile_model(LLAMA, output=path, effort="none", threads=1, weight_dtype="f32")
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "passages.txt"
    path.write_text("\n".join(passage.text for passage in corpus.passages()[:60]))
    return path


def reference(model: Path, windows: list[list[int]]) -> tuple[float, float]:
    """Return llama-perplexity's figures: perplexity and its standard error, in float64."""
    torch = pytest.importorskip("torch")
    import transformers

    exact = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    found: list[float] = []
    for ids in windows:
        with torch.no_grad():
            rows = torch.log_softmax(exact(torch.tensor([ids])).logits[0], dim=-1)
        half = len(ids) // 2
        found += [-float(rows[at, ids[at + 1]]) for at in range(half, len(ids) - 1)]
    mean = float(np.mean(found))
    error = np.sqrt((np.mean(np.square(found)) - mean**2) / (len(found) - 1))
    return float(np.exp(mean)), float(np.exp(mean) * error)


def assert_equal(report: dict[str, Any], model: Path, windows: list[list[int]]) -> None:
    perplexity, error = reference(model, windows)
    found = report["result"]
    assert found["perplexity"] == pytest.approx(perplexity, rel=1e-4)
    assert found["standard_error"] == pytest.approx(error, rel=1e-3)
    assert found["windows"] == len(windows)
    assert found["tokens"] == sum(map(len, windows))


def tokens_of(text: Path, model: Path) -> list[int]:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    return list(tokenizer.encode(text.read_text(), add_special_tokens=False).ids)


def test_second_halves_of_windows_equal_transformers(artifact: Path, text: Path) -> None:
    tokens = tokens_of(text, LLAMA)
    result = dovetail("bench", "perplexity", artifact, text, "--max-tokens", 1300, "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert_equal(report, LLAMA, [tokens[:512], tokens[512:1024]])
    assert report["result"]["scored_tokens"] == 2 * 255 and report["tokens_per_second"] > 0
    shown = dovetail("bench", "perplexity", artifact, text, "--context", 101, "--threads", 1)
    assert shown.code == 0, shown.err
    assert f"the second halves of {len(tokens) // 101} consecutive windows of 101" in shown.out


def test_a_begin_token_takes_the_first_place(text: Path, tmp_path: Path) -> None:
    """The model directory is one of a tokenizer that begins texts with a token."""
    model = tmp_path / "model"
    shutil.copytree(LLAMA, model)
    described = json.loads((model / "tokenizer.json").read_text())
    (begin,) = (one["id"] for one in described["added_tokens"] if one["content"] == BEGIN)
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": BEGIN, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {BEGIN: {"id": BEGIN, "ids": [begin], "tokens": [BEGIN]}},
    }
    (model / "tokenizer.json").write_text(json.dumps(described))
    config = json.loads((model / "config.json").read_text()) | {"bos_token_id": begin}
    (model / "config.json").write_text(json.dumps(config))
    path = tmp_path / "app.dove"
    compile_model(model, output=path, effort="none", threads=1, weight_dtype="f32")
    tokens = tokens_of(text, model)[:300]
    options = ("--context", 100, "--max-tokens", 300, "--json")
    result = dovetail("bench", "perplexity", path, text, *options)
    assert result.code == 0, result.err
    windows = [[begin, *tokens[start + 1 : start + 100]] for start in (0, 100, 200)]
    assert_equal(json.loads(result.out), model, windows)


def test_what_cannot_be_scored_is_one_sentence(artifact: Path, text: Path, tmp_path: Path) -> None:
    bench = ("bench", "perplexity")
    short, binary = tmp_path / "short.txt", tmp_path / "binary"
    short.write_text("A few words.")
    binary.write_bytes(b"\xff\xfe\x00")
    for arguments in (
        (artifact, short),
        (artifact, binary),
        (artifact, tmp_path / "none"),
        (artifact, text, "--context", 100_000),
        (tmp_path / "no.dove", text),
    ):
        assert_one_sentence(dovetail(*bench, *arguments))
