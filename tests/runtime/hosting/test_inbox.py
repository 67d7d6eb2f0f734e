"""Items cross threads once, in order, to a thread or an event loop."""

from __future__ import annotations

import asyncio
import threading

from dovetail.runtime.hosting.inbox import Inbox


def fill(box: Inbox[int]) -> None:
    for i in range(100):
        box.put(i)
    box.put(None)


def test_a_thread_reads_what_another_one_writes() -> None:
    box: Inbox[int] = Inbox()
    writer = threading.Thread(target=fill, args=(box,))
    writer.start()
    assert list(box) == list(range(100))
    assert list(box) == []  # the end stays
    writer.join()


def test_an_event_loop_reads_what_a_thread_writes() -> None:
    box: Inbox[int] = Inbox()

    async def read() -> list[int]:
        writing = asyncio.to_thread(fill, box)
        got = asyncio.create_task(collect(box))
        await writing
        return await got

    async def collect(box: Inbox[int]) -> list[int]:
        return [i async for i in box]

    assert asyncio.run(read()) == list(range(100))


def test_a_reader_whose_event_loop_has_gone_stops_nobody() -> None:
    box: Inbox[int] = Inbox()

    async def read_one() -> int:
        reader = aiter(box)
        box.put(1)
        return await anext(reader)

    assert asyncio.run(read_one()) == 1
    fill(box)
    assert list(box) == list(range(100))
