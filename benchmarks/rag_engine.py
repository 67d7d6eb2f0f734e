"""An engine that only takes time: continuous batching with scripted replies.

In: `Generate` orders. Out: seconds of each step, and at its end the reports that fall due. What the
emulated device does for one model's kernels, at the level of whole steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dovetail.ir.workflow import Name
from dovetail.runtime.wavefront.messages import Finished, Generate, Progressed, Report
from rag_costs import EngineCost
from rag_script import count_tokens

STEP_TOKENS = 2048
"""Prompt tokens that a step computes at most, but for one prompt that is longer."""
MOST_SEQUENCES = 256

Reply = Callable[[Name, int, str], str]
"""Node, round and prompt -> what the model says."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A reply on its way."""

    order: Generate
    words: list[str]
    prompt: int
    done: int = 0

    @property
    def text(self) -> str:
        """What is written so far."""
        return " ".join(self.words[: self.done])


class ScriptedEngine:
    """First come, first served: prompts whole, all decodes in each step."""

    def __init__(self, cost: EngineCost, reply: Reply) -> None:
        self._cost, self._reply = cost, reply
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._fresh: list[Sequence] = []  # prompts of the step under way
        self._gone: set[int] = set()
        self.delay = 0.0  # seconds that others used the device since the last step
        self.tokens = 0

    def add(self, order: Generate) -> None:
        """Take an order."""
        words = self._reply(order.source.node, order.source.round, order.prompt).split(" ")
        self._waiting.append(Sequence(order, words, count_tokens(order.prompt)))

    def cancel(self, job: int) -> None:
        """Drop a job, if it is there; one in the step under way leaves at its end."""
        self._gone.add(job)

    def begin_step(self) -> float | None:
        """Begin a step and return its seconds; None where there is nothing to do."""
        self._drop()
        room = MOST_SEQUENCES - len(self._running)
        tokens = 0
        while self._waiting and room:
            tokens += self._waiting[0].prompt
            if self._fresh and tokens > STEP_TOKENS:
                break
            self._fresh.append(self._waiting.popleft())
            room -= 1
        if not self._fresh and not self._running:
            return None
        stored = sum(sequence.prompt + sequence.done for sequence in self._running)
        prompts = [sequence.prompt for sequence in self._fresh]
        seconds = self._cost.seconds(prompts, len(self._running), stored) + self.delay
        self.delay = 0.0
        return seconds

    def end_step(self) -> list[Report]:
        """End the step; return what is to be told."""
        self._running += self._fresh
        self._fresh = []
        self._drop()
        reports: list[Report] = []
        left = []
        for sequence in self._running:
            sequence.done += 1
            self.tokens += 1
            order = sequence.order
            if sequence.done == len(sequence.words):
                reports.append(Finished(order.job, sequence.text))
                continue
            left.append(sequence)
            if order.steps and sequence.done % order.steps == 0:
                reports.append(Progressed(order.job, sequence.text, sequence.done))
        self._running = left
        return reports

    def _drop(self) -> None:
        if not self._gone:
            return
        gone, self._gone = self._gone, set()
        self._waiting = deque(s for s in self._waiting if s.order.job not in gone)
        self._running = [s for s in self._running if s.order.job not in gone]
