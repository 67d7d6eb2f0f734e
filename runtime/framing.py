"""Structs between processes: each as msgpack after its length, on a socket.

In: structs. Out: bytes, and structs again. A peer that has hung up, or sends what is too long, is
nobody any more: what would be received from it is None.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import TypeVar

import msgspec

LENGTH = struct.Struct("<q")
MAX_MESSAGE = 1 << 24
INLET_BYTES = 1 << 16

T = TypeVar("T")


def send_value(link: socket.socket, value: msgspec.Struct) -> None:
    """Send a struct after its length; a peer that is gone is noticed when it is read."""
    with suppress(OSError):
        link.sendall(pack_value(value))


def pack_value(value: msgspec.Struct) -> bytes:
    """Return a struct as a message."""
    data = msgspec.msgpack.encode(value)
    return LENGTH.pack(len(data)) + data


def receive_value(link: socket.socket, kind: type[T], most: int = MAX_MESSAGE) -> T | None:
    """Return the next struct, of at most `most` bytes, or None when the peer has hung up."""
    head = receive(link, LENGTH.size)
    length = LENGTH.unpack(head)[0] if head else 0
    data = receive(link, length) if 0 < length <= most else b""
    return msgspec.msgpack.decode(data, type=kind) if data else None


class Inlet:
    """Structs from one peer; those that have come already, and their lengths, take one read."""

    def __init__(self, link: socket.socket) -> None:
        """Only this may read from `link` from now on."""
        self._link, self._data = link, bytearray()

    @property
    def pending(self) -> bool:
        """Whether something has come that has not been returned yet: also that the peer is gone."""
        if not self._data:
            try:
                self._link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except OSError as error:
                return not isinstance(error, BlockingIOError)
        return True

    def receive(self, kind: type[T]) -> T | None:
        """Return the next struct, or None when the peer has hung up."""
        head = self._read(LENGTH.size)
        length = LENGTH.unpack(head)[0] if head else 0
        data = self._read(length) if 0 < length <= MAX_MESSAGE else b""
        return msgspec.msgpack.decode(data, type=kind) if data else None

    def _read(self, size: int) -> bytes:
        while len(self._data) < size:
            try:
                more = self._link.recv(max(INLET_BYTES, size - len(self._data)))
            except ConnectionError:
                return b""
            if not more:
                return b""
            self._data += more
        data = bytes(self._data[:size])
        del self._data[:size]
        return data


def receive(link: socket.socket, size: int) -> bytes:
    """Return exactly `size` bytes, or none when the peer has hung up."""
    try:
        data = link.recv(size, socket.MSG_WAITALL)
        while 0 < len(data) < size and (more := link.recv(size - len(data))):
            data += more
    except ConnectionError:
        return b""
    return data if len(data) == size else b""
