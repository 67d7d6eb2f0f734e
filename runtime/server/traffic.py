"""Which requests a server has under way, and when given ones have ended.

In: requests as they begin and end, on any thread. Out: callbacks when the first one begins and the
last one ends.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from itertools import count
from threading import Condition


class Traffic:
    """Requests under way, by number. For any thread."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._numbers = count()
        self._under_way: set[int] = set()
        self._busy: Callable[[], None] = lambda: None
        self._idle: Callable[[], None] = lambda: None

    def watch(self, busy: Callable[[], None], idle: Callable[[], None]) -> None:
        """Have `busy` called when the first request comes, `idle` when none is left."""
        with self._changed:
            self._busy, self._idle = busy, idle
            (busy if self._under_way else idle)()

    def begin(self) -> int:
        """Note that a request has come; return its number, for `end`."""
        with self._changed:
            number = next(self._numbers)
            self._under_way.add(number)
            if len(self._under_way) == 1:
                self._busy()
            return number

    def end(self, number: int) -> None:
        """Note that a request has ended, well or not."""
        with self._changed:
            self._under_way.remove(number)
            self._changed.notify_all()
            if not self._under_way:
                self._idle()

    def under_way(self) -> frozenset[int]:
        """Return the numbers of the requests that have not ended."""
        with self._changed:
            return frozenset(self._under_way)

    def wait_for(self, requests: Set[int]) -> None:
        """Return once all of these requests have ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._under_way.isdisjoint(requests))
