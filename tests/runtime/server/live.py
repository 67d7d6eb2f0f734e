"""A server of the tests: `dovetail serve` in a process of its own, on a free port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

http = httpx.Client(timeout=200)
"""For plain requests: a busy machine may take its time."""
SCRIPT = "from dovetail.cli import main; main()"


@dataclass(frozen=True)
class Live:
    """A running server."""

    url: str
    process: subprocess.Popen[str]

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal; return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(60)


@contextmanager
def serving(*arguments: object, log: Path, env: Mapping[str, str] | None = None) -> Iterator[Live]:
    """Run `dovetail serve arguments --port 0` until the body ends."""
    command = [sys.executable, "-P", "-c", SCRIPT, "serve", *map(str, arguments), "--port", "0"]
    with log.open("w") as err:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            env={**os.environ, **(env or {})},
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("dovetail: serving"), line + log.read_text()
        yield Live(line.split()[-1], process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(60)
        process.stdout.close()


def connect(live: Live) -> socket.socket:
    """Return a bare connection, for requests that no client would send."""
    host, port = live.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=200)
