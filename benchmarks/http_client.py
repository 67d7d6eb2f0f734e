"""A client that costs nearly nothing: HTTP/1.1 on connections that are open already.

In: bodies. Out: status, headers and the bytes of a reply, or when the tokens of a stream came. It
knows what our server, llama.cpp's and vLLM's send, no more.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass

END = b"0\r\n\r\n"
"""The last piece of a chunked body."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply; header names are in small letters."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Stream:
    """When it was asked for, its first and last event came (`perf_counter`); its bytes."""

    sent: float
    first: float
    last: float
    body: bytes

    def tokens(self) -> int | None:
        """Return the tokens of the answer by the server's own count, None where it gave none."""
        found = re.findall(rb'"completion_tokens": ?(\d+)', self.body)
        return int(found[-1]) if found else None


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
        status, headers = await self._ask(path, body)
        if "content-length" in headers:
            found = await self._reader.readexactly(int(headers["content-length"]))
        else:
            found = await self._reader.readuntil(END)
        return Reply(status, headers, found)

    async def stream(self, path: str, body: bytes) -> Stream:
        """Send a body that asks for events; return when they came, once all are there.

        Raises SystemExit with the reply where it is none of events.
        """
        sent = time.perf_counter()
        status, headers = await self._ask(path, body)
        if status != 200:
            found = await self._reader.readexactly(int(headers.get("content-length", 0)))
            raise SystemExit(f"a stream failed with {status}: {found[-300:]!r}")
        found, first, last = b"", 0.0, 0.0
        while not found.endswith(END):
            piece = await self._reader.read(1 << 16)
            if not piece:
                raise SystemExit(f"a stream broke off: {found[-300:]!r}")
            found += piece
            if b"data: {" in piece:
                last = time.perf_counter()
                first = first or last
        return Stream(sent, first, last, found)

    async def _ask(self, path: str, body: bytes) -> tuple[int, dict[str, str]]:
        head = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        pairs = [line.partition(":") for line in lines if line]
        return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()
