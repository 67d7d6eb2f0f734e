"""All generations under way, real ones and guesses, cut into sub-stages of decode steps.

In: prompts, reports of the engine. Out: orders to generate; each reply back as it grows and ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dovetail.ir.errors import DovetailError
from dovetail.ir.workflow import Generation, Retrieval
from dovetail.runtime.wavefront.board import Board, Waiter
from dovetail.runtime.wavefront.costs import Learned
from dovetail.runtime.wavefront.messages import Finished, Generate, Progressed, Source
from dovetail.runtime.wavefront.settings import SPLIT, WavefrontSettings
from dovetail.runtime.workflow_run import Call


@dataclass(slots=True, eq=False)
class Reply:
    """A generation. call: what waits for it; None while it is a guess. guessed: it began as one.

    text: what is written so far; marks: decode steps by then, of each report. vector: of an
    earlier `text`; drift: how far the one before was from it. ahead: the search that will read it.
    """

    source: Source
    node: Generation
    prompt: str
    call: Call | None
    began: float
    ahead: Retrieval | None = None
    job: int = 0
    guessed: bool = False
    text: str = ""
    marks: list[int] = field(default_factory=list)
    over: bool = False
    embedding: int = 0  # job
    vector: Any = None
    drift: float | None = None


@dataclass(frozen=True, slots=True)
class Reader:
    """Who is told of replies: as they grow, at the end, and when one fails."""

    grown: Callable[[Reply, float], None]
    ended: Callable[[Reply, float], None]
    failed: Callable[[Reply, DovetailError, float], None]


class Replies:
    """Generations of all requests."""

    def __init__(
        self, settings: WavefrontSettings, learned: Learned, board: Board, reader: Reader
    ) -> None:
        self._settings, self._learned = settings, learned
        self._board, self._reader = board, reader
        self._active: dict[int, Reply] = {}

    @property
    def load(self) -> int:
        """Generations under way."""
        return len(self._active)

    @property
    def active(self) -> Sequence[Reply]:
        """Generations under way, oldest first."""
        return list(self._active.values())

    def begin(self, reply: Reply) -> None:
        """Have the engine write a reply."""
        told = reply.ahead is not None and self._settings.allows(SPLIT)  # else nobody would look
        steps = self._learned.steps(reply.node.name, self.load + 1) if told else 0
        provisional = reply.call is None
        reply.job = self._board.post(
            lambda job: Generate(job, reply.source, reply.node, reply.prompt, steps, provisional),
            Waiter(
                reply.source.request,
                lambda report, now: self._told(reply, report, now),
                lambda error, now: self._failed(reply, error, now),
            ),
        )
        self._active[reply.job] = reply

    def drop(self, reply: Reply) -> None:
        """Forget a reply."""
        if self._active.pop(reply.job, None):
            self._board.cancel(reply.job)
        self._board.cancel(reply.embedding)
        reply.over = True

    def drop_request(self, request: int) -> None:
        """Forget all replies to a request."""
        for reply in [r for r in self.active if r.source.request == request]:
            self.drop(reply)

    def _told(self, reply: Reply, report: Progressed | Finished, now: float) -> None:
        if isinstance(report, Progressed):
            if report.tokens > (reply.marks or [0])[-1]:
                reply.text = report.text
                reply.marks.append(report.tokens)
                self._reader.grown(reply, now)
            return
        del self._active[reply.job]
        self._board.cancel(reply.embedding)
        self._learned.replied(reply.node.name, now - reply.began)
        reply.text, reply.over = report.value, True
        self._reader.ended(reply, now)

    def _failed(self, reply: Reply, error: DovetailError, now: float) -> None:
        del self._active[reply.job]
        reply.over = True
        self._reader.failed(reply, error, now)

    def check_integrity(self) -> None:
        """Assert what always holds."""
        for job, reply in self._active.items():
            assert reply.job == job and not reply.over
