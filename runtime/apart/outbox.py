"""Orders on their way to the engine's process: whoever gives one never waits for that process.

In: orders, from any thread. Out: messages. Where the process does not read for a while, a thread
waits for it, and sends what gathers; it hangs up on a process that reads nothing for `seconds`.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from contextlib import suppress

from dovetail.runtime.apart.wire import Order, Orders
from dovetail.runtime.ranks import pack_value

TIMEOUT = struct.Struct("@ll")
FULL = 1 << 20
"""Tokens of prompts after which a message takes no more orders."""


class Outbox:
    """Orders for one process."""

    def __init__(self, link: socket.socket, seconds: int) -> None:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, TIMEOUT.pack(seconds, 0))
        self._link = link
        self._lock = threading.Lock()
        self._orders: deque[Order] = deque()
        self._sending = False  # who sends takes what others give meanwhile, too

    def post(self, order: Order) -> None:
        """Have an order sent; one to a process that has gone is lost, as those it had read."""
        with self._lock:
            self._orders.append(order)
            if self._sending:
                return
            self._sending = True
        while message := self._gather():
            try:
                sent = self._link.send(message, socket.MSG_DONTWAIT)
            except OSError:  # the thread finds out which one
                sent = 0
            if sent < len(message):
                rest = message[sent:]
                threading.Thread(target=self._wait, args=(rest,), daemon=True).start()
                return

    def _wait(self, message: bytes) -> None:
        """Send what the process has no room for yet, and what comes meanwhile."""
        try:
            while message:
                self._link.sendall(message)
                message = self._gather()
        except OSError:  # it is gone, or has read nothing for long: its end is read elsewhere
            hang_up(self._link)

    def _gather(self) -> bytes:
        """Return orders that have been given as a message; nothing, and nobody sends, if none."""
        with self._lock:
            orders, room = [], FULL
            while self._orders and room > 0:
                orders.append(self._orders.popleft())
                room -= orders[-1].tokens
            self._sending = bool(orders)
        return pack_value(Orders(orders)) if orders else b""


def hang_up(link: socket.socket) -> None:
    """End a connection; who reads from it is told."""
    with suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
