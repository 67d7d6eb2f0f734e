"""Processes on this machine: started, asked how they ended, and killed.

In: a module and descriptors to inherit. Out: a `Member`. `ray_ranks.py` has the one that lets Ray
choose the machine.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Protocol, TypeAlias

Popen: TypeAlias = "subprocess.Popen[bytes]"

PARENT = "DOVETAIL_PARENT"
"""Environment variable of a child: the process that started it."""
CPUS = "DOVETAIL_CPUS"
"""Environment variable of a child: the CPUs that it may use, with commas; empty for all."""
END_SECONDS = 2.0
"""How long a process that is to end, or has hung up, is waited for."""


class Member(Protocol):
    """A process, on this machine or another one."""

    @property
    def where(self) -> str:
        """The process and its machine, in words."""

    def wait(self, seconds: float) -> str | None:
        """Return how it ended, within so many seconds; "" where as it should, None: it runs."""

    def kill(self) -> None:
        """End it at once."""


class _Starter:
    """The thread that starts all children: they are killed when it ends, so it never does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._asked: SimpleQueue[tuple[Callable[[], Popen], Future[Popen]]] = SimpleQueue()

    def run(self, start: Callable[[], Popen]) -> Popen:
        """Return what `start` does, or raise it."""
        future: Future[Popen] = Future()
        with self._lock:
            self._asked.put((start, future))
            if self._thread is None or not self._thread.is_alive():  # so in a forked process, too
                self._thread = threading.Thread(target=self._serve, name="starter", daemon=True)
                self._thread.start()
        return future.result()

    def _serve(self) -> None:
        while True:
            start, future = self._asked.get()
            try:
                future.set_result(start())
            except BaseException as error:
                future.set_exception(error)


_starter = _Starter()


class LocalProcess:
    """A child process of ours, which does not outlive this one."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[object] = (),
        *,
        words: Mapping[str, str] | None = None,
        fds: Sequence[int] = (),
        quiet: bool = False,
    ) -> None:
        """Start `python -P -m module arguments`; OSError where the system refuses.

        words: more environment variables. fds: descriptors to inherit. quiet: what it prints is
        for nobody.
        """
        # -P: the directory one happens to stand in must not hide the installed package
        command = [sys.executable, "-P", "-m", module, *map(str, arguments)]
        self._parent = os.getpid()
        environment = {**os.environ, PARENT: str(self._parent), **(words or {})}
        printed = subprocess.DEVNULL if quiet else None

        def start() -> Popen:
            return subprocess.Popen(
                command,
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                start_new_session=True,  # Ctrl-C is for the parent, which ends its children
                env=environment,
            )

        self.process: Popen = _starter.run(start)

    @property
    def where(self) -> str:
        """See Member."""
        return f"process {self.process.pid}"

    def wait(self, seconds: float) -> str | None:
        """See Member."""
        if os.getpid() != self._parent:  # in a fork, whose child it is not
            return ""
        try:
            status = self.process.wait(None if seconds == math.inf else seconds)
        except subprocess.TimeoutExpired:
            return None
        if status < 0:
            return f"was killed by signal {-status} ({signal.Signals(-status).name})"
        return f"ended with status {status}" if status else ""

    def kill(self) -> None:
        """See Member."""
        self.process.kill()


def end_members(members: Sequence[Member]) -> None:
    """Wait for processes that have been told to end; kill those that do not."""
    deadline = time.monotonic() + END_SECONDS
    for member in members:
        if member.wait(max(0.0, deadline - time.monotonic())) is None:
            member.kill()
            member.wait(END_SECONDS)
