"""An engine that only takes time: continuous batching with replies from a script.

In: `Generate` orders. Out: seconds of each step, and at its end the reports that fall due. Time is
whoever's that runs the steps: virtual (`workflows.py`), or the wall clock's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from dovetail.runtime.flows.control.messages import Finished, Generate, Progressed, Report


class EngineCost(Protocol):
    """What an engine's steps take."""

    def seconds(self, prefills: Sequence[int], decodes: int, stored: int) -> float:
        """Predict a step.

        Args:
            prefills: lengths of the prompts that are computed in it.
            decodes: sequences that get their next token.
            stored: tokens whose keys and values these read.
        """


@dataclass(slots=True, eq=False)
class _Sequence:
    """A reply on its way. prompt: its tokens."""

    order: Generate
    tokens: Sequence[str]
    prompt: int
    done: int = 0

    @property
    def text(self) -> str:
        return "".join(self.tokens[: self.done])


class ScriptedEngine:
    """First come, first served: prompts whole, all decodes in each step."""

    def __init__(
        self,
        cost: EngineCost,
        reply: Callable[[Generate], Sequence[str]],
        count_tokens: Callable[[str], int] = len,
        *,
        most_sequences: float = inf,
        most_tokens: float = inf,
    ) -> None:
        """Reply with `reply(order)`, texts to be joined, a token each.

        most_sequences: in a step. most_tokens: of prompts in a step, but for one that is longer.
        """
        self._cost, self._reply, self._count = cost, reply, count_tokens
        self._most_sequences, self._most_tokens = most_sequences, most_tokens
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._fresh: list[_Sequence] = []  # prompts of the step under way
        self._gone: set[int] = set()
        self.delay = 0.0
        """Seconds that others used the device since the last step."""

    def add(self, order: Generate) -> None:
        """Take an order."""
        self._waiting.append(_Sequence(order, self._reply(order), self._count(order.prompt)))

    def cancel(self, job: int) -> None:
        """Drop a job, if it is there; one in the step under way leaves at its end."""
        self._gone.add(job)

    def begin_step(self) -> float | None:
        """Begin a step and return its seconds; None where there is nothing to do."""
        self._drop()
        tokens = 0
        while self._waiting and len(self._running) + len(self._fresh) < self._most_sequences:
            tokens += self._waiting[0].prompt
            if self._fresh and tokens > self._most_tokens:
                break
            self._fresh.append(self._waiting.popleft())
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
            order = sequence.order
            if sequence.done >= len(sequence.tokens):
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
