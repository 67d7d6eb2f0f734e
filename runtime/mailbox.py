"""What one thread tells another piece by piece: read by a thread, an event loop, or a driver.

In: items, then the end. Out: each item once, in order, to one reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Items on their way to their one reader."""

    def __init__(self) -> None:
        self._items: SimpleQueue[T | None] = SimpleQueue()  # None: the end
        self._wake: Callable[[], object] | None = None

    # ---- for the one who writes ----

    def put(self, item: T) -> None:
        """Add an item."""
        self._put(item)

    def close(self) -> None:
        """Say that nothing more comes."""
        self._put(None)

    def _put(self, item: T | None) -> None:
        self._items.put(item)
        wake = self._wake
        if wake is not None:
            try:
                wake()
            except RuntimeError:  # its event loop has been closed: nobody reads any more
                self._wake = None

    # ---- for the one who reads ----

    def __iter__(self) -> Iterator[T]:
        """Yield items as they come, to the end."""
        while (item := self._items.get()) is not None:
            yield item
        self._items.put(None)  # who reads on finds the end again

    async def __aiter__(self) -> AsyncIterator[T]:
        """As iteration, in an event loop."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(ready.set)
        while True:
            try:
                item = self._items.get_nowait()
            except Empty:
                await ready.wait()
                ready.clear()
                continue
            if item is None:
                self._items.put(None)
                return
            yield item

    def watch(self, wake: Callable[[], object]) -> None:
        """Have `wake` called, on the writer's thread, now and whenever there is news."""
        self._wake = wake
        wake()

    def take(self) -> list[T]:
        """Return the items that are there, at once."""
        taken: list[T] = []
        while True:
            try:
                item = self._items.get_nowait()
            except Empty:
                return taken
            if item is not None:
                taken.append(item)
