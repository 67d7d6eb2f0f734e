"""Chats with the official client: field by field, and equal to offline runs."""

from __future__ import annotations

from typing import Any

import msgspec
import openai
import pytest

from dovetail.runtime.app import App
from dovetail.runtime.server.schema import (
    ChatRequest,
    CompletionRequest,
    MessagesRequest,
    ResponsesRequest,
)
from tests.runtime.server.live import Live, http
from tests.runtime.server.openai_calls import MESSAGES, PROMPT, SAMPLED, answer, chat_ids


def test_chat_equals_the_offline_run(client: openai.OpenAI, offline: App) -> None:
    reply = client.chat.completions.create(model="llama", messages=MESSAGES)
    ids = chat_ids(offline)
    assert reply.choices[0].message.content == answer(offline, ids, max_tokens=500)
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.object == "chat.completion" and reply.id.startswith("chatcmpl-")
    assert reply.model == "llama" and reply.system_fingerprint
    assert reply.usage is not None and reply.usage.prompt_tokens == len(ids)
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.choices[0].logprobs is None


def test_chat_streams_role_content_and_end(client: openai.OpenAI, offline: App) -> None:
    chunks = list(client.chat.completions.create(model="llama", messages=MESSAGES, stream=True))
    assert {c.id for c in chunks} == {chunks[0].id} and {c.created for c in chunks} == {
        chunks[0].created
    }
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    deltas = [c.choices[0].delta for c in chunks]
    assert deltas[0].role == "assistant" and all(d.role is None for d in deltas[1:])
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    text = "".join(d.content or "" for d in deltas)
    assert text == answer(offline, chat_ids(offline), max_tokens=500)
    assert all(c.usage is None for c in chunks)


