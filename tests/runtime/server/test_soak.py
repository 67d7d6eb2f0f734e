"""A hundred thousand short requests: memory, descriptors and threads are what they were."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import pytest
import uvloop

from tests.runtime.server.live import Live, serving
from tests.runtime.server.test_load import processes

MIB = 1 << 20
CLIENTS, EACH = 32, 32
"""Connections at once, and requests on one before it is closed for another."""
TURNS = 98
"""Of all clients: 100,352 requests."""
WARM_UP = 6
TEXT = {"prompt": "Zorvia", "max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "Where is Melkar?"}], "max_tokens": 1}
EMBED = {"model": "encoder", "input": "Melkar"}
WRONG = {"prompt": "a" * 100_000, "max_tokens": 1}
REQUESTS = (
    ("/v1/completions", TEXT, 200),
    ("/v1/chat/completions", CHAT, 200),
    ("/v1/embeddings", EMBED, 200),
    ("/v1/completions", TEXT | {"stream": True}, 200),
    ("/v1/completions", WRONG, 400),
)


@dataclass(frozen=True)
class Held:
    """What a server's processes hold."""

    memory: int
    descriptors: int
    threads: int

    @classmethod
    def by(cls, live: Live) -> Held:
        there = processes(live)
        return cls(
            sum(each.memory_full_info().pss for each in there),
            sum(each.num_fds() for each in there),
            sum(each.num_threads() for each in there),
        )


async def ask(host: str, port: int, first: int) -> None:
    """Send EACH requests of all kinds on one connection."""
    reader, writer = await asyncio.open_connection(host, port)
    for number in range(first, first + EACH):
        path, fields, status = REQUESTS[number % len(REQUESTS)]
        body = msgspec.json.encode(fields)
        head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        found = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert found.startswith(b"http/1.1 %d " % status), found
        if b"content-length: " in found:
            length = int(found.split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
        else:
            await reader.readuntil(b"\r\n0\r\n\r\n")
    writer.close()
    await writer.wait_closed()


def soak(live: Live, turns: int) -> None:
    """Have all clients ask, so many times."""
    host, port = live.url.removeprefix("http://").split(":")

    async def run() -> None:
        for _ in range(turns):
            await asyncio.gather(*(ask(host, int(port), each) for each in range(CLIENTS)))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def test_what_few_requests_took_is_given_back(live: Live) -> None:
    soak(live, 1)
    before = Held.by(live)
    soak(live, 1)
    after = Held.by(live)
    assert after.descriptors <= before.descriptors + 2  # of connections that are being closed
    assert after.threads <= before.threads + 2  # of a pool that grows to its size


@pytest.mark.long
def test_a_hundred_thousand_requests_leave_nothing(
    artifacts: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(*artifacts.values(), "--no-log-requests", log=tmp_path / "log") as live:
        soak(live, WARM_UP)
        before = Held.by(live)
        soak(live, TURNS)
        after = Held.by(live)
        assert psutil.Process(live.process.pid).is_running()
    with capsys.disabled():
        print(f"\n{TURNS * CLIENTS * EACH} requests: {before} -> {after}")
    assert after.memory - before.memory < 64 * MIB
    assert after.descriptors <= before.descriptors + 2
    assert after.threads <= before.threads + 2
