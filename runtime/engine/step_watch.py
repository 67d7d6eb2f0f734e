"""What is told of steps to who watches an engine: how long each should take, and their rows.

In: the plans of steps and their seconds. Out: predictions, which tell a long step from one that
hangs, and a histogram. They are rough: they are multiplied before anything follows from them.
Tables (`cost_tables.py`) are only there where devices are weighed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dovetail.runtime.engine.tally import Tally
from dovetail.runtime.schedule.plan import StepPlan

STEP_TOKENS = (1, 8, *(2**e for e in range(4, 15)))
"""Bounds by which steps are counted by the tokens they compute: vLLM's."""
KEYS_PER_ROW = 6
"""Keys, for each value of a hidden state, whose attention takes as long as a row's products."""
FEW = 32
"""Rows up to which a step waits for weights: it takes about as long as one of a single row."""
FRESH = 0.2
"""Weight of the newest step in a running mean."""
FIRST = 30.0
"""Seconds of a step while nothing is known: it may have to read weights, or build graphs. Also of a
grammar that is read: where many programs want the CPU, loading its library alone takes seconds."""


class StepWork(NamedTuple):
    """Rows of a step, the keys that its prompts look at, summed over their rows, and these rows."""

    rows: int
    keys: int
    prompts: int = 0

    @classmethod
    def of(cls, plan: StepPlan) -> StepWork:
        """Return the work of a plan."""
        rows = keys = prompts = 0
        for batch in plan.batches:
            rows += batch.tokens
            for chunk in batch.prefill:
                keys += chunk.length * (chunk.start + chunk.length)
                prompts += chunk.length
        return cls(rows, keys, prompts)


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


class StepWatch:
    """Tells `announce` when something begins, and the seconds that it should take."""

    def __init__(self, hidden_size: int, announce: Callable[[float], object]) -> None:
        self.announce = announce
        self.tokens = Tally(STEP_TOKENS)
        """The rows of steps that were computed."""
        self.prompt_tokens = 0  # of those
        self._times = StepTimes(KEYS_PER_ROW * hidden_size)

    def begin(self, plan: StepPlan) -> StepWork:
        """Tell of a step."""
        work = StepWork.of(plan)
        self.announce(max(plan.predicted_seconds, self._times.predict(work)))
        return work

    def end(self, work: StepWork, seconds: float) -> None:
        """Take note of what a step took that has been computed."""
        if work.rows:
            self.tokens.add(work.rows)
            self.prompt_tokens += work.prompts
            self._times.learn(work, seconds)


def _mean(known: float | None, newest: float) -> float:
    return newest if known is None else known + FRESH * (newest - known)
