"""Messages on their way to a process: whoever gives one never waits for that process.

In: packed messages, from any thread. Out: the same on its channel, in turn. Where the process does
not read for a while, a thread waits for it and sends what gathers; it hangs up on one that reads
nothing for `seconds`.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque

from dovetail.runtime.child.framing import Channel

TIMEOUT = struct.Struct("@ll")
GATHERED = 1 << 20
"""Bytes from which on messages are not gathered any more: they are sent first."""


class Outbox:
    """Messages for one process."""

    def __init__(self, channel: Channel, seconds: int) -> None:
        self._link = channel.socket
        self._link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, TIMEOUT.pack(seconds, 0))
        self._hang_up = channel.hang_up
        self._lock = threading.Lock()
        self._messages: deque[bytes] = deque()
        self._sending = False  # who sends takes what others give meanwhile, too

    def post(self, message: bytes) -> None:
        """Have a message sent; one to a process that has gone is lost, as those it had read."""
        try:
            if self._begins(message):
                self._send()
        except BaseException:  # part of a message may be out, and nobody sends what comes after
            self._hang_up()
            raise

    def _begins(self, message: bytes) -> bool:
        """Take a message; return whether nobody sends yet, and who gave it has to."""
        with self._lock:
            self._messages.append(message)
            sending, self._sending = self._sending, True
        return not sending

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
