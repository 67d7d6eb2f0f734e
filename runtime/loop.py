"""The one thread that steps the engine while there is work; callers exchange messages with it.

In: functions to be called between steps, and jobs. Out: their results as futures; jobs that are
told of every token and of their end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from dovetail.ir.errors import DovetailError, RequestError
from dovetail.runtime.engine import Engine
from dovetail.runtime.job import Job
from dovetail.runtime.request import FAILED

T = TypeVar("T")
_Message = tuple[Callable[[], Any], "Future[Any]"]

log = logging.getLogger("dovetail")


class EngineLoop:
    """Owns an engine. Only functions that `call` is given may touch it meanwhile."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._jobs: dict[int, Job] = {}
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
                raise RequestError("the app is closed; load the artifact again")
            self._inbox.put((function, future))
            self._start()
        return future

    def watch(self, jobs: Iterable[Job]) -> None:
        """Tell `jobs` of their tokens from now on. To be called by a function of `call`."""
        self._jobs.update((job.request.id, job) for job in jobs)

    def drop(self, jobs: Iterable[Job]) -> None:
        """End the unfinished ones of `jobs` and give back their blocks. As for `watch`."""
        for job in jobs:
            under_way = job.begun and not job.finished
            if under_way and self._jobs.pop(job.request.id, None) is not None:
                self.engine.finish(job.request, "abort")
                job.end()

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

    def _start(self) -> None:
        """Start the thread with the first message, and anew in a forked process."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._serve, name="dovetail", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while self._answer():
            if self._jobs:
                self._step()

    def _answer(self) -> bool:
        """Answer what has come in, waiting for it while there is no work; False at the end."""
        while True:
            try:
                function, future = self._inbox.get(block=not self._jobs)
            except Empty:
                return True
            if future.set_running_or_notify_cancel():
                _resolve(future, function)
            if function == self._end:
                return False

    def _step(self) -> None:
        """Run a step and tell the jobs; where no request can go on, all fail with the reason."""
        try:
            for request in self.engine.step():
                self._tell(self._jobs[request.id])
        except Exception as error:
            if not isinstance(error, DovetailError):
                log.exception("a step failed by a fault of the program")
            self._fail_all(error)

    def _tell(self, job: Job) -> None:
        if job.extend():
            self.engine.finish(job.request, "stop")
        if job.done:
            del self._jobs[job.request.id]
            job.end()

    def _fail_all(self, error: Exception) -> None:
        jobs, self._jobs = self._jobs, {}
        try:
            for job in jobs.values():
                if not job.done:
                    self.engine.finish(job.request, FAILED)
        finally:  # whatever else is wrong, nobody waits for ever
            for job in jobs.values():
                job.fail(error)

    def _end(self) -> None:
        self._fail_all(RequestError("the app was closed while the request was running"))
        self.engine.close()


def _resolve(future: Future[T], function: Callable[[], T]) -> None:
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
