"""What a server refuses, by status, field and header; and what it tells of itself."""

from __future__ import annotations

import gc
import gzip
import re
import weakref
from typing import Any

import openai
import pytest

import dovetail
from dovetail.errors import CapacityError, LengthError
from dovetail.runtime.server.errors import ApiError, busy
from dovetail.runtime.server.workflow_endpoint import blame_inputs
from tests.repository import ROOT
from tests.runtime.server.live import Live, http
from tests.runtime.server.openai_calls import MESSAGES, PROMPT, refused

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"n": 0}, "n"),
    ({"extra_body": {"bad_words": ["a", " "]}}, "bad_words[1]"),
    ({"n": -3}, "n"),
    ({"n": 10**6}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"seed": 1 << 80}, "seed"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logit_bias": {"768": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty"),
    ({"extra_body": {"repetition_penalty": 1e-300}}, "repetition_penalty"),
    ({"extra_body": {"allowed_token_ids": []}}, "allowed_token_ids"),
    ({"extra_body": {"stop_token_ids": [-1]}}, "stop_token_ids[0]"),
    ({"extra_body": {"skip_special_tokens": "no"}}, "skip_special_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"extra_body": {"min_p": 7}}, "min_p"),
    ({"max_tokens": 3, "extra_body": {"min_tokens": 4}}, "min_tokens"),
    ({"extra_body": {"priority": 1000}}, "priority"),
    ({"extra_body": {"stream": "yes"}}, "stream"),
    ({"extra_body": {"prompt_logprobs": 101}}, "prompt_logprobs"),
    ({"extra_body": {"prompt_logprobs": 1}, "stream": True}, "prompt_logprobs"),
]
WRONG_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user"}]}, "messages[0]"),
    ({"messages": [*MESSAGES, {"role": "assistant", "content": None}]}, "messages[1]"),
    (
        {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [{"id": "a"}]}]},
        "messages[1]",
    ),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ({"extra_body": {"continue_final_message": True}}, "continue_final_message"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"audio": {"format": "wav", "voice": "alloy"}}, "audio"),
    ({"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
    ({"extra_body": {"return_token_ids": True}}, "return_token_ids"),
    ({"extra_body": {"echo": True}}, "echo"),
    ({"extra_body": {"best_of": 3}}, "best_of"),
]
WRONG_TEXT: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [5, 768]}, "prompt"),
    ({"logprobs": 101}, "logprobs"),
    ({"logprobs": 1, "echo": True, "stream": True}, "logprobs"),
    ({"best_of": 3}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"extra_body": {"max_completion_tokens": 5}}, "max_completion_tokens"),
    ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG + WRONG_CHAT, ids=str)
def test_wrong_chats_are_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    call = client.chat.completions.create
    error = refused(call, **{"model": "llama", "messages": MESSAGES, **fields})
    assert (error.status_code, error.param) == (400, param), error.message
    assert error.type == "invalid_request_error"


@pytest.mark.parametrize(("fields", "param"), WRONG + WRONG_TEXT, ids=str)
def test_wrong_completions_are_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    call = client.completions.create
    error = refused(call, **{"model": "llama", "prompt": PROMPT, **fields})
    assert (error.status_code, error.param) == (400, param), error.message


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {}, "prompt"),
        ("chat/completions", {}, "messages"),
        ("messages", {"messages": MESSAGES}, "max_tokens"),
        ("embeddings", {"model": "encoder"}, "input"),
        ("embeddings", {"input": [[5], []]}, "input"),
        ("embeddings", {"input": [5, 1 << 20]}, "input"),
        ("embeddings", {"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ("embeddings", {"input": "a", "normalize": False}, "normalize"),
        ("embeddings", {"input": "a", "add_special_tokens": False}, "add_special_tokens"),
    ],
)
def test_the_field_that_is_missing_or_wrong_is_named(
    live: Live, path: str, body: dict[str, Any], param: str
) -> None:
    reply = http.post(f"{live.v1}/{path}", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param), error
    assert "Object" not in error["message"]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (gzip.compress(b'{"prompt": "a"}', mtime=0), 415, "'gzip' are not read; send"),
        ('{"prompt": "é"}'.encode("latin-1"), 400, "the body is not valid JSON: it is not UTF-8"),
    ],
)
def test_bytes_that_are_no_text_are_refused_in_words(
    live: Live, body: bytes, status: int, said: str
) -> None:
    headers = {"content-encoding": "gzip" if status == 415 else "Identity"}
    reply = http.post(f"{live.v1}/completions", content=body, headers=headers)
    assert reply.status_code == status and said in reply.json()["error"]["message"]


