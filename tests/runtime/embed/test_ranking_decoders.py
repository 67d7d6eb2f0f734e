"""Decoders that rank, in all forms in which they are published, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.compiler.pipeline import compile_model
from dovetail.ir.errors import RequestError
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.workflow import END, START
from dovetail.runtime.app import App, load
from tests.rerankers import (
    qwen_ids,
    save_classifier,
    save_reranker,
    scores,
    write_scores,
    write_tokenizer,
)

QUERY = "Who lives in Elm?"
DOCUMENTS = ["The mayor lives in Elm.", "x {query}", "Ada built the harbour. " * 90, ""]
OPTIONS: dict[str, Any] = {"effort": "none", "threads": 1, "weight_dtype": "f32"}


def ranked(app: App, **options: Any) -> np.ndarray:
    """Return the scores in the order of the documents."""
    found = app.rerank(QUERY, DOCUMENTS, **options)
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    return np.array([one.score for one in sorted(found, key=lambda one: one.index)])


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_answers_yes_or_no(tmp_path: Path, tied: bool) -> None:
    folder = tmp_path / "Qwen3-Reranker-0.6B"
    model = save_reranker(folder, tie_word_embeddings=tied)
    tokenizer = write_tokenizer(folder)
    answers = [tokenizer.token_to_id(word) for word in ("yes", "no")]
    compile_model(folder, output=tmp_path / "r.dove", max_context=400, **OPTIONS)
    with load(tmp_path / "r.dove") as app:
        for told in ({}, {"instruction": "Find the mayor"}):
            texts = [qwen_ids(tokenizer, QUERY, text, 400, *told.values()) for text in DOCUMENTS]
            assert max(map(len, texts)) == 400
            np.testing.assert_allclose(
                ranked(app, **told), scores(model, texts, *answers), atol=2e-5
            )
        graph = RAGraph(inputs=("input", "texts"))
        graph.add_rerank(1, query="input", documents="texts", output="best", **told)
        graph.add_edge(START, 1)
        graph.add_edge(1, END)
        best = app.run(graph, {"input": QUERY, "texts": DOCUMENTS}).outputs["best"]
        assert [one.id for one in best] == [r.index for r in app.rerank(QUERY, DOCUMENTS, **told)]
        with pytest.raises(RequestError, match="no encoder"):
            app.embed("x")


def test_what_a_file_says_goes_before_a_name(tmp_path: Path) -> None:
    """As vLLM's overrides have it."""
    model = save_reranker(tmp_path / "mine")
    tokenizer = write_tokenizer(tmp_path / "mine")
    file = tmp_path / "mine/config.json"
    told = {"classifier_from_token": ["<|end|>", "yes"], "is_original_qwen3_reranker": True}
    told |= {"architectures": ["Qwen3ForSequenceClassification"]}
    file.write_text(json.dumps(json.loads(file.read_text()) | told))
    compile_model(tmp_path / "mine", output=tmp_path / "r.dove", **OPTIONS)
    texts = [qwen_ids(tokenizer, QUERY, text, 512) for text in DOCUMENTS]
    answers = [tokenizer.token_to_id(word) for word in ("yes", "<|end|>")]
    with load(tmp_path / "r.dove") as app:
        np.testing.assert_allclose(ranked(app), scores(model, texts, *answers), atol=2e-5)


@pytest.mark.parametrize("name", ["Qwen3-Reranker-0.6B-seq-cls", "other"])
def test_classifiers_read_the_last_row(tmp_path: Path, name: str) -> None:
    model = save_classifier(tmp_path / name)
    tokenizer = write_tokenizer(tmp_path / name)
    compile_model(tmp_path / name, output=tmp_path / "r.dove", **OPTIONS)
    tokenizer.enable_truncation(512)
    if name == "other":
        texts = [tokenizer.encode(QUERY, text).ids for text in DOCUMENTS]
    else:
        texts = [qwen_ids(tokenizer, QUERY, text, 512) for text in DOCUMENTS]
    with load(tmp_path / "r.dove") as app:
        np.testing.assert_allclose(ranked(app), scores(model, texts), atol=2e-5)
        if name == "other":
            with pytest.raises(RequestError, match="takes no instruction"):
                app.rerank(QUERY, DOCUMENTS, instruction="Find it")


@pytest.mark.parametrize("answers", [(5, 6), (5,)])
@pytest.mark.parametrize("asks", [True, False])
def test_files_of_sentence_transformers_are_read(
    tmp_path: Path, answers: tuple[int, ...], asks: bool
) -> None:
    model = save_reranker(tmp_path / "m")
    tokenizer = write_tokenizer(tmp_path / "m")
    ids = dict(zip(("true_token_id", "false_token_id"), (*answers, None), strict=False))
    write_scores(tmp_path / "m", asks=asks, **ids)
    compile_model(tmp_path / "m", output=tmp_path / "r.dove", **OPTIONS)
    with load(tmp_path / "r.dove") as app:
        for told in ({}, {"instruction": "Look for it"}):
            said = told.get("instruction", "Find it")
            end = "\n<|im_end|>" if asks else "\n"
            texts = [
                tokenizer.encode(
                    f"<|im_start|>{said}\nquery: {QUERY}\ndocument: {text}{end}",
                    add_special_tokens=False,
                ).ids
                for text in DOCUMENTS[:2]
            ]
            found = ranked(app, **told)[:2]
            np.testing.assert_allclose(found, scores(model, texts, *answers), atol=2e-5)
