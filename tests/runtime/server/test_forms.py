"""Answers in forms with the official client: every way to ask, and what is refused by name."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from dovetail.runtime.app import App
from tests.runtime.server.live import Live, http
from tests.runtime.server.openai_calls import MESSAGES, PROMPT, chat_ids, refused

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def named(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema, **more}}


ASKS: dict[str, tuple[dict[str, Any], str]] = {
    "json_schema": ({"response_format": named(PERSON, strict=True)}, "json"),
    "not strict": ({"response_format": named(PERSON)}, "json"),
    "guided_json": ({"extra_body": {"guided_json": PERSON}}, "json"),
    "guided_json as text": ({"extra_body": {"guided_json": json.dumps(PERSON)}}, "json"),
    "structured_outputs": ({"extra_body": {"structured_outputs": {"json": PERSON}}}, "json"),
    "json_object": ({"response_format": {"type": "json_object"}}, r"(?s)\{.*\}"),
    "an object by vLLM": (
        {"extra_body": {"structured_outputs": {"json_object": True}}},
        r"(?s)\{.*\}",
    ),
    "regex": ({"extra_body": {"structured_outputs": {"regex": "[ab]{3}"}}}, "[ab]{3}"),
    "guided_regex": ({"extra_body": {"guided_regex": "[ab]{3}"}}, "[ab]{3}"),
    "choice": ({"extra_body": {"structured_outputs": {"choice": ["one", "two"]}}}, "one|two"),
    "guided_choice": ({"extra_body": {"guided_choice": ["one", "two"]}}, "one|two"),
    "grammar": (
        {"extra_body": {"structured_outputs": {"grammar": 'start: "x" /[0-9]/'}}},
        "x[0-9]",
    ),
    "guided_grammar": ({"extra_body": {"guided_grammar": 'root ::= "x" [0-9]'}}, "x[0-9]"),
    "text": ({"response_format": {"type": "text"}}, "The capital.*"),
}


def check(text: str | None, shape: str) -> None:
    assert text is not None
    if shape == "json":
        jsonschema.validate(json.loads(text), PERSON)
    else:
        assert re.fullmatch(shape, text), text


@pytest.mark.parametrize("name", ASKS)
def test_chats_answer_in_the_form_that_is_asked_for(client: openai.OpenAI, name: str) -> None:
    fields, shape = ASKS[name]
    asked: Any = {"model": "llama", "messages": MESSAGES, "max_tokens": 150, **fields}
    reply = client.chat.completions.create(**asked)
    assert reply.choices[0].finish_reason == "stop"
    check(reply.choices[0].message.content, shape)


@pytest.mark.parametrize("name", ["json_schema", "regex", "guided_choice"])
def test_streams_and_samples_have_the_form_too(client: openai.OpenAI, name: str) -> None:
    fields, shape = ASKS[name]
    asked: Any = {"model": "llama", "messages": MESSAGES, "max_tokens": 150, "n": 3, "seed": 5}
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(stream=True, temperature=1.5, **asked, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    for text in texts:
        check(text, shape)


@pytest.mark.parametrize("name", [name for name in ASKS if name != "text"])
def test_completions_answer_in_the_form_that_is_asked_for(client: openai.OpenAI, name: str) -> None:
    fields, shape = ASKS[name]
    fields = {**fields, "extra_body": dict(fields.get("extra_body", {}))}
    if (form := fields.pop("response_format", None)) is not None:
        fields["extra_body"]["response_format"] = form
    asked: Any = {"model": "llama", "prompt": [PROMPT, "Melkar"], "max_tokens": 150, **fields}
    for choice in client.completions.create(**asked).choices:
        assert choice.finish_reason == "stop"
        check(choice.text, shape)


def test_a_form_gives_the_offline_answer(client: openai.OpenAI, offline: App) -> None:
    asked: Any = {"model": "llama", "messages": MESSAGES, "max_tokens": 150}
    reply = client.chat.completions.create(response_format=named(PERSON), **asked)
    (wanted,) = offline.generate([chat_ids(offline)], schema=PERSON, max_tokens=150)
    assert reply.choices[0].message.content == wanted.text


class Leg(BaseModel):
    to: str
    kind: Literal["walk", "ride"]
    km: float | None


class Trip(BaseModel):
    title: str
    legs: list[Leg]


def test_pydantic_models_are_parsed(client: openai.OpenAI) -> None:
    asked: Any = {"model": "llama", "messages": MESSAGES, "max_tokens": 400}
    reply = client.chat.completions.parse(response_format=Trip, **asked)
    assert isinstance(reply.choices[0].message.parsed, Trip)
    with client.chat.completions.stream(response_format=Trip, **asked) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == reply.choices[0].message.parsed


KEYWORDS: dict[str, dict[str, Any]] = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "not": {"not": {"type": "string"}},
    "if, then": {"if": {}, "then": {}},
    "contains": {"type": "array", "contains": {"type": "string"}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "a"}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "unevaluatedProperties": {"properties": {}, "unevaluatedProperties": False},
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_keywords_that_are_not_supported_are_named(client: openai.OpenAI, name: str) -> None:
    create = client.chat.completions.create
    deep = {"type": "object", "properties": {"x": {"items": KEYWORDS[name]}}}
    for schema in (KEYWORDS[name], deep):
        asked: Any = {"model": "llama", "messages": MESSAGES, "response_format": named(schema)}
        error = refused(create, **asked)
        assert (error.status_code, error.param) == (400, "response_format")
        assert f"not supported: {name}" in error.message


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format"),
    ({"response_format": named({"type": "wizard"})}, "response_format"),
    ({"response_format": named({"type": "string", "format": "color"})}, "response_format"),
    ({"response_format": named({"type": "integer", "multipleOf": 999983})}, "response_format"),
    ({"extra_body": {"guided_json": "{"}}, "guided_json"),
    ({"extra_body": {"guided_regex": "a("}}, "guided_regex"),
    ({"extra_body": {"guided_regex": "a?" * 5000}}, "guided_regex"),
    ({"extra_body": {"guided_choice": []}}, "guided_choice"),
    ({"extra_body": {"guided_regex": "a", "guided_choice": ["a"]}}, "guided_regex"),
    ({"extra_body": {"guided_grammar": "start: b"}}, "guided_grammar"),
    ({"extra_body": {"structured_outputs": {}}}, "structured_outputs"),
    ({"extra_body": {"structured_outputs": {"regex": "a", "json": {}}}}, "structured_outputs"),
    ({"extra_body": {"structured_outputs": {"tag": "a"}}}, "structured_outputs"),
    (
        {"extra_body": {"guided_regex": "a"}, "response_format": {"type": "json_object"}},
        "response_format",
    ),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=str)
def test_wrong_forms_are_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    asked: Any = {"model": "llama", "messages": MESSAGES, "max_tokens": 20, **fields}
    error = refused(client.chat.completions.create, **asked)
    assert (error.status_code, error.param) == (400, param), error.message
    if param != "response_format.type":
        assert error.response.headers["x-should-retry"] == "false"


def test_honest_requests_do_not_wait_for_a_bad_form(live: Live) -> None:
    """While one burns its deadline in its process others are answered."""
    bad = {"messages": MESSAGES, "guided_json": {"type": "integer", "multipleOf": 999_979}}
    with pytest.raises(Exception, match="timed out"):
        http.post(f"{live.v1}/chat/completions", json=bad, timeout=0.02)
    good = {"messages": MESSAGES, "max_tokens": 1}
    assert http.post(f"{live.v1}/chat/completions", json=good).status_code == 200
    assert http.post(f"{live.v1}/chat/completions", json=bad).status_code == 400
