from __future__ import annotations

import argparse
import random
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from dovetail.tiny_world.encoder import Encoder
from dovetail.tiny_world.train_encoder import (
    draw_batches,
    draw_pairs,
    embed,
    save,
    train,
    train_tokenizer,
)
from dovetail.tiny_world.train_llama import lesson_world


def test_pairs_are_a_question_and_the_passage_that_answers_it() -> None:
    world = lesson_world(3, frozenset(), 0.5)
    pairs = draw_pairs(random.Random(1), world, 50)
    texts = {passage.document for passage in world.passages}
    assert len({passage for _, passage in pairs}) == 50
    assert all(question[-1] in "?." and passage in texts for question, passage in pairs)


def test_a_trained_folder_gives_the_embeddings_of_training(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(draw_batches(1, 32, frozenset()), 2)
    settings = argparse.Namespace(steps=2, batch=8, rate=1e-3, quiet=True)
    model = train(settings, tokenizer, frozenset())
    again = train(settings, tokenizer, frozenset())
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )
    save(model, tokenizer, tmp_path)
    texts = ["Who founded Melkar?", "A", "Melkar was founded by Ana Torson. " * 5]
    with torch.inference_mode():
        wanted = embed(model, tokenizer, texts).numpy()
    found = Encoder(tmp_path).embed(texts)
    assert abs(found - wanted).max() < 1e-5
