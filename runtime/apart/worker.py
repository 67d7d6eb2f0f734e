"""The engine's process: `python -P -m dovetail.runtime.apart.worker FD PROGRESS`.

In: an inherited socket, what to serve, and orders on it (`wire.py`). Out: after each step one
message with all that it brought, and the step's end in shared memory (PROGRESS). The process ends
at once when the app hangs up.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from dovetail.ir.errors import DovetailError
from dovetail.ir.model import KV_BLOCK
from dovetail.runtime.apart.wire import (
    Drop,
    Ended,
    ErrorText,
    News,
    Order,
    Orders,
    Ready,
    Record,
    Setup,
    Submit,
    Told,
    pack_told,
)
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.engine import STEP_TOKENS, DeviceWaits, Engine
from dovetail.runtime.framing import Inlet, pack_value, receive_value
from dovetail.runtime.host import Ask
from dovetail.runtime.leash import begin_child
from dovetail.runtime.loop import EngineLoop
from dovetail.runtime.open_engine import open_engine
from dovetail.runtime.progress import Progress
from dovetail.runtime.request import Request, SamplingParams, State
from dovetail.runtime.tally import Tally
from dovetail.runtime.timeline import Timeline
from dovetail.topology.hardware import read_hardware

PACE = 0.0005
"""Seconds between two messages for each request that the second one tells more tokens of: the app
takes about a tenth of that for each. First tokens and ends are told at once."""

WARM_PROMPT, WARM_ANSWER = 64, 4
"""Tokens of the answer that is generated before a process says that it is ready."""

GATHER = 0.005
"""Seconds that orders gather for while requests wait, and new ones would, too. Each read that waits
interrupts the engine's thread; all that has come by then is taken at once."""


class Stub:
    """A request of the app: what the engine's thread tells of it goes into the next message."""

    request: Request

    def __init__(self, number: int, *, live: bool, changed: dict[int, Stub]) -> None:
        """`changed` takes it up whenever there is something to tell."""
        self.number, self.begun, self.finished = number, False, False
        self._live, self._changed = live, changed
        self._error: Exception | None = None
        self._told = 0  # tokens
        self._scores_told = 0  # log probabilities of the prompt's tokens

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self.request.state is State.FINISHED

    def begin(self, request: Request) -> None:
        """Take the request that was made for this."""
        self.request, self.begun = request, True

    def extend(self) -> bool:
        """Stop texts are looked for where there is text: in the app."""
        return False

    def show(self) -> None:
        """Have tokens told that have come."""
        if self._live:
            self._changed[self.number] = self

    def end(self) -> None:
        """Have the end told."""
        self.finished = True
        self._changed[self.number] = self

    def fail(self, error: Exception) -> None:
        """Have told why it ends."""
        self._error = error
        self.end()

    @property
    def urgent(self) -> bool:
        """Whether its first tokens or its end are to be told."""
        return self.finished or not self._told

    def tell(self) -> News:
        """Return what has not been told yet."""
        if not self.begun:
            return News(self.number, [], end=Ended("error", ErrorText.of(self._failure())))
        request, told = self.request, self._told
        tokens = request.tokens[request.prompt_length + told :]
        self._told += len(tokens)
        scored = request.prompt_logprobs[self._scores_told :]
        self._scores_told += len(scored)
        end = None
        if self.finished:
            error = self._error or request.error
            end = Ended(request.finish_reason or "error", ErrorText.of(error) if error else None)
        metrics = request.metrics if end or (tokens and not told) else None
        return News(self.number, tokens, request.logprobs[told:], metrics, end, scored)

    def _failure(self) -> Exception:
        assert self._error is not None, "it has not begun, and nothing is wrong"
        return self._error