def test_ids_that_are_none_of_the_models_have_no_text(live: Live) -> None:
    reply = http.post(f"{live.url}/detokenize", json={"tokens": [5, 768]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tokens")


def test_unknown_models_and_paths_are_not_found(client: openai.OpenAI, live: Live) -> None:
    error = refused(client.completions.create, model="gpt", prompt="a")
    assert (error.status_code, error.code) == (404, "model_not_found")
    refused(client.models.retrieve, model="gpt")
    reply = http.get(f"{live.url}/v1/nothing")
    assert reply.status_code == 404 and "error" in reply.json()
    reply = http.get(f"{live.v1}/completions")
    assert reply.status_code == 405 and reply.headers["allow"] == "POST"


def test_models_are_asked_for_what_they_can(client: openai.OpenAI) -> None:
    assert refused(client.completions.create, model="encoder", prompt="a").status_code == 400
    assert refused(client.embeddings.create, model="llama", input="a").status_code == 400


@pytest.mark.parametrize("words", [1100, 100_000])
def test_too_long_a_prompt_is_never_to_be_sent_again(client: openai.OpenAI, words: int) -> None:
    messages = [{"role": "user", "content": "Zorvia " * words}]
    error = refused(client.chat.completions.create, model="llama", messages=messages)
    assert (error.status_code, error.code) == (400, "context_length_exceeded")
    assert error.response.headers["x-should-retry"] == "false"


TEXT = "Zorvia lies on the river Ossa. " * 40_000
LONG: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "completions": ("/v1/completions", {"prompt": TEXT}, "prompt", "1024 tokens"),
    "one of several": ("/v1/completions", {"prompt": ["a", TEXT]}, "prompt", "1024 tokens"),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": TEXT}]},
        "messages",
        "1024 tokens",
    ),
    "tokenize": ("/tokenize", {"prompt": TEXT}, "prompt", "1024 tokens"),
    "embeddings": ("/v1/embeddings", {"input": ["a", TEXT]}, "input[1]", "1048576"),
    "a query": (
        "/v1/rerank",
        {"model": "encoder", "query": TEXT, "documents": ["a"]},
        "query",
        "1048576",
    ),
    "a document": (
        "/v1/rerank",
        {"model": "encoder", "query": "a", "documents": [TEXT]},
        "documents[0]",
        "1048576",
    ),
}


@pytest.mark.parametrize("name", LONG)
def test_long_texts_are_refused_by_field_and_limit(live: Live, name: str) -> None:
    path, body, param, limit = LONG[name]
    reply = http.post(live.url + path, json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param) and limit in error["message"]
    assert reply.headers.get("x-should-retry") != "true"


