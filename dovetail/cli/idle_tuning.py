"""Tunes the models of a server while it has nothing to do (`dovetail serve --tune idle`).

In: jobs, each the command of a compile with measured schedules, and word of requests. Out:
artifacts that the server switches to. A request ends the child that measures at once; its trials
are on record, so that the next one goes on from there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from tempfile import TemporaryFile
from threading import Condition, Thread
from typing import IO

from dovetail.cli.compile_child import CompileChild
from dovetail.cli.model_cache import TuningJob
from dovetail.errors import DovetailError

log = logging.getLogger("dovetail.server")


class IdleTuner:
    """One thread, and one child while nobody wants anything. Told by the server's traffic."""

    def __init__(
        self, jobs: Sequence[TuningJob], after: float, switch: Callable[[TuningJob], None]
    ) -> None:
        """`after`: seconds without requests before it begins; `switch`: has a result served."""
        self._jobs, self._after, self._switch = jobs, after, switch
        self._changed = Condition()
        self._idle_since: float | None = None
        self._closed = self._stopped = False
        self._child: CompileChild | None = None
        self._thread = Thread(target=self._run, name="dovetail-tuning", daemon=True)
        self._thread.start()

    # ---- word of the server ----

    def busy(self) -> None:
        """End what measures: a request has come."""
        with self._changed:
            self._idle_since = None
            self._stop_child()
            self._changed.notify()

    def idle(self) -> None:
        """Hear that nothing is under way."""
        with self._changed:
            self._idle_since = time.monotonic()
            self._changed.notify()

    def close(self) -> None:
        """End the child and the thread."""
        with self._changed:
            self._closed = True
            self._stop_child()
            self._changed.notify()
        self._thread.join()

    # ---- the thread ----

    def _run(self) -> None:
        for job in self._jobs:
            tuned: bool | None = None
            while tuned is None and self._wait_idle():
                tuned = self._tune(job)
            if tuned and not self._closed:
                self._take(job)
        if not self._closed:
            log.info("tuning: nothing is left to tune")

    def _wait_idle(self) -> bool:
        """Return once there were no requests for long enough; False at the end."""
        with self._changed:
            while not self._closed:
                if self._idle_since is None:
                    self._changed.wait()
                    continue
                left = self._idle_since + self._after - time.monotonic()
                if left <= 0:
                    return True
                self._changed.wait(left)
        return False

    def _tune(self, job: TuningJob) -> bool | None:
        """Run the child; return whether there is a result, None where a request came before."""
        with self._changed:
            if self._closed or self._idle_since is None:
                return None
            log.info("tuning: measuring schedules of %r", job.name)
            said = TemporaryFile()
            child = self._child = CompileChild(job.command, job.output, said)
            self._stopped = False
        with said:
            code = child.wait()
            with self._changed:
                self._child = None
            if code and self._stopped:
                why = "with the server" if self._closed else "for requests"
                log.info("tuning: stopped %s; the measurements are kept", why)
                return None
            if code:
                log.warning("tuning: %r could not be compiled: %s", job.name, _last_line(said))
        return code == 0

    def _take(self, job: TuningJob) -> None:
        try:
            self._switch(job)
        except (DovetailError, OSError) as error:
            log.warning("tuning: %r keeps its schedules: %s", job.name, error)
            return
        log.info("tuning: %r is served with measured schedules now", job.name)

    def _stop_child(self) -> None:
        """Have the child and all it started end. With the lock."""
        if self._child is not None:
            self._stopped = True
            self._child.stop()


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    lines = file.read().decode(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.strip()), "it said nothing")
