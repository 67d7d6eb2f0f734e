"""The one thread that steps the engine while there is work; callers exchange messages with it.

In: functions to be called between steps, and jobs. Out: their results as futures; jobs that are
told of every token and of their end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from dovetail.ir.artifact import ServicePlan
from dovetail.ir.errors import DovetailError, RequestError
from dovetail.runtime.child.supervisor import CLOSED
from dovetail.runtime.engine.engine import Engine
from dovetail.runtime.engine.recorder import StepRecorder
from dovetail.runtime.hosting.wire import NO_STEPS, Ask, EngineLoad
from dovetail.runtime.schedule.request import FAILED, Listener, Request
from dovetail.runtime.timeline import Timeline

T = TypeVar("T")
_Message = tuple[Callable[[], Any], "Future[Any]"]

log = logging.getLogger("dovetail")


class EngineLoop:
    """Owns an engine; only functions of `call` may touch it meanwhile. For any thread."""

    ready = True
    failure = ""

    def __init__(self, engine: Engine, pause: Callable[[], object] = lambda: None) -> None:
        """`pause` is called on the engine's thread after each step, and before it waits."""
        self.engine, self._pause = engine, pause
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._jobs: dict[int, Listener] = {}
        self._lock = threading.Lock()  # nothing enters the inbox after the last message
        self._closed = False
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Have `function` called between two steps; return its result as a future.

        Raises RequestError when the loop has been closed.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RequestError(CLOSED)
            self._inbox.put((function, future))
            self._start()
        return future

    # ---- as `EngineProcess` ----

    @property
    def service(self) -> ServicePlan:
        """The processes, threads and CPUs that the engine runs with."""
        return self.engine.executor.service

    @property
    def load(self) -> EngineLoad:
        """How busy the engine is, read while it runs: whole numbers that need no lock."""
        book, engine = self.engine.scheduler, self.engine
        pools = {home: pool for home, pool in book.pools.items() if pool.n_blocks}
        blocks = sum(pool.n_blocks for pool in pools.values())
        return EngineLoad(
            running=sum(len(queue) for queue in book.running.values()),
            waiting=len(book.waiting),
            kv_usage=1 - sum(pool.free_blocks for pool in pools.values()) / blocks,
            waits=engine.waits,
            steps=engine.watch.tokens.read() if engine.watch else NO_STEPS,
            pools={h.value: 1 - pool.free_blocks / pool.n_blocks for h, pool in pools.items()},
            swaps={home.value: book.swaps[home] for home in pools},
            homes={home.value: len(book.running[home]) for home in pools},
            prompt_tokens=engine.watch.prompt_tokens if engine.watch else 0,
            drafts=dict(book.speculation.counts) if book.speculation else {},
        )

    @property
    def drafts(self) -> bool:
        """Whether tokens are drafted."""
        return self.engine.scheduler.speculation is not None

    def now(self) -> float:
        """Return seconds on the clock of all times that requests tell."""
        return self.engine.scheduler.clock()

    def begin(self, ask: Ask, jobs: Sequence[Listener]) -> None:
        """Have the requests of `ask` started, all or none; `jobs` are told what comes of them.

        Raises RequestError or CapacityError where it is known at once that none can be, else the
        jobs fail with it: what the engine's thread changes meanwhile matters for `max_waiting`.
        """
        for prompt in ask.prompts:
            self.engine.scheduler.check(prompt, ask.params)
        self.queue(ask, jobs)

    def queue(self, ask: Ask, jobs: Sequence[Listener]) -> None:
        """As `begin`; what is wrong fails the jobs. They begin once their grammar has been read."""
        arrival = self.now()  # a step may be under way
        begin = partial(self._begin, ask, arrival, jobs)
        if not ask.params.grammar:
            self.call(begin)
            return
        try:
            read = self.engine.grammars.read(ask.params.grammar)
        except RuntimeError:
            if not self._closed:
                raise
            raise RequestError(CLOSED) from None
        read.add_done_callback(partial(self._queue_read, begin, jobs))

    def _queue_read(
        self, begin: Callable[[Future[Any]], None], jobs: Sequence[Listener], read: Future[Any]
    ) -> None:
        """Begin requests whose grammar has been read. On the thread that reads them."""
        wrong = None if read.cancelled() else read.exception()
        try:  # by a message that wakes the engine's thread: it passes on what fails, too
            self.call(partial(begin, read) if wrong is None else partial(_fail, jobs, wrong))
        except RequestError as closed:
            _fail(jobs, closed)

    def drop(self, jobs: Sequence[Listener]) -> Future[None]:
        """Have the unfinished ones ended; the future is done once their blocks are free.

        Raises RequestError where this is closed: they have ended then.
        """
        return self.call(lambda: self._drop(jobs))

    def start_recording(self, timeline: Timeline) -> None:
        """Draw the steps from now on; RequestError while another timeline is drawn on."""
        recorder = StepRecorder(timeline, self.engine.scheduler.pools)
        self.call(lambda: self.engine.start_recording(recorder)).result()

    def stop_recording(self) -> None:
        """Draw no longer; all that was done by now is on the timeline."""
        with suppress(RequestError):  # closed meanwhile
            self.call(self.engine.stop_recording).result()

    def close(self) -> None:
        """Fail the requests under way, end the thread and the engine. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            thread = self._thread
            if thread is not None and thread.is_alive():
                self._inbox.put((self._end, Future()))
        if thread is None or not thread.is_alive():
            self._end()
        elif thread is not threading.current_thread():
            thread.join()

    # ---- the thread ----

    def _start(self) -> None:
        """Start the thread with the first message, and anew in a forked process."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._serve, name="dovetail", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while self._answer():
            if self._jobs:
                self._step()
                self._pause()

    def _begin(
        self,
        ask: Ask,
        arrival: float,
        jobs: Sequence[Listener],
        grammar: Future[Any] | None = None,
    ) -> None:
        requests: list[Request] = []
        try:
            for prompt in ask.prompts:
                beside = len(requests)
                requests += self.engine.submit(prompt, ask.params, ask.priority, beside)
        except DovetailError as error:
            for request in requests:  # all or none: those before it in the call
                self.engine.finish(request, "abort")
            _fail(jobs, error)
            return
        for job, request in zip(jobs, requests, strict=True):
            request.metrics.arrival, request.beside = arrival, ask.beside
            if grammar is not None:
                self.engine.grammars.hold(request, grammar)
            job.begin(request)
            self._jobs[request.id] = job
            if job.dropped:
                self._drop([job])
            elif ask.flow is not None and self.engine.recorder is not None:
                self.engine.recorder.join(request.id, ask.flow)

    def _drop(self, jobs: Sequence[Listener]) -> None:
        """End the unfinished ones of `jobs` and give back their blocks."""
        for job in jobs:
            job.dropped = True
            if job.begun and self._jobs.pop(job.request.id, None) is not None:
                self.engine.finish(job.request, "abort")
                job.end()

    def _answer(self) -> bool:
        """Answer what has come in, waiting for it while there is no work; False at the end."""
        while True:
            try:
                function, future = self._inbox.get_nowait()
            except Empty:
                if self._jobs:
                    return True
                self._pause()
                self.engine.rest()
                function, future = self._inbox.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
            if function == self._end:
                return False

    def _step(self) -> None:
        """Run a step and tell the jobs; where no request can go on, all fail with the reason."""
        try:
            for request in self.engine.step():
                self._tell(self._jobs[request.id])
        except Exception as error:
            if not isinstance(error, DovetailError):
                log.exception("a step failed because of a bug")
            self._fail_all(error)

    def _tell(self, job: Listener) -> None:
        if job.extend():
            self.engine.finish(job.request, "stop")
        if job.done:
            del self._jobs[job.request.id]
            job.end()
        else:
            job.show()

    def _fail_all(self, error: Exception) -> None:
        jobs, self._jobs = self._jobs, {}
        try:
            for job in jobs.values():
                if not job.done:
                    self.engine.finish(job.request, FAILED)
        finally:  # whatever else is wrong, nobody waits for ever
            _fail(jobs.values(), error)

    def _end(self) -> None:
        self._fail_all(RequestError("the app was closed while the request was running"))
        self.engine.close()


def _fail(jobs: Iterable[Listener], error: BaseException) -> None:
    for job in jobs:
        job.fail(error)
