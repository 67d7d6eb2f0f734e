"""A client for `http.py` that costs nearly nothing: HTTP/1.1 on connections that are open already.

In: bodies. Out: status, headers and the bytes of a reply. It knows what our server sends, no more.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

END = b"0\r\n\r\n"
"""The last piece of a chunked body."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply; header names are in small letters."""

    status: int
    headers: dict[str, str]
    body: bytes


class Connection:
    """One connection that is kept open; a request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, host: str, port: int) -> Connection:
        """Connect."""
        return cls(*await asyncio.open_connection(host, port, limit=1 << 24))

    async def post(self, path: str, body: bytes) -> Reply:
        """Send a body; return the reply once it is whole."""
        head = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        pairs = [line.split(": ", 1) for line in lines if line]
        headers = {name.lower(): value for name, value in pairs}
        if "content-length" in headers:
            found = await self._reader.readexactly(int(headers["content-length"]))
        else:
            found = await self._reader.readuntil(END)
        return Reply(int(first.split()[1]), headers, found)

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()
