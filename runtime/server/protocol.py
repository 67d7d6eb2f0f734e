"""HTTP/1.1 within bounds: what a client may send, and how slowly, before anybody knows its key.

In: the bytes of a connection. Out: requests for the application; 400, 408 and 431 in the envelope
of all errors. The parser keeps a header until it is whole and copies it for each piece that comes,
so what may come without a step forward is bounded: its work is then linear in bytes.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from dovetail.runtime.server.errors import ApiError
from dovetail.runtime.server.generation import new_id

HEAD_BYTES = 1 << 16
"""Of address and headers together; and of framing, between two bytes of a body."""
HEADERS = 128
LINGER_SECONDS, LINGER_BYTES = 1.0, 1 << 18
"""A refused client is read so long and so far, unheeded: a closed socket would take the reply away.
"""


class BoundedProtocol(HttpToolsProtocol):
    """A connection. A deadline runs while its client owes what nothing else waits for.

    That is a head that has not come in whole, and the rest of a body that has had its reply.
    """

    def __init__(self, *args: Any, head_seconds: float, **named: Any) -> None:
        super().__init__(*args, **named)
        self._seconds = head_seconds
        self._deadline: asyncio.TimerHandle | None = None
        self._in_head = self._in_body = self._refused = self._moved = False
        self._headers = self._size = 0  # of this request
        self._stuck = 0  # bytes since the last step forward; once refused, since then
        self._fault: ApiError | None = None  # why a callback stopped the parser
        self._cycles: list[RequestResponseCycle] = []  # requests that have come, the newest last

    # ---- the connection ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, not for ever."""
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadline, and tell all requests: uvicorn tells the newest alone."""
        self._disarm()
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, unless the client has been refused."""
        if self._refused:
            self._stuck += len(data)
            if self._stuck > LINGER_BYTES:
                self.transport.close()
            return
        if not self._in_body:
            self._arm()
        self._moved = False
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse(self._fault or ApiError(400, "the request is not valid HTTP/1.1"))
        self._stuck = 0 if self._moved else self._stuck + len(data)
        if self._stuck > HEAD_BYTES and not self._refused:
            self._refuse(_too_large())

    def _parse(self, data: bytes) -> None:
        """Parse bytes; another protocol that a client offers, as HTTP/2, is not taken up.

        The parser ends at such a head, without its body: another one gets that head without the
        offer. Java's client makes it with every first request.
        """
        self._unset_keepalive_if_required()
        left = memoryview(data)
        while left:
            try:
                self.parser.feed_data(left)
                return
            except httptools.HttpParserUpgrade as offer:
                head, left = self._without_offer(), left[offer.args[0] :]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            self.parser.feed_data(head)

    def _without_offer(self) -> bytes:
        """Return the head that has just come, without its offer of another protocol."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            raise httptools.HttpParserError
        kept = [b": ".join(pair) for pair in self.headers if pair[0] != b"upgrade"]
        return b"\r\n".join([b"%b %b HTTP/%b" % (method, self.url, version), *kept, b"\r\n"])

    # ---- the parser's callbacks ----

    def on_message_begin(self) -> None:
        """Count anew."""
        super().on_message_begin()
        self._headers = self._size = 0
        self._in_head = True
        self._arm()

    def on_url(self, url: bytes) -> None:
        """Take a part of the address."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or one behind a body in chunks."""
        self._headers += 1
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin the request: its body is timed by who reads it."""
        if self.parser.should_upgrade():
            return
        self._in_head, self._in_body, self._moved = False, True, True
        self._disarm()
        super().on_headers_complete()
        left = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles = [*left, self.cycle]

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._moved = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request."""
        if self.parser.should_upgrade():
            return
        self._in_body, self._moved = False, True
        self._disarm()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Have the rest of the body come soon, if there is one: nobody reads it."""
        super().on_response_complete()
        if self._in_body:
            self._arm()

    # ---- bounds ----

    def _count(self, size: int) -> None:
        self._size += size
        if self._headers > HEADERS or self._size > HEAD_BYTES:
            self._fault = _too_large()
            raise self._fault  # which stops the parser

    def _arm(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._seconds, self._expire)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        if self.transport.is_closing() or self._refused:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._arm()  # a reply is under way; the next request has time until it has ended
        elif self._in_body or not (self._in_head or self._stuck):
            self.transport.close()
        else:
            said = f"the headers did not arrive within {self._seconds:g} s"
            self._refuse(ApiError(408, said))

    def _refuse(self, error: ApiError) -> None:
        """Send a reply, unless one is under way, and close."""
        self._refused, self._stuck = True, 0
        self._disarm()
        self._unset_keepalive_if_required()
        cycle = self.cycle
        under_way = cycle is not None and not cycle.response_complete
        if under_way:  # its task is told that the client has gone, and sends nothing more
            cycle.disconnected = True
            cycle.message_event.set()
        if self.pipeline or (under_way and cycle.response_started):
            self.transport.close()
            return
        body = msgspec.json.encode(error.reply)
        head = (
            b"content-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\nx-request-id: %b\r\n\r\n"
        )
        self.transport.write(
            STATUS_LINE[error.status] + head % (len(body), new_id("req").encode()) + body
        )
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(LINGER_SECONDS, self.transport.close)
        else:
            self.transport.close()


def _too_large() -> ApiError:
    said = f"a request may have {HEADERS} headers, with its address {HEAD_BYTES} bytes in all"
    return ApiError(431, said)
