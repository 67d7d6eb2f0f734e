"""Tells a worker that hangs from one that is busy: by the progress of its work and nothing else.

In: readings of a worker, taken now and then, and the time. Out: a `Hang` once it has work and ended
no part of it for too long. A thread of the worker that beats would beat on while its work stands
still, so that only what the work itself counts is looked at.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

PATIENCE = 5.0
"""Seconds without progress that are never too long."""
SLACK = 10.0
"""Times its prediction that a step may take: predictions are rough, machines are shared."""
LOOKS = 10
"""Looks at a worker within `PATIENCE`."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A worker as it is now.

    busy: whether it has work. turns: parts of its work that have ended since it began, in any unit
    that grows. predicted: seconds that the part under way should take, 0 where none has begun.
    """

    busy: bool
    turns: float
    predicted: float = 0.0


IDLE = Reading(busy=False, turns=0)


@dataclass(frozen=True, slots=True)
class Hang:
    """A worker had work, and ended no step within so many seconds."""

    seconds: float

    def __str__(self) -> str:
        return f"hung: it had work, and ended no step within {self.seconds:.3g} s"


@dataclass(slots=True)
class Watch:
    """Readings of one worker in turn. Pure: told the time.

    Only time that the one who looks was awake counts, `step` seconds at most between two looks: a
    machine that was suspended, or a server that was stopped together with its workers, says nothing
    of them.
    """

    patience: float = PATIENCE
    stood: float = 0.0
    """Seconds that the worker has had work without progress."""
    _last: tuple[float, Reading] | None = None

    @property
    def step(self) -> float:
        """Seconds between two looks."""
        return self.patience / LOOKS

    def look(self, now: float, reading: Reading) -> Hang | None:
        """Take a reading in; return what is wrong with the worker, None where nothing is."""
        last, self._last = self._last, (now, reading)
        moved = last is None or not last[1].busy or last[1].turns != reading.turns
        if moved or not reading.busy:
            self.stood = 0.0
            return None
        assert last is not None
        self.stood += min(max(0.0, now - last[0]), 2 * self.step)
        bound = max(self.patience, SLACK * reading.predicted)
        return Hang(bound) if self.stood > bound else None


class HangWatcher:
    """A thread that looks at one worker until it ends or hangs."""

    def __init__(
        self, read: Callable[[], Reading], hung: Callable[[Hang], object], patience: float
    ) -> None:
        """`hung` is called once, on the thread, which then ends."""
        self._read, self._hung, self._watch = read, hung, Watch(patience)
        self._ended = threading.Event()
        threading.Thread(target=self._look, name="dovetail-watch", daemon=True).start()

    def end(self) -> None:
        """Look no more."""
        self._ended.set()

    def _look(self) -> None:
        while not self._ended.wait(self._watch.step):
            if hang := self._watch.look(time.monotonic(), self._read()):
                self._hung(hang)
                return
