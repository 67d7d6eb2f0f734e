"""Prompts of workflows: documents are cut to what a context holds, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.ir.errors import LengthError
from dovetail.ir.workflow import PromptMessage, render
from dovetail.runtime.flows.prompts import MARK, FilledPrompt, fit
from dovetail.runtime.index.documents import Document
from dovetail.runtime.text.tokenizer import Tokenizer
from dovetail.tiny_world import LLAMA

TOKENIZER = Tokenizer(LLAMA / "tokenizer.json")
TEMPLATE = "Documents:\n{docs}\nQuestion: {input}\nAnswer:"
QUESTION = "Where is Melkar?"


def made(lengths: list[int], question: str = QUESTION) -> FilledPrompt:
    """Return a prompt with documents of so many words."""
    docs = [Document(id=i, title=f"d{i}", text=f"w{i} " * words) for i, words in enumerate(lengths)]
    return FilledPrompt.of(TEMPLATE, {"docs": docs, "input": question})


@given(lengths=st.lists(st.integers(0, 60), max_size=6), context=st.integers(60, 200))
def test_the_nearest_documents_stay_as_far_as_there_is_room(
    lengths: list[int], context: int
) -> None:
    prompt = made(lengths)
    room = context - min(32, context // 4)
    ids, note, *_ = fit(prompt, TOKENIZER, context, max_tokens=32)
    text = TOKENIZER.decode(ids)
    if len(TOKENIZER.encode(prompt)) <= room or not lengths:
        assert ids == TOKENIZER.encode(prompt) and note is None
        return
    assert len(ids) <= room and note is not None and f"{context} tokens" in note
    assert text.startswith("Documents:") and text.endswith(f"Question: {QUESTION}\nAnswer:")
    kept = [f"d{i}: " in text for i in range(len(lengths))]
    assert kept == sorted(kept, reverse=True)
    gone = kept.count(False)
    assert not gone or f"{gone} left out" in note or "cut" in note
    assert len(ids) >= room - 24  # what a cut before a space, and a try more, may leave


def test_a_prompt_is_filled_in_as_it_always_was() -> None:
    docs = [Document(id=1, text="one"), Document(id=2, text="two")]
    for state in (
        {"docs": docs, "input": 5},
        {"docs": [], "input": "a"},
        {"docs": "x", "input": [1]},
    ):
        assert FilledPrompt.of(TEMPLATE, state) == render(TEMPLATE, state)
    assert render(TEMPLATE, {"docs": docs, "input": "?"}).startswith("Documents:\n- one\n- two\nQ")


def test_what_users_write_like_a_mark_stays_as_it_is() -> None:
    docs = [Document(id=1, text="one")]
    messages = (PromptMessage("user", "{docs} {input}"),)
    for number in ("7", "1" * 5000):  # Python reads no number of so many digits
        written = MARK.format(number)
        prompt = FilledPrompt.of(messages, {"docs": docs, "input": written})
        (message,) = prompt.mark()
        assert message["content"] == f"{MARK.format(0)} {written}"
        assert prompt.place(message["content"]) == f"- one {written}"


def test_what_was_not_retrieved_is_never_cut() -> None:
    with pytest.raises(LengthError, match="128"):
        fit(made([5, 5], QUESTION * 90), TOKENIZER, 128, max_tokens=16)
    with pytest.raises(LengthError):
        fit(QUESTION * 90, TOKENIZER, 128, max_tokens=16)
    listed = FilledPrompt.of("{input}", {"input": ["w1 " * 90] * 9})
    with pytest.raises(LengthError):
        fit(listed, TOKENIZER, 128, max_tokens=16)


def test_all_documents_go_where_the_rest_leaves_no_room() -> None:
    prompt = made([30, 30], QUESTION * 12)
    rest = len(TOKENIZER.encode(made([], QUESTION * 12)))
    ids, note, *_ = fit(prompt, TOKENIZER, rest + 1, max_tokens=64)
    assert len(ids) <= rest and note is not None and "2 left out" in note


@given(lengths=st.lists(st.integers(0, 60), min_size=1, max_size=6), most=st.integers(1, 200))
def test_documents_are_cut_to_a_number_of_tokens(lengths: list[int], most: int) -> None:
    prompt = made(lengths)
    documents = [text for text, retrieved in prompt.pieces if retrieved]
    every = "".join(documents)
    found = fit(prompt, TOKENIZER, 4096, 32, documents_tokens=most)
    if len(TOKENIZER.encode(every, special=False)) <= most:
        assert found == (TOKENIZER.encode(prompt), None, None, ())
        return
    assert found.note is not None and f"documents_tokens is {most}" in found.note
    assert found.prompt is not None and found.ids == TOKENIZER.encode(found.prompt)
    kept = found.prompt.removeprefix("Documents:\n").partition("\nQuestion")[0]
    assert every.startswith(kept), "whole ones first, the last one cut"
    assert most - 12 <= len(TOKENIZER.encode(kept, special=False)) <= most
    assert "".join(found.cut).strip() == every[len(kept) :].strip() or not kept.strip(" -")


def test_the_context_is_the_bound_where_more_documents_are_asked_for() -> None:
    found = fit(made([60, 60]), TOKENIZER, 128, 32, documents_tokens=120)
    assert found == fit(made([60, 60]), TOKENIZER, 128, 32)
    few = fit(made([60, 60]), TOKENIZER, 128, 32, documents_tokens=20)
    assert len(few.ids) < len(found.ids) and "documents_tokens is 20" in str(few.note)
