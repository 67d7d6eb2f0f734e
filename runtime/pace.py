"""How much longer the CPU's attention takes than its table says: a factor, learnt from steps.

In: seconds of attention, as told and as measured. Out: what to multiply the table by. It was
measured on an idle machine; beside the accelerator's work, or that of others, memory is shared.
"""

from __future__ import annotations

import statistics
from collections import deque

WINDOW = 32
"""Steps that are remembered; single ones, such as where the machine stopped, do not count."""
FEWEST = 4
"""Steps before the first answer."""


class Pace:
    """`factor`: the median of measured over told seconds of the last steps, 1 until some told."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._ratios: deque[float] = deque(maxlen=WINDOW)

    def learn(self, told: float, measured: float) -> None:
        """Take note of a step's attention, in seconds by the table and as it was."""
        if told <= 0.0 or measured <= 0.0:
            return
        self._ratios.append(measured / told)
        if len(self._ratios) >= FEWEST:
            self.factor = statistics.median(self._ratios)
