"""Orders on their way to the engine's process: whoever gives one never waits for that process.

In: encoded orders, from any thread. Out: messages. Where the process does not read for a while, a
thread waits for it, and sends what gathers; it hangs up on one that reads nothing for `seconds`.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque

import msgspec

from dovetail.runtime.apart.wire import PackedOrders
from dovetail.runtime.framing import MAX_MESSAGE, pack_value
from dovetail.runtime.launch import hang_up

TIMEOUT = struct.Struct("@ll")
FULL = MAX_MESSAGE // 2
"""Bytes of orders that one message gathers; an order that is longer goes alone."""


class Outbox:
    """Orders for one process."""

    def __init__(self, link: socket.socket, seconds: int) -> None:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, TIMEOUT.pack(seconds, 0))
        self._link = link
        self._lock = threading.Lock()
        self._orders: deque[msgspec.Raw] = deque()
        self._sending = False  # who sends takes what others give meanwhile, too

    def post(self, order: msgspec.Raw) -> None:
        """Have an order sent; one to a process that has gone is lost, as those it had read."""
        try:
            if self._begins(order):
                self._send()
        except BaseException:  # part of a message may be out, and nobody sends what comes after
            hang_up(self._link)
            raise

    def _begins(self, order: msgspec.Raw) -> bool:
        """Take an order; return whether nobody sends yet, and who gave it has to."""
        with self._lock:
            self._orders.append(order)
            sending, self._sending = self._sending, True
        return not sending

    def _send(self) -> None:
        """Send what there is, as far as the process has room for it."""
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
        except BaseException as error:
            hang_up(self._link)
            if not isinstance(error, OSError):  # it is gone, or has read nothing for long
                raise

    def _gather(self) -> bytes:
        """Return orders that have been given as a message; nothing, and nobody sends, if none."""
        with self._lock:
            orders: list[msgspec.Raw] = []
            room = FULL
            while self._orders and (not orders or len(self._orders[0]) <= room):
                orders.append(self._orders.popleft())
                room -= len(orders[-1])
            self._sending = bool(orders)
        return pack_value(PackedOrders(orders)) if orders else b""
