from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.types import Message

from dovetail.errors import DeviceError
from dovetail.runtime.server.edge import (
    DONE,
    MAX_SEEN,
    PING,
    EventStream,
    JsonReply,
    UnknownFields,
    last_event,
)
from dovetail.runtime.server.errors import ClientGone, to_api_error
from dovetail.runtime.server.schema import ChatRequest


class Client:
    """What a stream is sent to: it leaves when told to."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.leaving, self.pinged = asyncio.Event(), asyncio.Event()

    async def receive(self) -> Message:
        await self.leaving.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self.bodies.append(message["body"])
        if message.get("body") == PING:
            self.pinged.set()


async def stream(
    client: Client, events: AsyncGenerator[bytes], ping: float = 60, *, draining: bool = False
) -> None:
    def fail(error: BaseException) -> bytes:
        return last_event(to_api_error(error, draining=draining))

    scope: Any = {"type": "http"}
    await EventStream(events, ping, fail)(scope, client.receive, client.send)


def test_silence_is_filled_with_comments() -> None:
    async def run() -> list[bytes]:
        client = Client()

        async def events() -> AsyncGenerator[bytes]:
            yield b"one"
            await client.pinged.wait()
            yield b"two"

        await stream(client, events(), 0.01)
        return client.bodies

    bodies = asyncio.run(run())
    assert bodies[0] == b"one" and bodies[-2:] == [b"two", b""] and set(bodies[1:-2]) == {PING}


def test_a_client_that_leaves_ends_the_events() -> None:
    ended = []

    async def run() -> None:
        client = Client()

        async def events() -> AsyncGenerator[bytes]:
            try:
                yield b"one"
                client.leaving.set()
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        await stream(client, events())

    with pytest.raises(ClientGone):
        asyncio.run(run())
    assert ended == [True]


@pytest.mark.parametrize(
    ("error", "said"),
    [(DeviceError("a step failed"), b"a step failed"), (KeyError("secret"), b"fault of its own")],
)
def test_what_fails_on_the_way_is_an_event(error: Exception, said: bytes) -> None:
    async def run() -> list[bytes]:
        client = Client()

        async def events() -> AsyncGenerator[bytes]:
            yield b"one"
            raise error

        await stream(client, events())
        return client.bodies

    bodies = asyncio.run(run())
    assert bodies[0] == b"one" and said in bodies[1] and bodies[1].endswith(DONE)
    assert b"secret" not in bodies[1]


@pytest.mark.parametrize(
    ("draining", "said"), [(True, b"has stopped"), (False, b"fault of its own")]
)
def test_a_stream_that_is_cancelled_says_why_at_its_end(draining: bool, said: bytes) -> None:
    """The server stopped waiting for it, or something went wrong that is no fault of the client."""

    async def run() -> list[bytes]:
        client, begun = Client(), asyncio.Event()

        async def events() -> AsyncGenerator[bytes]:
            yield b"one"
            begun.set()
            await asyncio.Event().wait()

        task = asyncio.ensure_future(stream(client, events(), draining=draining))
        await begun.wait()
        task.cancel()
        await task
        return client.bodies

    bodies = asyncio.run(run())
    assert bodies[0] == b"one" and said in bodies[1] and bodies[1].endswith(DONE)


def test_a_reply_that_cannot_be_made_is_our_fault(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UnicodeEncodeError) as caught:
        JsonReply({"text": "\ud800"})
    assert "fault of its own" in to_api_error(caught.value, draining=False).message
    assert "because of a bug" in caplog.text


def test_fields_that_nobody_reads_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    unknown, path = UnknownFields(), "/v1/chat/completions"
    body = b'{"messages": [], "temprature": 1, "best": {"of": [3]}}'
    for _ in range(2):
        unknown.look(body, ChatRequest, path)
    unknown.look(b'{"temprature": 1, "max_tokens": 2}', ChatRequest, path)
    unknown.look(b'{"stop_words": 1}', ChatRequest, path)
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: unknown fields are ignored: 'best', 'temprature'",
        f"{path}: unknown fields are ignored: 'stop_words'",
    ]


def test_made_up_names_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    unknown = UnknownFields()
    for turn in range(1000):
        unknown.look(f'{{"x\\n{turn}{"y" * 200}": 1}}'.encode(), ChatRequest, "/")
    assert len(caplog.records) == MAX_SEEN
    assert all(len(record.getMessage().splitlines()[0]) < 120 for record in caplog.records)
