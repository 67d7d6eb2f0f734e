"""The edge of HTTP: bodies in within limits, JSON and event streams out, clients that go away.

In: Starlette requests. Out: decoded structs, and responses that end when their client does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from dovetail.runtime.server.errors import ApiError, ClientGone, decode_error, tell

T = TypeVar("T")
PING = b": ping\n\n"
"""A comment: keeps proxies from closing a stream in which nothing happens."""
DONE = b"data: [DONE]\n\n"
CLOSE = {"connection": "close"}
"""For replies to bodies that are not read to their end."""
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


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


async def read_json(request: Request, kind: type[T], *, most: int, seconds: float) -> T:
    """Return the body as `kind`.

    Raises ApiError where it has more than `most` bytes, takes longer than `seconds` to come, or is
    not a `kind`; ClientGone where it ends early.
    """
    try:
        async with asyncio.timeout(seconds):
            body = await _read_body(request, most)
    except TimeoutError:
        message = f"the body did not arrive within {seconds:g} s"
        raise ApiError(408, message, headers=CLOSE) from None
    except ClientDisconnect:
        raise ClientGone from None
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise decode_error(error) from None


async def _read_body(request: Request, most: int) -> bytes:
    length = request.headers.get("content-length", "0")
    body = bytearray()
    if not (length.isdecimal() and int(length) <= most):
        raise _too_large(most)
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise _too_large(most)
    return bytes(body)


def _too_large(most: int) -> ApiError:
    return ApiError(
        413,
        f"the body may have {most} bytes",
        code="body_too_large",
        headers=CLOSE,
    )


async def gone(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_present(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it and raise ClientGone where the client goes away."""
    return await wait_first(request, asyncio.ensure_future(work), None)


async def wait_first(request: Request, task: asyncio.Future[T], seconds: float | None) -> T:
    """Return the result of `task`, as `while_present`.

    Raises TimeoutError after `seconds`; the task goes on then.
    """
    leaving = asyncio.ensure_future(gone(request.receive))
    try:
        both: set[asyncio.Future[Any]] = {task, leaving}
        await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if leaving.done():
            raise ClientGone
        raise TimeoutError
    except BaseException as error:
        if not isinstance(error, TimeoutError):
            await stop(task)
        raise
    finally:
        await stop(leaving)


async def stop(task: asyncio.Future[Any]) -> None:
    """Cancel `task` and wait for its end, whatever it is."""
    if not task.done():
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


class EventStream(Response):
    """Events as they come; a client that goes away ends them, silence is filled with comments."""

    media_type = "text/event-stream"

    def __init__(
        self, first: asyncio.Future[bytes], rest: AsyncGenerator[bytes], ping_seconds: float
    ) -> None:
        """`first` is the event that `rest` is making already."""
        self.status_code, self.background = 200, None
        self._first, self._rest, self._ping = first, rest, ping_seconds
        self.init_headers(STREAM_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; ClientGone where it is cut short."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(gone(receive))
        try:
            while not sending.done():
                done, _ = await asyncio.wait(
                    {sending, leaving}, timeout=self._ping, return_when=asyncio.FIRST_COMPLETED
                )
                if sending in done:
                    break
                if leaving in done:
                    raise ClientGone
                await send(_part(PING))
            await sending
        finally:
            await stop(leaving)
            await stop(sending)
            await stop(self._first)
            await self._rest.aclose()

    async def _send(self, send: Send) -> None:
        try:
            await send(_part(await self._first))
            async for body in self._rest:
                await send(_part(body))
            last = b""
        except Exception as error:  # the status has been sent: what is left is an event
            last = event(tell(error).reply) + DONE
        await send({"type": "http.response.body", "body": last, "more_body": False})


def _part(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}
