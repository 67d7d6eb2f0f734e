"""What one thread tells another piece by piece: read by a thread or an event loop.

In: items, then the end; or calls. Out: each item once, in order, to one reader; calls in its event
loop. Who tells many readers of news wakes their loop once, not once for each.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Calls:
    """Calls for one thread, in order: it is woken once for all that come together. For any."""

    def __init__(self, wake: Callable[[Callable[[], None]], object]) -> None:
        """`wake` has a function called soon on that thread."""
        self._wake = wake
        self._calls: deque[Callable[[], object]] = deque()
        self._woken = False

    def add(self, call: Callable[[], object]) -> None:
        """Have `call` called there."""
        self._calls.append(call)
        if not self._woken:
            self._woken = True
            self._wake(self._answer)

    def _answer(self) -> None:
        self._woken = False  # first: what comes from now on wakes again
        for _ in range(len(self._calls)):
            self._calls.popleft()()


class LoopCalls(Calls):
    """Those for one event loop; a loop that is closed calls nothing."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(self._reach)
        self.loop = loop

    def _reach(self, answer: Callable[[], None]) -> None:
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(answer)


_own = threading.local()
"""`calls`: those for the event loop that runs on a thread."""


def waking(call: Callable[[], object]) -> Callable[[], None]:
    """Return what has `call` called in the running event loop, for other threads."""
    loop = asyncio.get_running_loop()
    calls: LoopCalls | None = getattr(_own, "calls", None)
    if calls is None or calls.loop is not loop:
        calls = _own.calls = LoopCalls(loop)
    return partial(calls.add, call)


class Inbox(Generic[T]):
    """Items on their way to their one reader."""

    def __init__(self) -> None:
        self._items: SimpleQueue[T | None] = SimpleQueue()  # None: the end
        self._wake: Callable[[], object] | None = None

    # ---- for the one who writes ----

    def put(self, item: T | None) -> None:
        """Add an item; None: nothing more comes."""
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
