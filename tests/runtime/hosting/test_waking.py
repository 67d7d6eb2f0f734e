"""Calls from other threads reach the event loop in order, as many at once as have gathered."""

from __future__ import annotations

import asyncio
import threading

from dovetail.runtime.hosting.inbox import waking


def test_calls_of_a_thread_come_in_order_and_together() -> None:
    async def run() -> tuple[list[int], list[int]]:
        got: list[int] = []
        done = asyncio.Event()
        ring = [waking(lambda i=i: got.append(i)) for i in range(100)]  # type: ignore[misc]
        end = waking(done.set)
        thread = threading.Thread(target=lambda: [call() for call in (*ring, end)])
        thread.start()
        thread.join()  # the loop stands still: all has gathered
        before = list(got)
        await asyncio.sleep(0)
        await done.wait()
        return before, got

    before, got = asyncio.run(run())
    assert before == [] and got == list(range(100))


def test_what_is_rung_while_calls_are_made_is_called_too() -> None:
    async def run() -> None:
        done = asyncio.Event()
        second = waking(done.set)
        waking(second)()
        await done.wait()

    asyncio.run(run())


def test_a_loop_that_is_closed_stops_nobody() -> None:
    async def make() -> list[int]:
        got: list[int] = []
        kept.append(waking(lambda: got.append(1)))
        return got

    kept: list[object] = []
    got = asyncio.run(make())
    for call in kept:
        call()  # type: ignore[operator]
    assert got == []
