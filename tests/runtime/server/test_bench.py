"""`dovetail bench serve` against the live server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from dovetail.cli.serve_client import Timing, run_load
from dovetail.cli.serve_load import Planned, Target
from tests.dovetail.commands import dovetail
from tests.runtime.server.live import Live


@pytest.mark.parametrize("backend", ["vllm", "openai-chat"])
def test_load_is_sent_and_measured(live: Live, tmp_path: Path, backend: str) -> None:
    plot = tmp_path / "curves.png"
    lengths = ("--random-input-len", 12, "--random-output-len", 4, "--ignore-eos")
    rates = ("--request-rate", 200, "--request-rate", 400, "--goodput", "ttft:60000", "tpot:60000")
    files = ("--save-result", "--result-dir", tmp_path / "new", "--plot", plot, "--json")
    flags = ("--backend", backend, "--num-prompts", 6, *lengths, *rates, *files)
    done = dovetail("bench", "serve", "--base-url", live.url, "--model", "llama", *flags)
    assert done.code == 0, done.err
    results = msgspec.json.decode(done.out)
    (saved,) = (tmp_path / "new").iterdir()
    assert saved.name.startswith(f"{backend}-200.0qps-400.0qps-llama-")
    assert results == msgspec.json.decode(saved.read_bytes())
    for result in results:
        assert (result["completed"], result["failed"]) == (6, 0), result["errors"]
        assert result["total_output_tokens"] == 24 and result["slo_attainment"] == 1.0
        assert backend != "vllm" or result["total_input_tokens"] == 72
        assert 0 < result["mean_ttft_ms"] < result["mean_e2el_ms"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_failures_are_counted_and_an_older_result_is_exchanged(live: Live, tmp_path: Path) -> None:
    (tmp_path / "one.json").touch()
    (tmp_path / "older").hardlink_to(tmp_path / "one.json")
    saving = ("--save-result", "--result-dir", tmp_path, "--result-filename", "one.json")
    flags = ("--num-prompts", 2, "--endpoint", "/v1/nothing", "--json", *saving)
    done = dovetail("bench", "serve", "--port", live.url.rsplit(":", 1)[1], *flags)
    assert (tmp_path / "one.json").read_bytes() and not (tmp_path / "older").read_bytes()
    result = msgspec.json.decode(done.out)
    assert (result["completed"], result["failed"]) == (0, 2)
    assert result["errors"][0].startswith("404 there is no such path; chats are at /v1/chat")


def test_a_prompt_that_is_too_long_is_told_as_the_server_says_it(
    live: Live, tmp_path: Path
) -> None:
    (tmp_path / "long.jsonl").write_bytes(msgspec.json.encode({"prompt": "a " * 500_000}))
    lengths = ("--dataset-name", "custom", "--dataset-path", tmp_path / "long.jsonl", "--json")
    for backend, field in (("vllm", "prompt"), ("openai-chat", "messages")):
        done = dovetail(
            "bench",
            "serve",
            "--base-url",
            live.url,
            "--backend",
            backend,
            *lengths,
            "--num-prompts",
            1,
        )
        (error,) = msgspec.json.decode(done.out)["errors"]
        assert error.startswith(f"400 {field}: ") and "1024 tokens" in error


def test_a_connection_that_is_closed_before_a_reply_is_tried_again() -> None:
    """As where a server closes a connection that it had said it keeps."""
    event = b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"
    reply = head % len(event) + event
    replies = iter([b"", reply, b"", b""])

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(next(replies))
        writer.close()

    async def ask_twice() -> list[str | None]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        target = Target(base_url=f"http://127.0.0.1:{port}", model="m")
        async with server:
            runs = [await run_load(target, [Planned(0.0, 4, 1)]) for _ in range(2)]
        return [timing.error for found, _ in runs for timing in found]

    first, second = asyncio.run(ask_twice())
    assert first is None
    assert second is not None and "RemoteProtocolError" in second


def test_every_legal_stream_of_events_is_read() -> None:
    """Comments, no space after the colon, an event of several lines, other names, CRLF."""
    events = (
        b': hello\r\ndata:{"choices": [{"text": "a"}]}\r\n\r\n'
        b'event: message\nid: 1\ndata: {"choices":\ndata: [{"text": "b"}]}\n\n:\n\n'
        b'data:{"choices": null, "usage": {"prompt_tokens": 4, "completion_tokens": 2}}\n\n'
        b"data:[DONE]\n\n"
    )
    timing = asyncio.run(ask_one(events))
    assert (timing.error, timing.text) == (None, "ab")
    assert (timing.prompt_tokens, timing.output_tokens) == (4, 2)


def test_a_stream_that_is_no_json_is_an_error_of_its_request() -> None:
    timing = asyncio.run(ask_one(b'data: {"choices": [{"text": "a"}]}\n\ndata: {"choices\n\n'))
    assert timing.error is not None and timing.error.startswith("DecodeError ")
    assert timing.text == "a"


async def ask_one(events: bytes) -> Timing:
    """Return how a request went that is answered by a stream of these events."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head + events)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        (timing,), _ = await run_load(Target(base_url=url, model="m"), [Planned(0.0, 4, 2)])
    return timing
