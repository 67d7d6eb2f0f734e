"""Tools with the official client: choices, calls at once and in streams, whole loops."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import openai
import pytest

from dovetail.tiny_world import corpus, prompts
from dovetail.tiny_world.questions import SINGLE, TWO_HOP
from tests.runtime.server.live import Live, http
from tests.runtime.server.openai_calls import refused

LOOK_UP: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Find passages about somebody or something.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
        },
    },
}
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
TOOLS = [LOOK_UP, ADD]
SUM = "What is 1203 plus 2210?"
RIVERS = "How long are Legrel River and Gragum River together?"


def strict(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "strict": True}}


def name_of(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool["function"]["name"]}}


def ask(client: openai.OpenAI, question: str | list[Any], **fields: Any) -> Any:
    messages = question if isinstance(question, list) else [{"role": "user", "content": question}]
    asked = {"model": "llama", "messages": messages, "tools": TOOLS, "temperature": 0, **fields}
    return client.chat.completions.create(**asked)


def read(calls: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls or []]


def gather(stream: Any) -> tuple[str, list[tuple[str, str, str]], str | None, list[Any]]:
    """Return content, calls (id, name, arguments), the reason, and the deltas of a stream."""
    content, calls, reason, deltas = "", [list[str]()][:0], None, []
    for chunk in stream:
        for choice in chunk.choices:
            deltas.append(choice.delta)
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                if call.index == len(calls):
                    assert call.id and call.type == "function"
                    calls.append([call.id, call.function.name, ""])
                calls[call.index][2] += call.function.arguments or ""
            reason = choice.finish_reason or reason
    return content, [tuple(call) for call in calls], reason, deltas  # type: ignore[misc]


# ---- what the bundled model does by itself ----


def test_a_tool_is_called_where_it_is_needed(client: openai.OpenAI) -> None:
    reply = ask(client, SUM).choices[0]
    assert reply.finish_reason == "tool_calls" and reply.message.content is None
    assert read(reply.message.tool_calls) == [("add", {"a": 1203, "b": 2210})]
    assert all(re.fullmatch("call_[0-9a-f]{24}", call.id) for call in reply.message.tool_calls)


def test_two_are_called_at_once(client: openai.OpenAI) -> None:
    calls = ask(client, RIVERS).choices[0].message.tool_calls
    assert read(calls) == [
        ("look_up", {"query": "How long is Legrel River?"}),
        ("look_up", {"query": "How long is Gragum River?"}),
    ]
    assert len({call.id for call in calls}) == 2
    single = ask(client, RIVERS, parallel_tool_calls=False).choices[0]
    assert read(single.message.tool_calls) == read(calls[:1])
    assert single.finish_reason == "tool_calls"


def test_streams_bring_calls_piece_by_piece(client: openai.OpenAI) -> None:
    whole = ask(client, RIVERS).choices[0].message.tool_calls
    content, calls, reason, deltas = gather(ask(client, RIVERS, stream=True))
    assert (content, reason) == ("", "tool_calls")
    assert [(name, json.loads(text)) for _, name, text in calls] == read(whole)
    pieces = [call for delta in deltas for call in delta.tool_calls or []]
    assert len(pieces) >= 4 and [p.index for p in pieces] == sorted(p.index for p in pieces)
    assert deltas[0].role == "assistant" and sum(bool(piece.id) for piece in pieces) == 2


def test_what_tools_return_is_answered_from(client: openai.OpenAI) -> None:
    first = ask(client, SUM).choices[0].message
    talk = [
        {"role": "user", "content": SUM},
        first.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "3413"},
    ]
    reply = ask(client, talk).choices[0]
    assert reply.message.content == "The sum of 1203 and 2210 is 3413."
    assert reply.finish_reason == "stop" and not reply.message.tool_calls


def run_loop(client: openai.OpenAI, question: str, find: Callable[[str], str]) -> tuple[str, int]:
    """Answer with tools; return the answer, and how many calls it took."""
    talk: list[Any] = [{"role": "user", "content": question}]
    for count in range(6):
        message = ask(client, talk).choices[0].message
        talk.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content, count
        for call in message.tool_calls:
            given = json.loads(call.function.arguments)
            is_sum = call.function.name == "add"
            told = str(given["a"] + given["b"]) if is_sum else find(given["query"])
            talk.append({"role": "tool", "tool_call_id": call.id, "content": told})
    return "", 6


def find_passages(query: str) -> str:
    """Return the passages about the longest name in a query."""
    held = [p for p in corpus.passages() if p.title in query]
    longest = max((len(p.title) for p in held), default=0)
    return prompts.bullets(p.document for p in held if len(p.title) == longest)


def test_whole_loops_end_with_the_answer(client: openai.OpenAI) -> None:
    """Of questions that one look-up answers, and those that take two, one after the other."""
    for kind, turns, least in ((SINGLE, 1, 9), (TWO_HOP, 2, 7)):
        asked = [q for q in corpus.questions("dev") if q.kind == kind][:10]
        found = [run_loop(client, q.question, find_passages) for q in asked]
        right = [one == (q.statement, turns) for one, q in zip(found, asked, strict=True)]
        assert sum(right) >= least, found
    rivers = [p for p in corpus.passages() if "River" in p.title and "kilometers" in p.text][:2]
    long = [int(re.findall(r"[0-9]{4}", p.text)[0]) for p in rivers]
    question = f"How long are {rivers[0].title} and {rivers[1].title} together?"
    text, turns = run_loop(client, question, find_passages)
    assert text.endswith(f"in kilometers is {sum(long)}.") and turns == 2


# ---- what any model must do ----


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tool", TOOLS, ids=["look_up", "add"])
@pytest.mark.parametrize("question", [SUM, "Hello."])
def test_the_tool_that_is_named_is_called(
    client: openai.OpenAI, question: str, tool: dict[str, Any], stream: bool
) -> None:
    asked = {"tool_choice": name_of(tool), "max_tokens": 200}
    if stream:
        content, calls, reason, _ = gather(ask(client, question, stream=True, **asked))
        ((_, name, arguments),) = calls
    else:
        choice = ask(client, question, **asked).choices[0]
        content, reason = choice.message.content or "", choice.finish_reason
        ((name, arguments),) = [
            (call.function.name, call.function.arguments) for call in choice.message.tool_calls
        ]
    assert (content, reason, name) == ("", "stop", tool["function"]["name"])
    jsonschema.validate(json.loads(arguments), tool["function"]["parameters"])


@pytest.mark.parametrize("parallel", [None, False])
@pytest.mark.parametrize("question", [SUM, RIVERS, "Hello.", "Name the capital of Zorvia."])
def test_some_tool_is_called_where_that_is_required(
    client: openai.OpenAI, question: str, parallel: bool | None
) -> None:
    asked: dict[str, Any] = {"tool_choice": "required", "max_tokens": 300}
    asked |= {} if parallel is None else {"parallel_tool_calls": parallel}
    reply = ask(client, question, **asked).choices[0]
    assert reply.finish_reason == "tool_calls" and reply.message.tool_calls
    assert parallel is None or len(reply.message.tool_calls) == 1
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    for name, given in read(reply.message.tool_calls):
        jsonschema.validate(given, schemas[name])


@pytest.mark.parametrize("temperature", [0, 1.2])
def test_strict_tools_are_called_by_their_schema(client: openai.OpenAI, temperature: float) -> None:
    """Also where words and calls are the model's choice."""
    odd = strict(ADD)
    odd["function"]["parameters"] = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    reply = ask(client, SUM, tools=[strict(LOOK_UP), odd], temperature=temperature, seed=3, n=4)
    called = [call for choice in reply.choices for call in read(choice.message.tool_calls)]
    assert called
    for name, given in called:
        assert name == "look_up" or given["b"] in ("x", "y")


