"""`/v1/responses` with the official client: the chat's answers in its items and events."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.runtime.server.live import Live, http
from tests.runtime.server.openai_calls import MESSAGES, PROMPT, refused
from tests.runtime.server.test_tools import ADD, RIVERS, SUM, TOOLS, make_tool

FLAT: list[Any] = [{"type": "function", **tool["function"], "strict": False} for tool in TOOLS]


def ask(client: openai.OpenAI, given: Any, **fields: Any) -> Any:
    return client.responses.create(**{"model": "llama", "input": given, "temperature": 0, **fields})


def test_a_text_is_answered_as_in_a_chat(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="llama", messages=MESSAGES)
    reply = ask(client, PROMPT)
    assert reply.output_text == chat.choices[0].message.content
    assert (reply.status, reply.object, reply.store) == ("completed", "response", False)
    assert reply.error is None and reply.incomplete_details is None
    assert chat.usage is not None and reply.usage.input_tokens == chat.usage.prompt_tokens
    assert reply.usage.total_tokens == chat.usage.total_tokens
    (message,) = reply.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")


def test_items_of_all_kinds_are_a_conversation(client: openai.OpenAI) -> None:
    parts = [{"type": "input_text", "text": PROMPT}]
    turns = [
        {"role": "user", "content": "Be brief."},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]},
        {"role": "user", "content": parts},
    ]  # fmt: skip
    messages: Any = [
        {"role": "system", "content": "Help."},
        {"role": "user", "content": "Be brief."},
        {"role": "assistant", "content": "Yes."},
        *MESSAGES,
    ]
    chat = client.chat.completions.create(model="llama", messages=messages, temperature=0)
    reply = ask(client, turns, instructions="Help.")
    assert reply.output_text == chat.choices[0].message.content
    assert chat.usage is not None and reply.usage.input_tokens == chat.usage.prompt_tokens


@pytest.mark.parametrize("summary", [[], [{"type": "summary_text", "text": "Hm."}]])
def test_reasoning_may_stand_alone(client: openai.OpenAI, summary: Any) -> None:
    """An answer that was cut off in it; or one that only its maker can read."""
    turns = [{"role": "user", "content": "a"}, {"type": "reasoning", "id": "r", "summary": summary}]
    for given in (turns, [*turns, {"role": "user", "content": PROMPT}]):
        assert ask(client, given, max_output_tokens=2).usage.output_tokens == 2


def test_calls_are_items_and_so_is_what_comes_of_them(client: openai.OpenAI) -> None:
    first = ask(client, SUM, tools=FLAT)
    (call,) = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == (
        *("function_call", "add"),
        {"a": 1203, "b": 2210},
    )
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "3413"}
    talk = [{"role": "user", "content": SUM}, *first.output, output]
    assert ask(client, talk, tools=FLAT).output_text == "The sum of 1203 and 2210 is 3413."
    both = ask(client, RIVERS, tools=FLAT)
    assert [item.name for item in both.output] == ["look_up", "look_up"]
    assert len(ask(client, RIVERS, tools=FLAT, parallel_tool_calls=False).output) == 1


ALLOWED = {
    "type": "allowed_tools",
    "mode": "required",
    "tools": [{"type": "function", "name": "add"}],
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}, ALLOWED])
def test_a_tool_is_called_that_must_be(client: openai.OpenAI, choice: Any) -> None:
    reply = ask(client, "Hello.", tools=FLAT, tool_choice=choice, max_output_tokens=300)
    assert reply.output and all(item.type == "function_call" for item in reply.output)
    if choice != "required":
        jsonschema.validate(json.loads(reply.output[0].arguments), ADD["function"]["parameters"])


@pytest.mark.parametrize("given", [PROMPT, RIVERS])
def test_events_tell_of_the_whole_answer(client: openai.OpenAI, given: str) -> None:
    whole = ask(client, given, tools=FLAT)
    asked: Any = {"model": "llama", "input": given, "tools": FLAT, "temperature": 0}
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:3] == [
        *("response.created", "response.in_progress", "response.output_item.added"),
    ]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))

    def plain(output: Any) -> list[Any]:
        drop = ("id", "call_id", "parsed_arguments")
        return [{k: v for k, v in item.to_dict().items() if k not in drop} for item in output]

    cut = plain(final.output)
    for item in cut:  # what the client has parsed beside
        for part in item.get("content", ()):
            part.pop("parsed", None)
    assert cut == plain(whole.output)
    deltas = [event.delta for event in events if event.type.endswith(".delta")]
    texts = [i.arguments if i.type == "function_call" else i.content[0].text for i in whole.output]
    assert "".join(deltas) == "".join(texts)
    assert kinds.count("response.output_item.done") == len(whole.output)
    assert final.usage == whole.usage or final.usage.input_tokens == whole.usage.input_tokens


class Answer(BaseModel):
    city: str
    sure: bool


def test_forms_are_asked_for_by_text(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(
        model="llama", input=PROMPT, text_format=Answer, max_output_tokens=200, temperature=0
    )
    assert isinstance(parsed.output_parsed, Answer)
    reply = ask(client, PROMPT, text={"format": {"type": "json_object"}}, max_output_tokens=200)
    assert isinstance(json.loads(reply.output_text), dict)


def test_an_answer_that_was_cut_off_is_incomplete(client: openai.OpenAI) -> None:
    reply = ask(client, PROMPT, max_output_tokens=3)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert reply.output[0].status == "incomplete" and reply.usage.output_tokens == 3
    stream = ask(client, PROMPT, max_output_tokens=3, stream=True)
    assert list(stream)[-1].type == "response.incomplete"


CHATS = (
    *(
        "messages[",
        "json_schema.schema",
        "response_format",
        ".function.",
        '"function": {',
        "`function`",
    ),
    *('"allowed_tools": {', "tool_call_id"),
)
"""Names of fields that chats alone have."""
CALL = {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "a", "output": "b"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"extra_body": {"stop": ["a"]}}, "stop"),
    ({"extra_body": {"max_tokens": 5}}, "max_tokens"),
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
    ({"input": [{"type": ["message"], "role": "user", "content": "a"}]}, "input[0].type"),
    ({"input": [{"role": "user"}]}, "input[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0]"),
    ({"input": [{"role": "wizard", "content": "a"}], "instructions": "b"}, "input[0].role"),
    *(({"input": [CALL | {name: 5}]}, "input[0]") for name in ("call_id", "name", "arguments")),
    *(({"input": [CALL, RESULT | {name: 5}]}, "input[1]") for name in ("call_id", "output")),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": None}]}]}, "input[0]"),
    ({"input": "Zorvia " * 3000}, "input"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools"),
    ({"tools": [FLAT[0] | {"parameters": {"properties": {"a": 5}}}]}, "tools"),
    ({"tools": [FLAT[0] | {"strict": "yes"}]}, "tools"),
    ({"tools": FLAT, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
    ({"tools": FLAT, "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tools": FLAT, "tool_choice": {"type": "function", "name": None}}, "tool_choice"),
    (
        {"tools": FLAT, "tool_choice": "required", "text": {"format": {"type": "json_object"}}},
        "text.format",
    ),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
    ({"temperature": 9}, "temperature"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: str(value)[:60])
def test_wrong_requests_are_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    error = refused(client.responses.create, **{"model": "llama", "input": "a", **fields})
    assert (error.status_code, error.param) == (400, param), error.message
    assert not any(name in error.message for name in CHATS), error.message


def test_nothing_is_kept(client: openai.OpenAI, live: Live) -> None:
    error = refused(client.responses.create, model="llama", input="a", previous_response_id="r")
    assert "keeps no answers" in error.message and error.code == "unsupported_parameter"
    assert http.get(f"{live.v1}/responses/r").status_code == 404
    assert refused(client.responses.create, model="gpt", input="a").status_code == 404


def test_a_failure_in_a_stream_is_raised(client: openai.OpenAI) -> None:
    asked: Any = {"model": "llama", "input": "a", "stream": True, "tools": FLAT}
    bad = [make_tool("f", {"not": {}})["function"] | {"type": "function", "strict": True}]
    assert refused(client.responses.create, **{**asked, "tools": bad}).status_code == 400
