"""The one thread that runs workflows: it owns a `Session`, and takes messages for it.

In: runs and cancellations, from any thread. Out: jobs, and their ends whatever happens.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from dovetail.ir.errors import DovetailError, RequestError
from dovetail.runtime.flows.job import WorkflowJob
from dovetail.runtime.flows.session import Hands, Session
from dovetail.runtime.wavefront.speculation import Statistics
from dovetail.runtime.wavefront.wavefront import Wavefront
from dovetail.runtime.workflow_run import WorkflowRun

ROOM_SECONDS = 0.05
"""Between two looks at whether the engine has room again for generations it refused."""
MESSAGES = 64
"""After so many the control plane is asked for orders, even if more have come."""

log = logging.getLogger("dovetail")


class Driver:
    """Runs workflows, any number at once. For any thread."""

    def __init__(self, hands: Hands, make_control: Callable[[], Wavefront]) -> None:
        """`make_control` is called on the driver's thread; again after a fault of the program."""
        self._hands, self._make_control = hands, make_control
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()  # nobody submits after the last message
        self._closed = False
        self._thread: threading.Thread | None = None
        self._session: Session | None = None

    def submit(self, run: WorkflowRun, *, events: bool) -> WorkflowJob:
        """Start a run; RequestError when this is closed."""
        job = WorkflowJob(run.workflow, self._cancel, events=events)
        with self._lock:
            if self._closed:
                raise RequestError("the app is closed; load the artifact again")
            self._inbox.put(lambda: self._begin(run, job))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="dovetail-workflows", daemon=True
                )
                self._thread.start()
        return job

    @property
    def statistics(self) -> Statistics:
        """What came of guesses, since the last fault of the program."""
        session = self._session
        return Statistics() if session is None else session.statistics

    def close(self) -> None:
        """Fail what is under way and end the thread. Safe to call twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inbox.put(self._end)
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    # ---- on the thread ----

    def _serve(self) -> None:
        taken = 0
        while (message := self._next()) != self._end:
            taken += 1
            try:
                message()
                if self._session is not None and (self._inbox.empty() or taken % MESSAGES == 0):
                    self._session.cycle()
            except Exception as error:
                log.exception("workflows failed by a fault of the program")
                self._leave(error)
        self._end()

    def _next(self) -> Callable[[], None]:
        session = self._session
        if session is None or not session.held:
            return self._inbox.get()
        try:
            return self._inbox.get(timeout=ROOM_SECONDS)
        except Empty:
            return session.retry

    def _begin(self, run: WorkflowRun, job: WorkflowJob) -> None:
        try:
            if self._session is None:
                self._session = Session(self._hands, self._make_control(), self._inbox.put)
            self._session.begin(run, job)
        except DovetailError as error:
            job.fail(error)
        except Exception as error:
            job.fail(error)
            raise

    def _cancel(self, job: WorkflowJob) -> None:
        self._inbox.put(lambda: self._drop(job))

    def _drop(self, job: WorkflowJob) -> None:
        if self._session is not None:
            self._session.drop(job)

    def _leave(self, error: Exception) -> None:
        """Fail what is under way; what comes later is served by another session."""
        session, self._session = self._session, None
        if session is not None:
            session.end(error)

    def _end(self) -> None:
        self._leave(RequestError("the app was closed while the workflow was running"))
