from __future__ import annotations

import argparse
import itertools
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

pytest.importorskip("torch")

import torch

from dovetail.tiny_world import LLAMA, corpus
from dovetail.tiny_world.prompts import ASSISTANT, END, USER
from dovetail.tiny_world.train_llama import (
    COURSES,
    CUT,
    PROMPT_WEIGHT,
    RATES,
    Trainer,
    batches,
    course_of,
    draw_lessons,
    encode,
    held_out_names,
    learning_rate,
    lesson_world,
    save,
    train,
    train_tokenizer,
    whole_replies,
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(LLAMA / "tokenizer.json"))


def settings(work: Path, steps: int) -> argparse.Namespace:
    return argparse.Namespace(
        work=work, steps=steps, batch=2, save_every=1, quiet=True, threads=1, start=None
    )


def test_no_lesson_holds_a_name_of_the_dev_and_test_splits() -> None:
    taken = held_out_names()
    assert len(taken) > 1500
    assert not taken & set(lesson_world(4, taken, 0.5).entities)
    world = corpus.bundled_world()
    assert {e.name for e in world.entities.values() if e.split != "train"} <= taken


def test_a_small_tokenizer_cuts_numbers_in_pairs_and_loses_nothing() -> None:
    made = train_tokenizer(draw_lessons(1, frozenset(), lambda _: CUT), 50)
    text = "Founded in 1402, naïve \N{SNOWMAN} Zelburg"
    encoded = made.encode(text)
    assert made.decode(encoded.ids) == text
    digits = [t.strip("\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}") for t in encoded.tokens]
    assert max(len(t) for t in digits if t.isdigit()) <= 2
    assert made.encode(f"{USER}a{END}{ASSISTANT}").ids[0] == 2


def test_a_course_begins_at_its_step_and_ends_before_the_next() -> None:
    first, second, *_ = COURSES
    assert first == 0 and course_of(0) is course_of(second - 1) is COURSES[0]
    assert course_of(second) is COURSES[second]
    assert course_of(max(RATES)) is COURSES[max(COURSES)]


def test_rates_rise_to_all_and_end_in_nothing() -> None:
    rates = [learning_rate(step) for step in range(max(RATES))]
    assert 0 < rates[0] < 0.01 and max(rates) == 1.0 and rates[-1] == 0.0
    assert max(abs(a - b) for a, b in itertools.pairwise(rates)) < 0.01


def test_replies_weigh_one_and_prompts_less(tokenizer: Tokenizer) -> None:
    ids, weights = encode(tokenizer, [("Question: a?\nAnswer:", False), (" b.<|end|>", True)])
    assert ids == tokenizer.encode("Question: a?\nAnswer: b.<|end|>").ids
    assert set(weights) == {PROMPT_WEIGHT, 1.0} and weights == sorted(weights)


def test_a_reply_is_right_when_all_its_tokens_are() -> None:
    replies = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 0, 1, 0]]).bool()
    right = torch.tensor([[0, 1, 1, 1, 0], [1, 0, 0, 1, 1]]).bool()
    assert whole_replies(right, replies) == 0.5
    assert whole_replies(replies, replies) == 1.0


def test_batches_are_padded_to_their_longest(tokenizer: Tokenizer) -> None:
    source = batches(tokenizer, draw_lessons(1, frozenset(), lambda _: CUT), 4, random.Random(1))
    for batch in itertools.islice(source, 8):
        real = batch.weights > 0
        assert batch.ids.shape == batch.weights.shape and batch.ids.shape[0] == 4
        assert real[:, 0].all() and real[:, -1].any()
        assert not batch.ids[~real].any()


def test_training_is_reproducible_and_goes_on_from_its_checkpoint(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in "ab"]
    models = []
    for folder in folders:
        folder.mkdir()
        models.append(train(settings(folder, 2), tokenizer, frozenset()))
    for one, two in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, two)
    again = Trainer()
    again.restore(folders[0] / "checkpoint.pt")
    assert again.done == 2
    for one, two in zip(again.model.parameters(), models[0].parameters(), strict=True):
        assert torch.equal(one, two)
    trained = train(settings(folders[0], 3), tokenizer, frozenset())
    assert not torch.equal(trained.lm_head.weight, models[0].lm_head.weight)
    save(trained, tokenizer, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
