"""Processes of a group: started on this machine, asked how they ended, and the loss of one told.

In: a command and descriptors to inherit. Out: a `Member` for each rank. `ray_ranks.py` has the one
that lets Ray choose the machine.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from dovetail.ir.errors import RankError
from dovetail.runtime.orders import PairSetup

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

    def launch(
        self, setup: PairSetup, module: str, words: Mapping[str, str], fds: Sequence[int]
    ) -> Member:
        """Start `module` as a process with environment `words`; RankError where that fails."""

    def close(self) -> None:
        """Give back what belongs to no single rank."""


class LocalProcess:
    """A child process of ours."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[object] = (),
        words: Mapping[str, str] | None = None,
        fds: Sequence[int] = (),
    ) -> None:
        """Start `python -P -m module arguments`; RankError where the system refuses."""
        command = [sys.executable, "-P", "-m", module, *map(str, arguments)]
        try:
            # A session of its own: Ctrl-C in a terminal is for the parent, which ends its ranks
            self.process = subprocess.Popen(
                command,
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **(words or {})},
            )
        except OSError as error:
            raise RankError(f"cannot start a process of the group ({error})") from None

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


class LocalLauncher:
    """Ranks as children of this process, on this machine."""

    host = "127.0.0.1"

    def launch(
        self, setup: PairSetup, module: str, words: Mapping[str, str], fds: Sequence[int]
    ) -> Member:
        """See Launcher."""
        return LocalProcess(module, words=words, fds=fds)

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
