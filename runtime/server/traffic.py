"""Whether a server has requests under way, and when those have ended that began before something.

In: requests as they begin and end, on any thread. Out: callbacks when the first one
begins and the last one ends; an event for the end of all earlier ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from threading import Event, Lock


class Traffic:
    """Requests under way, in generations: `turn` begins the next one. For any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._now = 0
        self._counts: Counter[int] = Counter()  # requests by their generation, those under way
        self._ended: dict[int, Event] = {}  # by the generation that began with it
        self._busy: Callable[[], None] = lambda: None
        self._idle: Callable[[], None] = lambda: None

    def watch(self, busy: Callable[[], None], idle: Callable[[], None]) -> None:
        """Have `busy` called when the first request comes, `idle` when none is left."""
        with self._lock:
            self._busy, self._idle = busy, idle
            (busy if self._counts else idle)()

    def begin(self) -> int:
        """Note that a request has come; return its generation, for `end`."""
        with self._lock:
            first = not self._counts
            self._counts[self._now] += 1
            if first:
                self._busy()
            return self._now

    def end(self, generation: int) -> None:
        """Note that a request has ended, well or not."""
        with self._lock:
            self._counts[generation] -= 1
            if not self._counts[generation]:
                del self._counts[generation]
                self._set_ended()
            if not self._counts:
                self._idle()

    def turn(self) -> Event:
        """Begin a generation; return what is set once all requests of those before have ended."""
        with self._lock:
            self._now += 1
            ended = self._ended[self._now] = Event()
            self._set_ended()
            return ended

    def _set_ended(self) -> None:
        oldest = min(self._counts, default=self._now)
        for began in [n for n in self._ended if n <= oldest]:
            self._ended.pop(began).set()
