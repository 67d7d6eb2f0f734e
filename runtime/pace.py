"""How much longer the CPU's attention takes than its table says: a factor, learnt from steps.

In: seconds of attention, as told and as measured. Out: what to multiply the table by. It was
measured on an idle machine; beside the accelerator's work, or that of others, memory is shared.
"""

from __future__ import annotations

import statistics

from dovetail.runtime.recent import Recent

WINDOW = 32
"""Steps that are remembered; single ones, such as where the machine stopped, do not count."""
FEWEST = 4
"""Steps that an answer takes."""


class Pace:
    """`factor`: the median of measured over told seconds of the last steps, 1 if few are known."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._ratios: Recent[float] = Recent(WINDOW, FEWEST)

    def learn(self, told: float, measured: float) -> None:
        """Take note of a step's attention, in seconds by the table and as it was."""
        if told > 0.0 and measured > 0.0:
            self._ratios.add(measured / told)
            self._settle()

    def review(self) -> None:
        """Forget the oldest step where none came since the last call."""
        if self._ratios.review():
            self._settle()

    def _settle(self) -> None:
        self.factor = statistics.median(self._ratios.samples) if self._ratios.known else 1.0
