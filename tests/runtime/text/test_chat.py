"""Conversations as prompts: which turns stay, what is too long, what is said of empty answers."""

from __future__ import annotations

import re
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.errors import RequestError
from dovetail.runtime.schedule.request import Chunk
from dovetail.runtime.text.chat import (
    AnswerReader,
    ChatPrompts,
    Message,
    explain_empty,
    old_turns,
    read_messages,
)
from dovetail.runtime.text.chat_template import ChatTemplate
from dovetail.runtime.text.tokenizer import Tokenizer
from dovetail.tiny_world import LLAMA

TEMPLATE = ChatTemplate(
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]", {}
)
TOKENIZER = Tokenizer(LLAMA / "tokenizer.json")
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool"])


def prompts(context: int) -> ChatPrompts:
    return ChatPrompts(TEMPLATE, TOKENIZER, context)


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def kept(found: list[int], messages: list[dict[str, str]]) -> list[int]:
    """Return the places of the messages, whose contents are numbers, that a prompt holds."""
    held = re.findall(r"\](\d+)\n", TOKENIZER.decode(found))
    assert [messages[int(place)]["content"] for place in held] == held
    return [int(place) for place in held]


@given(st.lists(ROLES, min_size=1, max_size=24), st.integers(16, 200))
def test_the_oldest_turns_go_and_no_more_than_must(roles: list[str], context: int) -> None:
    messages = [say(role, str(i)) for i, role in enumerate(roles)]
    turns = old_turns(messages)
    users = [i for i, role in enumerate(roles) if role == "user"]
    made = prompts(context)
    stay = [i for i in range(len(roles)) if not any(i in turn for turn in turns)]
    assert set(stay) >= {i for i, role in enumerate(roles) if role in ("system", "developer")}
    assert set(stay) >= set(users[-1:])
    try:
        found = made.fit(messages)
    except RequestError as error:
        assert "shorten it" in str(error)
        left = TEMPLATE.render([messages[i] for i in stay])
        assert len(TOKENIZER.encode(left, special=False)) >= context or len(stay) > context
        return
    assert len(found.ids) < context
    gone = [i for i in range(len(roles)) if i not in kept(found.ids, messages)]
    dropped = next(k for k in range(len(turns) + 1) if sorted(chain(*turns[:k])) == gone)
    assert len(found.notes) == (dropped > 0)
    if dropped:  # with one turn more there is too little room for an answer
        more = TEMPLATE.render(
            [m for i, m in enumerate(messages) if i not in chain(*turns[: dropped - 1])]
        )
        assert len(TOKENIZER.encode(more, special=False)) + context // 4 > context


def test_a_short_answer_needs_little_room() -> None:
    messages = [say("user", "one"), say("assistant", "two"), say("user", "three")]
    size = len(prompts(1000).fit(messages).ids)
    assert prompts(size + 2).fit(messages, max_tokens=2).notes == ()
    (note,) = prompts(size + 2).fit(messages, max_tokens=3).notes
    assert note.startswith("the oldest turn was left out") and str(size + 2) in note


def test_texts_far_too_long_are_not_rendered() -> None:
    asked: list[Any] = []

    class Counting(ChatTemplate):
        def render(self, messages: Any, **options: Any) -> str:
            asked.append(messages)
            return super().render(messages, **options)

    made = ChatPrompts(Counting("{{ messages[-1].content }}", {}), TOKENIZER, 64)
    old = [say("user", "a" * 1_000_000), say("assistant", "b")]
    assert made.fit([*old, say("user", "hi")]).ids == TOKENIZER.encode("hi", special=False)
    assert [[m["content"] for m in messages] for messages in asked] == [["hi"]]
    with pytest.raises(RequestError, match="has more than 64"):
        made.fit(old[:1])


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "Hello",
        {"role": "user", "content": "a"},
        7,
        [{"content": "a"}],
        [{"role": "king", "content": "a"}],
        [{"role": "user", "content": 5}],
        [{"role": "user"}],
        [{"role": "assistant", "tool_calls": [{"id": "a"}]}],
        [{"role": "user", "content": [{"type": "image"}]}],
        [object()],
        ["Hello"],
    ],
)
def test_wrong_messages_are_told_of(messages: Any) -> None:
    with pytest.raises(RequestError, match="message"):
        read_messages(messages)


def test_answers_are_messages_and_own_keys_stay() -> None:
    given_ = [Message(role="assistant", content="a"), {"role": "user", "content": "b", "mood": 1}]
    assert read_messages(given_) == [say("assistant", "a"), {**say("user", "b"), "mood": 1}]


@pytest.mark.parametrize(
    ("text", "ids", "reason", "said"),
    [
        ("word", [7], "stop", None),
        (None, [7], "stop", None),
        (" \n", [7, 8], "length", "all the tokens that it may have (2)"),
        ("", [1], "stop", "the model ended it at once"),
        ("", [7, 1], "stop", "the model wrote 1 token that is special or white space"),
        ("", [7, 8, 1], "stop", "the model wrote 2 tokens that are special or white space"),
        ("", [7], "stop", "a text or token to stop at"),
        ("", [], "abort", "it was cancelled"),
    ],
)
def test_empty_answers_are_explained(
    text: str | None, ids: list[int], reason: str, said: str | None
) -> None:
    found = explain_empty(text, ids, reason, {1})
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_notes_come_once_with_a_stream() -> None:
    reader = AnswerReader({1}, ["first"])
    deltas = [reader.read(chunk) for chunk in (Chunk(" ", (5,)), Chunk("", (1,), "stop"))]
    assert [d.content for d in deltas] == [" ", ""] and deltas[1].finish_reason == "stop"
    assert deltas[0].notes == ("first",) and "white space" in deltas[1].notes[0]
