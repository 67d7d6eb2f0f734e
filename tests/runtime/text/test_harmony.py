"""Answers of gpt-oss: channels become reasoning, content and calls, in any pieces."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.runtime.schedule.structured import StructuredOutputs
from dovetail.runtime.text.answers import Answer, CalledTool
from dovetail.runtime.text.call_grammar import call_grammar, frame, write_mark
from dovetail.runtime.text.grammar import quote, try_grammar
from dovetail.runtime.text.harmony import HARMONY, HARMONY_CALLS
from dovetail.runtime.text.tools import ChatStyle, read_offer
from tests.runtime.text.test_grammar import form, tokens

TEMPLATE = "{{ tools }}<|start|>assistant<|channel|>analysis<|message|>{{ m }}<|end|>"
STYLE = ChatStyle.of(TEMPLATE)
OFFER = read_offer([{"type": "function", "function": {"name": "add"}}])
NEXT = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>Hm. <b{NEXT}"
ADD = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
ANSWERS: dict[str, tuple[str, str, str, list[CalledTool]]] = {
    "answer": (f"{THOUGHT}<|channel|>final<|message|>Yes.<|return|>", "Yes.", "Hm. <b", []),
    "call": (
        f"{THOUGHT}<|channel|>commentary<|message|>I add.{NEXT}{ADD}<|call|>",
        *("I add.", "Hm. <b", [CalledTool("add", '{"a": 1}')]),
    ),
    "two calls": (f"{ADD}{NEXT}{ADD}", "", "", [CalledTool("add", '{"a": 1}')] * 2),
    "callee before the channel": (
        " to=functions.f-2<|channel|>commentary json<|message|>{}<|call|>",
        *("", "", [CalledTool("f-2", "{}")]),
    ),
    "a tool of its own": (
        f"<|channel|>analysis to=python code<|message|>1 + 1{NEXT}<|channel|>final<|message|>2",
        *("2", "1 + 1", []),
    ),
    "no end": ("<|channel|>final<|message|>a<|channel|>analysis<|message|>b", "a", "b", []),
    "no channel": ("Hello <|x", "Hello <|x", "", []),
    "cut within a header": (f"{THOUGHT}<|channel|>fi", "", "Hm. <b", []),
}


def parse(pieces: list[str], **options: Any) -> Answer:
    parser, found = STYLE.parser(**{"offer": OFFER, "begun": False, **options}), Answer()
    for piece in pieces:
        found.add(parser.feed(piece))
    return found.add(parser.close())


@pytest.mark.parametrize("name", ANSWERS)
@given(data=st.data())
def test_any_pieces_give_the_same_parts(name: str, data: st.DataObject) -> None:
    text, content, reasoning, calls = ANSWERS[name]
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=5))
    places = sorted({0, *cuts, len(text)})
    found = parse([text[a:b] for a, b in pairwise(places)])
    assert (found.content, found.reasoning, found.calls) == (content, reasoning, calls)


def test_an_answer_goes_on_within_what_the_prompt_began() -> None:
    prompt = "<|start|>assistant<|channel|>analysis<|message|>"
    assert STYLE.begins_thinking(prompt) and not STYLE.begins_thinking("<|start|>assistant")
    found = parse([f"Hm.{NEXT}<|channel|>final<|message|>Yes."], begun=True)
    assert (found.reasoning, found.content) == ("Hm.", "Yes.")


def test_calls_are_content_where_no_tools_are_offered_and_may_be_one() -> None:
    assert parse([ADD], offer=None).content == '{"a": 1}'
    assert len(parse([f"{ADD}{NEXT}{ADD}"], most=1).calls) == 1


def test_the_template_tells_the_style_and_reads_reasoning() -> None:
    assert (STYLE.calls, STYLE.thinking, STYLE.knows_tools) == (HARMONY_CALLS, HARMONY, True)
    said = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    ((shown,), _) = STYLE.show([said], None)
    assert shown == {**said, "thinking": "Hm."}


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


def takes(grammar: str, text: str) -> bool:
    """Tell whether a text is all that a grammar asks for, its marks in pieces that are no tokens.

    For the bundled tokenizer `<|end|>` is what ends all.
    """
    matcher = llguidance.LLMatcher(tokens(), grammar, log_level=0)
    ids = [i for piece in re.split(r"(?<=<\|)", text) for i in tokens().tokenize_str(piece)]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_calls_that_must_be_right_are(choice: str) -> None:
    offer = read_offer([TOOL], choice)
    assert offer is not None
    written = call_grammar(offer, STYLE, quote, begun=False)
    assert written is not None
    grammar = try_grammar(StructuredOutputs(written=written))
    assert takes(grammar, THOUGHT + ADD) and takes(grammar, ADD)
    assert not takes(grammar, THOUGHT + ADD.replace("1", '"b"'))
    final = f"{THOUGHT}<|channel|>final<|message|>Yes."
    assert takes(grammar, final) == (choice == "auto")


def test_a_form_is_that_of_the_final_channel() -> None:
    grammar = try_grammar(frame(form(choice=["yes", "no"]), HARMONY, quote, begun=False))
    final = "<|channel|>final<|message|>yes"
    assert takes(grammar, THOUGHT + final) and takes(grammar, final)
    assert not takes(grammar, "yes") and not takes(grammar, final + "!")


class Marks:
    """A tokenizer with these special tokens."""

    def find_special(self, text: str) -> int | None:
        return {"<|channel|>": 7, "<|message|>": 8}.get(text)


def test_marks_are_written_by_their_special_tokens() -> None:
    assert write_mark(Marks(), HARMONY.answer) == '<[7]> "final" <[8]>'
    assert STYLE.has_special_marks(Marks())
    assert not ChatStyle.of("<think></think>").has_special_marks(Marks())
