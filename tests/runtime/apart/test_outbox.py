"""Orders on a socket: all arrive in turn, in messages that are read, or the socket is hung up."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from dovetail.runtime.apart.outbox import Outbox
from dovetail.runtime.apart.wire import MAX_ORDER, Drop, Order, Orders, Record, pack_order
from dovetail.runtime.framing import receive_value

WIDE = 1 << 40
"""A number that takes nine bytes; those below 128 take one."""


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(300)
        yield ours, theirs


def drop_of(size: int) -> Drop:
    """Return an order that takes `size` bytes."""
    wide, narrow = divmod(size - len(pack_order(Drop((1,) * (1 << 16)))) + (1 << 16), 9)
    return Drop((WIDE,) * wide + (1,) * narrow)


def test_orders_gather_in_messages_that_are_read(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """The first fills the socket; the others wait together, and are more than a message takes."""
    ours, theirs = ends
    longest, long = drop_of(MAX_ORDER), drop_of(MAX_ORDER // 3)
    assert len(pack_order(longest)) == MAX_ORDER
    given: list[Order] = [long, long, Record(on=True), long, longest, Record(on=False), long, long]
    outbox = Outbox(ours, 300)
    for order in given:
        outbox.post(pack_order(order))
    found: list[Order] = []
    counts = []
    while len(found) < len(given):
        message = receive_value(theirs, Orders)
        assert message is not None, "a message that is too long"
        counts.append(len(message.orders))
        found += message.orders
    assert found == given
    assert len(counts) < len(given), "each went alone"


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_error_on_the_way_hangs_up(
    ends: tuple[socket.socket, socket.socket],
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
) -> None:
    """Else all that comes later would wait for somebody who sends no more."""

    def fail(value: Any) -> bytes:
        raise error

    ours, theirs = ends
    outbox = Outbox(ours, 300)
    outbox.post(pack_order(Record(on=True)))
    assert receive_value(theirs, Orders) == Orders([Record(on=True)])
    monkeypatch.setattr("dovetail.runtime.apart.outbox.pack_value", fail)
    with pytest.raises(error):
        outbox.post(pack_order(Record(on=False)))
    assert receive_value(theirs, Orders) is None
