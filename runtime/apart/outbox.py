"""Orders on their way to the engine's process: whoever gives one never waits for that process.

In: orders, from any thread. Out: messages, each with all orders that have gathered. They are sent
on a thread of its own, which hangs up where the process reads nothing for `seconds`.
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue

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
        self._orders: SimpleQueue[Order | None] = SimpleQueue()  # None: the end
        self._thread = threading.Thread(target=self._run, name="dovetail-orders", daemon=True)
        self._thread.start()

    def post(self, order: Order) -> None:
        """Have an order sent; one to a process that has gone is lost, as those it had read."""
        self._orders.put(order)

    def close(self) -> None:
        """End the thread, after the process has hung up."""
        self._orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while orders := self._gather():
                self._link.sendall(pack_value(Orders(orders)))
        except OSError:  # it is gone, or has read nothing for long: its end is read elsewhere
            hang_up(self._link)

    def _gather(self) -> list[Order]:
        """Wait for orders; return those that are there and fit a message, none at the end."""
        found: list[Order] = []
        order, room = self._orders.get(), FULL
        with suppress(Empty):
            while order is not None:
                found.append(order)
                room -= order.tokens
                if room < 0:
                    return found
                order = self._orders.get_nowait()
            self._orders.put(None)  # found again next time
        return found


def hang_up(link: socket.socket) -> None:
    """End a connection; who reads from it is told."""
    with suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
