"""Tells a worker that hangs from one that is busy, and when one that ended gets a successor.

In: readings of a worker, taken now and then, and the time; how workers end. Out: words once one has
work and ended no part of it for too long; the pause before the successor, if there is to be one. A
thread of the worker that beats would beat on while its work stands still, so that only what the
work itself counts is looked at: `Progress`, in memory that a process shares, to be read also when
the process is stopped or never gives up the interpreter.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

from dovetail.runtime.machine.memory import SharedMemory

PATIENCE = 5.0
"""Seconds without progress that are never too long."""
SLACK = 10.0
"""Times its prediction that a step may take: predictions are rough, machines are shared."""
LOOKS = 10
"""Looks at a worker within `PATIENCE`."""
STARTS = 3
"""Workers in a row that end before they are of any use; what waits fails then."""
PAUSE = 0.1
"""Seconds before the second start in a row; twice as long before the third."""
STEADY = 60.0
"""Seconds after which a worker was of use, though nobody asked anything of it."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A worker as it is now.

    busy: whether it has work. turns: parts of its work that have ended since it began, in any unit
    that grows. predicted: seconds that the part under way should take, 0 where none has begun.
    """

    busy: bool
    turns: float
    predicted: float = 0.0


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

    def look(self, now: float, reading: Reading) -> str:
        """Take a reading in; return what is wrong with the worker, "" where nothing is."""
        last, self._last = self._last, (now, reading)
        moved = last is None or not last[1].busy or last[1].turns != reading.turns
        if moved or not reading.busy:
            self.stood = 0.0
            return ""
        assert last is not None
        self.stood += min(max(0.0, now - last[0]), 2 * self.step)
        bound = max(self.patience, SLACK * reading.predicted)
        if self.stood <= bound:
            return ""
        return f"hung: it had work but finished no step within {bound:.3g} s"


@dataclass(slots=True)
class Restarts:
    """When workers that end are followed by others. Pure: told how long each served.

    One that ends at its work was of use: what it was asked may be to blame, and who asked is told.
    """

    failed: int = 0  # in a row, of no use

    def end(self, seconds: float = 0.0, *, worked: bool = False) -> float | None:
        """Take an end in; return the pause before the next start, None where that is given up.

        seconds: that it served, 0 where it was never ready. worked: whether it had work or did any.
        """
        self.failed = 0 if worked or seconds >= STEADY else self.failed + 1
        if self.failed < STARTS:
            return PAUSE * self.failed
        self.failed = 0
        return None


TURNS, PREDICTED = 0, 1
"""Their places, 8 bytes each: single writes that no reader sees half of."""


class Progress:
    """Written by the thread that steps, and by who gives it work; any readers."""

    def __init__(self, memory: SharedMemory | None = None) -> None:
        """`memory`: a page of another process, by its descriptor."""
        self.memory = memory or SharedMemory.create(mmap.PAGESIZE)
        numbers: Any = self.memory.bytes
        self._cells = memoryview(numbers).cast("d")

    def begin(self, predicted: float) -> None:
        """Note that a step begins that should take so many seconds."""
        self._cells[PREDICTED] = predicted

    def tick(self) -> None:
        """Note that a part of what is under way has ended."""
        self._cells[TURNS] += 1.0

    def end(self, predicted: float = 0.0) -> None:
        """Note that a step has ended, or that there was nothing to do.

        predicted: seconds of what goes on without a step.
        """
        self.tick()
        self._cells[PREDICTED] = predicted

    def read(self, *, busy: bool) -> Reading:
        """Return what a watcher looks at."""
        return Reading(busy, self._cells[TURNS], self._cells[PREDICTED])
