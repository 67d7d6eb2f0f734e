"""Servers with several clients: one quick run of ours, what a stream tells, and the summary."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository import ROOT

pytest.importorskip("torch")
sys.path.insert(0, str(ROOT / "benchmarks"))

from generate_peers import programs_missing
from http_client import Connection, Stream
from serve_clients import check_length, summarise

HEAD = b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nTransfer-Encoding:chunked\r\n\r\n"
EVENTS = (
    b'data: {"choices":[{"text":" the","index":0}]}\n\n',
    b'data: {"choices":[{"text":""}],"usage":{"completion_tokens":2,"prompt_tokens":3}}\n\n',
    b"data: [DONE]\n\n",
)


async def stream_from(*pieces: bytes) -> Stream:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        connection = await Connection.open(*server.sockets[0].getsockname())
        found = await connection.stream("/v1/completions", b"{}")
        connection.close()
    return found


def test_a_stream_tells_when_its_tokens_came_and_how_many() -> None:
    chunks = [f"{len(event):x}\r\n".encode() + event + b"\r\n" for event in EVENTS]
    found = asyncio.run(stream_from(HEAD, *chunks, b"0\r\n\r\n"))
    assert found.sent <= found.first <= found.last and found.tokens() == 2
    check_length(found, 2)
    with pytest.raises(SystemExit, match="has not 3 tokens"):
        check_length(found, 3)
    with pytest.raises(SystemExit, match="broke off"):
        asyncio.run(stream_from(HEAD, chunks[0]))
    refusal = b'HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\n{"a"'
    with pytest.raises(SystemExit, match="failed with 404"):
        asyncio.run(stream_from(refusal))


def test_the_summary_names_width_peer_and_clients() -> None:
    rows = [
        {"model": "m", "width": "Q4_0", "clients": 1, "side": "dovetail"},
        {"model": "m", "width": "Q4_0", "clients": 1, "side": "llamacpp", "bound": 1.3,
         "ttft_ratio": 1.1},
        {"model": "n", "width": "Q4_0", "clients": 1, "side": "llamacpp", "bound": 1.2,
         "ttft_ratio": 1.4},
        {"model": "1b", "width": "Q4_0", "clients": 1, "side": "llamacpp", "bound": 0.1,
         "ttft_ratio": 0.1},
        {"model": "m", "width": "BF16", "clients": 8, "side": "vllm", "bound": None,
         "ttft_ratio": 0.9},
    ]  # fmt: skip
    assert summarise(rows) == {
        "served_q4_0_vs_llamacpp_1": 1.2,
        "served_ttft_q4_0_vs_llamacpp_1": 1.1,
        "served_bf16_vs_vllm_8": None,
        "served_ttft_bf16_vs_vllm_8": 0.9,
    }


@pytest.mark.parametrize("peers", ["", pytest.param("llamacpp", marks=pytest.mark.long)])
def test_a_quick_run_writes_its_report(tmp_path: Path, peers: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/serve_clients.py"), "--quick"]
    command += ["--models", "tiny", "--widths", "Q4_0", "--clients", "1,3", "--threads", "1"]
    command += ["--peers", peers, "--json", str(tmp_path / "f.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "f.json").read_text())["rows"]
    sides = ["dovetail", "llamacpp"] if peers and not programs_missing() else ["dovetail"]
    assert [(row["clients"], row["side"]) for row in rows] == [
        (n, s) for n in (1, 3) for s in sides
    ]
    for row in rows:
        assert all(row[name] > 0 for name in ("tokens_s", "ttft_ms", "first_ttft_ms", "peak_mb"))
