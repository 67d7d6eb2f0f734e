from __future__ import annotations

from collections.abc import Sequence

import pytest

from dovetail.tiny_world import prompts
from dovetail.tiny_world.workflows import (
    MAX_STEPS,
    closed_book,
    exact_match,
    multistep,
    one_shot,
)

REPLIES = {
    prompts.CLOSED_BOOK.format(question="Q?"): " Unknown.",
    prompts.ANSWER.format(docs="- one\n- two", question="Q?"): " It is Melkar.",
    prompts.NEXT_QUESTION.format(question="Two?", known=prompts.NOTHING): " A?",
    prompts.ANSWER.format(docs="- a1", question="A?"): " A is B.",
    prompts.NEXT_QUESTION.format(question="Two?", known="- A is B."): " B?",
    prompts.ANSWER.format(docs="- b1", question="B?"): " B is Cor.",
    prompts.NEXT_QUESTION.format(question="Two?", known="- A is B.\n- B is Cor."): " None.",
    prompts.ANSWER.format(docs="- A is B.\n- B is Cor.", question="Two?"): " The A of B is Cor.",
    prompts.NEXT_QUESTION.format(question="Lost?", known=prompts.NOTHING): " C?",
    prompts.ANSWER.format(docs="- c1", question="C?"): " C is unknown.",
    prompts.NEXT_QUESTION.format(question="Lost?", known="- C is unknown."): " None.",
    prompts.NEXT_QUESTION.format(question="Silent?", known=prompts.NOTHING): " None.",
}
PASSAGES = {"Q?": ["one", "two", "three"], "A?": ["a1"], "B?": ["b1"], "C?": ["c1"]}


def generate(asked: Sequence[str]) -> list[str]:
    return [REPLIES[prompt] for prompt in asked]


def search(query: str, topk: int) -> list[str]:
    return PASSAGES[query][:topk]


def test_one_shot_reads_what_it_found() -> None:
    answer = one_shot(generate, search, "Q?", topk=2)
    assert answer.reply == "It is Melkar." and answer.short == "Melkar"
    assert [hop.passages for hop in answer.hops] == [("one", "two")]
    assert closed_book(generate, "Q?").reply == "Unknown."


def test_multistep_answers_each_step_then_the_question() -> None:
    answer = multistep(generate, search, "Two?")
    assert [hop.question for hop in answer.hops] == ["A?", "B?"]
    assert answer.short == "Cor"


@pytest.mark.parametrize("question", ["Lost?", "Silent?"])
def test_a_chain_that_breaks_is_unknown(question: str) -> None:
    assert multistep(generate, search, question).short == "unknown"


def test_an_endless_chain_stops() -> None:
    def forever(asked: Sequence[str]) -> list[str]:
        return ["again?" if prompt.endswith("Next question:") else "A is B." for prompt in asked]

    assert len(multistep(forever, lambda _q, _k: ["x"], "Two?").hops) == MAX_STEPS


@pytest.mark.parametrize(
    ("said", "wanted", "same"),
    [("Unknown", "unknown", True), ("The Melkar Song", "melkar song.", True), ("A", "B", False)],
)
def test_exact_match(said: str, wanted: str, same: bool) -> None:
    assert exact_match(said, wanted) is same
