"""The app's side of its engine's process, which is started anew when it dies.

In: requests as token ids, from any thread. Out: jobs that are told of tokens and ends. What runs in
a process that dies ends with a DeviceError; what comes meanwhile waits for the next one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import count
from pathlib import Path

from msgspec.structs import replace

from dovetail.ir.artifact import ServicePlan
from dovetail.ir.errors import DeviceError, DovetailError, RequestError
from dovetail.runtime.child.child import Child
from dovetail.runtime.child.framing import pack_value
from dovetail.runtime.child.supervisor import Supervisor
from dovetail.runtime.child.watch import PATIENCE, Progress, Reading
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.hosting.wire import (
    Ask,
    Drop,
    EngineLoad,
    EngineReady,
    Record,
    RequestUpdate,
    Setup,
    StepReport,
    pack_call,
)
from dovetail.runtime.machine.seat import ENGINE_SLOT, Board
from dovetail.runtime.schedule.request import FAILED, Listener, Metrics, Request
from dovetail.runtime.timeline import Timeline

MODULE = "dovetail.runtime.hosting.worker"
SEND_SECONDS = 10
CLOSED_MEANWHILE = "the app was closed while the request was running"

log = logging.getLogger("dovetail")


class EngineProcess(Supervisor[StepReport]):
    """An engine in a child process, started with this. For any thread; as `EngineLoop`."""

    def __init__(self, path: Path, options: EngineOptions, board: Board | None = None) -> None:
        """Start it; `wait` tells of what goes wrong with that. board: of all workers."""
        super().__init__(
            StepReport, closed=CLOSED_MEANWHILE, send_seconds=SEND_SECONDS, patience=PATIENCE
        )
        self._setup = Setup(
            path=str(path.resolve()), options=options, log_level=log.getEffectiveLevel()
        )
        self.drafts = options.scheduling.num_speculative_tokens > 0
        self._numbers = count()
        self._jobs: dict[int, Listener] = {}
        self._waiting: list[tuple[tuple[int, ...], bytes]] = []  # for a process
        self._tickets: dict[int, Future[None]] = {}
        self._progress, self._board = Progress(), board
        self.load = self._past = EngineLoad()  # as the process last reported, and the one before
        self._service: ServicePlan | None = None
        self._vocab_size = 0
        self._timeline: Timeline | None = None
        with self._lock:
            self._ensure()

    # ---- as `EngineLoop` ----

    @property
    def service(self) -> ServicePlan:
        """As the process that was ready last reported."""
        assert self._service is not None, "nobody has waited for the first one"
        return self._service

    def now(self) -> float:
        """Return seconds on the machine's monotonic clock."""
        return time.perf_counter()

    def begin(self, ask: Ask, jobs: Sequence[Listener]) -> None:
        """Send the requests, or keep them for the next process; what is wrong fails the jobs."""
        numbers = self._begin_jobs(ask, jobs)
        submit = pack_call(ask, numbers, self._vocab_size)
        with self._lock:
            self._check_open()
            self._jobs.update(zip(numbers, jobs, strict=True))
            if self._outbox is None:
                self._waiting.append((numbers, submit))
                self._ensure()
            else:
                self._outbox.post(submit)

    def drop(self, jobs: Sequence[Listener]) -> Future[None]:
        """Have the process end them; those that it was never sent end here."""
        numbers = tuple(job.request.id for job in jobs if job.begun)
        with self._lock:
            self._check_open()
            unsent = [self._jobs.pop(n) for n in self._unsent.intersection(numbers)]
            done = self._order(Drop(numbers))
        for job in unsent:
            job.request.finish("abort")
            job.end()
        return done

    def start_recording(self, timeline: Timeline) -> None:
        """Have the process draw, and those that follow it."""
        if self._timeline is not None:
            raise RequestError("a timeline is already being recorded; stop it first")
        self._timeline = timeline
        self._record(True)

    def stop_recording(self) -> None:
        """Have it stop."""
        self._record(False)
        self._timeline = None

    def _record(self, on: bool) -> None:
        with self._lock:
            done = self._order(Record(on))
        done.result()

    # ---- orders ----

    def _begin_jobs(self, ask: Ask, jobs: Sequence[Listener]) -> tuple[int, ...]:
        """Give jobs their requests, as far as the app knows them; return the numbers of these."""
        arrival, numbers = self.now(), []
        for place, job in enumerate(jobs):
            prompt = ask.prompts[place // ask.params.n]
            numbers.append(next(self._numbers))
            job.begin(
                Request(
                    id=numbers[-1],
                    tokens=list(prompt),
                    prompt_length=len(prompt),
                    max_tokens=ask.params.max_tokens,
                    params=ask.params,
                    metrics=Metrics(arrival),
                    index=place % ask.params.n,
                    seed=0,  # the process draws it
                )
            )
        return tuple(numbers)

    @property
    def _unsent(self) -> set[int]:
        """Requests that no process was sent yet. With the lock."""
        return {n for numbers, _ in self._waiting for n in numbers if n in self._jobs}

    def _order(self, order: Drop | Record) -> Future[None]:
        """Send the order with a ticket, which comes back once it is done. With the lock."""
        done: Future[None] = Future()
        if self._outbox is None:  # with the process all that it had is gone
            done.set_result(None)
        else:
            ticket = next(self._numbers)
            self._tickets[ticket] = done
            self._send(replace(order, ticket=ticket))
        return done

    def _send(self, order: Drop | Record) -> None:
        """Send an order, where a process is ready. With the lock."""
        if self._outbox is not None:
            self._outbox.post(pack_value(order))

    # ---- a Supervisor: see there ----

    def _launch(self) -> Child:
        shared = [self._progress.memory, *([self._board.memory] if self._board else ())]
        return Child.start(MODULE, "the engine's process {}", fds=[each.fd for each in shared])

    def _set_up(self, child: Child) -> None:
        ready = child.set_up(self._setup, EngineReady)
        self._service, self._vocab_size = ready.service, ready.vocab_size
        self._setup = replace(self._setup, model=ready.model)  # those that follow have it, too

    def _send_waiting(self) -> None:
        """Send what has waited for a process, but for what nobody waits for."""
        assert self._outbox is not None, "it has just been made"
        if self._timeline is not None:
            self._send(Record(on=True))
        for numbers, submit in self._waiting:
            gone = tuple(n for n in numbers if n not in self._jobs)
            if len(gone) < len(numbers):
                self._outbox.post(submit)
            if gone:
                self._send(Drop(gone))
        self._waiting.clear()

    def _look(self) -> Reading:
        return self._progress.read(busy=bool(self._jobs or self._tickets))

    def _hear(self, report: StepReport) -> None:
        self.load = report.load.after(self._past)
        if report.drawn is not None and self._timeline is not None:
            self._timeline.add(report.drawn)
        stopped = [update.number for update in report.updates if self._take(update, report.now)]
        with self._lock:
            if stopped:
                self._send(Drop(tuple(stopped)))
            done = [self._tickets.pop(ticket) for ticket in report.tickets]
        for future in done:
            future.set_result(None)

    def _take(self, update: RequestUpdate, now: float) -> bool:
        """Tell a job; return whether it ends here, at a stop text."""
        job = self._jobs.get(update.number)
        if job is None:  # it has ended here
            return False
        request, error = job.request, update.end.error if update.end else None
        if update.metrics is None and error is not None:  # refused: it never began
            del self._jobs[update.number]
            job.fail(error.make())
            return False
        if update.metrics is not None:
            update.metrics.arrival = request.metrics.arrival
            request.metrics = update.metrics
        request.error = error.make() if error else None
        request.prompt_logprobs += update.prompt_logprobs
        stopped = self._extend(job, update)
        if stopped and update.end is None:
            request.metrics.last_token = now
        if stopped or update.end is not None:
            del self._jobs[update.number]
            job.end()
        else:
            job.show()
        return stopped and update.end is None

    def _extend(self, job: Listener, update: RequestUpdate) -> bool:
        """Add tokens to a request, as the engine does; return whether there is a stop text."""
        request = job.request
        for place, token in enumerate(update.tokens):
            request.tokens.append(token)
            request.logprobs += update.logprobs[place : place + 1]
            if update.end is not None and place == len(update.tokens) - 1:
                request.finish(update.end.reason)
            if job.extend():
                request.finish("stop")
                return True
        if update.end is not None and not job.done:  # no token came with it
            request.finish(update.end.reason)
        return False

    def _lose(self, why: str) -> None:
        if self._board is not None:
            self._board.clear(ENGINE_SLOT)
        with self._lock:
            self._past = self.load
            self.load = EngineLoad().after(self._past)
            lost = [self._jobs.pop(number) for number in set(self._jobs) - self._unsent]
            tickets = list(self._tickets.values())
            self._tickets.clear()
        closed = RequestError(CLOSED_MEANWHILE) if self._closing.is_set() else None
        for job in lost:
            _fail(job, closed or DeviceError(f"{why}; send the request again"))
        for future in tickets:
            future.set_result(None)

    def _fail_all(self, error: DovetailError) -> None:
        """Fail what there is; the next request tries to start a process again."""
        with self._lock:
            left = list(self._jobs.values())
            self._jobs.clear()
            self._waiting.clear()
        for job in left:
            _fail(job, error)


def _fail(job: Listener, error: DovetailError) -> None:
    if not job.done:
        job.request.error = error
        job.request.finish(FAILED)
    job.fail(error)
