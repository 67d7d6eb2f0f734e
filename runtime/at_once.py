"""When does the known queue end if all of it is started as fast as it can be, and runs together?

In: the `Demand` of `steady.py` and a predictor. Out: seconds of a layer. A short queue has no
steady state: its end is what its prompts take, and then a step for each token of the last one.
Or prompts are spread, so that each step has just enough of them to hide the CPU's decodes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.runtime.pipeline import MeanStep
from dovetail.runtime.plan import Limits

AGES = 16
"""Groups of about equal age that the requests which run already are taken for."""
MOST_STEPS = 64
"""Steps with prompts that are looked at one by one; in a longer queue one stands for several."""


@dataclass(slots=True)
class _Group:
    """Requests that began together: how many, and the tokens each lacks."""

    count: float
    left: int


class AtOnce:
    """Plays a queue forward: prompts fill the steps, and who runs decodes in every step."""

    def __init__(self, limits: Limits, step: MeanStep, on_gpu: int) -> None:
        """on_gpu: requests the GPU holds at most."""
        self.limits, self.step, self.on_gpu = limits, step, on_gpu

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

        `waiting` prompts of `parts` chunks each are to come; who runs lacks `left` tokens.
        No more than `most` run at once: with those the GPU holds, it is the end without the CPU.
        spread: a step takes no more prompts than hide the CPU's decodes, if any number does.
        """
        length, chunks, seconds = max(1, round(answer)), round(waiting * parts), 0.0
        size = max(1, math.ceil(len(left) / AGES))
        ages = [sorted(left)[i : i + size] for i in range(0, len(left), size)]
        groups = [_Group(len(age), round(statistics.fmean(age))) for age in ages]
        stride = max(1, chunks * self.step.prompt // self.limits.max_step_tokens // MOST_STEPS)
        while chunks or groups:
            running = round(sum(group.count for group in groups))
            room = (self.limits.max_step_tokens - running) // self.step.prompt
            room = min(room, math.floor((most - running) * parts))
            if spread:
                room = self._enough(running, math.ceil(parts), min(chunks, room))
            taken = min(chunks, max(room, 0 if running else 1))
            steps = min((g.left for g in groups), default=1 if taken else 0)
            if taken:
                steps = max(1, min(stride, steps, chunks // taken))
            on_gpu = min(running, self.on_gpu)
            seconds += steps * self.step.seconds(on_gpu, running - on_gpu, taken)
            groups = [_Group(g.count, g.left - steps) for g in groups if g.left > steps]
            if taken and length > 1:
                groups.append(_Group(taken * steps / parts, length - 1))
            chunks -= taken * steps
        return seconds

    def _enough(self, running: int, least: int, room: int) -> int:
        """Return how many chunks hide the decodes on the CPU: `least` to `room` of them."""
        on_gpu = min(running, self.on_gpu)
        low, high = min(least, room), room
        while low < high:
            middle = (low + high) // 2
            if self.step.hides(on_gpu, running - on_gpu, middle):
                high = middle
            else:
                low = middle + 1
        return low
