"""The engine's process: what to serve, and orders (`wire.py`), come on its channel.

Out: after each step one message with all that it brought, and the step's end in shared memory. The
process ends at once when the app hangs up.
"""

from __future__ import annotations

import gc
import logging
import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from dovetail.ir.model import KV_BLOCK
from dovetail.runtime.artifact import open_same
from dovetail.runtime.child.framing import Channel, ErrorText
from dovetail.runtime.child.watch import Progress
from dovetail.runtime.child.worker import read_beside
from dovetail.runtime.engine.engine import DeviceWaits, Engine
from dovetail.runtime.engine.step_watch import FIRST, STEP_TOKENS, StepWatch
from dovetail.runtime.engine.tally import Tally
from dovetail.runtime.hosting.loop import EngineLoop
from dovetail.runtime.hosting.open_engine import open_engine
from dovetail.runtime.hosting.wire import (
    Drop,
    EngineReady,
    Order,
    Record,
    RequestEnd,
    RequestUpdate,
    Setup,
    StepReport,
    Submit,
)
from dovetail.runtime.machine.memory import SharedMemory
from dovetail.runtime.machine.seat import Board
from dovetail.runtime.schedule.request import Listener, SamplingParams
from dovetail.runtime.timeline import Timeline
from dovetail.topology.hardware import read_hardware

PACE = 0.0005
"""Seconds between two messages for each request that the second one tells more tokens of: the app
takes about a tenth of that for each. First tokens and ends are told at once."""
LOAD_SECONDS = 0.1
"""After so long the load is told again, even if no tokens are and as many requests run."""

WARM_PROMPT, WARM_ANSWER = 64, 4
"""Tokens of the answer that is generated before a process says that it is ready."""

GATHER = 0.005
"""Seconds that orders gather for while requests wait, and new ones would, too. Each read that waits
interrupts the engine's thread; all that has come by then is taken at once."""


class Stub(Listener):
    """A request of the app: what the engine's thread tells of it goes into the next message.

    Stop texts are looked for where there is text: in the app.
    """

    def __init__(self, number: int, *, live: bool, changed: dict[int, Stub]) -> None:
        """`changed` takes it up whenever there is something to tell."""
        self.number, self.finished = number, False
        self._live, self._changed = live, changed
        self._error: BaseException | None = None
        self._sent = 0  # tokens
        self._scores_sent = 0  # log probabilities of the prompt's tokens

    def show(self) -> None:
        """Have tokens told that have come."""
        if self._live:
            self._changed[self.number] = self

    def end(self) -> None:
        """Have the end told."""
        self.finished = True
        self._changed[self.number] = self

    def fail(self, error: BaseException) -> None:
        """Have told why it ends."""
        self._error = error
        self.end()

    @property
    def urgent(self) -> bool:
        """Whether its first tokens or its end are to be told."""
        return self.finished or not self._sent

    def report(self) -> RequestUpdate:
        """Return what has not been told yet."""
        if not self.begun:
            assert self._error is not None, "it has not begun, and nothing is wrong"
            return RequestUpdate(
                self.number, [], end=RequestEnd("error", ErrorText.of(self._error))
            )
        request, sent = self.request, self._sent
        tokens = request.tokens[request.prompt_length + sent :]
        self._sent += len(tokens)
        scored = request.prompt_logprobs[self._scores_sent :]
        self._scores_sent += len(scored)
        end = None
        if self.finished:
            error = self._error or request.error
            end = RequestEnd(
                request.finish_reason or "error", ErrorText.of(error) if error else None
            )
        metrics = request.metrics if end or (tokens and not sent) else None
        return RequestUpdate(self.number, tokens, request.logprobs[sent:], metrics, end, scored)


