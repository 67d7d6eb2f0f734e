"""Texts through a loaded artifact: the bundled encoder against transformers."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dovetail.compiler.pipeline import compile_model
from dovetail.ir.errors import RequestError
from dovetail.runtime.app import App, load
from dovetail.runtime.verify import verify_artifact
from dovetail.tiny_world import ENCODER
from tests.encoders import cosines, last_rows, save_encoder

TEXTS = ("Where does Ada live?", "", "The harbour of Elm was built by the mayor.", "x " * 900)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("texts") / "tiny.dove"
    compile_model(ENCODER, output=output, effort="none", threads=1)
    return output


@pytest.fixture(scope="module")
def app(path: Path) -> Iterator[App]:
    with load(path) as found:
        yield found


def test_texts_equal_transformers(app: App) -> None:
    import tokenizers
    import transformers

    tokenizer = tokenizers.Tokenizer.from_file(str(ENCODER / "tokenizer.json"))
    tokenizer.enable_truncation(256)
    ids = [np.array(e.ids) for e in tokenizer.encode_batch(list(TEXTS))]
    model = transformers.BertModel.from_pretrained(ENCODER, add_pooling_layer=False).eval()
    wanted = np.array([rows.mean(0) for rows in last_rows(model, ids)])
    assert cosines(app.embed(TEXTS), wanted).min() > 0.999999
    np.testing.assert_array_equal(app.embed(TEXTS[0]), app.embed([ids[0].tolist()]))
    np.testing.assert_array_equal(app.embed(ids[0].tolist()), app.embed([ids[0]]))
    np.testing.assert_array_equal(asyncio.run(app.aembed(TEXTS[2])), app.embed([TEXTS[2]]))
    assert app.embed([]).shape == (0, 128)


def test_a_prompt_goes_before_each_text(app: App) -> None:
    with_prompt = app.embed(["of Elm", "of Oak"], prompt="The mayor ")
    plain = app.embed(["The mayor of Elm", "The mayor of Oak"])
    np.testing.assert_allclose(with_prompt, plain, atol=1e-6)


def test_documents_are_ranked_as_by_transformers(tmp_path: Path) -> None:
    import torch
    import transformers

    where = tmp_path / "ranker"
    options = {"vocab_size": 3000, "num_labels": 1}
    model = save_encoder(where, "bert", head="ForSequenceClassification", **options)
    shutil.copy(ENCODER / "tokenizer.json", where)
    compile_model(where, output=tmp_path / "ranker.dove", effort="none", threads=1)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(where / "tokenizer.json"))
    documents = ["The mayor lives in Elm.", "x", "Ada built the harbour. " * 90]
    wanted = []
    options = {"truncation": True, "max_length": 512, "return_token_type_ids": True}
    for text in documents:
        given = tokenizer("Who lives in Elm?", text, **options)
        ids, kinds = (torch.tensor([given[k]]) for k in ("input_ids", "token_type_ids"))
        with torch.inference_mode():
            wanted.append(float(model(ids, token_type_ids=kinds).logits.sigmoid()))
    with load(tmp_path / "ranker.dove") as ranker:
        found = ranker.rerank("Who lives in Elm?", documents)
        assert ranker.rerank("Who lives in Elm?", documents, top_n=1) == found[:1]
        assert ranker.rerank("Who lives in Elm?", []) == []
        with pytest.raises(RequestError, match="no encoder"):
            ranker.embed("x")
    assert [one.index for one in found] == np.argsort(wanted)[::-1].tolist()
    for one in found:
        assert one.document == documents[one.index]
        assert one.score == pytest.approx(wanted[one.index], abs=1e-5)


def test_what_cannot_be_done_is_said(app: App) -> None:
    for call, words in (
        (lambda: app.embed("\ud800"), "half a surrogate"),
        (lambda: app.embed(["x", None]), "text 1"),
        (lambda: app.embed(5), "give texts"),
        (lambda: app.embed("x", prompt_name="query"), "no prompt 'query'"),
        (lambda: app.rerank("x", ["y"]), "no cross-encoder"),
        (lambda: app.generate("x"), "no model that generates"),
    ):
        with pytest.raises(RequestError, match=words):
            call()


def test_an_encoders_artifact_verifies_and_a_damaged_one_does_not(path: Path) -> None:
    assert verify_artifact(path).ok
    assert verify_artifact(path).models == ("embedder",)
    weights = path / "models/embedder/weights/weights.bin"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:5000] + b"!" + whole[5001:])
    try:
        assert "corrupted" in verify_artifact(path).faults[0]
    finally:
        weights.write_bytes(whole)
