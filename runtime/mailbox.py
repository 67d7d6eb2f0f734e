"""What one thread tells another piece by piece: read by a thread or an event loop.

In: items, then the end. Out: each item once, in order, to one reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from dovetail.runtime.bell import waking

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
            wake()

    # ---- for the one who reads ----

    def __iter__(self) -> Iterator[T]:
        """Yield items as they come, to the end."""
        while (item := self._items.get()) is not None:
            yield item
        self._items.put(None)  # who reads on finds the end again

    async def __aiter__(self) -> AsyncIterator[T]:
        """As iteration, in an event loop."""
        ready = asyncio.Event()
        self._wake = waking(ready.set)
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
