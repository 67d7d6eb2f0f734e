"""Grammars of forms and of calls: what they let through, what is refused, and in which bounds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import llguidance
import pytest

from dovetail.ir.errors import DeviceError, RequestError
from dovetail.runtime.schedule.structured import StructuredOutputs, read_structured
from dovetail.runtime.text.call_grammar import call_grammar, frame
from dovetail.runtime.text.forms import KEPT, Forms
from dovetail.runtime.text.grammar import MAX_OPTIONAL, json_rule, quote, try_grammar
from dovetail.runtime.text.masks import READER, Grammars
from dovetail.runtime.text.tools import (
    THOUGHTS,
    ChatStyle,
    Offer,
    read_offer,
)
from dovetail.tiny_world import LLAMA

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}
THINK = THOUGHTS[0]


@cache
def tokens() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(str(LLAMA / "tokenizer.json"), n_vocab=768, eos_token=[1])


def takes(grammar: str, text: str) -> bool:
    """Tell whether a text is all that a grammar asks for."""
    matcher = llguidance.LLMatcher(tokens(), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokens().tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def form(**wish: Any) -> StructuredOutputs:
    found = read_structured("form", wish)
    assert found is not None
    return found


TEXTS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"json": PERSON},
        ['{"name":"A"}', '{"name": "A", "age": 3}', '{\n  "name": "A"\n}', '{"name": "A"\n}'],
        ["{}", '{"age": 3}', '{"name": 5}', '{"name": "A", "x": 1}', '{  "name": "A"}', "[]"],
    ),
    ({"json": {**PERSON, "additionalProperties": True}}, ['{"name": "A", "x": [1]}'], ["{}"]),
    ({"json": PERSON, "disable_any_whitespace": True}, ['{"name":"A"}'], ['{"name": "A"}']),
    ({"json": {"x-guidance": {"lenient": True}, "const": 5}}, ["5"], ["6"]),
    ({"json": True}, ["5", "[]", '"a"'], [""]),
    ({"json_object": True}, ["{}", '{"a": [1, null]}'], ["[]", "5"]),
    ({"regex": "[a-c]{2}/x"}, ["ab/x"], ["ab", "abc/x", "aab/x"]),
    ({"regex": "^a|b$"}, ["a", "b"], ["ab", "c"]),
    ({"choice": ['a "b"', "é\n"]}, ['a "b"', "é\n"], ["a", ""]),
    ({"choice": ["a", "ab", "\x7f", "\0", "a"]}, ["a", "ab", "\x7f", "\0"], ["b", "aba"]),
    ({"choice": [f"choice {number}" for number in range(3000)]}, ["choice 7"], ["choice 3000"]),
    ({"grammar": 'start: "a" b\nb: /[0-9]+/'}, ["a12"], ["a", "12"]),
    ({"grammar": 'root ::= "a" b\nb ::= [0-9]+'}, ["a12"], ["a", "12"]),
    ({"json": {"type": "string", "pattern": "^a[0-9]$"}}, ['"a1"'], ['"a"', '"ba1"']),
    (
        {
            "json": {
                "$ref": "#/$defs/t",
                "$defs": {"t": {"properties": {"n": {"$ref": "#/$defs/t"}}}},
            }
        },
        ['{"n": {"n": {}}}'],
        ['{"m": 1}'],
    ),
    ({"json": {"$ref": "#"}}, ["5", "[]"], [""]),
    (
        {"json": {"properties": {"a": {"items": {}, "uniqueItems": False}}, "required": ["a"]}},
        ['{"a": [1, 1]}'],
        ["{}"],
    ),
    (
        {"json": {"allOf": [{"const": {"uniqueItems": False}}], "uniqueItems": False}},
        ['{"uniqueItems": false}'],
        ["{}"],
    ),
    (
        {"json": {"$ref": "#", "type": "object", "properties": {"n": {"$ref": "#"}}}},
        ['{"n": {"n": {}}}'],
        ["5", '{"n": 5}'],
    ),
    (
        {
            "json": {
                "allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}],
                "type": "object",
            }
        },
        ['{"a": 1, "b": 2}', "{}"],
        ["[]"],
    ),
]


@pytest.mark.parametrize(("wish", "right", "wrong"), TEXTS, ids=str)
def test_forms_let_through_what_they_say(
    wish: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    grammar = try_grammar(form(**wish))
    assert all(takes(grammar, text) for text in right)
    assert not any(takes(grammar, text) for text in wrong)


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, "not supported: uniqueItems"),
        ({"json": {"properties": {"a": {"not": {}, "if": {}}}}}, "not supported: if, not"),
        ({"json": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}}, "oneOf"),
        ({"json": {"type": "string", "format": "color"}}, "format: color"),
        ({"json": {"type": "wizard"}}, "wizard"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "5"),
        ({"json": {"$ref": "http://example.com/a"}}, "example.com"),
        ({"json": {"allOf": [{"$ref": "#"}]}}, "the schema lets no answer through"),
        ({"regex": "a("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"grammar": "start: b"}, "b"),
        ({"grammar": f"start: {' | '.join(quote(f'a{at}') for at in range(2500))}"}, "too many"),
        ({"regex": "a?" * (MAX_OPTIONAL + 1)}, f"{MAX_OPTIONAL} parts"),
        ({"json": {"pattern": "a*" * (MAX_OPTIONAL + 1)}}, f"{MAX_OPTIONAL} parts"),
        ({"grammar": 'start: "a"?' + ' "a"?' * MAX_OPTIONAL}, f"{MAX_OPTIONAL} parts"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(wish: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        try_grammar(form(**wish))


def test_objects_are_closed_unless_the_schema_speaks_of_more() -> None:
    inner = {"properties": {"a": {}}, "required": ["b"]}
    schema = {"properties": {"x": inner, "y": {"properties": {}}}, "patternProperties": {}}
    found = json.loads(json_rule(json.dumps(schema)).removeprefix("%json "))
    del found["x-guidance"]
    closed = {"properties": {}, "additionalProperties": False}
    assert found == {**schema, "properties": {"x": inner, "y": closed}}


# ---- bounds ----


@pytest.fixture
def forms() -> Iterator[Forms]:
    made = Forms()
    yield made
    made.close()


@pytest.mark.parametrize(
    "wish",
    [
        {"json": {"type": "integer", "multipleOf": 999_983}},
        {"json": {"enum": [f"value {i}" for i in range(15_000)]}},
        {"regex": "(" * 5000 + "a" + ")" * 5000},
        {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
        {"json": {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for i in range(10)]}
                            for j in range(8)]}},
    ],
    ids=["a product", "choices", "brackets", "deep rules", "combinations"],
)  # fmt: skip
def test_bad_forms_take_their_time_in_another_process(forms: Forms, wish: dict[str, Any]) -> None:
    """They are refused, or known in bounded time; an honest one is known after each."""
    try:
        forms.write(form(**wish))
    except RequestError as error:
        assert str(error)
    assert takes(forms.write(form(choice=["a"])), "a")


def test_forms_that_were_asked_for_last_are_known(forms: Forms) -> None:
    first = form(choice=["first"])
    pinned = form(choice=["pinned"])
    forms.pin(pinned)
    wanted = forms.write(first)
    assert forms.find(first) == wanted
    for number in range(KEPT):
        forms.write(form(choice=[f"c{number}"]))
    assert forms.find(first) is None and forms.find(pinned) is not None
    assert forms.write(first) == wanted
    forms.close()
    with pytest.raises(RequestError, match="closed"):
        forms.write(form(choice=["later"]))


def test_nobody_waits_for_a_form_that_cannot_be_sent(forms: Forms) -> None:
    with pytest.raises(DeviceError, match="surrogates"):
        forms.start(StructuredOutputs(regex="\ud800")).result(60)
    assert takes(forms.write(form(choice=["a"])), "a")


# ---- reasoning and calls ----


def test_reasoning_may_go_before_a_form() -> None:
    asked = form(json=PERSON)
    grammar = try_grammar(frame(asked, THINK, quote, begun=False))
    assert takes(grammar, '{"name": "A"}')
    assert takes(grammar, '<think>{"name": 5}</think>\n\n{"name": "A"}')
    assert not takes(grammar, 'Well: {"name": "A"}')
    grammar = try_grammar(frame(asked, THINK, quote, begun=True))
    assert takes(grammar, 'so.</think>{"name": "A"}') and not takes(grammar, '{"name": "A"}')
    assert frame(asked, None, quote, begun=False) == asked


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {"properties": {"q": {"type": "string"}}, "required": ["q"]},
            "strict": True,
        },
    },
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}},
    },
]
FIND, ADD = '{"name": "find", "arguments": {"q": "x"}}', '{"name": "add", "arguments": {"a": 1}}'
WRITTEN: dict[str, tuple[str, str, str]] = {
    "tools <tool_call>": (
        f"<tool_call>\n{FIND}\n</tool_call>",
        f"<tool_call>\n{ADD}\n</tool_call>",
        "\n",
    ),
    "tools <|python_tag|>": (
        FIND.replace("arguments", "parameters"),
        ADD.replace("arguments", "parameters"),
        "; ",
    ),
    "tools [TOOL_CALLS]": (f"[TOOL_CALLS] [{FIND}]", f"[TOOL_CALLS][{ADD}]", ""),
    "tools [TOOL_CALLS] [ARGS]": (
        '[TOOL_CALLS]find[ARGS]{"q": "x"}',
        '[TOOL_CALLS]add[ARGS]{"a": 1}',
        "",
    ),
    "": (FIND, ADD, ""),
}
"""By the template: two calls as the model writes them, and what goes between them."""


def offered(choice: object, **more: Any) -> Offer:
    found = read_offer(TOOLS, choice, **more)
    assert found is not None
    return found


def grammar_of(template: str, choice: object, *, begun: bool = False, **more: Any) -> str:
    found = call_grammar(offered(choice, **more), ChatStyle.of(template), quote, begun=begun)
    assert found is not None
    return try_grammar(StructuredOutputs(written=found))


@pytest.mark.parametrize("thinks", ["", "</think>"])
@pytest.mark.parametrize("template", WRITTEN)
def test_calls_that_must_be_are_written_as_the_family_writes_them(
    template: str, thinks: str
) -> None:
    find, add, between = WRITTEN[template]
    thought = "<think>Hm.</think>\n" if thinks else ""
    grammar = grammar_of(template + thinks, "required")
    both = find + between + add
    if template.endswith("[TOOL_CALLS]"):
        both = f"[TOOL_CALLS][{FIND}, {ADD}]"
    elif not template:
        both = f"[{FIND}, {ADD}]"
    assert all(takes(grammar, thought + text) for text in (find, add, both))
    assert not any(takes(grammar, text) for text in ("Hello.", find.replace('"q"', '"z"'), ""))
    single = grammar_of(template + thinks, "required", parallel=False)
    assert takes(single, thought + find) and not takes(single, thought + both)
    named = grammar_of(template + thinks, {"type": "function", "function": {"name": "add"}})
    assert takes(named, thought + add) and not takes(named, thought + find)


@pytest.mark.parametrize("thinks", ["", "</think>"])
@pytest.mark.parametrize("template", WRITTEN)
def test_calls_of_strict_tools_are_right_among_words(template: str, thinks: str) -> None:
    find, add, _ = WRITTEN[template]
    thought = "<think>Hm.</think>\n" if thinks else ""
    grammar = grammar_of(template + thinks, "auto")
    odd = add.replace('"a": 1', '"b": "c"')  # which is not strict
    assert all(takes(grammar, thought + text) for text in ("Hello.", "", find, odd))
    assert not takes(grammar, thought + find.replace('"q"', '"z"'))


def test_nothing_is_asked_of_calls_that_are_free() -> None:
    offer = read_offer(TOOLS[1:])
    assert offer is not None
    assert call_grammar(offer, ChatStyle.of("tools <tool_call>"), quote, begun=False) is None


def test_what_is_warm_has_read_the_vocabulary_and_tried_a_form_before_one_is_asked_for() -> None:
    grammars, forms = Grammars(LLAMA / "tokenizer.json", 768, [1]), Forms()
    grammars.warm()
    grammars._thread(READER).submit(lambda: None).result()  # behind it
    assert "_words" in vars(grammars)
    Grammars(None, 768, [1]).warm()  # nothing to read
    forms.warm()
    forms.write(form(json_object=True))
    assert forms.find(form(json_object=True)) is not None
    forms.close()
    grammars.close()


def test_an_end_that_the_model_has_no_logit_for_is_left_out() -> None:
    grammars = Grammars(LLAMA / "tokenizer.json", 768, [1, 1 << 20])
    assert not grammars.read('start: "a"').result().is_error()
    grammars.close()
