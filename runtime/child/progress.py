"""The progress of an engine's steps, in memory that its process shares with who watches it.

In: steps that begin, with their predictions, and that end. Out: two numbers, which are there to be
read also when the process is stopped or never gives up the interpreter.
"""

from __future__ import annotations

import mmap
from typing import Any

from dovetail.runtime.child.watch import Reading
from dovetail.runtime.machine.shared_memory import SharedMemory

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

    def end(self, predicted: float = 0.0) -> None:
        """Note that a step has ended, or that there was nothing to do.

        predicted: seconds of what goes on without a step.
        """
        self._cells[TURNS] += 1.0
        self._cells[PREDICTED] = predicted

    def read(self, *, busy: bool) -> Reading:
        """Return what a watcher looks at."""
        return Reading(busy, self._cells[TURNS], self._cells[PREDICTED])