@pytest.mark.parametrize("count", [1, 20, 1000])
def test_a_prompt_is_cut_before_anything_is_too_long(
    client: openai.OpenAI, live: Live, count: int
) -> None:
    """By its last tokens, whether it is read whole for them or not."""
    words = "Zorvia lies on the river Ossa. " * 70
    last = http.post(f"{live.url}/tokenize", json={"prompt": words}).json()
    options: dict[str, Any] = {"max_tokens": 1, "extra_body": {"truncate_prompt_tokens": count}}
    create = client.completions.create
    cut = create(model="llama", prompt=words * 200, echo=True, **options)
    assert cut.usage is not None and cut.usage.prompt_tokens == count
    given = last["tokens"][-count:] if count <= last["count"] else None
    if given is not None:
        same = create(model="llama", prompt=given, echo=True, max_tokens=1)
        assert same.choices[0].text == cut.choices[0].text
    ids = create(model="llama", prompt=[5] * 5000, **options)
    assert ids.usage is not None and ids.usage.prompt_tokens == count
    messages: Any = [{"role": "user", "content": words * 200}]
    chat = client.chat.completions.create(model="llama", messages=messages, **options)
    assert chat.usage is not None and chat.usage.prompt_tokens == count


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": MESSAGES, "functions": [], "suffix": "", "echo": False}),
        ("chat/completions", {"messages": MESSAGES, "store": True, "service_tier": "auto"}),
        ("completions", {"prompt": "a", "tools": None, "length_penalty": 1.0}),
        ("responses", {"input": "a", "include": ["reasoning.encrypted_content"], "n": 1}),
        ("responses", {"input": "a", "truncate_prompt_tokens": -1, "add_special_tokens": False}),
        ("embeddings", {"input": "a", "truncate_prompt_tokens": -1, "user": "a"}),
    ],
)
def test_fields_that_ask_for_nothing_are_no_fault(
    live: Live, path: str, body: dict[str, Any]
) -> None:
    reply = http.post(f"{live.v1}/{path}", json=body)
    assert reply.status_code == 200, reply.text


def test_ids_of_requests_are_kept(live: Live) -> None:
    reply = http.get(f"{live.v1}/models", headers={"x-request-id": "mine-5"})
    assert reply.headers["x-request-id"] == "mine-5"
    bad = http.get(f"{live.v1}/models", headers={"x-request-id": "a b"})
    assert bad.headers["x-request-id"].startswith("req-")


def test_metrics_have_the_known_names(client: openai.OpenAI, live: Live) -> None:
    client.completions.create(model="llama", prompt=PROMPT, max_tokens=2)
    text = http.get(f"{live.url}/metrics").text
    for name in (
        'generation_tokens_total{engine="0",model_name="llama"}',
        'time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="llama"}',
        'request_success_total{engine="0",finished_reason="length",model_name="llama"}',
        'prefix_cache_queries_total{engine="0",model_name="llama"}',
        'prefix_cache_hits_total{engine="0",model_name="llama"}',
        'num_requests_running{engine="0",model_name="llama"} 0.0',
        'kv_cache_usage_perc{engine="0",model_name="llama"} 0.0',
        'iteration_tokens_total_bucket{engine="0",le="16384.0",model_name="llama"}',
    ):
        assert f"dovetail:{name}" in text, name
    listed = (ROOT / "docs/server.md").read_text().partition("## Metrics")[2]
    for name in re.findall(r"# TYPE dovetail:(\w+)", text):
        assert f"`{name.removesuffix('_total')}" in listed, f"{name} is in no document"


def test_health_and_version(live: Live) -> None:
    for path in ("/health", "/health/live", "/health/ready"):
        assert http.get(live.url + path).json() == {"status": "ok"}
    assert http.get(f"{live.url}/version").json() == {"version": dovetail.__version__}


def test_nobody_is_told_to_come_back_later_than_clients_heed() -> None:
    headers = busy(CapacityError("full", retry_after=2000.0)).headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("60", "60000")


def test_a_refusal_of_inputs_does_not_hold_them() -> None:
    """A circle of error and frame would keep bodies of megabytes until Python looks for circles."""

    class Inputs:
        pass

    def refuse() -> weakref.ref[Inputs]:
        inputs = Inputs()
        try:
            with blame_inputs():
                _raise_beside(inputs)
        except ApiError as error:
            error.with_traceback(None)
        return weakref.ref(inputs)

    gc.disable()
    try:
        assert refuse()() is None
    finally:
        gc.enable()


def _raise_beside(_inputs: object) -> None:
    raise LengthError("too long", "inputs.a")
