"""The edge of HTTP: bodies in within limits, JSON and event streams out, clients that go away.

In: Starlette requests. Out: decoded structs, and responses that end when their client does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec
import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dovetail.ir.errors import WorkflowError, describe_error
from dovetail.runtime.server.errors import ApiError, ClientGone, decode_error
from dovetail.runtime.server.schema import READ, WRITTEN

log = logging.getLogger("dovetail.server")
T = TypeVar("T")
MAX_SEEN = 256
"""Unknown fields that are told of; names are the clients' to make up."""
PING = b": ping\n\n"
"""A comment: keeps proxies from closing a stream in which nothing happens."""
DONE = b"data: [DONE]\n\n"
LENGTH_DIGITS = 19
"""Digits of a content-length: Python reads thousands in quadratic time, and more not at all."""
PADDING = b" " * 6
"""Behind a body: half a surrogate pair nearer to the end is told as one that was cut off."""
CLOSE = {"connection": "close"}
"""For replies to bodies that are not read to their end."""
STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
]


def _plain(value: object) -> object:
    """Return what JSON can hold of what a node of a workflow may write."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


_WRITTEN = msgspec.json.Encoder(enc_hook=_plain)


def encode_written(value: object) -> msgspec.Raw:
    """Return what a workflow wrote, or holds that, as JSON for a reply.

    Raises WorkflowError where functions of users made what JSON cannot hold.
    """
    try:
        return msgspec.Raw(_WRITTEN.encode(value))
    except Exception as error:  # half a surrogate, a circle, a text that fails to be made
        raise WorkflowError(
            f"what the workflow wrote cannot be sent as JSON: {describe_error(error)}; have its "
            "functions return plain values"
        ) from None


class JsonReply(Response):
    """A struct as JSON."""

    media_type = "application/json"

    def __init__(
        self, value: object, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(msgspec.json.encode(value), status, headers)


def event(value: object) -> bytes:
    """Return `value` as one server-sent event."""
    return b"data: %b\n\n" % msgspec.json.encode(value)


def named_event(name: str, value: object) -> bytes:
    """Return `value` as a server-sent event of a name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(value))


def last_event(error: ApiError) -> bytes:
    """Return what a stream of OpenAI's ends with where it fails."""
    return event(error.reply) + DONE


class UnknownFields:
    """Refuses fields that nobody reads and that ask for something; tells of others, once each."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def look(self, body: bytes | bytearray, kind: type, path: str) -> None:
        """Look at a body that was read as a `kind`; ApiError where it asks for what is not."""
        if not issubclass(kind, msgspec.Struct):
            return
        given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        unknown = given.keys() - {*kind.__struct_encode_fields__}
        neutral = WRITTEN if "stream" in kind.__struct_fields__ else READ
        for name in sorted(unknown & neutral.keys()):
            value = msgspec.json.decode(given[name])
            if value is not None and value not in neutral[name]:
                said = f"`{name}` is not supported by {path}; leave it out"
                raise ApiError(400, said, param=name, code="unsupported_parameter")
        found = sorted({name[:64] for name in unknown} - self._seen)[:16]
        if found and len(self._seen) < MAX_SEEN:
            self._seen.update(found)
            log.warning("%s: unknown fields are ignored: %s", path, ", ".join(map(repr, found)))


async def read_json(
    request: Request, kind: type[T], *, most: int, seconds: float, unknown: UnknownFields
) -> T:
    """Return the body as `kind`; `unknown` tells of fields that are not part of one.

    Raises ApiError where it is compressed, has more than `most` bytes, takes longer than `seconds`
    to come, or is not a `kind`; ClientGone where it ends early.
    """
    if (coding := request.headers.get("content-encoding", "identity")).lower() != "identity":
        said = f"bodies of the content-encoding {coding[:64]!r} are not read; send them plain"
        raise ApiError(415, said, headers=CLOSE)
    try:
        async with asyncio.timeout(seconds):
            body = await _read_body(request, most)
    except TimeoutError:
        message = f"the body did not arrive within {seconds:g} s"
        raise ApiError(408, message, headers=CLOSE) from None
    except ClientDisconnect:
        raise ClientGone from None
    try:
        found = msgspec.json.decode(body, type=kind)
        unknown.look(body, kind, request.url.path)
        return found
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise decode_error(error) from None


def body_length(request: Request) -> int | None:
    """Return the length that a body is said to have; None where it comes in chunks.

    Raises ApiError where that is no number, or has more digits than any.
    """
    said = request.headers.get("content-length")
    if said is None:
        return None
    if not said.isdecimal() or len(said) > LENGTH_DIGITS:
        message = f"the header `content-length` must be a number of {LENGTH_DIGITS} digits at most"
        raise ApiError(400, message, headers=CLOSE)
    return int(said)


async def _read_body(request: Request, most: int) -> bytearray:
    body = bytearray()
    if (body_length(request) or 0) > most:
        raise _too_large(most)
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise _too_large(most)
    body += PADDING
    return body


def _too_large(most: int) -> ApiError:
    said = f"the body has more than {most} bytes, the limit of this server"
    return ApiError(413, said, code="body_too_large", headers=CLOSE)


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Run the body while the client is there: it is cancelled and ClientGone raised where it goes.

    To be entered once the request's body has been read.
    """
    task, left = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = True
        task.cancel()

    watching = asyncio.ensure_future(watch())
    try:
        yield
    except asyncio.CancelledError:
        if left and not task.uncancel():
            raise ClientGone from None
        raise
    finally:
        watching.cancel()


class EventStream(Response):
    """Events as they come; a client that goes away ends them, silence is filled with comments.

    The head goes with the first event or comment: what goes wrong before is raised, later it is an
    event itself.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        ping_seconds: float,
        fail: Callable[[BaseException], bytes],
    ) -> None:
        """`fail` writes an error that comes when the status has been sent."""
        self._fail = fail
        self.status_code, self.background = 200, None
        self.raw_headers = STREAM_HEADERS
        self._events, self._ping = events, ping_seconds
        self._begun = False
        self._pinging: asyncio.Future[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; ClientGone where it is cut short."""
        self._out, self._loop = send, asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer = self._loop.call_later(self._ping, self._look)
        try:
            async with while_connected(receive):
                async for body in self._events:
                    await self._send(body)
                await self._send(b"", more=False)
        except (Exception, asyncio.CancelledError) as error:
            if not self._begun or isinstance(error, ClientGone):
                raise
            await self._send(self._fail(error), more=False)
        finally:
            self._timer.cancel()
            if self._pinging is not None:
                self._pinging.cancel()
            await self._events.aclose()

    async def _send(self, body: bytes, *, more: bool = True) -> None:
        self._last = self._loop.time()
        if not self._begun:
            self._begun = True
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await self._out(start)
        await self._out({"type": "http.response.body", "body": body, "more_body": more})

    def _look(self) -> None:
        """Send a comment if nothing was sent for long; look again when that may be so."""
        silence = self._loop.time() - self._last
        if silence >= self._ping:
            silence = 0.0
            if self._pinging is None or self._pinging.done():  # not while the client is slow
                self._pinging = asyncio.ensure_future(self._send(PING))
        self._timer = self._loop.call_later(self._ping - silence, self._look)
