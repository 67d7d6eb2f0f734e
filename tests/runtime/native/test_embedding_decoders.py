"""Decoders that embed, compiled and run, against transformers on each text alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.encoders import (
    GEMMA,
    Dense,
    compiled,
    cosines,
    last_rows,
    load_encoder,
    random_texts,
    save_decoder,
)

LENGTHS = (1, 2, 3, 15, 16, 17, 33, 75, 95, 96, 97, 200, 511, 512)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"architecture": "Qwen3ForCausalLM"}),
    "qwen3-biases": ("qwen3", {"attention_bias": True, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {"architecture": "Qwen2ForCausalLM"}),
    "llama": ("llama", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "gemma3": ("gemma3", {"num_hidden_layers": 7}),
    "embeddinggemma": ("gemma3", GEMMA),
}


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize("kind", KINDS)
def test_last_rows_equal_transformers(tmp_path: Path, kind: str) -> None:
    family, options = KINDS[kind]
    model, texts = save_decoder(tmp_path / "m", family, **options), random_texts(LENGTHS)
    found = load_encoder(compiled(tmp_path / "m", tmp_path / "m.dove"), threads=2)
    wanted = unit(np.array([rows[-1] for rows in last_rows(model, texts)]))
    np.testing.assert_allclose(found.embed_tokens(texts), wanted, atol=1e-5)
    found.close()


def test_means_go_through_dense_layers(tmp_path: Path) -> None:
    """As EmbeddingGemma's."""
    layers = (Dense(96, 64), Dense(48, 96))
    how = {"pooling": "mean_tokens", "dense": layers, **GEMMA}
    model, texts = save_decoder(tmp_path / "m", "gemma3", **how), random_texts(LENGTHS)
    found = load_encoder(compiled(tmp_path / "m", tmp_path / "m.dove"))
    wanted = np.array([rows.mean(0) for rows in last_rows(model, texts)])
    wanted = unit(layers[1](layers[0](wanted)))
    assert (found.spec.reach, found.spec.causal, found.dim) == (12, False, 48)
    np.testing.assert_allclose(found.embed_tokens(texts), wanted, atol=1e-5)
    found.close()


def test_rows_see_the_whole_text_where_config_json_says_so(tmp_path: Path) -> None:
    """As those of gte-Qwen2."""
    options = {"pooling": "mean_tokens", "unit": False, "is_causal": False}
    model, texts = save_decoder(tmp_path / "m", "qwen2", **options), random_texts(LENGTHS[:9])
    for layer in model.layers:
        layer.self_attn.is_causal = False
    found = load_encoder(compiled(tmp_path / "m", tmp_path / "m.dove"))
    wanted = np.array([rows.mean(0) for rows in last_rows(model, texts)])
    assert not found.spec.causal
    np.testing.assert_allclose(found.embed_tokens(texts), wanted, atol=2e-5)
    found.close()


@pytest.mark.parametrize("family", ["qwen3", pytest.param("gemma3", marks=pytest.mark.long)])
@pytest.mark.parametrize(("dtype", "least"), [("bf16", 0.999), ("int8", 0.995)])
def test_narrow_weights_stay_near(tmp_path: Path, family: str, dtype: str, least: float) -> None:
    model, texts = save_decoder(tmp_path / "m", family), random_texts(LENGTHS)
    out = compiled(tmp_path / "m", tmp_path / "m.dove", weight_dtype=dtype)
    found = load_encoder(out)
    wanted = np.array([rows[-1] for rows in last_rows(model, texts)])
    assert cosines(found.embed_tokens(texts), wanted).min() > least
    again = load_encoder(compiled(out, tmp_path / "again.dove", weight_dtype=None))
    np.testing.assert_array_equal(again.embed_tokens(texts), found.embed_tokens(texts))
    again.close()
    found.close()


def test_a_text_longer_than_a_pass_has_one_of_its_own(tmp_path: Path) -> None:
    options = {"max_position_embeddings": 40960, "sliding_window": 300}
    model = save_decoder(tmp_path / "m", "mistral", **options)
    found = load_encoder(compiled(tmp_path / "m", tmp_path / "m.dove", max_context=2048))
    texts = random_texts((600, 1500, 2, 600))
    wanted = unit(np.array([rows[-1] for rows in last_rows(model, texts)]))
    np.testing.assert_allclose(found.embed_tokens(texts), wanted, atol=1e-5)
    found.close()


@pytest.mark.usefixtures("each_target")
def test_every_target_of_this_machine(tmp_path: Path) -> None:
    how = {"pooling": "mean_tokens", "dense": [Dense(48, 64)], **GEMMA}
    for family, options in (("qwen3", {}), ("gemma3", how)):
        where = tmp_path / family
        model, texts = save_decoder(where, family, **options), random_texts((5, 100, 33))
        found = load_encoder(compiled(where, tmp_path / f"{family}.dove"))
        rows = last_rows(model, texts)
        last = np.array([each[-1] for each in rows])
        wanted = last if family == "qwen3" else Dense(48, 64)(np.array([r.mean(0) for r in rows]))
        np.testing.assert_allclose(found.embed_tokens(texts), unit(wanted), atol=1e-5)
        found.close()