@pytest.mark.parametrize(("mode", "least"), [("auto", 0), ("required", 1)])
def test_only_the_tools_that_are_allowed_are_called(
    client: openai.OpenAI, mode: str, least: int
) -> None:
    allowed = {"mode": mode, "tools": [name_of(LOOK_UP)]}
    choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    found = ask(client, SUM, tool_choice=choice, max_tokens=200).choices[0].message.tool_calls or []
    assert len(found) >= least and {call.function.name for call in found} <= {"look_up"}


def test_no_tool_is_called_where_none_may_be(client: openai.OpenAI) -> None:
    reply = ask(client, SUM, tool_choice="none", max_tokens=30).choices[0]
    assert not reply.message.tool_calls and reply.message.content
    bare = ask(client, SUM, tools=openai.omit, max_tokens=30).choices[0]
    assert reply.message.content == bare.message.content


def test_calls_that_are_cut_off_say_so(client: openai.OpenAI) -> None:
    reply = ask(client, SUM, max_tokens=36).choices[0]
    assert reply.finish_reason == "length" and reply.message.tool_calls
    assert reply.message.tool_calls[0].function.arguments.startswith('{"a": ')


def test_log_probabilities_go_with_calls(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 1}
    whole = ask(client, SUM, **asked).choices[0].logprobs
    found = []
    for chunk in ask(client, SUM, stream=True, **asked):
        logprobs = chunk.choices[0].logprobs
        found += (logprobs.content or []) if logprobs else []
    assert whole is not None and found == whole.content
    assert "<tool_call>" in "".join(token.token for token in found)