class Desk:
    """The engine behind a socket: orders in, messages out."""

    def __init__(self, link: socket.socket, engine: Engine, progress: Progress) -> None:
        self._link, self._engine, self._progress = link, engine, progress
        engine.announce = progress.begin
        self._loop = EngineLoop(engine, self._tell)
        self._stubs: dict[int, Stub] = {}
        self._changed: dict[int, Stub] = {}
        self._tickets: list[int] = []
        self._timeline: Timeline | None = None
        self._last = 0.0  # when something was told

    @property
    def crowded(self) -> bool:
        """Whether requests wait."""
        return bool(self._engine.scheduler.waiting)

    def take(self, order: Order) -> None:
        """Have an order done. On the thread that reads."""
        _DO[type(order)](self, order)

    def submit(self, order: Submit) -> None:
        """Start requests."""
        stubs = [Stub(n, live=order.live, changed=self._changed) for n in order.numbers]
        self._stubs.update((stub.number, stub) for stub in stubs)
        ask = Ask(list(order.prompts), order.params, order.priority)
        try:
            self._loop.begin(ask, stubs)
        except DovetailError as error:
            self._loop.call(partial(_fail_all, stubs, error))
            return
        if self._timeline is not None:
            self._loop.call(partial(self._join, stubs, order.flow))

    def drop(self, order: Drop) -> None:
        """End requests."""
        found = [stub for n in order.numbers if (stub := self._stubs.get(n)) is not None]
        self._loop.drop(found)
        self._loop.call(partial(self._give_back, order.ticket))

    def record(self, order: Record) -> None:
        """Begin to draw steps, or end it."""
        if order.on:
            timeline = Timeline(self._loop.now)
            self._loop.start_recording(timeline)
            self._timeline = timeline
        else:
            self._loop.stop_recording()
        self._loop.call(partial(self._give_back, order.ticket))

    # ---- on the engine's thread ----

    def _join(self, stubs: Sequence[Stub], flow: int | None) -> None:
        """Draw arrows under the numbers that the app knows."""
        recorder = self._engine.recorder
        for stub in stubs:
            if recorder is not None and stub.begun:
                recorder.join(stub.request.id, stub.number if flow is None else flow)

    def _give_back(self, ticket: int | None) -> None:
        """Have told that an order is done, where somebody waits for that."""
        if ticket is not None:
            self._tickets.append(ticket)

    def _tell(self) -> None:
        """Send what there is to tell."""
        self._progress.end()
        drawn = self._timeline.drain() if self._timeline is not None else None
        now = self._loop.now()
        told = list(self._changed.values())
        if now < self._last + PACE * len(told):
            told = [stub for stub in told if stub.urgent]
        else:
            self._last = now
        if not (told or self._tickets or drawn):
            return
        news = [stub.tell() for stub in told]
        for stub in told:
            del self._changed[stub.number]
            if stub.finished:
                self._stubs.pop(stub.number, None)
        tickets, self._tickets = self._tickets, []
        try:
            for message in pack_told(Told(now, self._loop.load, news, tickets, drawn)):
                self._link.sendall(message)
        except OSError:  # the app is gone
            os._exit(0)


def _fail_all(stubs: Sequence[Stub], error: DovetailError) -> None:
    for stub in stubs:
        stub.fail(error)


_DO: dict[type, Callable[[Desk, Any], None]] = {
    Submit: Desk.submit,
    Drop: Desk.drop,
    Record: Desk.record,
}


def serve(link: socket.socket, progress: Progress) -> None:
    """Open what the app asks for, and answer its orders until it hangs up."""
    setup = receive_value(link, Setup)
    if setup is None:
        return
    _write_log(setup.log_level)
    opened: Future[Desk] = Future()
    reader = threading.Thread(target=_read, args=(link, opened), daemon=True)
    reader.start()  # now: so that the process ends also while it opens files
    try:
        hardware = read_hardware()
        engine = open_engine(open_artifact(setup.path, hardware), hardware, setup.options)
    except (DovetailError, MemoryError, OSError) as error:
        link.sendall(pack_value(Ready(error=ErrorText.of(error))))
        return
    warm_up(engine)
    gc.collect()
    gc.freeze()  # what is there stays: later collections need not look at it
    opened.set_result(Desk(link, engine, progress))
    link.sendall(pack_value(Ready(engine.service, engine.spec.vocab_size)))
    reader.join()


def warm_up(engine: Engine) -> None:
    """Answer a prompt that nobody sees: what would make the first one slow happens now.

    Weights and the rows of activations get their pages, Python reads code. What counts requests and
    steps, and the KV pool, are as before.
    """
    limits, pools = engine.scheduler.limits, engine.scheduler.pools
    least = min(pools[home].n_blocks for home in engine.scheduler.homes)
    room = min(limits.max_step_tokens, min(limits.max_context, least * KV_BLOCK) - WARM_ANSWER)
    if room < 1:
        return
    params = SamplingParams(max_tokens=WARM_ANSWER, ignore_eos=True)
    engine.submit([0] * min(room, WARM_PROMPT), params)
    while engine.scheduler.busy:
        engine.step()
    engine.scheduler.answer_tokens = None
    engine.step_tokens, engine.waits = Tally(STEP_TOKENS), DeviceWaits()
    for pool in engine.scheduler.pools.values():
        pool.forget()


def _read(link: socket.socket, opened: Future[Desk]) -> None:
    take_orders(link, opened)
    os._exit(0)  # whatever is being computed, nobody waits for it


def take_orders(
    link: socket.socket, opened: Future[Desk], sleep: Callable[[float], None] = time.sleep
) -> None:
    """Have orders done until the app hangs up; while requests wait, let more gather for `sleep`."""
    inlet = Inlet(link)
    while (message := inlet.receive(Orders)) is not None:
        desk = opened.result()
        for order in message.orders:
            desk.take(order)
        if desk.crowded and not inlet.pending:
            sleep(GATHER)


def _write_log(level: int) -> None:
    """Send what the engine logs to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s engine: %(message)s"))
    logger = logging.getLogger("dovetail")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(level)


if __name__ == "__main__":
    begin_child()
    with suppress(ConnectionError):  # the app is gone
        link, shared = map(int, sys.argv[1:])
        serve(socket.socket(fileno=link), Progress.join(shared))
