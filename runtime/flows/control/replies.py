"""All generations under way, real ones and guesses, cut into sub-stages of decode steps.

In: prompts, reports of the engine. Out: orders to generate; each reply back as it grows and ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from dovetail.ir.errors import DovetailError
from dovetail.ir.live_graph import LiveGraph, LiveNode
from dovetail.ir.transform import split_reply
from dovetail.ir.workflow import Generation, Name, Retrieval
from dovetail.runtime.flows.control.board import Board, Callbacks, Waiter
from dovetail.runtime.flows.control.costs import Learned
from dovetail.runtime.flows.control.messages import Finished, Generate, Progressed, Source
from dovetail.runtime.flows.control.search import Search
from dovetail.runtime.flows.control.settings import SPLIT, WavefrontSettings
from dovetail.runtime.flows.workflow_run import Call

Key: TypeAlias = tuple[Name, int]
"""Node and round: which call of a request."""


@dataclass(slots=True, eq=False)
class PendingReply:
    """A generation. call: what waits for it; None while it is a guess.

    work: its sub-stage under way; ended: the last that is over. search: what it was begun on before
    that was over, None for no guess; ids: of what was found. text: what is written so far, in so
    many tokens. vector: of an earlier `text`; drift: how far the one before was from it. ahead: the
    search that will read it.
    """

    graph: LiveGraph
    work: LiveNode

    source: Source
    node: Generation
    prompt: str
    call: Call | None
    began: float
    ahead: Retrieval | None = None
    job: int = 0
    search: Search | None = None
    ids: tuple[int, ...] = ()
    text: str = ""
    tokens: int = 0
    ended: LiveNode | None = None
    over: bool = False
    embedding: int = 0  # job
    vector: Any = None
    drift: float | None = None

    @property
    def key(self) -> Key:
        """Which call of its request it is for."""
        return self.source.node, self.source.round


class Replies:
    """Generations of all requests."""

    def __init__(
        self,
        settings: WavefrontSettings,
        learned: Learned,
        board: Board,
        callbacks: Callbacks[PendingReply],
    ) -> None:
        self._settings, self._learned = settings, learned
        self._board, self._callbacks = board, callbacks
        self._active: dict[int, PendingReply] = {}

    @property
    def load(self) -> int:
        """Generations under way."""
        return len(self._active)

    @property
    def active(self) -> Sequence[PendingReply]:
        """Generations under way, oldest first."""
        return list(self._active.values())

    def begin(self, reply: PendingReply) -> None:
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
        reply.graph.begin(reply.work)
        self._active[reply.job] = reply

    def drop(self, reply: PendingReply) -> None:
        """Forget a reply."""
        if self._active.pop(reply.job, None):
            self._board.cancel(reply.job)
        self._board.cancel(reply.embedding)
        reply.over = True

    def drop_request(self, request: int) -> None:
        """Forget all replies to a request."""
        for reply in [r for r in self.active if r.source.request == request]:
            self.drop(reply)

    def _told(self, reply: PendingReply, report: Progressed | Finished, now: float) -> None:
        if isinstance(report, Progressed):
            if (steps := report.tokens - reply.tokens) > 0:
                reply.text, reply.tokens, reply.ended = report.text, report.tokens, reply.work
                reply.work = split_reply(reply.graph, reply.work, steps)
                self._callbacks.changed(reply, now)
            return
        del self._active[reply.job]
        reply.graph.finish(reply.work)
        self._board.cancel(reply.embedding)
        self._learned.replied(reply.node.name, now - reply.began)
        reply.text, reply.over = report.value, True
        self._callbacks.ended(reply, now)

    def _failed(self, reply: PendingReply, error: DovetailError, now: float) -> None:
        del self._active[reply.job]
        reply.over = True
        self._callbacks.failed(reply, error, now)
