"""Waking an event loop from other threads: all that is to be done by then takes one call.

In: calls on any thread. Out: the same calls in the event loop. Who tells many readers of news
wakes their loop once, not once for each.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress


class Bell:
    """Calls for one event loop, in order. For any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[Callable[[], object]] = deque()
        self._rung = False

    def ring(self, call: Callable[[], object]) -> None:
        """Have `call` called in the event loop; a loop that is closed calls nothing."""
        self._calls.append(call)
        if not self._rung:
            self._rung = True
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._rung = False  # first: what comes from now on rings again
        while self._calls:
            self._calls.popleft()()


class _Own(threading.local):
    """The bell of the event loop that runs on a thread."""

    bell: Bell | None = None


_own = _Own()


def waking(call: Callable[[], object]) -> Callable[[], None]:
    """Return what has `call` called in the running event loop, for other threads."""
    loop = asyncio.get_running_loop()
    if _own.bell is None or _own.bell.loop is not loop:
        _own.bell = Bell(loop)
    bell = _own.bell
    return lambda: bell.ring(call)
