"""Encoders of GGUF files: the same vectors as those of the directories that they were made of."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from dovetail.compiler.encoder_folder import is_encoder
from dovetail.compiler.encoder_spec import read_encoder_spec
from dovetail.runtime.app import load
from dovetail.tiny_world import ENCODER
from tests.encoders import (
    GEMMA,
    MODERN,
    PADDED,
    Jina,
    compiled,
    cosines,
    last_rows,
    load_encoder,
    random_texts,
    save_decoder,
    save_encoder,
)
from tests.gguf_encoders import save_gguf_encoder
from tests.gguf_files import save_gguf

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "roberta": ("roberta", {**PADDED, "type_vocab_size": 1}),
    "nomic": ("nomic", {}),
    "modernbert": ("modernbert", MODERN),
}
TEXTS = random_texts([3, 40, 130, 1])


@pytest.mark.parametrize("case", CASES)
def test_vectors_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    family, options = CASES[case]
    model = save_encoder(tmp_path / "m", family, **options)
    file = save_gguf_encoder(tmp_path / "m.gguf", tmp_path / "m")
    assert is_encoder(file)
    found = load_encoder(compiled(file, tmp_path / "m.dove")).embed_tokens(TEXTS)
    wanted = np.array([rows.mean(0) for rows in last_rows(model, TEXTS)])
    assert cosines(found, wanted).min() > 0.999999
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-6)


def test_jina_has_its_gate_and_its_values_in_one_tensor(tmp_path: Path) -> None:
    jina = Jina()
    jina.save(tmp_path / "m")
    file = save_gguf_encoder(
        tmp_path / "m.gguf", tmp_path / "m", arch="jina-bert-v2", state=jina.tensors
    )
    found = load_encoder(compiled(file, tmp_path / "m.dove")).embed_tokens(TEXTS)
    assert cosines(found, np.array([jina.rows(ids).mean(0) for ids in TEXTS])).min() > 0.999999


def test_a_classifier_scores_pairs(tmp_path: Path) -> None:
    """As files of bge-reranker-v2-m3."""
    options = {**PADDED, "type_vocab_size": 1, "vocab_size": 3000, "num_labels": 1}
    head = "ForSequenceClassification"
    save_encoder(tmp_path / "m", "roberta", head=head, **options)
    tokens = ENCODER / "tokenizer.json"
    shutil.copy(tokens, tmp_path / "m")
    file = save_gguf_encoder(tmp_path / "m.gguf", tmp_path / "m", pooling="rank", tokens=tokens)
    asked = "Who lives in Elm?", ["The mayor lives in Elm.", "Ada built the harbour."]
    scores = []
    for source in (tmp_path / "m", file):
        with load(compiled(source, tmp_path / f"{source.name}.dove")) as app:
            scores.append([(one.index, one.score) for one in app.rerank(*asked)])
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-5)


def test_wordpiece_is_read_back(tmp_path: Path) -> None:
    """Texts with accents, signs, capitals, pieces and words that are not known."""
    tokens = ENCODER / "tokenizer.json"
    file = save_gguf_encoder(tmp_path / "m.gguf", ENCODER, tokens=tokens)
    texts = ["Where does Ada live?", "", "Thé MAYOR's harbour, 5%", "\u4e2d\u6587 \u20ac x\ty"]
    with load(compiled(file, tmp_path / "a.dove")) as app:
        with load(compiled(ENCODER, tmp_path / "b.dove")) as other:
            (ours,) = app.embeddings.encoders.values()
            (theirs,) = other.embeddings.encoders.values()
            for one, another in zip(ours.read(texts), theirs.read(texts), strict=True):
                np.testing.assert_array_equal(one, another)
            assert cosines(app.embed(texts), other.embed(texts)).min() > 0.999999


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "F16", "mixed"])
def test_quantised_weights_are_kept(tmp_path: Path, kind: str) -> None:
    options = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    save_encoder(tmp_path / "m", "bert", **options)
    mixed = {"attn_v": "Q6_K", "token_embd": "Q8_0"}

    def kind_of(name: str) -> str:
        return next((form for part, form in mixed.items() if part in name), "Q4_K")

    file = save_gguf_encoder(
        tmp_path / "m.gguf", tmp_path / "m", kind_of if kind == "mixed" else kind
    )
    spec = read_encoder_spec(file)
    layer = spec.weight_format("layers.0.qkv"), spec.weight_format("layers.0.o")
    assert (
        layer
        == {
            "Q8_0": ("q8_32", "q8_32"),
            "Q4_K": ("q4_32km", "q4_32km"),
            "F16": ("f32", "f32"),
            "mixed": ("bf16", "q4_32km"),
        }[kind]
    )
    kept = load_encoder(compiled(file, tmp_path / "k.dove", weight_dtype=None)).embed_tokens(TEXTS)
    floats = load_encoder(compiled(file, tmp_path / "f.dove")).embed_tokens(TEXTS)
    assert cosines(kept, floats).min() > 0.999


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_decoders_that_embed_say_how_rows_are_pooled(
    tmp_path: Path, family: str, kind: str
) -> None:
    """As files of Qwen3-Embedding and EmbeddingGemma."""
    gemma = family == "gemma3"
    pooling, options = ("mean", dict(GEMMA)) if gemma else ("lasttoken", {})
    options["intermediate_size"] = 128
    model = save_decoder(tmp_path / "m", family, pooling=pooling, **options)
    rng = np.random.default_rng(0)
    layers = [rng.normal(0, 0.1, shape).astype(np.float32) for shape in ((96, 64), (32, 96))]

    def change(writer: Any) -> None:
        writer.add_pooling_type(gguf.PoolingType.MEAN if gemma else gguf.PoolingType.LAST)
        for name, values in zip(("dense_2", "dense_3"), layers * gemma, strict=False):
            writer.add_tensor(f"{name}.weight", values)

    file = save_gguf(
        tmp_path / "m.gguf",
        tmp_path / "m",
        kind,
        arch="gemma-embedding" if gemma else None,
        change=change,
    )
    rows = last_rows(model, TEXTS)
    wanted = np.array([each.mean(0) if gemma else each[-1] for each in rows])
    for values in layers * gemma:
        wanted = wanted @ values.T
    dtype, least = ("f32", 0.99999) if kind == "F32" else (None, 0.997)
    found = load_encoder(compiled(file, tmp_path / "m.dove", weight_dtype=dtype))
    assert cosines(found.embed_tokens(TEXTS), wanted).min() > least
