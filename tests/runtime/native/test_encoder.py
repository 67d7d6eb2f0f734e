"""Encoders compiled and run, against transformers on each text alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from dovetail.ir.errors import ArtifactError, RequestError
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.native.encoder import Encoder, pack_texts
from dovetail.topology.hardware import read_hardware
from tests.encoders import (
    MODERN,
    PADDED,
    Dense,
    Jina,
    compiled,
    cosines,
    last_rows,
    load_encoder,
    random_texts,
    save_encoder,
    write_modules,
    write_nomic_words,
)

LENGTHS = (1, 2, 3, 15, 16, 17, 33, 75, 95, 96, 97, 200, 511, 512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoder")


@pytest.fixture(scope="module")
def model(folder: Path) -> object:
    return save_encoder(folder / "bert", "bert", modules=True)


@pytest.fixture(scope="module")
def encoder(folder: Path, model: object) -> Iterator[Encoder]:
    found = load_encoder(compiled(folder / "bert", folder / "bert.dove"), threads=2)
    yield found
    found.close()


def test_unit_means_equal_transformers(encoder: Encoder, model: object) -> None:
    texts = random_texts(LENGTHS)
    wanted = np.array([rows.mean(0) for rows in last_rows(model, texts)])
    got = encoder.embed_tokens(texts)
    assert got.dtype == np.float32
    assert got.shape == (len(texts), encoder.dim)
    assert cosines(got, wanted).min() > 0.999999
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("family", "options", "pooling", "row", "unit"),
    [
        ("bert", {}, {"pooling_mode_cls_token": True}, 0, False),
        ("bert", {}, {"pooling_mode": "lasttoken"}, -1, True),
        ("modernbert", MODERN, {"pooling_mode_cls_token": True}, 0, True),
    ],
)
def test_a_row_stands_for_each_text(
    folder: Path, family: str, options: dict, pooling: dict, row: int, unit: bool
) -> None:
    """All others end with the last attention, where their length is asked for."""
    where = folder / f"{family}{row}"
    model = save_encoder(where, family, **options)
    write_modules(where, pooling, unit=unit)
    texts = random_texts(LENGTHS[:9])
    found = load_encoder(compiled(where, folder / f"{family}{row}.dove"))
    wanted = np.array([rows[row] for rows in last_rows(model, texts)])
    if unit:
        wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    np.testing.assert_allclose(found.embed_tokens(texts), wanted, atol=2e-5)
    found.close()


@pytest.mark.parametrize(
    ("family", "activation"), [("roberta", "gelu_new"), ("xlm-roberta", "gelu")]
)
def test_positions_after_the_padding_row(folder: Path, family: str, activation: str) -> None:
    where, texts = folder / family, random_texts(LENGTHS)
    options = {**PADDED, "type_vocab_size": 1, "hidden_act": activation}
    model = save_encoder(where, family, **options)
    found = load_encoder(compiled(where, folder / f"{family}.dove"))
    wanted = np.array([rows.mean(0) for rows in last_rows(model, texts)])
    assert found.spec.max_tokens == 512
    assert cosines(found.embed_tokens(texts), wanted).min() > 0.999999
    found.close()


def test_rows_go_through_dense_layers(folder: Path) -> None:
    where, texts = folder / "dense", random_texts(LENGTHS[:9])
    model = save_encoder(where, "bert")
    layers = (Dense(40, 64, bias=True, activation="activation.Tanh"), Dense(24, 40))
    for pooling, row in (("cls_token", lambda x: x[0]), ("mean_tokens", lambda x: x.mean(0))):
        rows = np.array([row(rows) for rows in last_rows(model, texts)])
        for count in (1, 2):
            rows = layers[count - 1](rows)
            chosen = {f"pooling_mode_{pooling}": True}
            write_modules(where, chosen, unit=False, dense=layers[:count])
            found = load_encoder(compiled(where, folder / f"{pooling}{count}.dove"))
            assert found.dim == layers[count - 1].n
            np.testing.assert_allclose(found.embed_tokens(texts), rows, atol=2e-5)
            found.close()


@pytest.mark.parametrize(
    ("family", "options"),
    [("bert", {}), ("mpnet", PADDED), pytest.param("nomic", {}, marks=pytest.mark.long)],
)
def test_bfloat16_weights_stay_near(folder: Path, family: str, options: dict) -> None:
    where, texts = folder / f"{family}-bf16", random_texts(LENGTHS)
    model = save_encoder(where, family, dtype="bfloat16", **options)
    found = load_encoder(compiled(where, folder / f"{family}-bf16.dove", weight_dtype="bf16"))
    assert found.spec.weight_dtype == "bf16"
    wanted = np.array([rows.mean(0) for rows in last_rows(model.float(), texts)])
    assert cosines(found.embed_tokens(texts), wanted).min() > 0.9995
    found.close()


def test_jina_sees_by_distance_and_has_a_gate(folder: Path) -> None:
    model, texts = Jina(), random_texts(LENGTHS)
    model.save(folder / "jina")
    found = load_encoder(compiled(folder / "jina", folder / "jina.dove", max_context=512))
    wanted = np.array([model.rows(text).mean(0) for text in texts])
    np.testing.assert_allclose(found.embed_tokens(texts), wanted, atol=2e-5)
    found.close()


def test_an_artifact_without_its_biases_is_refused(folder: Path) -> None:
    """One of an older version has slopes, which a tape of this one would pass over."""
    Jina(layers=1).save(folder / "older")
    path = compiled(folder / "older", folder / "older.dove", max_context=64)
    name = "models/embedder/encoder.json"
    data = (path / name).read_bytes().replace(b'"bias"', b'"slopes"')
    (path / name).write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_bytes())
    manifest["files"][name] = {"bytes": len(data), "sha256": sha256(data).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match="lists no 'bias'"):
        open_artifact(path, read_hardware(), kernels=False)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gte", {"pad_token_id": 0, "type_vocab_size": 0}),
        ("modernbert", MODERN),
        ("nomic", {}),
        ("mpnet", PADDED),
    ],
)
def test_models_equal_transformers(folder: Path, family: str, options: dict) -> None:
    where, texts = folder / family, random_texts(LENGTHS)
    model = save_encoder(where, family, **options)
    found = load_encoder(compiled(where, folder / f"{family}.dove"))
    wanted = np.array([rows.mean(0) for rows in last_rows(model, texts)])
    np.testing.assert_allclose(found.embed_tokens(texts), wanted, atol=2e-5)
    found.close()


def test_nomic_in_the_words_of_its_authors(folder: Path) -> None:
    where, texts = folder / "nomic-words", random_texts(LENGTHS)
    model = save_encoder(
        where, "nomic", rope_parameters={"rope_type": "default", "rope_theta": 500.0}
    )
    write_nomic_words(where)
    found = load_encoder(compiled(where, folder / "nomic-words.dove"))
    wanted = np.array([rows.mean(0) for rows in last_rows(model, texts)])
    np.testing.assert_allclose(found.embed_tokens(texts), wanted, atol=2e-5)
    found.close()


def test_a_text_longer_than_a_pass_has_one_of_its_own(folder: Path) -> None:
    where = folder / "long"
    model = save_encoder(where, "modernbert", **{**MODERN, "max_position_embeddings": 2048})
    found = load_encoder(compiled(where, folder / "long.dove"))
    texts = random_texts((600, 1500, 2, 600))
    wanted = np.array([rows.mean(0) for rows in last_rows(model, texts)])
    np.testing.assert_allclose(found.embed_tokens(texts), wanted, atol=2e-5)
    found.close()


@pytest.mark.parametrize(
    ("family", "rows", "options"),
    [
        ("bert", 2, {}),
        ("roberta", 1, PADDED),
        ("mpnet", 0, PADDED),
        ("nomic", 2, {}),
        ("gte", 1, {"pad_token_id": 0}),
        ("modernbert", 0, {**MODERN, "classifier_pooling": "mean"}),
    ],
)
def test_classifiers_give_the_logits_of_pairs(
    folder: Path, family: str, rows: int, options: dict
) -> None:
    torch = pytest.importorskip("torch")

    where, texts = folder / f"{family}-labels", random_texts((3, 20, 100))
    options = {"num_labels": 3, **({"type_vocab_size": rows} if rows else {}), **options}
    model = save_encoder(where, family, head="ForSequenceClassification", **options)
    found = load_encoder(compiled(where, folder / f"{family}-labels.dove"))
    types = [(np.arange(len(text)) > 1).astype(np.int32) * max(rows - 1, 0) for text in texts]
    with torch.inference_mode():
        wanted = [
            model(
                torch.tensor(text)[None].long(),
                **({"token_type_ids": torch.tensor(kind)[None].long()} if rows else {}),
            )
            for text, kind in zip(texts, types, strict=True)
        ]
    logits = np.array([out.logits[0].numpy() for out in wanted])
    np.testing.assert_allclose(found.embed_tokens(texts, types), logits, atol=2e-5)
    found.close()


def test_a_text_is_the_same_alone_and_in_any_batch(encoder: Encoder) -> None:
    texts = random_texts([7, 512, 40, 512, 3, 512, 90, *range(1, 80)])
    together = encoder.embed_tokens(texts)
    for i in (0, 1, 6, 50):
        np.testing.assert_allclose(encoder.embed_tokens([texts[i]])[0], together[i], atol=1e-6)
    assert encoder.embed_tokens([]).shape == (0, encoder.dim)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([[]], "at least one token"),
        ([[1], [2.5]], "text 1 must be a list"),
        ([[[1], [2, 3]]], "text 0 must be a list"),
        ([[1] * 513], "513 tokens"),
        ([[0, 300]], "out of the vocabulary"),
        ([[-1]], "out of the vocabulary"),
    ],
)
def test_wrong_texts_are_refused(encoder: Encoder, texts: list, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        encoder.embed_tokens(texts)


def test_wrong_types_are_refused(encoder: Encoder) -> None:
    for types in ([[0]], [[0, 2]], [[0, -1]], [[0, 1], [0]]):
        with pytest.raises(RequestError, match="types"):
            encoder.embed_tokens([[5, 6]], types)


@given(
    lengths=st.lists(st.integers(1, 50), max_size=60),
    tokens=st.integers(50, 120),
    most=st.integers(1, 9),
)
def test_passes_hold_every_text_once_in_order(lengths: list[int], tokens: int, most: int) -> None:
    spans = list(pack_texts(lengths, tokens, most))
    assert [i for span in spans for i in span] == list(range(len(lengths)))
    for span in spans:
        assert 1 <= len(span) <= most
        assert sum(lengths[i] for i in span) <= tokens
    for span, after in pairwise(spans):
        grown = sum(lengths[i] for i in (*span, after[0]))
        assert grown > tokens or len(span) == most


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("bert", {}),
        ("roberta", PADDED),
        ("mpnet", PADDED),
        ("nomic", {}),
        ("gte", {"pad_token_id": 0}),
        ("modernbert", MODERN),
    ],
)
def test_500_texts_of_1_to_512_tokens(folder: Path, family: str, options: dict) -> None:
    where = folder / f"{family}-500"
    model = save_encoder(where, family, **options)
    found = load_encoder(compiled(where, folder / f"{family}-500.dove"))
    texts = random_texts(np.random.default_rng(1).integers(1, 513, 500).tolist(), seed=2)
    wanted = np.array([rows.mean(0) for rows in last_rows(model, texts)])
    assert cosines(found.embed_tokens(texts), wanted).min() >= 0.99999
    found.close()


@pytest.mark.long
def test_500_texts_of_jina(folder: Path) -> None:
    model = Jina()
    model.save(folder / "jina-500")
    found = load_encoder(compiled(folder / "jina-500", folder / "jina-500.dove"))
    texts = random_texts(np.random.default_rng(1).integers(1, 513, 500).tolist(), seed=2)
    with threadpool_limits(1):  # small products, for which others would only be waited
        wanted = np.array([model.rows(text).mean(0) for text in texts])
    assert cosines(found.embed_tokens(texts), wanted).min() >= 0.99999
    found.close()
