"""Calls of all families: what is written as one writes them is read as it was, however it comes."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache, partial
from itertools import pairwise
from typing import Any, ClassVar

import jsonschema
import llguidance
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from dovetail.ir.errors import RequestError
from dovetail.runtime.schedule.structured import StructuredOutputs
from dovetail.runtime.text import call_formats
from dovetail.runtime.text.answers import Answer, AnswerParser, CallArguments, CallBegin
from dovetail.runtime.text.argument_grammar import PIECES
from dovetail.runtime.text.call_formats import (
    DEEPSEEK,
    DEEPSEEK_FENCED,
    FUNCTION_GEMMA,
    GEMMA,
    GLM,
    LFM2,
    LISTED,
    MINIMAX,
    OLMO,
    PYTHONIC,
    QWEN,
    SEED,
    TAGS,
    CallFormat,
    write_calls,
)
from dovetail.runtime.text.call_grammar import call_grammar, write_mark
from dovetail.runtime.text.call_literals import read_literal, read_word
from dovetail.runtime.text.call_values import argument_kinds, read_value
from dovetail.runtime.text.grammar import quote, try_grammar
from dovetail.runtime.text.tools import ChatStyle, Offer, read_offer

NAMES = {
    form: name.lower() for name, form in vars(call_formats).items() if isinstance(form, CallFormat)
}
FORMS = st.sampled_from(sorted(NAMES, key=lambda form: NAMES[form]))
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "share": {"type": ["number", "null"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "place": {"type": "object", "properties": {"x": {"type": "number"}}},
    },
}
KINDS = {"find": argument_kinds(json.dumps(SCHEMA))}


def read(form: CallFormat, pieces: Sequence[str]) -> Answer:
    parser, found = AnswerParser(form, tools=KINDS), Answer()
    for piece in pieces:
        found.add(parser.feed(piece))
    return found.add(parser.close())


def calls_of(found: Answer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in found.calls]


# ---- round trips ----

letters = st.characters(exclude_categories=["Cs"])
texts = st.text(letters, max_size=12) | st.sampled_from(
    ["5", "true", "null", "a\nb", "\n", " x ", "'", '"it\'s"', "\\n", "</", "<", "{", "a, b", "é✓"]
)
leaves = texts | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False, width=32)
words = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)
values = st.recursive(
    leaves.filter(lambda value: value not in (float("inf"), float("-inf"))),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
some = st.fixed_dictionaries(
    {},
    optional={
        "city": texts,
        "days": st.integers(),
        "exact": st.booleans(),
        "share": st.floats(-1e6, 1e6) | st.none(),
        "tags": st.lists(texts, max_size=3),
        "place": st.dictionaries(words, values, max_size=2),
    },
)
several = st.lists(st.tuples(st.just("find"), some), min_size=1, max_size=3)


def holds_marks(form: CallFormat, value: Any) -> bool:
    """Tell whether a value holds what would end it, so that no text of the form can be it."""
    mark = form.valued.strip() if form.kind == TAGS else form.quote
    if isinstance(value, str):
        return bool(mark) and (mark in value or (value + mark).find(mark) != len(value))
    if isinstance(value, dict):
        return any(holds_marks(form, one) for one in value.values())
    return isinstance(value, list) and any(holds_marks(form, one) for one in value)


@settings(max_examples=300)
@given(FORMS, several, st.data())
@example(QWEN, [("find", {"city": "\n a\n\nb \n", "days": 3})], None)
@example(GLM, [("find", {}), ("find", {"city": "</arg_valu", "exact": True})], None)
@example(GEMMA, [("find", {"city": '<|"', "place": {"x": [1, {"y": "z"}]}})], None)
@example(LFM2, [("find", {"city": 'it\'s "so"\\', "share": None, "exact": False})], None)
def test_what_a_family_writes_is_read_as_it_was(
    form: CallFormat, called: list[tuple[str, dict[str, Any]]], data: Any
) -> None:
    assume(not any(holds_marks(form, given) for _, given in called))
    text = write_calls(form, called)
    cuts = [] if data is None else data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    pieces = [text[a:b] for a, b in pairwise(sorted({0, *cuts, len(text)}))]
    whole = read(form, [text])
    assert (calls_of(whole), whole.content) == (called, "")
    assert read(form, pieces) == whole == read(form, list(text))


# ---- what models write ----

ASKED = {"city": "Ada's\ntown", "days": 3, "exact": True}
WRITTEN: list[tuple[CallFormat, str, str, list[dict[str, Any]]]] = [
    (
        QWEN,
        "I look.\n\n<tool_call>\n<function=find>\n<parameter=city>\nAda's\ntown\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=find>\n</function>\n</tool_call>",
        "I look.",
        [ASKED, {}],
    ),
    (  # without the outer mark, and lines
        QWEN,
        "<function=find><parameter=days>3</parameter></tool_call> Done.",
        "Done.",
        [{"days": 3}],
    ),
    (QWEN, '<tool_call>{"name": "find", "arguments": {"days": 3}}</tool_call>', "", [{"days": 3}]),
    (QWEN, "a <function= b, <tool_call> c", "a <function= b, <tool_call> c", []),
    (
        SEED,
        "<seed:tool_call>\n<function=find>\n<parameter=city> x\n</parameter>\n</function>\n"
        "</seed:tool_call>",
        "",
        [{"city": " x\n"}],
    ),
    (
        GLM,
        "<tool_call>find\n<arg_key>city</arg_key>\n<arg_value>Ada's\ntown</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>exact</arg_key>"
        "<arg_value>true</arg_value></tool_call>",
        "",
        [ASKED],
    ),
    (GLM, "<tool_call>find</tool_call>", "", [{}]),
    (GLM, "a <tool_call> is written so", "a <tool_call> is written so", []),
    (
        MINIMAX,
        '\n<minimax:tool_call>\n<invoke name="find">\n<parameter name="city">a b</parameter>\n'
        '</invoke>\n<invoke name="find">\n<parameter name="tags">["x", "y"]</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        "",
        [{"city": "a b"}, {"tags": ["x", "y"]}],
    ),
    (
        LFM2,
        '<|tool_call_start|>[find(city="Ada\'s\\ntown", days=3, exact=True), find()]'
        "<|tool_call_end|>I look.",
        "I look.",
        [ASKED, {}],
    ),
    (  # quotes that nothing escapes
        LFM2,
        "<|tool_call_start|>[find(city='it's 'so', days = 03 , tags=('a', 'b',))]<|tool_call_end|>",
        "",
        [{"city": "it's 'so", "days": 3, "tags": ["a", "b"]}],
    ),
    (
        LFM2,
        '<|tool_call_start|>[{"name": "find", "arguments": {"days": 3}}]<|tool_call_end|>',
        "",
        [{"days": 3}],
    ),
    (PYTHONIC, "[find(days=-3), find(share=None)]", "", [{"days": -3}, {"share": None}]),
    (PYTHONIC, "[find(the town)] is a link", "[find(the town)] is a link", []),
    (
        OLMO,
        "<function_calls>\nfind(city='x', place={'x': 1.5, 'y': {}})\nfind(days=3)\n"
        "</function_calls>",
        "",
        [{"city": "x", "place": {"x": 1.5, "y": {}}}, {"days": 3}],
    ),
    (
        GEMMA,
        '<|tool_call>call:find{city:<|"|>Ada\'s\ntown<|"|>,days:3,exact:true}<tool_call|>'
        '<|tool_call>call:find{place:{x:1.5,<|"|>y<|"|>:[]},tags:[<|"|>"a", {b}<|"|>]}<tool_call|>',
        "",
        [ASKED, {"place": {"x": 1.5, "y": []}, "tags": ['"a", {b}']}],
    ),
    (
        FUNCTION_GEMMA,
        "<start_function_call>call:find{city:<escape>a, b<escape>}<end_function_call>",
        "",
        [{"city": "a, b"}],
    ),
    (
        DEEPSEEK_FENCED,
        "So.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n"
        '{"days": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n'
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "So.",
        [{"days": 3}, {}],
    ),
    (
        DEEPSEEK,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>"
        '{"days": 3}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>find<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [{"days": 3}, {}],
    ),
    (LISTED, '<|tool_call|>[{"name": "find", "arguments": {}}]', "", [{}]),
]


@pytest.mark.parametrize(
    ("form", "text", "content", "given"), WRITTEN, ids=[NAMES[one[0]] for one in WRITTEN]
)
def test_calls_are_read_as_models_write_them(
    form: CallFormat, text: str, content: str, given: list[dict[str, Any]]
) -> None:
    wanted = [("find", one) for one in given]
    for size in (1, 2, 3, 7, len(text)):
        found = read(form, [text[at : at + size] for at in range(0, len(text), size)])
        assert (calls_of(found), found.content) == (wanted, content)


def test_a_text_streams_letter_by_letter_and_what_has_a_type_when_it_is_whole() -> None:
    parser = AnswerParser(QWEN, tools=KINDS)
    head = "<tool_call>\n<function=find>\n<parameter=city>"
    assert parser.feed(head) == [CallBegin("find"), CallArguments('{"city": "')]
    assert parser.feed("\n") == []
    assert parser.feed('a "b"') == [CallArguments('a \\"b\\"')]
    assert parser.feed("\n</par") == [] and parser.feed("x") == [CallArguments("\\n</parx")]
    assert parser.feed("\n</parameter><parameter=days>1") == [CallArguments('", "days": ')]
    assert parser.feed("2\n</parameter></function>") == [CallArguments("12}")]


@pytest.mark.parametrize(
    ("text", "kinds", "wanted"),
    [
        ("5", {"string"}, '"5"'),
        ("5", {"integer"}, "5"),
        ("5", {"string", "integer"}, "5"),
        ("5", {"string", "boolean"}, '"5"'),
        ("5", {"number"}, "5"),
        ("five", {"integer"}, '"five"'),
        ("5", set(), "5"),
        ("null", {"string"}, '"null"'),
        ("None", {"string", "null"}, "null"),
        ("True", {"boolean"}, "true"),
        ("['a', True, (1,)]", {"array"}, '["a", true, [1]]'),
        ("{'a': 'it's'}", set(), '{"a": "it\'s"}'),
        ("[1, oops(2)]", {"array"}, '"[1, oops(2)]"'),
        ("{} and []", set(), '"{} and []"'),
        ("NaN", {"number"}, '"NaN"'),
        (" hi ", set(), '" hi "'),
    ],
)
def test_values_get_the_type_that_the_schema_asks_for(
    text: str, kinds: set[str], wanted: str
) -> None:
    assert read_value(text, frozenset(kinds)) == wanted


def test_types_are_found_through_references_and_alternatives() -> None:
    schema = {
        "$ref": "#/$defs/all",
        "$defs": {
            "all": {
                "properties": {
                    "a": {"$ref": "#/$defs/word"},
                    "b": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/e/oneOf/0"}]},
                    "c": {"enum": ["x", 1, None]},
                    "d": {},
                    "e": {"$ref": "#/$defs/e"},
                }
            },
            "word": {"type": "string"},
            "e": {"$ref": "#/$defs/e", "oneOf": [{"type": "null"}]},
        },
    }
    assert argument_kinds(json.dumps(schema)) == {
        "a": {"string"},
        "b": {"integer", "null"},
        "c": {"string", "integer", "null"},
        "d": set(),
        "e": {"null"},
        "": set(),
    }
    assert argument_kinds('{"additionalProperties": {"type": "string"}}') == {"": {"string"}}


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("1_000", 1000),
        ("0x1f", 31),
        ("+5", 5),
        (".5", 0.5),
        ("007", 7),
        ("inf", "inf"),
        ("a b", "a b"),
    ],
)
def test_words_without_quotes_are_numbers_or_texts(word: str, wanted: object) -> None:
    assert json.loads(read_word(word)) == wanted


@given(
    st.text(letters, max_size=30) | st.sampled_from(["\\x4", "\\u12G", "\\U00110000", "\\ud83d"])
)
def test_whatever_stands_between_quotes_gives_json(text: str) -> None:
    found = read_literal(f"['{text}']")
    assert found is None or isinstance(json.loads(found), list)


def test_escapes_are_those_of_python_and_json() -> None:
    written = r"""["\x41\u0042\U00000043\n\t\\\'\"\q", '\ud83d\ude00', '\xz']"""
    assert json.loads(read_literal(written) or "") == ["ABC\n\t\\'\"\\q", "😀", "\\xz"]


def test_brackets_are_followed_only_so_deep() -> None:
    assert read_literal("[" * 150 + "'a'" + "]" * 150) is not None
    assert read_literal("[" * 5000 + "'a'" + "]" * 5000) is None


# ---- grammars ----


@cache
def tokens() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer("byte")


def takes(grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(tokens(), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokens().tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def offer_of(schema: Any, choice: object = "required", **more: Any) -> Offer:
    function = {"name": "find", "parameters": schema, **more}
    found = read_offer([{"type": "function", "function": function}], choice)
    assert found is not None
    return found


def grammar_of(form: CallFormat, schema: Any, choice: object = "required", **more: Any) -> str:
    style = ChatStyle(form, None, knows_tools=True)
    found = call_grammar(offer_of(schema, choice, **more), style, quote, begun=False)
    assert found is not None
    return try_grammar(StructuredOutputs(written=found))


@cache
def wanted_grammar(form: CallFormat) -> str:
    return grammar_of(form, SCHEMA)


@settings(max_examples=150, deadline=None)
@given(FORMS, several)
def test_a_grammar_takes_what_a_family_writes(
    form: CallFormat, called: list[tuple[str, dict[str, Any]]]
) -> None:
    assume(not any(holds_marks(form, given) for _, given in called))
    ordered = [
        (name, {key: g[key] for key in SCHEMA["properties"] if key in g}) for name, g in called
    ]
    assume(all(set(g.get("place", {})) <= {"x"} for _, g in ordered))
    assume(all(isinstance(g.get("place", {}).get("x", 0), int | float) for _, g in ordered))
    assume(not any(isinstance(g.get("place", {}).get("x", 0), bool) for _, g in ordered))
    assert takes(wanted_grammar(form), write_calls(form, ordered))


HELD: dict[str, Any] = {
    "type": "object",
    "$defs": {
        "word": {"type": "string", "enum": ["a'b", "</c>", "d\ne", "a", "ab", "ab", "", "é\u2028"]},
        "short": {"type": "string", "maxLength": 3},
        "tree": {"type": "object", "properties": {"t": {"$ref": "#/$defs/tree"}}},
    },
    "properties": {
        "word": {"$ref": "#/$defs/word"},
        "code": {"type": "string", "pattern": "^[A-C]{2}/[0-9]$"},
        "near": {"type": "string", "pattern": "^x|y$"},
        "both": {"$ref": "#/$defs/short", "pattern": "^[a-c/]*\\/$", "minLength": 2},
        "some": {"anyOf": [{"$ref": "#/$defs/word"}, {"type": "null"}]},
        "kind": {"anyOf": [{"const": "a"}, {"const": "b"}, {"enum": ["c"]}]},
        "less": {"anyOf": [{"$ref": "#/$defs/short"}, {"type": "integer"}]},
        "none": {"type": ["string", "null"], "pattern": "^[0-9]*$"},
        "marked": {"enum": ["</parameter>", "</arg_value>", '<|"|>', "<escape>", "in"]},
        "tree": {"$ref": "#/$defs/tree"},
        "size": {"type": "string", "minLength": 2, "maxLength": 4},
        "free": {"type": "string"},
        "mode": {"enum": ["on", 1, None]},
        "flag": {"const": True},
        "list": {"type": "array", "items": {"$ref": "#/$defs/word"}},
        "deep": {
            "type": "object",
            "properties": {"n": {"type": "integer"}, "w": {"$ref": "#/$defs/word"}},
            "required": ["w"],
            "additionalProperties": False,
        },
    },
    "required": ["code", "size", "flag"],
    "additionalProperties": False,
}


def follow(grammar: str, hints: Sequence[str], draw: Any) -> str | None:
    """Return a text that a grammar lets through, drawn at random; None where it came to no end."""
    matcher = llguidance.LLMatcher(tokens(), grammar, log_level=0)
    text = b""
    for _ in range(400):
        if matcher.is_stopped() or (matcher.is_accepting() and draw.random() < 0.5):
            return text.decode()
        if draw.random() < 0.4:
            hint = draw.choice(hints).encode()
            count = matcher.try_consume_tokens(list(hint))
            text += hint[:count]
            if count:
                continue
        allowed = [at for at, bias in enumerate(matcher.compute_logit_bias()[:256]) if bias]
        assert allowed, text
        letter = draw.choice([at for at in allowed if at < 127] or allowed)
        assert matcher.consume_token(letter)
        text += bytes([letter])
    return None


EITHER = {
    "type": "object",
    "anyOf": [
        {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"properties": {"b": {"type": "integer"}}, "required": ["b"]},
    ],
}
OTHERS = {"type": "object", "additionalProperties": {"type": "string"}, "required": ["b"]}


@pytest.mark.parametrize(
    "schema", [SCHEMA, HELD, EITHER, OTHERS], ids=["plain", "held", "either", "others"]
)
@pytest.mark.parametrize("form", NAMES, ids=NAMES.values())
def test_what_a_grammar_lets_through_is_read_as_calls_that_the_schema_allows(
    form: CallFormat, schema: dict[str, Any]
) -> None:
    marks = (form.valued, form.valued.strip(), form.quote, form.close, form.after, form.end)
    hints = [mark for mark in (*marks, *"\"'})],1") if mark]
    grammar, tools = grammar_of(form, schema), {"find": argument_kinds(json.dumps(schema))}
    read_ = 0
    for seed in range(12):
        text = follow(grammar, hints, random.Random(seed))
        if text is None:
            continue
        parser = AnswerParser(form, tools=tools)
        found = Answer().add([*parser.feed(text), *parser.close()])
        assert found.calls and not found.content, text
        read_ += 1
        for name, arguments in calls_of(found):
            assert name == "find"
            jsonschema.validate(arguments, schema)
            assert schema in (EITHER, OTHERS) or arguments.keys() <= schema["properties"].keys()
    assert read_, "none came to its end"


ONE = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}


@pytest.mark.parametrize("form", NAMES, ids=NAMES.values())
def test_words_and_strict_calls_go_together_where_the_choice_is_the_model_s(
    form: CallFormat,
) -> None:
    strict = grammar_of(form, ONE, "auto", strict=True)
    call, other = (write_calls(form, [("find", {key: "x"})]) for key in "qz")
    assert all(takes(strict, text) for text in ("Hello.", "", call))
    assert not takes(strict, other) and not takes(strict, write_calls(form, [("find", {})]))
    both = write_calls(form, [("find", {"q": "x"}), ("find", {"q": "y"})])
    assert takes(strict, both)
    if not form.bare:
        assert takes(strict, f"I look. {call}")
    wanted = grammar_of(form, ONE)
    assert takes(wanted, both) and not takes(wanted, "Hello.")
    single = grammar_of(form, ONE, {"type": "function", "function": {"name": "find"}})
    assert takes(single, call) and not takes(single, both)


@pytest.mark.parametrize("form", NAMES, ids=NAMES.values())
def test_arguments_that_no_schema_names_may_be_any(form: CallFormat) -> None:
    grammar = grammar_of(form, {"type": "object"})
    called = [("find", {}), ("find", {"a": "x", "b_2": [1, {"c": None}], "d": True})]
    assert takes(grammar, write_calls(form, called))


@pytest.mark.parametrize("form", NAMES, ids=NAMES.values())
def test_a_tool_may_have_many_arguments(form: CallFormat) -> None:
    named = {f"p{place}": {"type": "string"} for place in range(250)}
    grammar = grammar_of(form, {"type": "object", "properties": named})
    for called in ({}, {"p3": "x", "p249": "y"}):
        assert takes(grammar, write_calls(form, [("find", called)]))


@pytest.mark.parametrize("form", [QWEN, LFM2, GEMMA], ids=lambda form: NAMES[form])
def test_names_that_could_not_be_read_are_refused_or_left_out(form: CallFormat) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "integer"}, '=">': {"type": "integer"}}}
    assert takes(grammar_of(form, odd), write_calls(form, [("find", {"a": 1})]))
    with pytest.raises(RequestError, match="'=\">' cannot be written"):
        grammar_of(form, {**odd, "required": ['=">']})


def test_values_that_could_not_be_read_are_left_out() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x</parameter>", "y"]}}}
    one, other = (write_calls(QWEN, [("find", {"a": a})]) for a in ("y", "x</parameter>"))
    grammar = grammar_of(QWEN, schema)
    assert takes(grammar, one) and not takes(grammar, other)
    schema["properties"]["a"]["enum"].pop()
    with pytest.raises(RequestError, match="no value of an enum"):
        grammar_of(QWEN, schema)
    for nothing in ({"enum": []}, {"$ref": "#/properties/a"}):
        with pytest.raises(RequestError, match="lets no value through, or refers to itself alone"):
            grammar_of(QWEN, {"type": "object", "properties": {"a": nothing}})


def test_what_a_schema_refers_to_is_written_once_for_each_part_and_bounded() -> None:
    """Of 200 definitions a part that refers to one holds that one."""
    defs = {f"d{place}": {"type": "integer", "minimum": place} for place in range(200)}
    named = {name: {"$ref": f"#/$defs/{name}"} for name in defs}
    schema: dict[str, Any] = {"type": "object", "properties": named, "$defs": defs}
    assert len(grammar_of(QWEN, schema)) < 10 * len(json.dumps(schema))
    schema["$defs"]["d0"] = {"type": "array", "items": {"anyOf": [*named.values()]}}
    defs |= {f"d{place}": {"type": "array", "items": named["d0"]} for place in range(1, 200)}
    with pytest.raises(RequestError, match="refer to too much"):
        grammar_of(QWEN, schema)


def test_each_letter_of_a_pattern_is_read_once() -> None:
    """The server's event loop waits for it."""
    assert PIECES.findall(r"a\[[^]\]x]b[[[[\x") == ["a", r"\[", r"[^]\]x]", "b", r"[[[[\x"]
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "[" * 100_000}}}
    with pytest.raises(RequestError, match="cannot be followed"):
        grammar_of(QWEN, bad)