def test_usage_ends_a_stream_where_it_is_asked_for(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="llama", messages=MESSAGES, max_tokens=5)
    chunks = list(
        client.chat.completions.create(
            model="llama",
            messages=MESSAGES,
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 5
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    details = chunks[-1].usage.prompt_tokens_details
    assert details is not None, "the prompt was computed a moment ago"
    assert details.cached_tokens == (whole.usage.prompt_tokens - 1) // 16 * 16 > 0
    assert all(c.usage is None for c in chunks[:-1])


def test_usage_is_left_out_of_a_stream_otherwise(live: Live) -> None:
    body = {"model": "llama", "messages": MESSAGES, "max_tokens": 2, "stream": True}
    text = http.post(f"{live.v1}/chat/completions", json=body).text
    assert "usage" not in text and text.endswith("data: [DONE]\n\n")
    body["stream_options"] = {"include_usage": True}
    text = http.post(f"{live.v1}/chat/completions", json=body).text
    assert '"usage":null' in text and '"choices":[],"usage":{' in text


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_either_name_bounds_the_answer(client: openai.OpenAI, name: str) -> None:
    fields: Any = {name: 3}
    reply = client.chat.completions.create(model="llama", messages=MESSAGES, **fields)
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None and reply.usage.completion_tokens == 3


def test_several_choices_differ_and_keep_their_seed(client: openai.OpenAI, offline: App) -> None:
    reply = client.chat.completions.create(model="llama", messages=MESSAGES, n=3, **SAMPLED)
    texts = [choice.message.content for choice in reply.choices]
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert texts == [c.text for c in offline.generate([chat_ids(offline)], n=3, **SAMPLED)]
    again = client.chat.completions.create(model="llama", messages=MESSAGES, n=3, **SAMPLED)
    assert texts == [choice.message.content for choice in again.choices]


def test_streamed_choices_are_told_apart(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="llama", messages=MESSAGES, n=3, **SAMPLED)
    texts = ["", "", ""]
    ends = []
    stream = client.chat.completions.create(
        model="llama", messages=MESSAGES, n=3, stream=True, **SAMPLED
    )
    for chunk in stream:
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        ends += [choice.index] if choice.finish_reason else []
    assert texts == [choice.message.content for choice in whole.choices]
    assert sorted(ends) == [0, 1, 2]


@pytest.mark.parametrize("stop", [" capital", ["nowhere", "ital of"]])
def test_a_stop_text_ends_the_answer_before_it(
    client: openai.OpenAI, offline: App, stop: Any
) -> None:
    reply = client.chat.completions.create(model="llama", messages=MESSAGES, stop=stop)
    whole = answer(offline, chat_ids(offline), max_tokens=500)
    last = stop if isinstance(stop, str) else stop[-1]
    assert reply.choices[0].message.content == whole[: whole.index(last)]
    assert reply.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model="llama", messages=MESSAGES, stop=stop, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == reply.choices[0].message.content


def test_chat_logprobs_spell_the_answer(client: openai.OpenAI, offline: App) -> None:
    reply = client.chat.completions.create(
        model="llama", messages=MESSAGES, logprobs=True, top_logprobs=3
    )
    found = reply.choices[0].logprobs
    assert found is not None and found.content is not None
    assert b"".join(bytes(t.bytes or []) for t in found.content).decode() == (
        reply.choices[0].message.content
    )
    (reference,) = offline.generate([chat_ids(offline)], max_tokens=500, logprobs=3)
    assert reference.logprobs is not None
    for ours, theirs in zip(found.content, reference.logprobs, strict=False):
        assert ours.logprob == theirs.logprob
        assert [t.logprob for t in ours.top_logprobs] == [lp for _, lp in theirs.top]
        best = ours.top_logprobs[0]
        assert (best.token, best.logprob) == (ours.token, ours.logprob)  # greedy


def test_streamed_logprobs_are_the_same(client: openai.OpenAI) -> None:
    fields: Any = {"model": "llama", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**fields).choices[0].logprobs
    found = []
    for chunk in client.chat.completions.create(stream=True, **fields):
        logprobs = chunk.choices[0].logprobs
        found += (logprobs.content or []) if logprobs else []
    assert whole is not None and found == whole.content


def test_parts_of_a_message_are_its_text(client: openai.OpenAI) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    one = client.chat.completions.create(model="llama", messages=MESSAGES)
    two = client.chat.completions.create(model="llama", messages=parts)
    assert one.choices[0].message.content == two.choices[0].message.content


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_other_roles_are_taken(client: openai.OpenAI, role: str) -> None:
    messages: Any = [{"role": role, "content": "Be brief."}, *MESSAGES]
    reply = client.chat.completions.create(model="llama", messages=messages, max_tokens=2)
    assert reply.choices[0].message.content


def test_the_assistant_answers_a_conversation(client: openai.OpenAI, offline: App) -> None:
    turns: Any = [*MESSAGES, {"role": "assistant", "content": "Melkar."}, *MESSAGES]
    reply = client.chat.completions.create(model="llama", messages=turns, max_tokens=8)
    assert offline.tokenizer is not None
    text = f"<|user|>{PROMPT}<|end|><|assistant|>Melkar.<|end|><|user|>{PROMPT}<|end|><|assistant|>"
    ids = offline.tokenizer.encode(text, special=False)
    assert reply.choices[0].message.content == answer(offline, ids, max_tokens=8)


NEEDED: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "chat/completions": (ChatRequest, {"messages": MESSAGES}),
    "completions": (CompletionRequest, {"prompt": PROMPT}),
    "responses": (ResponsesRequest, {"input": MESSAGES}),
    "messages": (MessagesRequest, {"messages": MESSAGES, "max_tokens": 20}),
}


@pytest.mark.parametrize("path", NEEDED)
def test_null_stands_for_what_is_absent(live: Live, path: str) -> None:
    kind, needed = NEEDED[path]
    nulls: dict[str, Any] = dict.fromkeys(kind.__struct_encode_fields__)
    reply = http.post(f"{live.v1}/{path}", json=nulls | needed)
    assert reply.status_code == 200, reply.text


def test_null_stands_for_what_is_absent_within_fields(live: Live) -> None:
    function = {"name": "add", "description": None, "parameters": None, "strict": None}
    call = {"id": "c", "type": None, "function": {"name": "add", "arguments": "{}"}}
    body = {
        "messages": [
            {**MESSAGES[0], "name": None, "tool_calls": None, "tool_call_id": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "1", "name": None},
        ],
        "tools": [{"type": "function", "function": function}],
        "stream": True,
        "stream_options": {"include_usage": None},
        "response_format": {"type": "text", "json_schema": None},
        "max_tokens": 5,
    }
    reply = http.post(f"{live.v1}/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    items = [{"type": None, **MESSAGES[0]}, {"type": "reasoning", "summary": None}]
    assert http.post(f"{live.v1}/responses", json={"input": items}).status_code == 200
