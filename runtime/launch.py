"""Child processes: started on this machine, asked how they ended, and the loss of one told.

In: a module and descriptors to inherit. Out: a `Child` on a socket, or a `Member` for each rank of
a group. `ray_ranks.py` has the one that lets Ray choose the machine.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Protocol, TypeAlias

from dovetail.ir.errors import DeviceError, RankError
from dovetail.runtime.leash import PARENT

Popen: TypeAlias = "subprocess.Popen[bytes]"

END_SECONDS = 2.0
"""How long a process that is to end, or has hung up, is waited for."""
GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR
"""What the socket of a process shows that has ended, whoever watches for it."""


class Member(Protocol):
    """The process of a rank."""

    @property
    def where(self) -> str:
        """The process and its machine, in words."""

    def fate(self, seconds: float) -> str | None:
        """Return how it ended, within so many seconds; "" where as it should, None: it runs."""

    def kill(self) -> None:
        """End it at once."""


class Launcher(Protocol):
    """What starts ranks."""

    host: str
    """An address of this machine that the ranks reach."""

    def launch(self, setup: Any, module: str, words: Mapping[str, str]) -> Member:
        """Start `module` as a process with environment `words`; RankError where that fails."""

    def close(self) -> None:
        """Give back what belongs to no single rank."""


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
        words: Mapping[str, str] | None = None,
        fds: Sequence[int] = (),
    ) -> None:
        """Start `python -P -m module arguments`; RankError where the system refuses."""
        command = [sys.executable, "-P", "-m", module, *map(str, arguments)]
        # A session of its own: Ctrl-C in a terminal is for the parent, which ends its children
        environment = {**os.environ, PARENT: str(os.getpid()), **(words or {})}

        def start() -> Popen:
            return subprocess.Popen(
                command,
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
            )

        try:
            self.process: Popen = _starter.run(start)
        except OSError as error:
            raise RankError(f"cannot start a process of the group ({error})") from error

    @property
    def where(self) -> str:
        """See Member."""
        return f"process {self.process.pid}"

    def fate(self, seconds: float) -> str | None:
        """See Member."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        if status < 0:
            return f"was killed by signal {-status} ({signal.Signals(-status).name})"
        return f"ended with status {status}" if status else ""

    def kill(self) -> None:
        """See Member."""
        self.process.kill()


class Child:
    """A process of ours that is spoken to on a socket, and ends when that is hung up."""

    def __init__(
        self,
        module: str,
        what: str,
        fds: Sequence[int] = (),
        words: Mapping[str, str] | None = None,
    ) -> None:
        """Start `module` with the descriptors of its socket and of `fds`.

        Raises DeviceError, which names it as `what`, where the system refuses.
        """
        self.link, theirs = socket.socketpair()
        inherited = (theirs.fileno(), *fds)
        try:
            self.member = LocalProcess(module, inherited, words, inherited)
        except RankError as error:
            self.link.close()
            raise DeviceError(f"cannot start {what} ({error.__cause__})") from None
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self.member.process.pid

    def bury(self, seconds: float = END_SECONDS) -> str:
        """Hang up and wait: it goes by itself, else it is killed. Return how it ended, in words."""
        with suppress(OSError):
            self.link.close()
        end_members([self.member], seconds)
        return self.member.fate(END_SECONDS) or "ended"


def hang_up(link: socket.socket) -> None:
    """End a connection; who reads from it is told."""
    with suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)


class LocalLauncher:
    """Ranks as children of this process, on this machine."""

    host = "127.0.0.1"

    def launch(self, setup: Any, module: str, words: Mapping[str, str]) -> Member:
        """See Launcher."""
        return LocalProcess(module, words=words)

    def close(self) -> None:
        """Nothing is held."""


class Link(Protocol):
    """The first rank's connection to another one."""

    @property
    def rank(self) -> int:
        """Which rank."""

    @property
    def socket(self) -> socket.socket:
        """It hangs up with the process."""

    @property
    def member(self) -> Member:
        """The process."""

    @property
    def where(self) -> str:
        """The process and its machine, in words."""

    def last_words(self) -> str:
        """Return why the rank ended, where it said so."""


def hung_up(sockets: Sequence[socket.socket], seconds: float = 0.0) -> list[int]:
    """Return the places of sockets whose other end is gone; wait for one that long."""
    poller = select.poll()
    places = {}
    for place, end in enumerate(sockets):
        if end.fileno() < 0:
            return [place]
        places[end.fileno()] = place
        poller.register(end, GONE)
    return [places[fd] for fd, _ in poller.poll(seconds * 1000)]


def find_loss(links: Sequence[Link], ranks: int) -> str:
    """Return which rank has died and how, in words; wait a little for the system to say so.

    Ranks that end because another one did are not to blame.
    """
    deadline, left, first = time.monotonic() + END_SECONDS, list(links), ""
    while left and (seconds := deadline - time.monotonic()) > 0:
        gone = [left[place] for place in hung_up([link.socket for link in left], seconds)]
        for link in gone:
            name = f"rank {link.rank} of {ranks} ({link.where})"
            if said := link.last_words() or link.member.fate(END_SECONDS):
                return f"{name} {said}"
            first = first or f"{name} has ended"
            left.remove(link)
    return first or "a process of the group does not answer"


def end_members(members: Sequence[Member], seconds: float = END_SECONDS) -> None:
    """Wait for processes that have been told to end; kill those that do not."""
    deadline = time.monotonic() + seconds
    for member in members:
        if member.fate(max(0.0, deadline - time.monotonic())) is None:
            member.kill()
            member.fate(seconds)
