"""When does the known queue end if all of it is started as fast as it can be, and runs together?

In: the `Demand` of `steady.py` and a predictor. Out: seconds of a layer. A short queue has no
steady state: its end is what its prompts take, and then a step for each token of the last one.
Or prompts are spread, so that each step has just enough of them to hide the CPU's decodes.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from dovetail.runtime.pipeline import MeanStep
from dovetail.runtime.plan import Limits

AGES = 16
"""Groups of about equal age that the requests which run already are taken for."""
MOST_STEPS = 64
"""Steps with prompts that are looked at one by one; in a longer queue one stands for several."""


class _Crowd:
    """Requests that run, in groups that began together: these end in that order."""

    def __init__(self, left: Sequence[int]) -> None:
        """left: tokens that each of them lacks, no more than any that begins later."""
        self.count = self.settled = float(len(left))  # settled: those of `left` that still run
        self._steps = 0
        size = max(1, math.ceil(len(left) / AGES))
        ages = [sorted(left)[i : i + size] for i in range(0, len(left), size)]
        ends = [(round(statistics.fmean(age)), len(age)) for age in ages]
        self._ends: deque[tuple[int, float, bool]] = deque((*end, True) for end in ends)

    @property
    def unchanged(self) -> int:
        """Steps until the first group ends, 0 if there is none."""
        return self._ends[0][0] - self._steps if self._ends else 0

    def pass_steps(self, steps: int) -> None:
        """Let all decode so often; who lacks nothing more goes."""
        self._steps += steps
        while self._ends and self._ends[0][0] <= self._steps:
            _, count, settled = self._ends.popleft()
            self.count -= count
            self.settled -= count * settled

    def join(self, count: float, left: int) -> None:
        """Take in so many that lack `left` tokens."""
        if count and left:
            self._ends.append((self._steps + left, count, False))
            self.count += count


class AtOnce:
    """Plays a queue forward: prompts fill the steps, and who runs decodes in every step."""

    def __init__(
        self, limits: Limits, step: MeanStep, on_gpu: int, *, closed: bool = False
    ) -> None:
        """on_gpu: requests the GPU holds at most; closed: none but those that run already."""
        self.limits, self.step, self.on_gpu, self.closed = limits, step, on_gpu, closed
        self._enough: dict[tuple[int, int], int] = {}

    def finish(
        self,
        waiting: int,
        left: Sequence[int],
        parts: float,
        answer: float,
        most: int,
        *,
        spread: bool = False,
    ) -> float:
        """Return the time of a layer until all have ended.

        `waiting` prompts of `parts` chunks each are to come; who runs lacks `left` tokens, each no
        more than `answer`.
        No more than `most` run at once: with those the GPU holds, it is the end without the CPU.
        spread: a step takes no more prompts than hide the CPU's decodes, if any number does.
        """
        length, chunks, seconds = max(1, round(answer)), round(waiting * parts), 0.0
        stride = max(1, chunks * self.step.prompt // self.limits.max_step_tokens // MOST_STEPS)
        crowd = _Crowd(left)
        while chunks or crowd.unchanged:
            running = round(crowd.count)
            on_gpu = min(running, self.on_gpu)
            if self.closed:
                on_gpu = min(on_gpu, round(crowd.settled))
            room = (self.limits.max_step_tokens - running) // self.step.prompt
            room = min(chunks, room, math.floor((most - running) * parts))
            if spread:
                least = max(math.ceil(parts), self._find_enough(on_gpu, running - on_gpu))
                room = min(room, least)
            taken = min(chunks, max(room, 0 if running else 1))
            steps = crowd.unchanged or 1
            if taken:
                steps = max(1, min(stride, steps, chunks // taken))
            seconds += steps * self.step.seconds(on_gpu, running - on_gpu, taken)
            crowd.pass_steps(steps)
            crowd.join(taken * steps / parts, length - 1)
            chunks -= taken * steps
        return seconds

    def _find_enough(self, on_gpu: int, on_cpu: int) -> int:
        """Return how few chunks of a step hide the decodes on the CPU; as many as fit if none do.

        Known ones are asked for again in most steps.
        """
        found = self._enough.get((on_gpu, on_cpu))
        if found is None:
            low, high = 0, self.limits.max_step_tokens // self.step.prompt
            while low < high:
                middle = (low + high) // 2
                if self.step.hides(on_gpu, on_cpu, middle):
                    high = middle
                else:
                    low = middle + 1
            found = self._enough[on_gpu, on_cpu] = low
        return found
