"""Forms of answers as callers ask for them: vLLM's names in, one checked value out."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from dovetail.ir.errors import RequestError
from dovetail.runtime.schedule.request import SamplingParams
from dovetail.runtime.schedule.structured import MAX_FORM, StructuredOutputs, read_structured

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}


class Person(BaseModel):
    name: str


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ({"json": SCHEMA}, StructuredOutputs(json=json.dumps(SCHEMA))),
        ({"json": json.dumps(SCHEMA)}, StructuredOutputs(json=json.dumps(SCHEMA))),
        ({"json": Person}, StructuredOutputs(json=json.dumps(Person.model_json_schema()))),
        ({"json": True, "regex": None}, StructuredOutputs(json="true")),
        ({"regex": "a+"}, StructuredOutputs(regex="a+")),
        ({"choice": ["a", "b"]}, StructuredOutputs(choice=("a", "b"))),
        ({"grammar": "start: 'a'"}, StructuredOutputs(grammar="start: 'a'")),
        ({"json_object": True}, StructuredOutputs(json_object=True)),
        (SimpleNamespace(choice=["a"], json=None), StructuredOutputs(choice=("a",))),
        (
            {"json_object": True, "disable_any_whitespace": True},
            StructuredOutputs(json_object=True, disable_any_whitespace=True),
        ),
    ],
)
def test_forms_have_the_names_of_vllm(value: Any, wanted: StructuredOutputs) -> None:
    assert read_structured("structured_outputs", value) == wanted
    assert SamplingParams.make({"structured_outputs": value}).structured_outputs == wanted


def test_a_schema_stands_for_its_form() -> None:
    wanted = StructuredOutputs(json=json.dumps(SCHEMA))
    assert SamplingParams.make({"schema": SCHEMA}).structured_outputs == wanted
    assert SamplingParams.make({"schema": None}).structured_outputs is None
    with pytest.raises(RequestError, match="either"):
        SamplingParams.make({"schema": SCHEMA, "structured_outputs": {"regex": "a"}})


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({}, "none"),
        ({"json": SCHEMA, "regex": "a"}, "json and regex"),
        ({"json_object": False}, "none"),
        ({"lark": "a"}, "no 'lark'"),
        ({"json": "{"}, "no JSON"),
        ({"json": 5}, "an object"),
        ({"json": {"const": float("nan")}}, "no JSON"),
        ({"regex": ""}, "none|empty"),
        ({"regex": 5}, "text"),
        ({"choice": []}, "none|list"),
        ({"choice": "ab"}, "list"),
        ({"choice": ["a", ""]}, "not empty"),
        ({"json_object": "yes"}, "true or false"),
        ({"regex": "a\ud800"}, "half a surrogate pair"),
        ({"choice": ["a", "\udc00"]}, "half a surrogate pair"),
        ({"json": {"const": "\ud800"}}, "surrogates not allowed"),
        ({"json": '{"const": "\\ud800"}'}, "surrogates not allowed"),
        ({"regex": "a" * (MAX_FORM + 1)}, str(MAX_FORM)),
        ({"choice": ["a" * MAX_FORM, "b"]}, str(MAX_FORM)),
        ({"json": {"description": "a" * MAX_FORM}}, str(MAX_FORM)),
    ],
)
def test_what_is_no_form_is_refused(value: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        SamplingParams.make({"structured_outputs": value})


def test_deep_schemas_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(RequestError, match="no JSON"):
        SamplingParams.make({"schema": deep})
    while deep:  # or Python takes it apart in as deep a recursion
        deep = deep.pop("items", {})