def test_what_all_tools_refer_to_is_bounded_together() -> None:
    """Each tool is small for itself; the server's event loop waits for the grammar of all."""
    wide = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(300)}}
    named = {f"x{i}": {"$ref": "#/$defs/wide"} for i in range(50)}
    schema = {"type": "object", "properties": named, "$defs": {"wide": wide}}
    tools = [{"function": {"name": f"f{i}", "parameters": schema}} for i in range(4)]
    style = ChatStyle(QWEN, None, knows_tools=True)
    for count in (1, 4):
        offer = read_offer(tools[:count], "required")
        assert offer is not None
        with nullcontext() if count == 1 else pytest.raises(RequestError, match="too much"):
            call_grammar(offer, style, quote, begun=False)


def test_schemas_refer_to_each_other_only_so_deep() -> None:
    def refer(to: int) -> dict[str, Any]:
        return {"type": "object", "properties": {"p": {"$ref": f"#/$defs/d{to}"}}}

    defs = {f"d{place}": refer(place + 1) for place in range(200)} | {"d200": {}}
    grammar_of(GEMMA, {**refer(150), "$defs": defs})
    with pytest.raises(RequestError, match="too deeply: 64 at most"):
        grammar_of(GEMMA, {**refer(0), "$defs": defs})


@pytest.mark.parametrize("form", [QWEN, GEMMA])
def test_a_long_chain_of_references_is_told_as_one(form: CallFormat) -> None:
    """Nothing is nested there; the chain is followed deeper than it may be."""
    defs = {f"d{place}": {"$ref": f"#/$defs/d{place + 1}"} for place in range(200)}
    schema = {"type": "object", "properties": {"p": {"$ref": "#/$defs/d0"}}}
    for last, said in ((40, nullcontext()), (200, pytest.raises(RequestError, match="64 at most"))):
        with said:
            kept = {name: defs[name] for name in [*defs][:last]}
            grammar_of(form, schema | {"$defs": {**kept, f"d{last}": {"type": "string"}}})


