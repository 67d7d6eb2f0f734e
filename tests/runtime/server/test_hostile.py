"""Inputs that mean harm: each gets the right status, and the server lives on in the same memory."""

from __future__ import annotations

import socket
from typing import Any

import msgspec
import psutil
import pytest

from tests.runtime.server.live import Live, connect, http

MIB = 1 << 20
CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RANK = "/v1/rerank"
JSON = {"content-type": "application/json"}


def chat(content: str, **more: Any) -> bytes:
    return msgspec.json.encode({"messages": [{"role": "user", "content": content}], **more})


def text(**fields: Any) -> bytes:
    return msgspec.json.encode({"prompt": "a", "max_tokens": 1, **fields})


def rank(query: str, documents: list[Any]) -> bytes:
    return msgspec.json.encode({"model": "encoder", "query": query, "documents": documents})


BODIES: dict[str, tuple[str, bytes, int]] = {
    "a prompt of 10 MB": (CHAT, chat("Zorvia " * (10 * MIB // 7)), 400),
    "a prompt of 10 MB, one character": (TEXT, text(prompt="a" * 10 * MIB), 400),
    "a body of 20 MB": (TEXT, b" " * 20 * MIB, 413),
    "100,000 messages": (
        CHAT,
        msgspec.json.encode({"messages": [{"role": "user", "content": "a"}] * 100_000}),
        400,
    ),
    "deep lists": (TEXT, b'{"prompt":' + b"[" * 100_000, 400),
    "deep objects in an unknown field": (TEXT, b'{"x":' + b'{"a":' * 100_000, 400),
    "deep lists that end": (CHAT, b'{"metadata":' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400),
    "no JSON": (TEXT, b"prompt=a", 400),
    "nothing": (TEXT, b"", 400),
    "a list": (TEXT, b"[]", 400),
    "null": (TEXT, b"null", 400),
    "half an object": (TEXT, b'{"prompt": "a"', 400),
    "bytes behind the object": (TEXT, text() + b"garbage", 400),
    "bad UTF-8": (TEXT, b'{"prompt": "\xff\xfe"}', 400),
    "half a surrogate pair": (TEXT, b'{"prompt": "\\ud800", "max_tokens": 1}', 400),
    "NaN as temperature": (TEXT, b'{"prompt": "a", "temperature": NaN}', 400),
    "infinite temperature": (TEXT, b'{"prompt": "a", "temperature": 1e999}', 400),
    "negative n": (TEXT, text(n=-1), 400),
    "half a million choices": (TEXT, text(prompt=["a"] * 2048, n=256), 400),
    "a million ids to decode": (
        "/detokenize",
        msgspec.json.encode({"tokens": [5] * MIB}),
        400,
    ),
    "a huge n": (TEXT, text(n=1 << 40), 400),
    "a huge max_tokens": (TEXT, b'{"prompt": "a", "max_tokens": ' + b"9" * 400 + b"}", 400),
    "null bytes": (TEXT, text(prompt="\0\0\0"), 200),
    "duplicate keys": (TEXT, b'{"prompt": "a", "n": 9, "n": 1, "max_tokens": 1}', 200),
    "a template as content": (CHAT, chat("{{ ''.__class__.__mro__ }}{% raw %}", max_tokens=1), 200),
    "a template of one's own": (CHAT, chat("a", chat_template="{{ 1/0 }}"), 400),
    "arguments that stand for messages": (
        CHAT,
        chat("a", chat_template_kwargs={"messages": 5, "self": 1}, max_tokens=1),
        200,
    ),
    "special tokens in a message": (CHAT, chat("<|end|><|assistant|>" * 20, max_tokens=1), 200),
    "a path as model": (TEXT, text(model="../../../../etc/passwd"), 404),
    "a long model id": (TEXT, text(model="m" * MIB), 404),
    "token ids beyond the vocabulary": (TEXT, text(prompt=[2_000_000_000]), 400),
    "negative token ids": (TEXT, text(prompt=[-1]), 400),
    "ids of an encoder beyond its vocabulary": (EMBED, b'{"input": [2000000000]}', 400),
    "an unknown encoding": (EMBED, b'{"input": "a", "encoding_format": "hex"}', 400),
    "a million ids as a prompt": (TEXT, msgspec.json.encode({"prompt": [5] * MIB}), 400),
    "too many ids": (TEXT, msgspec.json.encode({"prompt": [5] * (MIB + 1)}), 400),
    "too many prompts": (TEXT, text(prompt=["a"] * 2049), 400),
    "too many texts": (EMBED, msgspec.json.encode({"input": ["a"] * 2049}), 400),
    "a prompt of 10 MB, its end": (
        TEXT,
        text(prompt="Zorvia " * (10 * MIB // 7), truncate_prompt_tokens=20),
        200,
    ),
    "a chat of 10 MB, its end": (
        CHAT,
        chat("Zorvia " * (10 * MIB // 7), truncate_prompt_tokens=20, max_tokens=1),
        200,
    ),
    "10 MB to tokenise": ("/tokenize", text(prompt="a " * 5 * MIB), 400),
    "10 MB to embed": (EMBED, msgspec.json.encode({"input": ["a", "a " * 5 * MIB]}), 400),
    "a query of 10 MB": (RANK, rank("a " * 5 * MIB, ["b"]), 400),
    "a document of 10 MB": (RANK, rank("a", ["b", "a " * 5 * MIB]), 400),
    "a document of 10 MB as an object": (RANK, rank("a", [{"text": "a " * 5 * MIB}]), 400),
    "long documents": (RANK, rank("a", ["word " * 50_000] * 8), 200),
    "a megabyte of bad words": (TEXT, text(bad_words=["word " * 200] * 1024), 400),
    "hardly any repetition penalty": (TEXT, text(repetition_penalty=1e-300), 400),
    "a long text to embed": (EMBED, msgspec.json.encode({"input": "word " * (MIB // 10)}), 200),
    "1,000 stop texts": (TEXT, text(stop=["x"] * 1000), 400),
    "a long stop text": (TEXT, text(stop="x" * MIB), 400),
    "ids to decode beyond the vocabulary": ("/detokenize", b'{"tokens": [2000000000]}', 400),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_get_the_right_status(live: Live, name: str) -> None:
    path, body, status = BODIES[name]
    reply = http.post(live.url + path, content=body, headers=JSON)
    assert reply.status_code == status, reply.text[:500]
    if status != 200:
        error = reply.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert len(error["message"]) < 1000 and "Traceback" not in error["message"]
    assert http.get(f"{live.url}/health").status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "\\ud800"}',  # so near to the end, where it might be cut off
        b'{"prompt": "\\udc00", "max_tokens": 1}',
        b'{"x": "\\ud800 and more", "prompt": "a"}',
        b'{"\\ud83d": 1, "prompt": "a"}',
    ],
)
def test_half_a_surrogate_pair_is_called_that(live: Live, body: bytes) -> None:
    reply = http.post(live.url + TEXT, content=body, headers=JSON)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_json")
    assert "half a surrogate pair" in reply.json()["error"]["message"], reply.text


@pytest.mark.parametrize(
    "path", ["/v1/models/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/v1/models/%00", "//"]
)
def test_paths_lead_nowhere_else(live: Live, path: str) -> None:
    with connect(live) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode())
        assert b" 404 " in read(client)


def read(client: socket.socket) -> bytes:
    found = b""
    while part := client.recv(1 << 16):
        found += part
    return found


RAW: dict[str, tuple[bytes, bytes]] = {
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 9 + b"\r\n\r\n", b" 400 "),
    "a method of its own": (b"HACK / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n", b" 40"),
    "a length that is no number": (
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n",
        b" 400 ",
    ),
    "a negative length": (
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: -5\r\n\r\n",
        b" 400 ",
    ),
}


@pytest.mark.parametrize("name", RAW)
def test_broken_requests_are_answered_and_closed(live: Live, name: str) -> None:
    sent, status = RAW[name]
    with connect(live) as client:
        client.sendall(sent)
        assert status in read(client)


def test_half_requests_hold_nobody_up(live: Live) -> None:
    """Clients that stop in their headers or bodies, and one that never reads what it asked for."""
    begun = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n"
    streaming = text(stream=True, max_tokens=200, ignore_eos=True)
    whole = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b"
    clients = [connect(live) for _ in range(30)]
    starts = (begun[:20], begun + b'{"prompt', whole % (len(streaming), streaming))
    for i, client in enumerate(clients):
        client.sendall(starts[i % 3])
    assert http.post(live.url + TEXT, content=text()).status_code == 200
    for client in clients:
        client.close()
    assert http.post(live.url + TEXT, content=text()).status_code == 200


@pytest.mark.long
def test_memory_stays_flat(live: Live) -> None:
    """All of them again and again; between large bodies memory swings, so the least counts."""

    def least_memory(rounds: int) -> int:
        found = []
        for _ in range(rounds):
            for path, body, _ in BODIES.values():
                http.post(live.url + path, content=body, headers=JSON)
            found.append(psutil.Process(live.process.pid).memory_info().rss)
        return min(found[2:])

    before = least_memory(6)
    assert least_memory(10) - before < 32 * MIB
