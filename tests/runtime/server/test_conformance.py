"""The official `openai` client against a live server: field by field, and equal to offline runs."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import openai
import pytest

import dovetail
from dovetail.runtime.app import App
from tests.runtime.server.live import Live, http

PROMPT = (
    "Documents:\n- Melkar is the capital of Zorvia.\n"
    "Question: What is the capital of Zorvia?\nAnswer:"
)
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 12}


def chat_ids(offline: App) -> list[int]:
    assert offline.tokenizer is not None
    return offline.tokenizer.encode(f"<|user|>{PROMPT}<|end|><|assistant|>", special=False)


def answer(offline: App, prompt: str | list[int], **options: Any) -> str:
    (found,) = offline.generate([prompt], **options)
    assert found.text is not None
    return found.text


def refused(call: Any, **fields: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        call(**fields)
    body = caught.value.body
    assert isinstance(body, dict) and set(body) == {"message", "type", "param", "code"}
    return caught.value


# ---- chat ----


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
        assert ours.top_logprobs[0].token == ours.token  # greedy


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


# ---- completions ----


def test_completion_equals_the_offline_run(client: openai.OpenAI, offline: App) -> None:
    reply = client.completions.create(model="llama", prompt=PROMPT, max_tokens=12)
    assert reply.choices[0].text == answer(offline, PROMPT, max_tokens=12)
    assert reply.object == "text_completion" and reply.id.startswith("cmpl-")
    assert reply.choices[0].finish_reason in ("stop", "length")


def test_a_completion_has_16_tokens_at_most(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="llama", prompt=PROMPT, extra_body={"ignore_eos": True})
    assert reply.usage is not None and reply.usage.completion_tokens == 16
    assert reply.choices[0].finish_reason == "length"


@pytest.mark.parametrize("kind", ["texts", "ids", "lists"])
def test_prompts_come_in_three_more_forms(client: openai.OpenAI, offline: App, kind: str) -> None:
    assert offline.tokenizer is not None
    texts = [PROMPT, "Question: Where is Melkar?\nPassage:"]
    ids = [offline.tokenizer.encode(text) for text in texts]
    prompt: Any = {"texts": texts, "ids": ids[0], "lists": ids}[kind]
    reply = client.completions.create(model="llama", prompt=prompt, max_tokens=6)
    wanted = [answer(offline, text, max_tokens=6) for text in texts]
    assert [choice.text for choice in reply.choices] == wanted[: len(reply.choices)]
    assert len(reply.choices) == (1 if kind == "ids" else 2)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == sum(map(len, ids[: len(reply.choices)]))


def test_choices_of_several_prompts_are_numbered_by_prompt(
    client: openai.OpenAI, offline: App
) -> None:
    prompts = [PROMPT, "Question:"]
    reply = client.completions.create(model="llama", prompt=prompts, n=2, **SAMPLED)
    found = offline.generate(prompts, n=2, **SAMPLED)
    assert [c.index for c in reply.choices] == [0, 1, 2, 3]
    assert [c.text for c in reply.choices] == [c.text for c in found]


def test_echo_puts_the_prompt_first(client: openai.OpenAI, offline: App) -> None:
    reply = client.completions.create(model="llama", prompt=PROMPT, max_tokens=4, echo=True)
    assert reply.choices[0].text == PROMPT + answer(offline, PROMPT, max_tokens=4)
    stream = client.completions.create(
        model="llama", prompt=PROMPT, max_tokens=4, echo=True, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == reply.choices[0].text


def test_echo_alone_generates_nothing(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="llama", prompt=PROMPT, max_tokens=0, echo=True)
    assert reply.choices[0].text == PROMPT and reply.choices[0].finish_reason == "length"
    assert reply.usage is not None and reply.usage.completion_tokens == 0


def test_completion_streams(client: openai.OpenAI, offline: App) -> None:
    chunks = list(
        client.completions.create(
            model="llama",
            prompt=PROMPT,
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].text for c in chunks[:-1])
    assert text == answer(offline, PROMPT, max_tokens=9)
    assert chunks[-1].choices == [] and chunks[-1].usage is not None


def test_completion_logprobs(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="llama", prompt=PROMPT, max_tokens=6, logprobs=2)
    found = reply.choices[0].logprobs
    assert found is not None and found.tokens is not None and found.text_offset is not None
    assert "".join(found.tokens) == reply.choices[0].text
    assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(len(found.tokens))]
    assert found.top_logprobs is not None and found.token_logprobs is not None
    assert all(len(top) == 2 for top in found.top_logprobs)
    best = [max(top.values()) for top in found.top_logprobs]
    np.testing.assert_allclose(found.token_logprobs, best, atol=1e-4)


@pytest.mark.parametrize(
    "extra", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}], ids=["top_k", "min_p", "top_p"]
)
def test_narrow_sampling_is_greedy(
    client: openai.OpenAI, offline: App, extra: dict[str, Any]
) -> None:
    reply = client.completions.create(
        model="llama", prompt=PROMPT, temperature=1.5, max_tokens=8, extra_body=extra
    )
    assert reply.choices[0].text == answer(offline, PROMPT, max_tokens=8)


RULES: list[dict[str, Any]] = [
    {"presence_penalty": 2.0, "ignore_eos": True},
    {"frequency_penalty": 2.0, "ignore_eos": True},
    {"repetition_penalty": 3.0},
    {"logit_bias": {"535": -100}},
    {"min_tokens": 20},
    {"stop_token_ids": [265]},
    {"stop_token_ids": [265], "include_stop_str_in_output": True},
    {"bad_words": ["is", "of"]},
    {"allowed_token_ids": [*range(32, 127)], "temperature": 1.0, "seed": 3},
]


@pytest.mark.parametrize("fields", RULES, ids="-".join)
def test_rules_for_logits_are_the_offline_ones(
    client: openai.OpenAI, offline: App, fields: dict[str, Any]
) -> None:
    """`test_logit_rules` holds those to a reference."""
    asked = client.completions.create(
        model="llama", prompt=PROMPT, max_tokens=24, extra_body=fields, logprobs=1
    )
    (found,) = offline.generate([PROMPT], max_tokens=24, **fields, logprobs=1)
    plain = answer(offline, PROMPT, max_tokens=24, ignore_eos="ignore_eos" in fields)
    assert asked.choices[0].text == found.text != plain
    assert asked.choices[0].finish_reason == found.finish_reason
    shown, noted = asked.choices[0].logprobs, found.logprobs
    assert shown is not None and shown.token_logprobs is not None and noted is not None
    ends = offline.engine.spec.eos_token_ids  # no text, and not shown
    assert shown.token_logprobs == [one.logprob for one in noted if one.token_id not in ends]
    chat = {"max_tokens": 24, "model": "llama", "messages": MESSAGES, "extra_body": fields}
    reply = client.chat.completions.create(**chat)
    wanted = answer(offline, chat_ids(offline), max_tokens=24, **fields)
    assert reply.choices[0].message.content == wanted


def test_one_token_wins_by_its_bias(client: openai.OpenAI, offline: App) -> None:
    assert offline.tokenizer is not None
    (token,) = offline.tokenizer.encode("z", special=False)
    reply = client.completions.create(
        model="llama", prompt=PROMPT, max_tokens=5, logit_bias={str(token): 100}
    )
    assert reply.choices[0].text == "zzzzz"


def test_a_prompt_is_cut_to_its_last_tokens(client: openai.OpenAI, offline: App) -> None:
    assert offline.tokenizer is not None
    ids = offline.tokenizer.encode(PROMPT)
    reply = client.completions.create(
        model="llama", prompt=PROMPT, max_tokens=6, extra_body={"truncate_prompt_tokens": 9}
    )
    assert reply.choices[0].text == answer(offline, ids[-9:], max_tokens=6)
    assert reply.usage is not None and reply.usage.prompt_tokens == 9


def test_the_models_own_defaults_stand(client: openai.OpenAI, offline: App) -> None:
    """generation_config.json says `do_sample: false`: no temperature means 0, not OpenAI's 1."""
    reply = client.completions.create(model="llama", prompt="Question:", max_tokens=12)
    assert reply.choices[0].text == answer(offline, "Question:", max_tokens=12)


