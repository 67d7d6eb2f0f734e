"""`/v1/messages` with the official client of Anthropic."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from dovetail.runtime.server.messages import _loads
from tests.extras import need
from tests.runtime.server.live import Live, http
from tests.runtime.server.openai_calls import MESSAGES, PROMPT
from tests.runtime.server.test_tools import RIVERS, SUM, TOOLS

need("anthropic")

BLOCKS: list[Any] = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"]["description"],
        "input_schema": tool["function"]["parameters"],
    }
    for tool in TOOLS
]
GREEDY = {"temperature": 0}
"""The newest client has no argument for it."""


@pytest.fixture(scope="module")
def claude(live: Live) -> Iterator[Any]:
    import anthropic

    with anthropic.Anthropic(
        base_url=live.url, api_key="unused", max_retries=0, timeout=200
    ) as found:
        yield found


def ask(claude: Any, content: Any, **fields: Any) -> Any:
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    asked = {"model": "llama", "messages": messages, "max_tokens": 300, "extra_body": GREEDY}
    return claude.messages.create(**{**asked, **fields})


def test_a_message_is_answered_as_in_a_chat(claude: Any, client: openai.OpenAI) -> None:
    talk: Any = [{"role": "system", "content": "Help."}, *MESSAGES]
    chat = client.chat.completions.create(model="llama", messages=talk, temperature=0)
    reply = ask(claude, PROMPT, system="Help.")
    assert reply.content[0].text == chat.choices[0].message.content
    assert (reply.type, reply.role, reply.stop_reason) == ("message", "assistant", "end_turn")
    read = reply.usage.input_tokens + reply.usage.cache_read_input_tokens
    assert chat.usage is not None and read == chat.usage.prompt_tokens
    assert reply.usage.output_tokens == chat.usage.completion_tokens
    parts = [{"type": "text", "text": "Help."}]
    again = ask(
        claude, [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}], system=parts
    )
    assert again.content == reply.content


def test_tools_are_used_and_their_results_read(claude: Any) -> None:
    reply = ask(claude, SUM, tools=BLOCKS)
    (use,) = reply.content
    assert (use.type, use.name, use.input) == ("tool_use", "add", {"a": 1203, "b": 2210})
    assert reply.stop_reason == "tool_use"
    for content in ("3413", [{"type": "text", "text": "3413"}]):
        result = {"type": "tool_result", "tool_use_id": use.id, "content": content}
        talk = [
            {"role": "user", "content": SUM},
            {"role": "assistant", "content": reply.content},
            {"role": "user", "content": [result]},
        ]
        found = ask(claude, talk, tools=BLOCKS)
        assert found.content[0].text == "The sum of 1203 and 2210 is 3413."
    both = ask(claude, RIVERS, tools=BLOCKS)
    assert [block.name for block in both.content] == ["look_up", "look_up"]
    alone = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(ask(claude, RIVERS, tools=BLOCKS, tool_choice=alone).content) == 1


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_a_tool_is_used_that_must_be(claude: Any, choice: Any) -> None:
    reply = ask(claude, "Hello.", tools=BLOCKS, tool_choice=choice)
    assert reply.content and all(block.type == "tool_use" for block in reply.content)
    assert reply.stop_reason == "tool_use"
    assert choice["type"] == "any" or reply.content[0].input.keys() == {"a", "b"}


def test_none_is_used_that_may_not_be(claude: Any) -> None:
    reply = ask(claude, SUM, tools=BLOCKS, tool_choice={"type": "none"}, max_tokens=20)
    assert reply.content[0].type == "text"


@pytest.mark.parametrize("content", [PROMPT, SUM, RIVERS])
def test_events_tell_of_the_whole_message(claude: Any, content: str) -> None:
    whole = ask(claude, content, tools=BLOCKS)
    asked = {"model": "llama", "messages": [{"role": "user", "content": content}]}
    with claude.messages.stream(**asked, tools=BLOCKS, max_tokens=300, extra_body=GREEDY) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")
    assert kinds.count("content_block_delta") >= kinds.count("content_block_start")

    def plain(message: Any) -> list[Any]:
        blocks = [block.to_dict() for block in message.content]
        drop = ("id", "parsed_output")
        return [{k: v for k, v in block.items() if k not in drop} for block in blocks]

    assert plain(final) == plain(whole)
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_ends_have_their_reasons(claude: Any) -> None:
    cut = ask(claude, PROMPT, max_tokens=2)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
    stopped = ask(claude, PROMPT, stop_sequences=[" capital"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " capital")
    for stream in (False, True):
        fields: Any = {"stop_sequences": ["nowhere", "capital", "Zorvia"], "stream": stream}
        reply = ask(claude, PROMPT, **fields)
        ends = [event.delta for event in reply if event.type == "message_delta"] if stream else []
        end = ends[0] if stream else reply
        assert (end.stop_reason, end.stop_sequence) == ("stop_sequence", "capital")
    assert ask(claude, PROMPT, stop_sequences=["nowhere"]).stop_reason == "end_turn"
    started = ask(claude, SUM, tools=BLOCKS, max_tokens=36)
    assert (started.stop_reason, started.content[0].input) == ("max_tokens", {})


def test_an_answer_that_was_begun_goes_on(claude: Any) -> None:
    whole = ask(claude, PROMPT).content[0].text
    begun = whole[: whole.index("capital") + len("capital")]
    talk = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": begun}]
    assert begun + ask(claude, talk).content[0].text == whole


@pytest.mark.parametrize("content", ["", [], [{"type": "redacted_thinking", "data": "x"}]])
def test_an_answer_that_says_nothing_is_not_begun(claude: Any, content: Any) -> None:
    last = {"role": "assistant", "content": content}
    talk = [{"role": "user", "content": PROMPT}, last]
    assert ask(claude, talk).content == ask(claude, PROMPT).content
    assert ask(claude, [*talk, talk[0]], max_tokens=1).content


def test_an_empty_text_beside_a_result_is_nothing(claude: Any) -> None:
    use = {"type": "tool_use", "id": "a", "name": "add", "input": {"a": 1203, "b": 2210}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "3413"}
    talk = [{"role": "user", "content": SUM}, {"role": "assistant", "content": [use]}]
    both = [result, {"type": "text", "text": ""}]
    found = ask(claude, [*talk, {"role": "user", "content": both}], tools=BLOCKS)
    assert found.content[0].text == "The sum of 1203 and 2210 is 3413."


@pytest.mark.parametrize("part", [{"text": "a"}, {"type": "text", "text": 5}, 5], ids=str)
def test_results_that_are_no_blocks_are_refused(live: Live, part: Any) -> None:
    content = [{"type": "tool_result", "tool_use_id": "a", "content": [part]}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    reply = http.post(f"{live.v1}/messages", json=body)
    assert reply.status_code == 400, reply.text


def test_forms_are_asked_for_by_the_output(claude: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    config = {"format": {"type": "json_schema", "schema": schema}}
    reply = ask(claude, PROMPT, output_config=config)
    assert json.loads(reply.content[0].text).keys() == {"a"}


def test_tokens_are_counted(claude: Any) -> None:
    talk = [{"role": "user", "content": PROMPT}]
    count = claude.messages.count_tokens(model="llama", messages=talk, tools=BLOCKS)
    usage = ask(claude, PROMPT, tools=BLOCKS).usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://example.com"}}
USE = {"type": "tool_use", "id": "a", "input": {}}
CHATS = ("json_schema.schema", "response_format", ".function.")
"""Names of fields that chats alone have."""
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0].type"),
    ({"system": "b", "messages": [{"role": "assistant", "content": [USE]}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": "Zorvia " * 3000}]}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tools": BLOCKS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
    ({"tools": BLOCKS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [{"name": "f", "input_schema": {"properties": {"a": 5}}}]}, "tools"),
    ({"tools": BLOCKS + BLOCKS}, "tools"),
    ({"system": [IMAGE]}, "system[0].type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: str(value)[:60])
def test_wrong_requests_are_refused_in_its_words(
    claude: Any, fields: dict[str, Any], param: str
) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(claude, "a", **fields)
    body = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"] == param
    assert not any(name in body["error"]["message"] for name in CHATS), body["error"]["message"]


def test_unknown_models_are_not_found(claude: Any) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as caught:
        ask(claude, "a", model="claude")
    assert caught.value.body["error"]["type"] == "not_found_error"


def test_bodies_without_a_limit_are_refused(live: Live) -> None:
    body = {"model": "llama", "messages": [{"role": "user", "content": "a"}]}
    reply = http.post(f"{live.v1}/messages", json=body)
    assert reply.status_code == 400 and "max_tokens" in reply.json()["error"]["message"]


@pytest.mark.parametrize("cut", ['{"a": ', '{"a": ' + "[" * 5000, "5"])
def test_arguments_that_cannot_be_read_are_an_empty_object(cut: str) -> None:
    assert _loads(cut) == {}
