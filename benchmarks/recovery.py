"""What a killed process costs those who use the server: each worker in turn, under load.

Clients stream completions and embed texts without a pause. `ended_s`: from the kill to the end of
the last request that was on the worker. `back_s`: to the first 2 s that serve 0.9 of what was
served before. `lost`: requests with neither the right answer nor a clear error.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from common import Report
from http_client import Connection
from http_overhead import make_prompts, request_body
from http_servers import PATH, serve_dovetail

WORKERS = {"engine": "apart.worker", "encoder": "embedding.worker"}
EMBEDDINGS = "/v1/embeddings"
WINDOW = 2.0
"""Seconds over which a rate is taken."""
SHARE = 0.9
ANSWER = 16
VOCABULARY = 512
"""Token ids of prompts: every tokenizer has so many."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has ended: for which kind of client, when, and whether `right` or `error`."""

    kind: str
    at: float
    outcome: str


def count(ended: Sequence[Ended], kind: str, start: float, end: float) -> int:
    """Return how many requests of a kind ended right from `start` to `end`."""
    return sum(e.kind == kind and e.outcome == "right" and start <= e.at < end for e in ended)


def find_recovery(ended: Sequence[Ended], kind: str, killed: float, before: float) -> float:
    """Return the seconds after which a window serves SHARE of `before` per second, inf if none."""
    ends = sorted(e.at for e in ended if e.kind == kind and e.outcome == "right" and e.at >= killed)
    last = max((e.at for e in ended), default=killed)
    for start in (killed, *ends):
        if start + WINDOW > last:
            break
        if count(ended, kind, start, start + WINDOW) >= SHARE * before * WINDOW:
            return start - killed
    return float("inf")


class Clients:
    """Connections that ask without a pause until they are told to end."""

    def __init__(self, host: str, port: int, models: tuple[str, str]) -> None:
        """`models`: ids of the one that generates and of the encoder."""
        self._place, self._models = (host, port), models
        self.ended: list[Ended] = []
        self._over = False

    async def run(self, streams: int, texts: int, work: Any) -> None:
        """Have clients ask while `work` goes on."""
        prompts = make_prompts(streams, 16, VOCABULARY)
        bodies = [request_body(prompt, ANSWER, stream=True) for prompt in prompts]
        text = {"model": self._models[1], "input": "Zorvia lies on the river Ossa."}
        asked = [("engine", PATH, body) for body in bodies]
        asked += [("encoder", EMBEDDINGS, msgspec.json.encode(text))] * texts
        clients = [asyncio.ensure_future(self._ask(*one)) for one in asked]
        await work
        self._over = True
        await asyncio.gather(*clients)

    async def _ask(self, kind: str, path: str, body: bytes) -> None:
        connection = await Connection.open(*self._place)
        wanted = None
        while not self._over:
            reply = await connection.post(path, body)
            found = read_answer(reply.body)
            wanted = found if wanted is None else wanted
            failed = reply.status == 500 or found == "error"
            outcome = "error" if failed else "right" if found == wanted else "lost"
            self.ended.append(Ended(kind, time.perf_counter(), outcome))
        connection.close()


def read_answer(body: bytes) -> str:
    """Return what a reply says whatever its ids and times are; `error` where it ends with one."""
    if b'"error"' in body:
        return "error"
    lines = [line[6:] for line in body.splitlines() if line.startswith(b"data: {")]
    if not lines:
        return repr(msgspec.json.decode(body)["data"])
    return "".join(msgspec.json.decode(line)["choices"][0]["text"] for line in lines)


async def kill_one(clients: Clients, server: psutil.Process, kind: str, seconds: float) -> Any:
    """Kill the worker of that kind after some seconds, and wait for some; return a row."""
    await asyncio.sleep(seconds)
    killed = time.perf_counter()
    for child in server.children():
        if any(WORKERS[kind] in word for word in child.cmdline()):
            child.kill()
    await asyncio.sleep(2 * seconds)
    rate = count(clients.ended, kind, killed - seconds / 2, killed) / (seconds / 2)
    since = [e for e in clients.ended if e.at >= killed]
    errors = [e for e in since if e.outcome == "error"]
    return {
        "worker": kind,
        "rate_before": rate,
        "errors": len(errors),
        "errors_of_others": sum(e.kind != kind for e in errors),
        "lost": sum(e.outcome == "lost" for e in since),
        "ended_s": max((e.at - killed for e in errors), default=0.0),
        "back_s": find_recovery(since, kind, killed, rate),
    }


async def measure(host: str, port: int, server: psutil.Process, options: Any) -> list[Any]:
    """Return a row for each worker."""
    clients, rows = Clients(host, port, ("llama", "encoder")), []

    async def kill_all() -> None:
        rows.extend([await kill_one(clients, server, kind, options.seconds) for kind in WORKERS])

    await clients.run(options.streams, options.texts, kill_all())
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--streams", type=int, default=16, help="that generate at once")
    parser.add_argument("--texts", type=int, default=2, help="clients that embed")
    parser.add_argument("--seconds", type=float, default=6.0, help="before a kill; twice after it")
    parser.add_argument("--json", type=Path, metavar="F", help="write the report to F")
    options = parser.parse_args(arguments)
    from dovetail.compiler.pipeline import compile_model
    from dovetail.tiny_world import ENCODER, LLAMA

    config = {name: getattr(options, name) for name in ("streams", "texts", "seconds")}
    report = Report("recovery", config)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / "llama.dove", Path(folder) / "encoder.dove"]
        for model, path in zip((LLAMA, ENCODER), paths, strict=True):
            # products of bfloat16 round by the size of a batch, and answers are compared
            compile_model(model, output=path, effort="none", weight_dtype="f32")
        with serve_dovetail(*paths) as at:
            server = psutil.Process(at.pid)
            report.rows += asyncio.run(measure(at.host, at.port, server, options))
    report.summary = {
        name: max(row[name] for row in report.rows) for name in ("ended_s", "back_s", "lost")
    }
    report.print()
    report.write(options.json)


if __name__ == "__main__":
    main()
