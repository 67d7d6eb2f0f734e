"""Whether a server has requests under way, and when those have ended that began before something.

In: requests as they begin and end, on any thread. Out: calls of a watcher when the first one
begins and the last one ends; an event for the end of all earlier ones.
"""

from __future__ import annotations

from threading import Event, Lock
from typing import Protocol


class Watcher(Protocol):
    """Is told when a server becomes busy or idle. Its calls return at once."""

    def busy(self) -> None:
        """Hear that a request has come."""

    def idle(self) -> None:
        """Hear that none is left."""


class Traffic:
    """Requests under way, in generations: `turn` begins the next one. For any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._now, self._counts = 0, {0: 0}
        self._ended: dict[int, Event] = {}
        self._watcher: Watcher | None = None

    def watch(self, watcher: Watcher) -> None:
        """Have `watcher` told from now on."""
        with self._lock:
            self._watcher = watcher
            self._tell()

    def begin(self) -> int:
        """Note that a request has come; return its generation, for `end`."""
        with self._lock:
            self._counts[self._now] += 1
            if sum(self._counts.values()) == 1:
                self._tell()
            return self._now

    def end(self, generation: int) -> None:
        """Note that a request has ended, well or not."""
        with self._lock:
            self._counts[generation] -= 1
            self._forget()
            if not any(self._counts.values()):
                self._tell()

    def turn(self) -> Event:
        """Begin a generation; return what is set once all requests of those before have ended."""
        with self._lock:
            before, ended = self._now, Event()
            self._now += 1
            self._counts[self._now] = 0
            self._ended[before] = ended
            self._forget()
            return ended

    def _forget(self) -> None:
        """Set what waits for the end of generations that have ended."""
        for past in [n for n, count in self._counts.items() if n < self._now and not count]:
            del self._counts[past]
        for past in [n for n in self._ended if min(self._counts) > n]:
            self._ended.pop(past).set()

    def _tell(self) -> None:
        if self._watcher is not None:
            (self._watcher.busy if any(self._counts.values()) else self._watcher.idle)()