# ---- embeddings, rerank, models, tokens ----


def test_embeddings_in_both_forms(client: openai.OpenAI, artifacts: dict[str, Any]) -> None:
    texts = ["Melkar is the capital of Zorvia.", "Who?"]
    with dovetail.load(artifacts["encoder"]) as app:
        rows = app.embed(texts)
    default = client.embeddings.create(model="encoder", input=texts)  # asks for base64
    floats = client.embeddings.create(model="encoder", input=texts, encoding_format="float")
    for reply in (default, floats):
        np.testing.assert_allclose([d.embedding for d in reply.data], rows, atol=1e-6)
        assert [d.index for d in reply.data] == [0, 1]
        assert reply.object == "list" and reply.data[0].object == "embedding"
        assert reply.usage.prompt_tokens == reply.usage.total_tokens > 4


def test_base64_is_little_endian_float32(live: Live) -> None:
    body = {"model": "encoder", "input": "Who?", "encoding_format": "base64"}
    found = http.post(f"{live.v1}/embeddings", json=body).json()["data"][0]["embedding"]
    vector = np.frombuffer(base64.b64decode(found), "<f4")
    body["encoding_format"] = "float"
    plain = http.post(f"{live.v1}/embeddings", json=body).json()["data"][0]["embedding"]
    np.testing.assert_array_equal(vector, np.float32(plain))


