"""How long a step should take, as those before it did: what tells a long step from one that hangs.

In: the work of steps and their seconds. Out: predictions, rough ones: they are multiplied before
anything follows from them. Tables (`cost_tables.py`) are only there where devices are weighed.
"""

from __future__ import annotations

from typing import NamedTuple

from dovetail.runtime.schedule.plan import StepPlan

FEW = 32
"""Rows up to which a step waits for weights: it takes about as long as one of a single row."""
FRESH = 0.2
"""Weight of the newest step in a running mean."""
FIRST = 30.0
"""Seconds of a step while nothing is known: it may have to read weights, or build graphs."""


class StepWork(NamedTuple):
    """Rows of a step, and the keys that its prompts look at, summed over their rows."""

    rows: int
    keys: int

    @classmethod
    def of(cls, plan: StepPlan) -> StepWork:
        """Return the work of a plan."""
        rows = keys = 0
        for batch in plan.batches:
            rows += batch.tokens
            for chunk in batch.prefill:
                keys += chunk.length * (chunk.start + chunk.length)
        return cls(rows, keys)


class StepTimes:
    """Running means of steps of few rows, and of a row in others."""

    def __init__(self, keys_per_row: float) -> None:
        """`keys_per_row`: looking at so many keys takes as long as all products of a row."""
        self._keys_per_row = keys_per_row
        self._few: float | None = None
        self._row: float | None = None

    def predict(self, work: StepWork) -> float:
        """Return the seconds that a step should take."""
        if self._row is not None:
            return max(self._few or 0.0, self._row * max(FEW, self._rows(work)))
        if self._few is not None:
            return self._few * max(1.0, self._rows(work))
        return FIRST

    def learn(self, work: StepWork, seconds: float) -> None:
        """Take note of what a step took."""
        if 0 < work.rows <= FEW:
            self._few = _mean(self._few, seconds)
        elif work.rows:
            self._row = _mean(self._row, seconds / self._rows(work))

    def _rows(self, work: StepWork) -> float:
        return work.rows + work.keys / self._keys_per_row


def _mean(known: float | None, newest: float) -> float:
    return newest if known is None else known + FRESH * (newest - known)
