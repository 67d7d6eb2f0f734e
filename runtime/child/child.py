"""A child process as its parent sees it: a process and the channel to it.

In: a module whose `serve` runs there (`worker.py`), and messages. Out: its answers, what it raised,
or how it ended.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec

from dovetail.ir.errors import DeviceError
from dovetail.runtime.child.framing import Channel
from dovetail.runtime.child.launch import CPUS, END_SECONDS, LocalProcess, Member, end_members

WORKER = "dovetail.runtime.child.worker"
GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR
"""What the socket of a process shows that has ended, whoever watches for it."""

T = TypeVar("T")


class StartError(DeviceError):
    """A child that could not be started, died before it was ready, or was not ready in time."""


class ChildLost(Exception):
    """A child has died, or says what it should not; how it ended, in words."""


class ChildLate(ChildLost):
    """A child has not answered in time."""


class Child:
    """A process that ends when its channel is hung up. `name`: what it is, in words."""

    def __init__(self, name: str, pid: int, member: Member, channel: Channel) -> None:
        self.name, self.pid, self.member, self.channel = name, pid, member, channel

    @classmethod
    def start(
        cls,
        module: str,
        what: str,
        *,
        fds: Sequence[int] = (),
        words: Mapping[str, str] | None = None,
        cpus: Sequence[int] = (),
        quiet: bool = False,
    ) -> Child:
        """Start a process that runs `serve` of `module`, with a channel and `fds`.

        `what` names it, with {} for the process's number. cpus: those it may use, () = all of this
        process's. For others see LocalProcess. Raises StartError where the system refuses.
        """
        ours, theirs = socket.socketpair()
        inherited = (theirs.fileno(), *fds)
        words = {**(words or {}), CPUS: ",".join(map(str, cpus))}
        try:
            member = LocalProcess(
                WORKER, (module, *inherited), words=words, fds=inherited, quiet=quiet
            )
        except OSError as error:
            ours.close()
            raise StartError(f"cannot start {what.format('')} ({error})") from error
        finally:
            theirs.close()
        pid = member.process.pid
        return cls(what.format(pid), pid, member, Channel(ours))

    def set_up(
        self, value: msgspec.Struct | None, kind: type[T], seconds: float | None = None
    ) -> T:
        """Return the first answer of a new child, as `ask`.

        Raises what it raised, StartError where none comes; then the child has ended.
        """
        try:
            return self.ask(value, kind, seconds)
        except ChildLost as lost:
            self.end()
            raise StartError(f"{self.name} {lost} on its start") from None
        except BaseException:
            self.end()
            raise

    def tell(self, value: msgspec.Struct) -> None:
        """Send a message; that the child is gone is noticed when it is asked."""
        with suppress(OSError):
            self.channel.send(value)

    def ask(self, value: msgspec.Struct | None, kind: type[T], seconds: float | None = None) -> T:
        """Send `value`, if it is one, and return the answer; ChildLate after `seconds`.

        Raises what the child raised, ChildLost where it has died.
        """
        try:
            self.channel.socket.settimeout(seconds)
            if value is not None:
                self.channel.send(value)
            found = self.channel.receive(kind)
            self.channel.socket.settimeout(None)
        except TimeoutError:
            raise ChildLate(f"did not answer in {seconds:g} s") from None
        except (OSError, msgspec.MsgspecError):
            found = None
        if found is None:
            raise ChildLost(self.member.wait(END_SECONDS) or "hung up")
        return found

    def end(self) -> str:
        """Hang up and wait: it goes by itself, else it is killed. Return how it ended, in words."""
        self.channel.socket.close()
        end_members([self.member])
        return self.member.wait(END_SECONDS) or "ended"

    def kill(self) -> None:
        """End it at once: it may be in the midst of anything."""
        self.member.kill()
        self.end()


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
