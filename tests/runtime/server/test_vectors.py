"""Embeddings and rerank, and what a server tells of its models and tokens."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import openai
import pytest

import dovetail
from dovetail.runtime.app import App
from tests.runtime.server.live import Live, http
from tests.runtime.server.openai_calls import MESSAGES, PROMPT, chat_ids, refused
from tests.runtime.server.test_tools import TOOLS


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


def test_embeddings_are_cut_to_dimensions(client: openai.OpenAI) -> None:
    (whole,) = client.embeddings.create(model="encoder", input="a", dimensions=128).data
    (short,) = client.embeddings.create(model="encoder", input="a", dimensions=64).data
    wanted = np.array(whole.embedding[:64])
    wanted /= np.linalg.norm(wanted)
    np.testing.assert_allclose(short.embedding, wanted, atol=1e-6)
    error = refused(client.embeddings.create, model="encoder", input="a", dimensions=129)
    assert error.status_code == 400 and error.param == "dimensions"
    assert "1 to 128" in str(error)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
def test_rerank_puts_the_answer_first(live: Live, path: str) -> None:
    documents = ["Apples grow on trees.", {"text": "Melkar is the capital of Zorvia."}]
    body = {"query": "What is the capital of Zorvia?", "documents": documents, "top_n": 1}
    found = http.post(live.url + path, json={"model": "encoder", **body}).json()
    assert [result["index"] for result in found["results"]] == [1]
    assert found["results"][0]["document"] == {"text": "Melkar is the capital of Zorvia."}
    bare = http.post(live.url + path, json={**body, "return_documents": False}).json()
    assert "document" not in bare["results"][0] and bare["model"] == "encoder"


def test_clients_of_text_embeddings_inference_are_served(live: Live) -> None:
    from huggingface_hub import InferenceClient

    texts = ["Melkar is the capital of Zorvia.", "Who?"]
    hub = InferenceClient(model=f"{live.url}/embed")
    found = np.array([hub.feature_extraction(text, normalize=True)[0] for text in texts])
    body = {"model": "encoder", "input": texts, "encoding_format": "float"}
    rows = [
        one["embedding"] for one in http.post(f"{live.v1}/embeddings", json=body).json()["data"]
    ]
    np.testing.assert_allclose(found, rows, atol=1e-5)
    ids = http.post(f"{live.url}/embed", json={"inputs": [5, 6], "truncate": True, "dimensions": 8})
    assert len(ids.json()) == 1 and len(ids.json()[0]) == 8
    asked = {"query": "What is the capital of Zorvia?", "texts": texts, "raw_scores": False}
    ranked = http.post(f"{live.url}/rerank", json={**asked, "return_text": True}).json()
    ours = http.post(f"{live.v1}/rerank", json={**asked, "documents": texts}).json()["results"]
    assert ranked == [
        {"index": o["index"], "score": o["relevance_score"], "text": texts[o["index"]]}
        for o in ours
    ]
    assert "text" not in http.post(f"{live.url}/rerank", json=asked).json()[0]
    assert len(http.post(f"{live.url}/rerank", json={**asked, "top_n": 1}).json()) == 1
    told = http.get(f"{live.url}/info").json()
    assert told["model_id"] == "encoder" and told["model_type"] == {
        "embedding": {"pooling": "mean"}
    }


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/embed", {"inputs": []}, "inputs"),
        ("/embed", {"inputs": "a", "truncation_direction": "Left"}, "truncation_direction"),
        ("/embed", {"inputs": "a", "dimensions": 999}, "dimensions"),
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"query": "a", "texts": ["b"], "raw_scores": True}, "raw_scores"),
        ("/rerank", {"query": "a", "texts": ["b"], "documents": ["b"]}, "documents"),
        ("/rerank", {"query": "a", "texts": ["b"], "instruction": "c"}, "instruction"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "b"}, "prompt_name"),
    ],
)
def test_what_these_clients_may_not_ask(
    live: Live, path: str, body: dict[str, Any], param: str
) -> None:
    reply = http.post(live.url + path, json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text


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


BEGUN: Any = [*MESSAGES, {"role": "assistant", "content": "The capital"}]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": MESSAGES, "tools": TOOLS},
        {"messages": BEGUN, "add_generation_prompt": False, "continue_final_message": True},
    ],
    ids=["tools", "begun"],
)
def test_tokens_of_a_conversation_are_those_that_a_chat_reads(
    live: Live, fields: dict[str, Any]
) -> None:
    found = http.post(f"{live.url}/tokenize", json=fields).json()
    chat = http.post(f"{live.v1}/chat/completions", json={**fields, "max_tokens": 1}).json()
    plain = http.post(f"{live.url}/tokenize", json={"messages": fields["messages"]}).json()
    assert found["count"] == chat["usage"]["prompt_tokens"] != plain["count"]


def test_the_first_model_that_can_is_the_default(live: Live) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1}
    assert http.post(f"{live.v1}/completions", json=body).json()["model"] == "llama"
    assert http.post(f"{live.v1}/embeddings", json={"input": "a"}).json()["model"] == "encoder"