@pytest.mark.parametrize("form", [[5, 6, 7], [[5, 6, 7], [8, 9]]], ids=["ids", "lists"])
def test_embeddings_take_token_ids(client: openai.OpenAI, form: Any) -> None:
    reply = client.embeddings.create(model="encoder", input=form)
    assert len(reply.data) == (1 if form[0] == 5 else 2)


def test_embedding_dimensions_cannot_be_cut(client: openai.OpenAI) -> None:
    assert client.embeddings.create(model="encoder", input="a", dimensions=128).data
    error = refused(client.embeddings.create, model="encoder", input="a", dimensions=64)
    assert error.status_code == 400 and error.param == "dimensions"


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
def test_rerank_puts_the_answer_first(live: Live, path: str) -> None:
    documents = ["Apples grow on trees.", {"text": "Melkar is the capital of Zorvia."}]
    body = {"query": "What is the capital of Zorvia?", "documents": documents, "top_n": 1}
    found = http.post(live.url + path, json={"model": "encoder", **body}).json()
    assert [result["index"] for result in found["results"]] == [1]
    assert found["results"][0]["document"] == {"text": "Melkar is the capital of Zorvia."}
    bare = http.post(live.url + path, json={**body, "return_documents": False}).json()
    assert "document" not in bare["results"][0] and bare["model"] == "encoder"


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["llama", "encoder"]
    assert client.models.retrieve("llama").owned_by == "dovetail"
    assert client.models.list().data[0].max_model_len == 1024  # type: ignore[attr-defined]


def test_tokens_come_and_go(live: Live, offline: App) -> None:
    found = http.post(f"{live.url}/tokenize", json={"model": "llama", "prompt": PROMPT}).json()
    assert offline.tokenizer is not None
    assert found["tokens"] == offline.tokenizer.encode(PROMPT)
    assert found["count"] == len(found["tokens"]) and found["max_model_len"] == 1024
    back = http.post(f"{live.url}/detokenize", json={"tokens": found["tokens"]}).json()
    assert back == {"prompt": PROMPT}
    chat = http.post(f"{live.url}/tokenize", json={"messages": MESSAGES}).json()
    assert chat["tokens"] == chat_ids(offline)


def test_the_first_model_that_can_is_the_default(live: Live) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1}
    assert http.post(f"{live.v1}/completions", json=body).json()["model"] == "llama"
    assert http.post(f"{live.v1}/embeddings", json={"input": "a"}).json()["model"] == "encoder"


# ---- refusals ----

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"n": 0}, "n"),
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
    ({"logit_bias": {"5": 101}}, "logit_bias[...]"),
    ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty"),
    ({"extra_body": {"allowed_token_ids": []}}, "allowed_token_ids"),
    ({"extra_body": {"stop_token_ids": [-1]}}, "stop_token_ids[0]"),
    ({"extra_body": {"skip_special_tokens": False}}, "skip_special_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"extra_body": {"min_p": 7}}, "min_p"),
    ({"max_tokens": 3, "extra_body": {"min_tokens": 4}}, "min_tokens"),
    ({"extra_body": {"priority": 1000}}, "priority"),
    ({"extra_body": {"stream": "yes"}}, "stream"),
]
WRONG_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template"),
]
WRONG_TEXT: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"logprobs": 101}, "logprobs"),
    ({"logprobs": 1, "echo": True}, "logprobs"),
    ({"best_of": 3}, "best_of"),
    ({"suffix": "x"}, "suffix"),
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
        'num_requests_running{engine="0",model_name="llama"} 0.0',
        'kv_cache_usage_perc{engine="0",model_name="llama"} 0.0',
    ):
        assert f"dovetail:{name}" in text, name


def test_health_and_version(live: Live) -> None:
    for path in ("/health", "/health/live", "/health/ready"):
        assert http.get(live.url + path).json() == {"status": "ok"}
    assert http.get(f"{live.url}/version").json() == {"version": dovetail.__version__}