REFERRED = {
    "$ref": "#/$defs/A",
    "$defs": {"A": {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}},
}
SHAPES: dict[str, list[tuple[str, Any]]] = {
    "no parameters": [("now", None)],
    "empty": [("now", {})],
    "references": [("f", REFERRED)],
    "many": [(f"tool-{i}", ADD["function"]["parameters"]) for i in range(20)],
}


def make_tool(name: str, parameters: Any) -> dict[str, Any]:
    more = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **more}}


@pytest.mark.parametrize("shape", SHAPES)
def test_tools_of_all_shapes_are_called(client: openai.OpenAI, shape: str) -> None:
    tools = [make_tool(*one) for one in SHAPES[shape]]
    reply = ask(client, "Go.", tools=tools, tool_choice="required", max_tokens=300).choices[0]
    calls = read(reply.message.tool_calls)
    assert calls, "a call was required"
    for name, given in calls:
        jsonschema.validate(given, dict(SHAPES[shape])[name] or {"type": "object"})


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ({"tools": [LOOK_UP, LOOK_UP]}, "tools"),
    ({"tools": [make_tool("f", {"properties": [1]})], "stream": True}, "tools"),
    ({"tools": [LOOK_UP] * 129}, "tools"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [strict(make_tool("f", {"not": {}}))]}, "tools"),
    ({"tools": [make_tool("f", {"not": {}})], "tool_choice": "required"}, "tools"),
    ({"messages": [{"role": "tool", "content": 5}]}, "messages[0].content"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=str)
def test_wrong_tools_are_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    messages = [{"role": "user", "content": SUM}]
    asked = {"model": "llama", "messages": messages, "tools": TOOLS, **fields}
    error = refused(client.chat.completions.create, **asked)
    assert (error.status_code, error.param) == (400, param), error.message


def test_a_schema_that_is_nested_too_deeply_is_refused(live: Live) -> None:
    """It can be decoded, but what is done with it goes deeper."""
    schema = '{"properties": {"a": ' * 400 + "{}" + "}}" * 400
    tool = '{"type": "function", "function": {"name": "f", "strict": true, "parameters": %s}}'
    body = f'{{"messages": [{{"role": "user", "content": "a"}}], "tools": [{tool % schema}]}}'
    reply = http.post(f"{live.v1}/chat/completions", content=body)
    assert reply.status_code == 400, reply.text
    assert "nested too deeply" in reply.json()["error"]["message"]


def test_an_empty_list_of_tools_is_none(live: Live) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [], "max_tokens": 1}
    reply = http.post(f"{live.v1}/chat/completions", json=body).json()
    assert "tool_calls" not in reply["choices"][0]["message"]
