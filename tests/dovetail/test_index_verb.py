"""`dovetail index build` on the bundled encoder: a folder that opens, interruptions, bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("faiss")

from dovetail.cli.model_cache import find_artifact
from dovetail.compiler.write import index_build
from dovetail.runtime.app import load
from dovetail.runtime.index.manifest import read_manifest
from dovetail.runtime.retrieval.folder import check_rest, open_index
from dovetail.tiny_world import ENCODER, LLAMA, corpus
from tests.dovetail.commands import assert_one_sentence, dovetail
from tests.encoders import save_decoder


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [passage.document for passage in corpus.passages()][:60]


@pytest.fixture(scope="module")
def written(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text(
        "".join(json.dumps({"id": f"w{i}", "text": t}) + "\n" for i, t in enumerate(texts))
    )
    return path


def test_a_model_directory_embeds_a_corpus(
    written: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = find_artifact(ENCODER, {})  # what the verb finds, and else would make
    output, arguments = written.with_name("idx"), ("--embedder", ENCODER, "--threads", 1)
    monkeypatch.setattr(index_build, "SLICE", 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_build, "_cluster", _interrupt)
        result = dovetail("index", "build", written, "-o", output, *arguments)
    assert result.code == 2 and "run the same command again" in result.err and not output.exists()
    result = dovetail("index", "build", written, "-o", output, *arguments, "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert (report["documents"], report["resumed"], report["clusters"]) == (60, 60, 1)
    result = dovetail("index", "build", written, "-o", output, *arguments, "--clusters", 4)
    assert result.code == 0 and "60 passages (60 as they were), 128 values" in result.out, result
    check_rest(output, read_manifest(output))
    opened = open_index(output)
    with load(compiled, threads=1) as app:
        rows = app.embed(texts[:5])
    assert [opened.find(row, 1, 4)[0].text for row in rows] == texts[:5]


def test_a_decoder_of_sentence_transformers_embeds_a_corpus(written: Path, tmp_path: Path) -> None:
    model, output = tmp_path / "m", tmp_path / "idx"
    save_decoder(model, "qwen3", vocab_size=768)
    shutil.copy(LLAMA / "tokenizer.json", model)
    (model / "config_sentence_transformers.json").write_text('{"prompts": {"query": "Query: "}}')
    result = dovetail("index", "build", written, "-o", output, "--embedder", model, "--threads", 1)
    assert result.code == 0 and "60 passages, 64 values" in result.out, result.err
    entry = open_index(output).embedder
    assert entry is not None and (entry.query_prompt, entry.passage_prompt) == ("Query: ", "")
    (model / "modules.json").unlink()
    result = dovetail("index", "build", written, "-o", output, "--embedder", model)
    assert result.code == 2 and "Qwen3Model is not a supported encoder" in result.err


def test_bad_input_is_one_sentence(written: Path, tmp_path: Path) -> None:
    build = ("index", "build")
    model = ("--embedder", ENCODER, "--threads", 1)
    for arguments in (
        (tmp_path / "none", "-o", tmp_path / "idx", *model),
        (written, "-o", tmp_path / "no" / "idx", *model),
        (written, "-o", tmp_path / "idx", "--embedder", tmp_path),
        (written, "-o", tmp_path / "idx", *model, "--clusters", 61),
        (written, "-o", tmp_path / "idx", *model, "--codes", "zip"),
        (written, "-o", tmp_path / "idx", *model, "--codes", "pq"),
        (written, "-o", tmp_path / "idx", *model, "--metric", "cos"),
    ):
        result = dovetail(*build, *arguments)
        assert result.code == 2 and result.err.splitlines()[-1].startswith("dovetail: "), result
        assert "embed " not in result.err, "nothing is embedded for an index that cannot be"
    assert not list(tmp_path.iterdir())


def test_what_is_no_supported_encoder_is_refused_before_it_is_compiled(
    written: Path, tmp_path: Path
) -> None:
    output, unknown = tmp_path / "idx", tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text('{"architectures": ["FunnelModel"]}')
    for model, family in ((LLAMA, "LlamaForCausalLM"), (unknown, "FunnelModel")):
        result = dovetail("index", "build", written, "-o", output, "--embedder", model)
        assert_one_sentence(result)
        assert f"architecture {family} is not a supported encoder" in result.err
    assert not output.exists()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
