"""Orders as the engine's process reads them: at once, however many have come."""

from __future__ import annotations

import socket
from concurrent.futures import Future

from dovetail.runtime.apart.wire import Drop, Order, Orders
from dovetail.runtime.apart.worker import GATHER, Desk, take_orders
from dovetail.runtime.framing import pack_value


class Crowded(Desk):
    """A desk at which requests wait, whatever comes; keeps the orders."""

    def __init__(self) -> None:
        self.taken: list[Order] = []

    crowded = True

    def take(self, order: Order) -> None:
        self.taken.append(order)


def test_all_that_has_come_is_taken_before_more_gathers() -> None:
    ours, theirs = socket.socketpair()
    opened: Future[Desk] = Future()
    desk = Crowded()
    opened.set_result(desk)
    orders: list[Order] = [Drop((number,)) for number in range(200)]
    found: list[tuple[float, int]] = []

    def hang_up(seconds: float) -> None:
        found.append((seconds, len(desk.taken)))
        ours.close()

    with ours, theirs:
        for order in orders:
            ours.sendall(pack_value(Orders([order])))
        take_orders(theirs, opened, hang_up)
    assert desk.taken == orders
    assert found == [(GATHER, len(orders))], "(seconds, orders taken before) of each sleep"