def properties(count: int, of: Any, begin: str = "p") -> dict[str, Any]:
    return {"properties": {f"{begin}{place}": of for place in range(count)}}


FAR = {f"{'x' * 400}{place}": {} for place in range(200)}
LABOUR: dict[str, dict[str, Any]] = {
    "parts by alternatives": {"allOf": [{}] * 300, "anyOf": [{}] * 300},
    "names that no model writes": properties(1100, {}, "<") | {"anyOf": [{}] * 200},
    "values that no model writes": properties(200, {"$ref": "#/$defs/d"})
    | {"$defs": {"d": {"type": "string", "enum": ["a", *range(1000)]}}},
    "references that are shortened": properties(40, {"$ref": "#/$defs/d"})
    | {
        "$defs": FAR
        | {"d": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/{name}"} for name in FAR]}}
    },
}


@pytest.mark.parametrize("name", LABOUR)
def test_what_is_read_is_bounded_where_little_is_written(name: str) -> None:
    """The server's event loop waits for it."""
    with pytest.raises(RequestError, match=r"too m(any|uch)"):
        grammar_of(QWEN, {"type": "object", **LABOUR[name]})


class Marks:
    """A tokenizer in which the marks of Gemma 4 are special."""

    known: ClassVar = {'<|"|>': 5, "<|tool_call>": 6, "<tool_call|>": 7}

    def find_special(self, text: str) -> int | None:
        return self.known.get(text)


def test_marks_that_are_tokens_are_tokens_in_grammars() -> None:
    style = ChatStyle(GEMMA, None, knows_tools=True)
    tokenizer: Any = Marks()
    literal = partial(write_mark, tokenizer)
    found = call_grammar(offer_of(ONE), style, literal, begun=False)
    assert found is not None and "<[6]> marked" in found
    assert "args_0_0: <[5]> /(?s:.*)/ <[5]>" in found and '"}"' in found
    assert style.has_special_marks(tokenizer, offered=True)
    assert not style.has_special_marks(tokenizer)
