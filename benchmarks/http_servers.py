"""Servers over HTTP as child processes: ours, llama.cpp's, vLLM's, all with the same endpoint.

In: what is to be served. Out: where it listens, once it answers.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.error import URLError

from dovetail.cli.serve_client import ask_model
from dovetail.cli.serve_load import Target
from llamacpp import SERVER, find_programs

PATH = "/v1/completions"
HOST = "127.0.0.1"
SERVE = "from dovetail.cli import main; main()"
START_SECONDS = 600.0
"""Within these a peer's server must be ready."""


@dataclass(frozen=True, slots=True)
class Listening:
    """A server that is ready: where, its process, and seconds from the command to readiness."""

    host: str
    port: int
    pid: int
    seconds: float

    def target(self, clients: int | None = None) -> Target:
        """Return how its one model is asked, by so many clients at once at most."""
        found = Target(host=self.host, port=self.port, ignore_eos=True, max_concurrency=clients)
        return replace(found, model=ask_model(found)[0])


@contextmanager
def serve_dovetail(*models: Path, options: Sequence[str] = ()) -> Iterator[Listening]:
    """Serve artifacts or models; it says itself when and where it is ready."""
    command = [sys.executable, "-P", "-c", SERVE, "serve", *map(str, models), "--port", "0"]
    start = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--no-log-requests", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        line = next((line for line in process.stdout if " on http://" in line), "")
        seconds = time.perf_counter() - start
        if not line:
            raise SystemExit(f"cannot be served; try `dovetail serve {models[0]}`")
        host, port = line.split()[-1].removeprefix("http://").split(":")
        yield Listening(host, int(port), process.pid, seconds)
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


@contextmanager
def serve_llamacpp(
    model: Path, threads: int, slots: int, context: int, *options: str
) -> Iterator[Listening]:
    """Serve a GGUF file by `llama-server`; slots: sequences at once, of `context` tokens each."""
    programs = find_programs()
    assert programs is not None, "a peer that is absent is left out"
    command = [programs.path(SERVER), "-m", str(model), "-t", str(threads), "--no-webui"]
    with _polled([*command, "-np", str(slots), "-c", str(slots * context), *options]) as found:
        yield found


@contextmanager
def serve_vllm(model: Path, slots: int, context: int) -> Iterator[Listening]:
    """Serve a bfloat16 directory by vLLM's own server."""
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model"]
    command += [str(model), "--dtype", "bfloat16", "--max-num-seqs", str(slots)]
    command += ["--max-model-len", str(context)]
    with _polled(command) as found:
        yield found


@contextmanager
def _polled(command: Sequence[str]) -> Iterator[Listening]:
    """Start a server on a free port; it is ready when /health says so."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    start = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--host", HOST, "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not _healthy(port):
            if process.poll() is not None or time.perf_counter() - start > START_SECONDS:
                raise SystemExit(f"{command[0]} does not serve")
            time.sleep(0.02)
        yield Listening(HOST, port, process.pid, time.perf_counter() - start)
    finally:
        process.terminate()
        process.wait()


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (URLError, OSError):
        return False