class EngineWorker:
    """The engine behind a channel: orders in, messages out."""

    def __init__(self, channel: Channel, engine: Engine, progress: Progress) -> None:
        self._channel, self._engine, self._progress = channel, engine, progress
        self._loop = EngineLoop(engine, self._report)
        self._stubs: dict[int, Stub] = {}
        self._changed: dict[int, Stub] = {}
        self._tickets: list[int] = []
        self._timeline: Timeline | None = None
        self._last = 0.0  # when tokens were told
        self._load_sent = 0.0, (0, 0)  # when, and how many requests waited and ran
        if (file := engine.scheduler.pool.file) is not None:
            file.copied = progress.tick

    @property
    def crowded(self) -> bool:
        """Whether requests wait."""
        return bool(self._engine.scheduler.waiting)

    def take(self, order: Order) -> None:
        """Have an order done. On the thread that reads."""
        _DO[type(order)](self, order)

    def submit(self, order: Submit) -> None:
        """Start requests."""
        live = order.ask.chunks
        stubs = [Stub(n, live=live, changed=self._changed) for n in order.numbers]
        self._stubs.update((stub.number, stub) for stub in stubs)
        if order.ask.params.grammar:
            self._progress.begin(FIRST)
        self._loop.queue(order.ask, stubs)
        if self._timeline is not None and order.ask.flow is None:
            self._loop.call(partial(self._join, stubs))

    def drop(self, order: Drop) -> None:
        """End requests."""
        found = [stub for n in order.numbers if (stub := self._stubs.get(n)) is not None]
        self._loop.drop(found)
        self._loop.call(partial(self._give_back, order.ticket))

    def record(self, order: Record) -> None:
        """Begin to draw steps, or end it; also asked twice, as where a process was just started."""
        drawing = self._engine.recorder is not None
        if order.on and not drawing:
            timeline = Timeline(self._loop.now)
            self._loop.start_recording(timeline)
            self._timeline = timeline
        elif drawing and not order.on:
            self._loop.stop_recording()
        self._loop.call(partial(self._give_back, order.ticket))

    # ---- on the engine's thread ----

    def _join(self, stubs: Sequence[Stub]) -> None:
        """Draw arrows under the numbers that the app knows."""
        recorder = self._engine.recorder
        for stub in stubs:
            if recorder is not None and stub.begun:
                recorder.join(stub.request.id, stub.number)

    def _give_back(self, ticket: int | None) -> None:
        """Have told that an order is done, where somebody waits for that."""
        if ticket is not None:
            self._tickets.append(ticket)

    def _report(self) -> None:
        unread = self._stubs and not self._engine.scheduler.busy  # their grammars
        self._progress.end(FIRST if unread else 0.0)
        drawn = self._timeline.drain() if self._timeline is not None else None
        now = self._loop.now()
        changed = list(self._changed.values())
        if now < self._last + PACE * len(changed):
            changed = [stub for stub in changed if stub.urgent]
        else:
            self._last = now
        book = self._engine.scheduler
        counts = len(book.waiting), len(book.requests)
        then, known = self._load_sent
        stale = counts != known or now > then + LOAD_SECONDS
        if not (changed or self._tickets or drawn or stale):
            return
        self._load_sent = now, counts
        updates = [stub.report() for stub in changed]
        for stub in changed:
            del self._changed[stub.number]
            if stub.finished:
                self._stubs.pop(stub.number, None)
        tickets, self._tickets = self._tickets, []
        try:
            self._channel.send(StepReport(now, self._loop.load, updates, tickets, drawn))
        except OSError:  # the app is gone
            os._exit(0)


_DO: dict[type, Callable[[EngineWorker, Any], None]] = {
    Submit: EngineWorker.submit,
    Drop: EngineWorker.drop,
    Record: EngineWorker.record,
}


def serve(channel: Channel, progress: int, board: int = -1) -> None:
    """Open what the app asks for, and answer its orders until it hangs up.

    progress, board: the descriptors of `Progress`, and of a `Board` if there is one.
    """
    setup = channel.receive(Setup)
    if setup is None:
        return
    log_to_stderr(setup.log_level, "engine: ")
    opened: Future[EngineWorker] = Future()
    order: Any = Order
    take = partial(take_order, channel, opened)
    reader = read_beside(channel, order, take)  # now: the process ends also while it opens files
    hardware = read_hardware()
    artifact = open_same(setup.path, hardware, setup.model)
    engine = open_engine(artifact, hardware, setup.options, Board.join(board))
    shown = Progress(SharedMemory(progress, mmap.PAGESIZE))
    engine.watch = StepWatch(engine.spec.hidden_size, shown.begin)
    warm_up(engine)
    engine.rest()
    engine.watch.tokens, engine.watch.prompt_tokens = Tally(STEP_TOKENS), 0
    gc.collect()
    gc.freeze()  # what is there stays: later collections need not look at it
    opened.set_result(EngineWorker(channel, engine, shown))
    model = artifact.manifest.model_fingerprint
    channel.send(EngineReady(engine.executor.service, engine.spec.vocab_size, model))
    engine.grammars.warm()
    reader.join()


def warm_up(engine: Engine) -> None:
    """Answer a prompt that nobody sees: what would make the first one slow happens now.

    Weights and the rows of activations get their pages, Python reads code. What counts requests and
    steps, the KV pool and its file are as before.
    """
    limits, pools = engine.scheduler.limits, engine.scheduler.pools
    least = min(pools[home].n_blocks for home in engine.scheduler.homes)
    room = min(limits.max_step_tokens, min(limits.max_context, least * KV_BLOCK) - WARM_ANSWER)
    if room < 1:
        return
    params = SamplingParams(max_tokens=WARM_ANSWER, ignore_eos=True)
    file, engine.scheduler.pool.file = engine.scheduler.pool.file, None
    engine.submit([0] * min(room, WARM_PROMPT), params)
    while engine.scheduler.busy:
        engine.step()
    engine.scheduler.answer_tokens = None
    engine.waits = DeviceWaits()
    if engine.scheduler.speculation:
        engine.scheduler.speculation.counts.clear()
    for pool in engine.scheduler.pools.values():
        pool.forget()
    engine.scheduler.pool.file = file


def take_order(
    channel: Channel,
    opened: Future[EngineWorker],
    order: Order,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Have an order done; while requests wait and nothing else has come, `sleep`: more gather."""
    worker = opened.result()
    worker.take(order)
    if worker.crowded and not channel.pending:
        sleep(GATHER)


def log_to_stderr(level: int, who: str = "") -> None:
    """Write a line with the time for each record of this program's log."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {who}%(message)s"))
    logger = logging.getLogger("dovetail")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(level)
