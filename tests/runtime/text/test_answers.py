"""Answers in parts: whatever pieces a text comes in, the parts are those of the whole text."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dovetail.runtime.text.answers import (
    Answer,
    AnswerParser,
    CallArguments,
    CallBegin,
    CalledTool,
    Part,
    Thinking,
)
from dovetail.runtime.text.call_formats import (
    FAMILIES,
    HERMES,
    LLAMA,
    MISTRAL,
    PLAIN,
    CallFormat,
)
from dovetail.runtime.text.tools import THOUGHTS, ChatStyle

THINK = THOUGHTS[0]
FORMS = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "plain": PLAIN}
CALL = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}\\"{"}]}}'
LLAMA_CALL = '{"type": "function", "name": "add", "parameters": {"a": "é\\u00e9"}}'
PIECES = [
    *(
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        "```json\n",
        "```",
    ),
    *("<think>", "</think>", "<thin", "</", "<tool", "[TOOL", "; ", ", ", "[", "]", "{", "}", "\n"),
    *(CALL, LLAMA_CALL, '{"a": 1}', '{"name": "f"}', '{"name": 3}', '{"name": "f", "arguments": '),
    *(
        '"{\\"a\\": 2}"',
        "null",
        "3.5",
        "true",
        '"',
        "\\",
        " ",
        "  \n",
        "add",
        "Hello",
        " world.",
        "é",
    ),
    *('"arguments": {"x": []}', '"name": "g"', ":", '{"name": "f", "arguments": null}'),
]
texts = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)
forms = st.sampled_from([None, *FORMS.values()])
thoughts = st.sampled_from([None, *THOUGHTS])


def parse(pieces: list[str], parser: AnswerParser) -> Answer:
    found = Answer()
    for piece in pieces:
        found.add(parser.feed(piece))
    return found.add(parser.close())


def whole(text: str, form: CallFormat | None, thinking: Thinking | None = None) -> Answer:
    return parse([text], AnswerParser(form, thinking))


@given(texts, forms, thoughts, st.booleans(), st.data())
@example(CALL, LLAMA, None, False, None)
@example(f"<tool_call>\n{CALL}\n</tool_call>", HERMES, THINK, False, None)
@example("hm</think>\n\n[TOOL_CALLS]add[ARGS]{}", MISTRAL, THINK, True, None)
def test_any_pieces_give_the_parts_of_the_whole(
    text: str, form: CallFormat | None, thinking: Thinking | None, begun: bool, data: object
) -> None:
    begun = begun and thinking is not None
    wanted = parse([text], AnswerParser(form, thinking, begun=begun))
    if data is None:
        pieces = list(text)
    else:
        cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
        pieces = [text[a:b] for a, b in pairwise(sorted({0, *cuts, len(text)}))]
    assert parse(pieces, AnswerParser(form, thinking, begun=begun)) == wanted


@given(texts, forms, thoughts)
def test_nothing_is_lost_and_nothing_is_said_twice(
    text: str, form: CallFormat | None, thinking: Thinking | None
) -> None:
    """Letters of an answer come in their order; those that are left out are marks and space."""
    found = whole(text, form, thinking)
    if not found.calls:
        said = found.reasoning + found.content
        at = 0
        for letter in said:
            at = text.index(letter, at) + 1
        left = len(text) - len(said)
        marks = len("<think></think>") + len("```json")
        assert 0 <= left <= marks + sum(letter in " \t\r\n" for letter in text)


def call(name: str, arguments: object) -> CalledTool:
    return CalledTool(name, json.dumps(arguments))


MANY = '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
READ: list[tuple[str, str, str, list[tuple[str, object]]]] = [
    (
        "hermes",
        f"<tool_call>\n{CALL}\n</tool_call>",
        "",
        [("add", {"a": 1, "b": [2, {"c": '}"{'}]})],
    ),
    (
        "hermes",
        'So:\n<tool_call>\n{"arguments": {"q": "x"}, "name": "f"}\n</tool_call>\n'
        '<tool_call>{"name": "g"}</tool_call>\n',
        "So:",
        [("f", {"q": "x"}), ("g", {})],
    ),
    ("hermes", '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', []),
    ("hermes", "a <tool_call> is written so", "a <tool_call> is written so", []),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 2}"}</tool_call>',
        "",
        [("f", {"a": 2})],
    ),
    ("llama", '{"name": "f", "parameters": {"a": "b"}}', "", [("f", {"a": "b"})]),
    (
        "llama",
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": 1}}',
        "",
        [("f", {}), ("g", {"x": 1})],
    ),
    ("llama", '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
    ("llama", "{curly} words", "{curly} words", []),
    ("mistral", f"[TOOL_CALLS] {MANY}", "", [("f", {"a": 1}), ("g", {})]),
    (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g-2[CALL_ID]abc[ARGS]{}',
        "",
        [("f", {"a": 1}), ("g-2", {})],
    ),
    ("plain", f"```json\n{MANY}\n```", "", [("f", {"a": 1}), ("g", {})]),
    ("plain", "```python\nprint({})\n```", "```python\nprint({})\n```", []),
    ("plain", "[1] says so", "[1] says so", []),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), READ)
def test_calls_are_read_as_each_family_writes_them(
    form: str, text: str, content: str, calls: list[tuple[str, object]]
) -> None:
    found = whole(text, FORMS[form])
    assert found.content == content
    assert [(one.name, json.loads(one.arguments)) for one in found.calls] == calls


def test_reasoning_goes_before_content() -> None:
    found = whole("<think>\nOne. Two.\n</think>\n\nThree. ", None, THINK)
    assert (found.reasoning, found.content) == ("One. Two.", "Three. ")
    found = parse(["still </thin", "king"], AnswerParser(None, THINK, begun=True))
    assert (found.reasoning, found.content) == ("still </thinking", "")
    assert whole(" a <think>b</think>", None, THINK).content == " a <think>b</think>"


def test_arguments_stream_as_soon_as_it_is_sure_that_they_are_some() -> None:
    parser = AnswerParser(LLAMA)
    assert parser.feed('{"name": "f", "parameters": ') == []
    assert parser.feed('{"a": ') == [CallBegin("f"), CallArguments('{"a": ')]
    assert parser.feed("1}") == [CallArguments("1}")]
    assert parser.feed("}") == [] and parser.close() == []


def test_a_call_that_is_cut_off_keeps_what_it_had() -> None:
    found = whole('<tool_call>{"name": "f", "arguments": {"a": "b', HERMES)
    assert found.calls == [CalledTool("f", '{"a": "b')] and not found.content


def test_what_is_nested_too_deeply_is_no_name() -> None:
    text = '{"name": ' + "[" * 5000 + "]" * 5000
    assert whole(text, LLAMA).content == text


def test_further_calls_are_left_out_where_one_is_wanted() -> None:
    text = '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{"b": 2} end'
    parser, parts = AnswerParser(MISTRAL, most=1), list[Part]()
    for letter in text:
        parts += parser.feed(letter)
    found = Answer().add([*parts, *parser.close()])
    assert found == Answer("end", "", [call("f", {"a": 1})])


def test_formats_are_told_apart_by_the_template() -> None:
    assert len({form for _, form in FAMILIES}) == len(FAMILIES)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("Hm.\n</think>\n\n<response>\nYes.\n\nNo. \n</response>\n", "Yes.\n\nNo."),
        ("Hm.</think>Yes <resp", "Yes <resp"),
        ("Hm.</think> <response></response> ", ""),
        ("Hm.</think>Yes. \n", "Yes. \n"),
    ],
)
def test_marks_around_an_answer_are_no_part_of_it(text: str, content: str) -> None:
    thinking = Thinking("<think>", "</think>", around=("<response>", "</response>"))
    for size in (1, 2, 5, len(text)):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        found = parse(pieces, AnswerParser(HERMES, thinking, begun=True))
        assert found == Answer(content, "Hm.")
    called = f"{text.partition('<')[0]}</think>\n<tool_call>\n{CALL}\n</tool_call>\n"
    found = parse(list(called), AnswerParser(HERMES, thinking, begun=True))
    assert [one.name for one in found.calls] == ["add"] and not found.content


def test_marks_around_answers_are_those_of_the_template() -> None:
    style = ChatStyle.of("<think></think>\n<response>\n{{ content }}</response>")
    assert style.thinking is not None and style.thinking.around == ("<response>", "</response>")
