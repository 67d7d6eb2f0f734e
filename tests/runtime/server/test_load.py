"""Many clients at once: each stream's text is the offline run's of its prompt, none is lost."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from dovetail.runtime.app import App
from tests.runtime.server.live import Live, serving

MIB = 1 << 20
WORDS = ("Zorvia", "Melkar", "Ossa", "river", "capital", "city", "people", "book", "company", "who")


def prompts(count: int) -> list[str]:
    """Texts that all differ."""
    return [
        f"Question: What is {WORDS[i % 10]} {WORDS[i // 10 % 10]} {WORDS[i // 100 % 10]}?\nAnswer:"
        for i in range(count)
    ]


async def read_stream(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> str | int:
    """Return the text of a stream, or the status of a refusal."""
    found = last = ""
    async with client.stream("POST", url, json=body) as reply:
        if reply.status_code != 200:
            return reply.status_code
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                chunk = msgspec.json.decode(line[6:])
                assert "error" not in chunk, chunk
                found += chunk["choices"][0]["text"]
            last = line or last
        assert last == "data: [DONE]"
    return found


def run_clients(live: Live, texts: list[str], wanted: dict[str, str], seconds: float) -> list[int]:
    """Have one client for each text stream it again and again; return [accepted, refused]."""
    counts = [0, 0]

    async def client(session: httpx.AsyncClient, text: str, end: float) -> None:
        body = {"prompt": text, "max_tokens": 24, "stream": True}
        while True:
            found = await read_stream(session, f"{live.v1}/completions", body)
            assert found in (429, wanted[text])
            counts[found == 429] += 1
            if time.perf_counter() >= end:
                return

    async def all_clients() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=300, limits=limits) as session:
            end = time.perf_counter() + seconds
            await asyncio.gather(*(client(session, text, end) for text in texts))

    asyncio.run(all_clients())
    return counts


def answers(offline: App, texts: list[str]) -> dict[str, str]:
    found = offline.generate(texts, max_tokens=24)
    return {text: one.text or "" for text, one in zip(texts, found, strict=True)}


def test_streams_are_never_mixed_up(live: Live, offline: App) -> None:
    texts = prompts(24)
    accepted, refused = run_clients(live, texts, answers(offline, texts), 0)
    assert (accepted, refused) == (24, 0)


@pytest.mark.long
def test_500_clients_stream_for_a_minute(
    artifacts: dict[str, Path], offline: App, tmp_path: Path
) -> None:
    texts = prompts(500)
    wanted = answers(offline, texts)
    flags = ("--deterministic", "--max-queue", 400, "--no-log-requests")
    with serving(artifacts["llama"], *flags, log=tmp_path / "log") as server:
        process = psutil.Process(server.process.pid)
        warm = run_clients(server, texts, wanted, 0)
        before = process.memory_info().rss
        accepted, _ = run_clients(server, texts, wanted, 60)
        assert warm[0] > 0 and accepted > warm[0]
        assert process.memory_info().rss - before < 64 * MIB
    assert "Traceback" not in (tmp_path / "log").read_text()
