"""How late the CPU's attention of a stage is: seconds that no table tells, learnt from steps.

In: stages as predicted, what the step took. Out: seconds to count for every such stage. Starting
the attention, copies of queries and results, other work on the machine: whatever it is, steps of
more CPU requests pay it less often, so those who plan must know of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.runtime.recent import Recent

WINDOW = 64
"""Steps that are remembered."""
LEARN_EVERY = 8
"""Steps between two answers."""
FEWEST = 16
"""Steps before the first answer: single ones say little."""
LONGEST = 4.0
"""What a step took counts up to so many times its prediction: a stop of the machine is no cost."""
TOLERANCE = 0.01
"""Mean error of predictions that counts as none."""
HALVINGS = 24
"""Of the range in which the answer is looked for."""

Stages = tuple[tuple[float, float], ...]
"""Seconds of a layer's stages on the accelerator and on the CPU, 0 where that has no part."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A step in seconds of a layer: its stages as the tables tell them, and what it took."""

    stages: Stages
    seconds: float

    def error(self, late: float) -> float:
        """Return by which part of its time the step was longer than predicted."""
        told = sum(max(gpu, cpu + late if cpu else 0.0) for gpu, cpu in self.stages)
        return (self.seconds - told) / self.seconds


class Lateness:
    """`seconds` to add to each stage of CPU attention so that recent steps are told right.

    The least such number: where attention stays hidden nothing can be seen of it, and none is
    added. Errors of steps are averaged in parts of their time, as is the noise of machines.
    """

    def __init__(self, first: float = 0.0) -> None:
        """first: the answer until steps have told, and when what they told is forgotten."""
        self.seconds = self.first = first
        self._steps: Recent[_Step] = Recent(WINDOW, FEWEST)
        self._seen = 0

    def learn(self, stages: Stages, seconds: float) -> None:
        """Take note of a step: its stages by the tables, and what it took, both for one layer."""
        told = sum(max(stage) for stage in stages)
        if told <= 0.0 or seconds <= 0.0:
            return
        self._steps.add(_Step(stages, min(seconds, LONGEST * told)))
        self._seen += 1
        if self._steps.known and self._seen % LEARN_EVERY == 0:
            self.seconds = self._solve()

    def review(self) -> None:
        """Forget the oldest step where none came since the last call; with the last, the answer."""
        if self._steps.review() and not self._steps.known:
            self.seconds = self.first

    def _error(self, late: float) -> float:
        steps = self._steps.samples
        return sum(step.error(late) for step in steps) / len(steps)

    def _solve(self) -> float:
        """Return the least lateness by which the steps are not longer than predicted."""
        if self._error(0.0) <= TOLERANCE:
            return 0.0
        low, high = 0.0, max(step.seconds for step in self._steps.samples)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._error(middle) > 0.0 else (low, middle)
        return high
