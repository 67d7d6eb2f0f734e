"""Messages between processes come whole and in turn, errors as what they were."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from dovetail.ir.errors import (
    ArtifactError,
    CapacityError,
    DeviceError,
    LengthError,
    MissingKernelsError,
)
from dovetail.runtime.child.framing import (
    LENGTH,
    MAX_MESSAGE,
    READ_BYTES,
    Channel,
    ErrorText,
    pack_value,
)


class Note(msgspec.Struct):
    """Some numbers."""

    numbers: list[int]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, Channel(theirs)


def test_messages_are_read_until_the_peer_hangs_up(ends: tuple[socket.socket, Channel]) -> None:
    ours, channel = ends
    values = [Note([1]), Note([2, 3])]
    ours.sendall(pack_value(values[0]) + pack_value(values[1]) + pack_value(values[0])[:-1])
    assert [channel.receive(Note) for _ in values] == values
    ours.close()
    assert channel.receive(Note) is None


def test_what_has_come_is_known_before_it_is_read(ends: tuple[socket.socket, Channel]) -> None:
    ours, channel = ends
    pending = [channel.pending]
    ours.sendall(pack_value(Note([])) * 2)
    for _ in range(2):
        pending.append(channel.pending)
        channel.receive(Note)
    pending.append(channel.pending)
    ours.close()
    assert [*pending, channel.pending] == [False, True, True, False, True]


@pytest.mark.parametrize("most", [MAX_MESSAGE, 1 << 20])
def test_long_messages_come_whole_and_those_that_are_too_long_not_at_all(
    ends: tuple[socket.socket, Channel], most: int
) -> None:
    ours, channel = ends[0], Channel(ends[1].socket, most)
    long = Note([1] * (READ_BYTES + 1000))
    ours.sendall(pack_value(long)[:READ_BYTES])
    ours.sendall(pack_value(long)[READ_BYTES:] + LENGTH.pack(most + 1))
    assert channel.receive(Note) == long
    assert channel.receive(Note) is None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ArtifactError("no such file"), ArtifactError),
        (CapacityError("full", 2.5), CapacityError),
        (LengthError("too long", "inputs.a"), LengthError),
        (MissingKernelsError(Path("app.dove"), "generic", ()), ArtifactError),
        (ZeroDivisionError("by zero"), DeviceError),
    ],
)
def test_an_error_is_raised_by_its_name(
    ends: tuple[socket.socket, Channel], error: Exception, kind: type[Exception]
) -> None:
    ours, channel = ends
    ours.sendall(pack_value(ErrorText.of(error)))
    with pytest.raises(kind, match=re.escape(str(error))) as raised:
        channel.receive(Note)
    assert type(raised.value) is kind
    for detail in ("retry_after", "field"):
        assert getattr(raised.value, detail, None) == getattr(error, detail, None)
