"""Encoders of GGUF files: the same vectors as those of the directories that they were made of."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from dovetail.compiler.formats.encoder_formats import tell_widened
from dovetail.compiler.models.encoder_folder import is_encoder, open_folder
from dovetail.compiler.models.encoder_spec import read_encoder_spec
from dovetail.compiler.models.gguf_model import GgufModel
from dovetail.compiler.models.source import open_model
from dovetail.ir.errors import SpecError
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
from tests.gguf_encoders import SPACE, save_gguf_encoder
from tests.gguf_files import add_tokenizer, read_state, save_gguf
from tests.rerankers import save_reranker, write_tokenizer

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "roberta": ("roberta", {**PADDED, "type_vocab_size": 1}),
    "nomic": ("nomic", {}),
    "modernbert": ("modernbert", MODERN),
}
SETTINGS = {"eos_token": "<|end|>", "pad_token": "<|end|>", "chat_template": ""}
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


@pytest.mark.parametrize("parted", [False, True])
def test_gate_and_values_of_jina_are_one_tensor_or_two(tmp_path: Path, parted: bool) -> None:
    jina = Jina()
    jina.save(tmp_path / "m")
    state = dict(jina.tensors)
    for name in [name for name in state if parted and "gated_layers" in name]:
        for part, rows in zip("wv", np.split(state.pop(name), 2), strict=True):
            state[name.replace("gated_layers", f"gated_layers_{part}")] = rows
    file = save_gguf_encoder(tmp_path / "m.gguf", tmp_path / "m", arch="jina-bert-v2", state=state)
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


@pytest.mark.parametrize(
    "kind", ["Q8_0", pytest.param("Q4_K", marks=pytest.mark.long), "F16", "mixed"]
)
def test_quantised_weights_are_kept(tmp_path: Path, kind: str) -> None:
    options = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    save_encoder(tmp_path / "m", "bert", **options)
    mixed = {"attn_v": "Q6_K", "token_embd": "Q4_0"}

    def kind_of(name: str) -> str:
        return next((form for part, form in mixed.items() if part in name), "Q8_0")

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
            "mixed": ("bf16", "q8_32"),
        }[kind]
    )
    notes = tell_widened(spec, open_folder(file).source.checkpoint())
    assert [note[:20] for note in notes] == ["2 matrices of severa"] * (kind == "mixed")
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


@pytest.mark.parametrize("form", ["classifier", "name"])
def test_a_decoder_ranks_by_yes_and_no(tmp_path: Path, form: str) -> None:
    """As files of Qwen3-Reranker: with two rows of its head, or all of it."""
    save_reranker(tmp_path / "qwen3-reranker", tie_word_embeddings=True, vocab_size=772)
    tokenizer = write_tokenizer(tmp_path / "qwen3-reranker")
    embedding = read_state(tmp_path / "qwen3-reranker")["model.embed_tokens.weight"]
    (tmp_path / "qwen3-reranker/tokenizer_config.json").write_text(json.dumps(SETTINGS))

    def change(writer: Any) -> None:
        if form == "name":
            return
        writer.add_pooling_type(gguf.PoolingType.RANK)
        writer.add_classifier_output_labels(["yes", "no"])
        rows = [tokenizer.token_to_id(word) for word in ("yes", "no")]
        writer.add_tensor("cls.output.weight", np.ascontiguousarray(embedding[rows]))

    name = "Qwen3-Reranker-0.6B.gguf" if form == "name" else "m.gguf"
    tokens = add_tokenizer(tmp_path / "qwen3-reranker")
    file = save_gguf(tmp_path / name, tmp_path / "qwen3-reranker", tokenizer=tokens, change=change)
    asked = "Who lives in Elm?", ["The mayor lives in Elm.", "Ada built the harbour."]
    scores = []
    for source in (tmp_path / "qwen3-reranker", file):
        with load(compiled(source, tmp_path / f"{source.name}.dove", max_context=400)) as app:
            scores.append([(one.index, one.score) for one in app.rerank(*asked)])
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-5)


def test_unigrams_are_read_back(tmp_path: Path) -> None:
    """As files of bge-m3; two tokens stand between a pair."""
    import tokenizers

    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [(f"{SPACE}the", -2.0), (SPACE, -3.0), ("the", -4.0), ("n", -5.0), ("th", -6.0)]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "bert")
    writer.add_tokenizer_model("t5")
    writer.add_token_list([piece for piece, _ in pieces])
    writer.add_token_scores([score for _, score in pieces])
    writer.add_token_types([3, 3, 3, 2, *[1] * (len(pieces) - 4)])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    made = tokenizers.Tokenizer.from_buffer(open_model(tmp_path / "m.gguf").file("tokenizer.json"))
    assert made.encode("the  then x").ids == [0, 4, 4, 7, 5, 3, 2]
    assert made.encode("the", "n").ids == [0, 4, 2, 2, 5, 7, 2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bert.attention.causal": True}, "rows of encoders see whole texts"),
        ({"bert.rope.scaling.type": "yarn"}, "ropes of encoders are not scaled"),
        ({"bert.pooling_type": 4}, "no tensor pooler.dense.weight"),
        ({"bert.pooling_type": np.array([1, 2])}, "pooling_type differs between layers"),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    save_encoder(tmp_path / "m", "bert")
    model = open_model(save_gguf_encoder(tmp_path / "m.gguf", tmp_path / "m"))
    assert isinstance(model, GgufModel)
    changed = replace(model.header, values={**model.header.values, **changes})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dovetail.compiler.models.gguf_model.read_gguf", lambda _path: changed)
        with pytest.raises(SpecError, match=words):
            read_encoder_spec(tmp_path / "m.gguf")


def test_a_decoder_that_classifies_otherwise_is_refused(tmp_path: Path) -> None:
    save_reranker(tmp_path / "m")
    file = save_gguf(
        tmp_path / "m.gguf",
        tmp_path / "m",
        change=lambda writer: writer.add_pooling_type(gguf.PoolingType.RANK),
    )
    with pytest.raises(SpecError, match="classifies as None is not supported"):
        is_encoder(file)
