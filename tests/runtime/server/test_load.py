"""Many clients at once: each stream's text is the offline run's of its prompt, none is lost."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from dovetail.runtime.app import App
from dovetail.runtime.request import Completion
from tests.runtime.server.live import Live, serving

MIB = 1 << 20
TOKENS = 24
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
WORDS = ("Zorvia", "Melkar", "Ossa", "river", "capital", "city", "people", "book", "company", "who")


def prompts(count: int) -> list[str]:
    """Texts that all differ."""
    return [
        f"Question: What is {WORDS[i % 10]} {WORDS[i // 10 % 10]} {WORDS[i // 100 % 10]}?\nAnswer:"
        for i in range(count)
    ]


@dataclass
class Load:
    """What came of many clients: streams that ended, their tokens, refusals, seconds."""

    accepted: int = 0
    tokens: int = 0
    refused: int = 0
    seconds: float = 0.0


async def read_stream(live: Live, body: dict[str, Any]) -> str | float:
    """Return the text of a stream; of a refusal the seconds after which to come back.

    What comes is read at once at its end: clients share the machine with the server.
    """
    host, port = live.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = msgspec.json.encode(body)
    writer.write(HEAD + b"content-length: %d\r\n\r\n%b" % (len(content), content))
    head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    if not head.startswith(b"HTTP/1.1 200"):
        assert head.startswith(b"HTTP/1.1 429"), head + rest
        found = re.search(rb"retry-after-ms: (\d+)", head)
        assert found is not None
        return int(found[1]) / 1e3
    events = re.findall(rb"^data: (.*)\n\n", rest, re.MULTILINE)
    assert events.pop() == b"[DONE]"
    chunks = [msgspec.json.decode(each) for each in events]
    assert all("error" not in chunk for chunk in chunks), chunks
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def run_clients(live: Live, wanted: Mapping[str, Completion], seconds: float) -> Load:
    """Have one client for each prompt stream it again and again, for so many seconds."""
    load, begun = Load(), time.perf_counter()

    async def client(text: str) -> None:
        body = {"prompt": text, "max_tokens": TOKENS, "stream": True}
        while True:
            found = await read_stream(live, body)
            if isinstance(found, str):
                assert found == wanted[text].text
                load.accepted += 1
                load.tokens += len(wanted[text].token_ids)
            else:
                load.refused += 1
                await asyncio.sleep(found)
            if time.perf_counter() >= begun + seconds:
                return

    async def all_clients() -> None:
        await asyncio.gather(*map(client, wanted))

    asyncio.run(all_clients())
    load.seconds = time.perf_counter() - begun
    return load


def answers(offline: App, texts: list[str]) -> dict[str, Completion]:
    return dict(zip(texts, offline.generate(texts, max_tokens=TOKENS), strict=True))


def processes(live: Live) -> list[psutil.Process]:
    server = psutil.Process(live.process.pid)
    return [server, *server.children(recursive=True)]


def memory(live: Live) -> int:
    """Return the bytes that the server's processes hold together."""
    return sum(each.memory_info().rss for each in processes(live))


def cpu(measured: Iterable[psutil.Process]) -> float:
    """Return the seconds that processes have computed."""
    return sum(sum(each.cpu_times()[:2]) for each in measured)


def test_streams_are_never_mixed_up(live: Live, offline: App) -> None:
    found = run_clients(live, answers(offline, prompts(24)), 0)
    assert (found.accepted, found.refused) == (24, 0)


@pytest.mark.long
def test_500_clients_stream_for_a_minute(
    artifacts: dict[str, Path], offline: App, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Says how many tokens a second were accepted, and how many the offline run gives.

    And what a token costs of a CPU here and there: other work on the machine matters less for that.
    """
    texts, here = prompts(500), [psutil.Process()]
    wanted = answers(offline, texts)
    begun, before = time.perf_counter(), cpu(here)
    tokens = sum(len(one.token_ids) for one in answers(offline, texts).values())
    capacity, cost = tokens / (time.perf_counter() - begun), (cpu(here) - before) / tokens
    flags = ("--deterministic", "--max-queue", 400, "--no-log-requests")
    with serving(artifacts["llama"], *flags, log=tmp_path / "log") as server:
        warm = run_clients(server, wanted, 0)
        held, computed, clients = memory(server), cpu(processes(server)), cpu(here)
        found = run_clients(server, wanted, 60)
        assert warm.accepted > 0 and found.accepted > warm.accepted
        assert memory(server) - held < 64 * MIB
        computed, clients = cpu(processes(server)) - computed, cpu(here) - clients
    assert "Traceback" not in (tmp_path / "log").read_text()
    rate, served = found.tokens / found.seconds, computed / found.tokens
    with capsys.disabled():
        print(f"\n{found}: {rate:.0f} tokens/s, offline {capacity:.0f}: {rate / capacity:.2f}")
        print(
            f"CPU ms a token: {served * 1e3:.3f}, offline {cost * 1e3:.3f}; clients {clients:.0f} s"
        )
