from __future__ import annotations

import random

import pytest

from dovetail.tiny_world.questions import (
    COMPARISON,
    SINGLE,
    TWO_HOP,
    UNANSWERABLE,
    deny,
    draw_question,
    make_questions,
    short_answer,
)
from dovetail.tiny_world.world import World, build_world
from tests.tiny_world.test_world import COUNTS, SHARES

KINDS = (SINGLE, TWO_HOP, COMPARISON, UNANSWERABLE)


@pytest.fixture(scope="module")
def world() -> World:
    return build_world(5, COUNTS, SHARES)


@pytest.mark.parametrize("kind", KINDS)
def test_the_short_answer_is_read_off_the_statement(world: World, kind: str) -> None:
    rng = random.Random(1)
    for _ in range(300):
        question = draw_question(rng, world, kind, "test")
        assert short_answer(question.statement).lower() == question.answer.lower()
        assert question.kind == kind and question.split == "test"


def test_single_hop_gold_tells_the_answer(world: World) -> None:
    text = {p.id: p.text for p in world.passages}
    for question in make_questions(1, world, "train", {SINGLE: 60}):
        (gold,) = question.gold
        assert question.answer in text[gold]


def test_a_chain_of_steps_leads_to_the_answer(world: World) -> None:
    for question in make_questions(1, world, "train", {TWO_HOP: 60}):
        first, second = question.steps
        assert short_answer(first.statement) in second.question
        assert short_answer(second.statement) == question.answer
        assert short_answer(first.statement) not in question.question


def test_a_comparison_names_the_winner(world: World) -> None:
    for question in make_questions(1, world, "train", {COMPARISON: 20}):
        values = {step.fact[0]: int(short_answer(step.statement)) for step in question.steps}
        choose = max if "longer" in question.question else min
        assert question.answer == choose(values, key=lambda name: values[name])


def test_an_unanswerable_question_is_told_nowhere(world: World) -> None:
    for question in make_questions(1, world, "train", {UNANSWERABLE: 40}):
        assert question.steps[0].fact not in world.facts
        assert question.answer == "unknown" and question.gold


def test_questions_are_distinct_and_numbered(world: World) -> None:
    made = make_questions(1, world, "dev", {SINGLE: 30, TWO_HOP: 10})
    assert len({q.question for q in made}) == 40
    assert [q.id for q in made] == [f"dev-{i:04}" for i in range(40)]


def test_a_denied_statement_ends_in_unknown(world: World) -> None:
    for kind in KINDS:
        question = draw_question(random.Random(2), world, kind, "test")
        denied = deny(question.statement)
        assert denied.endswith(" is unknown.") and denied[0].isupper()
        assert kind == UNANSWERABLE or question.answer not in denied.split(" is ")[-1]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The capital of Zorvia is Melkar.", "Melkar"),
        ("The job of Ana Torson is baker.", "baker"),
        ("The length of Bako River in kilometers is 1203.", "1203"),
        ("It is 12 for A and 13 for B, so the elder is The Melkar Song.", "The Melkar Song"),
        ("Unknown.", "Unknown"),
        ("", ""),
    ],
)
def test_short_answer(text: str, answer: str) -> None:
    assert short_answer(text) == answer
