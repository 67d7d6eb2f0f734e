"""What HTTP adds to the engine: per request, to streams in throughput, and at a cold start.

`overhead_p99_ms`: of requests at a rate, what the client waits beyond the engine's own time, which
the server tells in a header. `stream_vs_offline`: tokens per second of concurrent streams over
those of the same prompts in this process, in turns. `cold_start_s`: from command to readiness.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from common import Report, Sample, run_quiet, sample
from dovetail.runtime.app import App, load
from http_client import Connection
from http_servers import PATH, serve_dovetail

CONNECTIONS = 64
ANSWER = 8
"""Tokens of a request of the overhead part."""


def make_prompts(count: int, tokens: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Return random prompts."""
    drawn = np.random.default_rng(seed).integers(10, vocabulary, (count, tokens))
    found: list[list[int]] = drawn.tolist()
    return found


def request_body(prompt: Sequence[int], answer: int, *, stream: bool) -> bytes:
    """Return the body of a request."""
    fields: dict[str, Any] = {"prompt": prompt, "max_tokens": answer, "ignore_eos": True}
    return msgspec.json.encode({**fields, "temperature": 0, "stream": stream})


async def time_overheads(
    host: str, port: int, bodies: Sequence[bytes], rate: float, connections: int
) -> list[float]:
    """Send `bodies` at Poisson arrivals; return the ms that each took beyond the engine."""
    free: asyncio.Queue[Connection] = asyncio.Queue()
    opened = [await Connection.open(host, port) for _ in range(connections)]
    await asyncio.gather(*(connection.post(PATH, bodies[0]) for connection in opened))
    for connection in opened:
        free.put_nowait(connection)
    gaps = np.random.default_rng(1).exponential(1 / rate, len(bodies))
    start = time.perf_counter()

    async def one(at: float, body: bytes) -> float:
        await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
        connection = await free.get()
        sent = time.perf_counter()
        reply = await connection.post(PATH, body)
        took = (time.perf_counter() - sent) * 1e3
        free.put_nowait(connection)
        if reply.status != 200:
            raise SystemExit(f"a request failed: {reply.body!r}")
        return took - float(reply.headers["openai-processing-ms"])

    gc.disable()  # a pause of the client is none of the server's
    try:
        return list(await asyncio.gather(*map(one, np.cumsum(gaps).tolist(), bodies)))
    finally:
        gc.enable()
        for connection in opened:
            connection.close()


async def stream_all(connections: Sequence[Connection], bodies: Sequence[bytes]) -> None:
    """Read a stream on each connection to its end."""
    replies = await asyncio.gather(
        *(connection.post(PATH, body) for connection, body in zip(connections, bodies, strict=True))
    )
    for reply in replies:
        if reply.status != 200 or b"data: [DONE]" not in reply.body:
            raise SystemExit(f"a stream failed: {reply.body[-300:]!r}")


def compare_streams(
    app: App, host: str, port: int, prompts: Sequence[list[int]], answer: int, rounds: int
) -> tuple[Sample, Sample]:
    """Return the seconds of all streams together, and of the same prompts in this process."""
    bodies = [request_body(prompt, answer, stream=True) for prompt in prompts]
    times: dict[str, list[float]] = {"http": [], "offline": []}
    with asyncio.Runner() as runner:

        async def connect() -> list[Connection]:
            return [await Connection.open(host, port) for _ in prompts]

        connections = runner.run(connect())
        sides = {
            "http": lambda: runner.run(stream_all(connections, bodies)),
            "offline": lambda: app.generate(
                list(prompts), max_tokens=answer, ignore_eos=True, temperature=0.0
            ),
        }
        for turn in range(-1, rounds):
            for name, side in sides.items():
                region = run_quiet(side)
                if turn >= 0:
                    times[name].append(region.seconds)
        for connection in connections:
            connection.close()
    return sample(times["http"]), sample(times["offline"])


def measure(options: argparse.Namespace, artifact: Path) -> Report:
    """Return the report of all three parts."""
    config = {
        name: getattr(options, name)
        for name in ("rate", "seconds", "streams", "prompt", "answer", "rounds", "starts")
    }
    report = Report("http", {"artifact": artifact.name, **config})
    starts = []
    for _ in range(options.starts):
        with serve_dovetail(artifact) as server:
            starts.append(server.seconds)
    report.rows.append({"part": "cold start", **_row(sample(starts), "s")})
    with serve_dovetail(artifact) as server, load(artifact) as app:
        host, port = server.host, server.port
        vocabulary = app.engine.spec.vocab_size
        prompts = make_prompts(int(options.rate * options.seconds), options.prompt, vocabulary)
        bodies = [request_body(prompt, ANSWER, stream=False) for prompt in prompts]
        overheads = asyncio.run(time_overheads(host, port, bodies, options.rate, CONNECTIONS))
        p99 = float(np.percentile(overheads, 99))
        shown = {f"p{p}_ms": float(np.percentile(overheads, p)) for p in (50, 90, 99)}
        report.rows.append({"part": f"overhead at {options.rate:g}/s", **shown})
        prompts = make_prompts(options.streams, options.prompt, vocabulary, seed=1)
        http, offline = compare_streams(app, host, port, prompts, options.answer, options.rounds)
    for name, found in (("streams", http), ("offline", offline)):
        rate = options.streams * options.answer / found.median
        report.rows.append({"part": name, "tokens_per_s": rate, **_row(found, "s")})
    report.summary = {
        "overhead_p99_ms": p99,
        "stream_vs_offline": offline.median / http.median,
        "cold_start_s": statistics.median(starts),
    }
    return report


def _row(found: Sample, unit: str) -> dict[str, Any]:
    return {f"median_{unit}": found.median, "spread": found.spread, "runs": found.runs}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("artifact", type=Path, nargs="?", help="default: the bundled Llama's")
    parser.add_argument("--rate", type=float, default=50.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of requests at that rate")
    parser.add_argument("--streams", type=int, default=32, help="at once")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=128, help="tokens of a stream")
    parser.add_argument(
        "--rounds", type=int, default=5, help="of streams and offline runs in turns"
    )
    parser.add_argument("--starts", type=int, default=3, help="cold starts")
    parser.add_argument("--json", type=Path, metavar="F", help="write the report to F")
    options = parser.parse_args(arguments)
    if options.artifact is not None:
        report = measure(options, options.artifact)
    else:
        from dovetail.compiler.pipeline import compile_model
        from dovetail.tiny_world import LLAMA

        with tempfile.TemporaryDirectory() as folder:
            artifact = Path(folder) / "llama.dove"
            compile_model(LLAMA, output=artifact, effort="none")
            report = measure(options, artifact)
    report.print()
    report.write(options.json)


if __name__ == "__main__":
    main()
