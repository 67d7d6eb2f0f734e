"""Messages between two processes: structs as msgpack after their length, on a socket.

In: structs. Out: bytes, and structs again; an `ErrorText`, whose length is sent as a negative
number, is raised where it is received. A peer that has hung up, or sends what is too long, is
nobody any more: what would be received from it is None. Who gives a message to an `Outbox` never
waits for the peer.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import TypeVar

import msgspec

from dovetail.ir import errors
from dovetail.ir.errors import DeviceError, DovetailError

DETAILS = {"CapacityError": "retry_after", "LengthError": "field"}
"""What errors of a class tell beside their text."""
SENT_AS = {"MissingKernelsError": "ArtifactError", "SyntaxDiagnostic": "SpecError"}
"""Classes that are made of more than goes with a message, and what stands for them."""


class ErrorText(msgspec.Struct, frozen=True, array_like=True):
    """An error: its class in `ir.errors`, its text, and the detail that its class has."""

    kind: str
    message: str
    detail: float | str | None = None

    @classmethod
    def of(cls, error: BaseException) -> ErrorText:
        """Return an error as a message; one that is none of ours is a DeviceError's text."""
        kind = type(error).__name__
        if not isinstance(error, DovetailError):
            return cls("DeviceError", f"{kind}: {error}")
        return cls(SENT_AS.get(kind, kind), str(error), getattr(error, DETAILS.get(kind, ""), None))

    def make(self) -> DovetailError:
        """Return the error."""
        found = getattr(errors, self.kind, DeviceError)
        known = isinstance(found, type) and issubclass(found, DovetailError)
        detail = (self.detail,) if self.kind in DETAILS else ()
        return (found if known else DeviceError)(self.message, *detail)


LENGTH = struct.Struct("<q")
MAX_MESSAGE = 1 << 30
READ_BYTES = 1 << 16
"""Bytes asked of a socket at once: many small messages take one read."""

T = TypeVar("T")


def pack_value(value: msgspec.Struct) -> bytes:
    """Return a struct as a message."""
    data = msgspec.msgpack.encode(value)
    return LENGTH.pack(-len(data) if isinstance(value, ErrorText) else len(data)) + data


class Channel:
    """The connection to one peer. Any thread may send; one at a time receives."""

    def __init__(self, link: socket.socket, most: int = MAX_MESSAGE) -> None:
        """Only this may read from `link` from now on. `most`: bytes of a message."""
        self.socket, self._most = link, most
        self._data = bytearray()

    def send(self, value: msgspec.Struct) -> None:
        """Send a struct; OSError where the peer is gone."""
        self.socket.sendall(pack_value(value))

    @property
    def pending(self) -> bool:
        """Whether something has come that has not been returned yet: also that the peer is gone."""
        if not self._data:
            try:
                self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except OSError as error:
                return not isinstance(error, BlockingIOError)
        return True

    def receive(self, kind: type[T]) -> T | None:
        """Return the next struct, None when the peer has hung up; raises an error that it sent.

        Also TimeoutError after the socket's timeout, if it has one.
        """
        head = self._read(LENGTH.size)
        length = LENGTH.unpack(head)[0] if head else 0
        data = self._read(abs(length)) if 0 < abs(length) <= self._most else b""
        if data and length < 0:
            raise msgspec.msgpack.decode(data, type=ErrorText).make()
        return msgspec.msgpack.decode(data, type=kind) if data else None

    def messages(self, kind: type[T]) -> Iterator[T]:
        """Yield structs until the peer hangs up; raises as `receive`."""
        while (message := self.receive(kind)) is not None:
            yield message

    def hang_up(self) -> None:
        """End the connection; whoever reads from either end is told."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def _read(self, size: int) -> bytes | bytearray:
        while len(self._data) < size:
            try:
                more = self.socket.recv(max(READ_BYTES, size - len(self._data)))
            except ConnectionError:
                return b""
            if not more:
                return b""
            self._data += more
        data = self._data[:size]
        del self._data[:size]
        return data


TIMEOUT = struct.Struct("@ll")
GATHERED = 1 << 20
"""Bytes from which on messages are not gathered any more: they are sent first."""


class Outbox:
    """Packed messages for one peer, from any thread, sent in turn.

    Where it does not read for a while, a thread waits for it and sends what gathers.
    """

    def __init__(self, channel: Channel, seconds: int) -> None:
        """It hangs up on a peer that reads nothing for so many `seconds`."""
        self._link = channel.socket
        self._link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, TIMEOUT.pack(seconds, 0))
        self._hang_up = channel.hang_up
        self._lock = threading.Lock()
        self._messages: deque[bytes] = deque()
        self._sending = False  # who sends takes what others give meanwhile, too

    def post(self, message: bytes) -> None:
        """Have a message sent; one to a process that has gone is lost, as those it had read."""
        try:
            with self._lock:
                self._messages.append(message)
                sending, self._sending = self._sending, True
            if not sending:
                self._send()
        except BaseException:  # part of a message may be out, and nobody sends what comes after
            self._hang_up()
            raise

    def _send(self) -> None:
        """Send what there is, as far as the process has room for it."""
        while data := self._gather():
            try:
                sent = self._link.send(data, socket.MSG_DONTWAIT)
            except OSError:  # the thread finds out which one
                sent = 0
            if sent < len(data):
                rest = data[sent:]
                threading.Thread(target=self._wait, args=(rest,), daemon=True).start()
                return

    def _wait(self, data: bytes) -> None:
        """Send what the process has no room for yet, and what comes meanwhile."""
        try:
            while data:
                self._link.sendall(data)
                data = self._gather()
        except BaseException as error:
            self._hang_up()
            if not isinstance(error, OSError):  # it is gone, or has read nothing for long
                raise

    def _gather(self) -> bytes:
        """Return the bytes of messages that have been given; none, and nobody sends, if none."""
        with self._lock:
            found: list[bytes] = []
            while self._messages and (not found or sum(map(len, found)) < GATHERED):
                found.append(self._messages.popleft())
            self._sending = bool(found)
        return found[0] if len(found) == 1 else b"".join(found)
