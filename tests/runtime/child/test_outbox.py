"""Messages on a socket: all arrive in turn, or the socket is hung up."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from dovetail.runtime.child.framing import GATHERED, Channel, Outbox, pack_value


class Note(msgspec.Struct):
    """A message of some bytes."""

    data: bytes


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(300)
        yield Channel(ours), Channel(theirs)


def test_messages_arrive_in_turn_whatever_their_length(ends: tuple[Channel, Channel]) -> None:
    """The first fills the socket; the others wait together, and are more than is gathered."""
    ours, theirs = ends
    sizes = [3 * GATHERED, GATHERED // 3, 1, GATHERED, 5 * GATHERED, 2, GATHERED // 2, GATHERED]
    given = [Note(bytes([place]) * size) for place, size in enumerate(sizes)]
    outbox = Outbox(ours, 300)
    for note in given:
        outbox.post(pack_value(note))
    assert [theirs.receive(Note) for _ in given] == given


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_error_on_the_way_hangs_up(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Else all that comes later would wait for somebody who sends no more."""

    def fail(outbox: Any) -> bytes:
        raise error

    ours, theirs = ends
    outbox = Outbox(ours, 300)
    outbox.post(pack_value(Note(b"a")))
    assert theirs.receive(Note) == Note(b"a")
    monkeypatch.setattr(Outbox, "_gather", fail)
    with pytest.raises(error):
        outbox.post(pack_value(Note(b"b")))
    assert theirs.receive(Note) is None
