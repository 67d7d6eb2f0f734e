"""The app's side of its engine's process: an `EngineHost` that starts it anew when it dies.

In: requests as token ids, from any thread. Out: jobs that are told of tokens and ends. What runs in
a process that dies ends with a DeviceError; what comes meanwhile waits for the next one.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from pathlib import Path

import msgspec

from dovetail.ir.artifact import ServicePlan
from dovetail.ir.errors import DeviceError, DovetailError, RequestError
from dovetail.runtime.apart.outbox import Outbox
from dovetail.runtime.apart.wire import (
    Drop,
    News,
    Order,
    Ready,
    Record,
    Setup,
    Told,
    pack_call,
    pack_order,
)
from dovetail.runtime.framing import Inlet, pack_value, receive_value
from dovetail.runtime.host import Ask, EngineLoad
from dovetail.runtime.job import Job
from dovetail.runtime.launch import END_SECONDS, Child, hang_up
from dovetail.runtime.open_engine import EngineOptions
from dovetail.runtime.progress import Progress
from dovetail.runtime.request import FAILED, Metrics, Request
from dovetail.runtime.timeline import Timeline
from dovetail.runtime.watch import PATIENCE, Hang, HangWatcher, Reading

MODULE = "dovetail.runtime.apart.worker"
STARTS = 3
"""Processes in a row that die before they are ready; what waits fails then."""
SEND_SECONDS = 10
"""A process that takes no order for so long is replaced: it always reads, unless it is stopped."""
CLOSED = "the app is closed; load the artifact again"
CLOSED_MEANWHILE = "the app was closed while the request was running"

log = logging.getLogger("dovetail")


class _DiedOnStart(DeviceError):
    """A process that ended before it was ready."""


class EngineProcess:
    """An engine in a child process, started with this. For any thread."""

    def __init__(self, path: Path, options: EngineOptions) -> None:
        """Start it; `wait` tells of what goes wrong with that."""
        self._setup = Setup(
            path=str(path.resolve()), options=options, log_level=log.getEffectiveLevel()
        )
        self._lock = threading.Lock()
        self._numbers = count()
        self._jobs: dict[int, Job] = {}
        self._waiting: list[tuple[tuple[int, ...], msgspec.Raw]] = []  # for a process
        self._tickets: dict[int, Future[None]] = {}
        self._outbox: Outbox | None = None  # of a process that is ready
        self._child: Child | None = None
        self._progress = Progress()
        self._hang: Hang | None = None
        self._ailment = ""
        self._load = EngineLoad()
        self._service: ServicePlan | None = None
        self._vocab_size = 0
        self._timeline: Timeline | None = None
        self._closed = False
        self._first: Future[None] = Future()
        self._thread: threading.Thread | None = None
        with self._lock:
            self._ensure_thread()

    def wait(self) -> None:
        """Return once the first process serves.

        Raises what opening the engine raised there, DeviceError where the process died.
        """
        self._first.result()

    @property
    def pid(self) -> int | None:
        """Process id of the child, None while there is none."""
        child = self._child
        return None if child is None else child.pid

    # ---- an EngineHost: see there ----

    @property
    def ready(self) -> bool:
        """False from the death of a process until the next one serves."""
        return self._outbox is not None

    @property
    def ailment(self) -> str:
        """See EngineHost."""
        return "" if self.ready else self._ailment

    @property
    def service(self) -> ServicePlan:
        """As the process that was ready last told."""
        assert self._service is not None, "nobody has waited for the first one"
        return self._service

    @property
    def load(self) -> EngineLoad:
        """As the process last told."""
        return self._load

    def now(self) -> float:
        """Return seconds on the machine's monotonic clock."""
        return time.perf_counter()

    def begin(self, ask: Ask, jobs: Sequence[Job]) -> None:
        """Send the requests, or keep them for the next process; what is wrong fails the jobs."""
        numbers = self._begin_jobs(ask, jobs)
        submit = pack_call(ask, numbers, self._vocab_size)
        with self._lock:
            self._check_open()
            self._jobs.update(zip(numbers, jobs, strict=True))
            if self._outbox is None:
                self._waiting.append((numbers, submit))
                self._ensure_thread()
            else:
                self._outbox.post(submit)

    def drop(self, jobs: Sequence[Job]) -> Future[None]:
        """Have the process end them; those that it was never sent end here."""
        done: Future[None] = Future()
        numbers = tuple(job.request.id for job in jobs if job.begun)
        with self._lock:
            self._check_open()
            unsent = [self._jobs.pop(n) for n in self._unsent.intersection(numbers)]
            if self._outbox is None:  # with the process all its blocks are gone
                done.set_result(None)
            else:
                ticket = next(self._numbers)
                self._tickets[ticket] = done
                self._send(Drop(numbers, ticket))
        for job in unsent:
            job.request.finish("abort")
            job.end()
        return done

    def start_recording(self, timeline: Timeline) -> None:
        """Have the process draw, and those that follow it."""
        if self._timeline is not None:
            raise RequestError("the app is being recorded already; end that recording first")
        self._timeline = timeline
        self._record(on=True)

    def stop_recording(self) -> None:
        """Have it stop."""
        self._record(on=False)
        self._timeline = None

    def close(self) -> None:
        """End the process; what is under way fails."""
        with self._lock:
            self._closed = True
            child, thread = self._child, self._thread
            if child is not None:
                hang_up(child.link)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    # ---- orders ----

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError(CLOSED)

    def _begin_jobs(self, ask: Ask, jobs: Sequence[Job]) -> tuple[int, ...]:
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

    def _send_waiting(self) -> None:
        """Send what has waited for a process, but for what nobody waits for. With the lock."""
        assert self._outbox is not None, "it has just been made"
        for numbers, submit in self._waiting:
            gone = tuple(n for n in numbers if n not in self._jobs)
            if len(gone) < len(numbers):
                self._outbox.post(submit)
            if gone:
                self._send(Drop(gone))
        self._waiting.clear()

    def _send(self, order: Order) -> None:
        """Send an order to a process that is ready. With the lock."""
        if self._outbox is not None:
            self._outbox.post(pack_order(order))

    def _record(self, *, on: bool) -> None:
        done: Future[None] = Future()
        with self._lock:
            if self._outbox is None:
                return
            ticket = next(self._numbers)
            self._tickets[ticket] = done
            self._send(Record(on, ticket))
        done.result()

    # ---- what the process tells; on the thread that reads ----

    def _hear(self, told: Told) -> None:
        self._load = told.load
        if told.drawn is not None and self._timeline is not None:
            self._timeline.add(told.drawn)
        stopped = [news.number for news in told.news if self._take(news, told.now)]
        with self._lock:
            if stopped:
                self._send(Drop(tuple(stopped)))
            done = [self._tickets.pop(ticket) for ticket in told.tickets]
        for future in done:
            future.set_result(None)

    def _take(self, news: News, now: float) -> bool:
        """Tell a job; return whether it ends here, at a stop text."""
        job = self._jobs.get(news.number)
        if job is None:  # it has ended here
            return False
        request, error = job.request, news.end.error if news.end else None
        if news.metrics is None and error is not None:  # refused: it never began
            del self._jobs[news.number]
            job.fail(error.make())
            return False
        if news.metrics is not None:
            news.metrics.arrival = request.metrics.arrival
            request.metrics = news.metrics
        request.error = error.make() if error else None
        request.prompt_logprobs += news.prompt_logprobs
        stopped = self._extend(job, news)
        if stopped and news.end is None:
            request.metrics.last_token = now
        if stopped or news.end is not None:
            del self._jobs[news.number]
            job.end()
        else:
            job.show()
        return stopped and news.end is None

    def _extend(self, job: Job, news: News) -> bool:
        """Add tokens to a request, as the engine does; return whether there is a stop text."""
        request = job.request
        for place, token in enumerate(news.tokens):
            request.tokens.append(token)
            request.logprobs += news.logprobs[place : place + 1]
            if news.end is not None and place == len(news.tokens) - 1:
                request.finish(news.end.reason)
            if job.extend():
                request.finish("stop")
                return True
        if news.end is not None and not job.done:  # no token came with it
            request.finish(news.end.reason)
        return False

    # ---- the process's life, on one thread ----

    def _ensure_thread(self) -> None:
        """Have somebody start a process. With the lock."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep, name="dovetail-engine", daemon=True)
            self._thread.start()

    def _keep(self) -> None:
        """Start a process and read what it tells; when it dies, start the next."""
        failed = 0
        while True:
            try:
                child = self._start()
            except DovetailError as error:
                failed += 1
                if isinstance(error, _DiedOnStart) and failed < STARTS and not self._closed:
                    continue
                self._give_up(RequestError(CLOSED_MEANWHILE) if self._closed else error)
                return
            failed = 0
            watcher = HangWatcher(self._look, partial(self._kill, child), PATIENCE)
            self._read(child.link)
            watcher.end()
            why = self._end(child)
            if self._closed:
                self._give_up(RequestError(CLOSED_MEANWHILE))
                return
            log.warning("%s; starting another one", why)

    def _start(self) -> Child:
        """Return a process that serves; DovetailError where there is none."""
        child = Child(MODULE, "the engine's process", [self._progress.fd])
        with self._lock:
            self._child = child
            if self._closed:
                hang_up(child.link)
        try:
            child.link.sendall(pack_value(self._setup))
            ready = receive_value(child.link, Ready)
        except OSError:
            ready = None
        if ready is None or ready.error is not None:
            fate = self._bury(child)
            why = f"the engine's {child.member.where} {fate} on its start"
            raise ready.error.make() if ready and ready.error else _DiedOnStart(why)
        self._service, self._vocab_size = ready.service, ready.vocab_size
        return child

    def _look(self) -> Reading:
        """Return the process as its watcher sees it: without the lock, which a sender may hold."""
        busy = bool(self._jobs or self._tickets)
        return self._progress.read(busy=busy)

    def _kill(self, child: Child, hang: Hang) -> None:
        self._hang = hang
        child.member.kill()

    def _read(self, link: socket.socket) -> None:
        try:
            with self._lock:
                self._outbox = Outbox(link, SEND_SECONDS)
                if self._timeline is not None:
                    self._send(Record(on=True))
                self._send_waiting()
            if not self._first.done():
                self._first.set_result(None)
            inlet = Inlet(link)
            while (told := inlet.receive(Told)) is not None:
                self._hear(told)
        except Exception:
            log.exception("what the engine's process is sent or says is wrong")

    def _end(self, child: Child) -> str:
        """Fail what the process had; return how it ended, in words."""
        with self._lock:
            self._outbox, self._load = None, EngineLoad()
            lost = [self._jobs.pop(number) for number in set(self._jobs) - self._unsent]
            tickets = list(self._tickets.values())
            self._tickets.clear()
        hang_up(child.link)
        # The lost are told at once, and the child is buried after
        fate = child.member.fate(END_SECONDS) or "hung up"
        hang, self._hang = self._hang, None
        self._ailment = why = f"the engine's {child.member.where} {hang or fate}"
        ended = RequestError(CLOSED_MEANWHILE) if self._closed else None
        for job in lost:
            _fail(job, ended or DeviceError(f"{why}; send the request again"))
        for future in tickets:
            future.set_result(None)
        self._bury(child)
        return why

    def _bury(self, child: Child) -> str:
        fate = child.bury()
        with self._lock:
            self._child = None
        return fate

    def _give_up(self, error: DovetailError) -> None:
        """Fail what there is; the next request tries to start a process again."""
        with self._lock:
            self._thread = None
            left = list(self._jobs.values())
            self._jobs.clear()
            self._waiting.clear()
        for job in left:
            _fail(job, error)
        if not self._first.done():
            self._first.set_exception(error)


def _fail(job: Job, error: DovetailError) -> None:
    if not job.done:
        job.request.error = error
        job.request.finish(FAILED)
    job.fail(error)
