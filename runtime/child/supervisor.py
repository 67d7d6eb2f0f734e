"""Keeps one child process: starts it, reads what it says, ends it where it hangs, starts the next.

In: what the process is for, as a subclass. Out: calls of its methods, on one thread; messages for
the process go from any thread, without waiting.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from dovetail.ir.errors import DeviceError, DovetailError, RequestError
from dovetail.runtime.child.child import Child, StartError
from dovetail.runtime.child.framing import ErrorText, Outbox
from dovetail.runtime.child.launch import END_SECONDS
from dovetail.runtime.child.watch import PATIENCE, Reading, Restarts, Watch

CLOSED = "the app is closed; load the artifact again"
FORKED = "the app was loaded before this process was forked off; load the artifact in this process"

M = TypeVar("M")

log = logging.getLogger("dovetail")


def check_usable(*, closed: bool, forked: bool) -> None:
    """Raise RequestError where an app is closed, or its threads are those of a forked parent."""
    if closed or forked:
        raise RequestError(CLOSED if closed else FORKED)


class Supervisor(ABC, Generic[M]):
    """One process at a time. With `_lock` nothing waits for long."""

    def __init__(
        self, kind: type[M], *, closed: str, send_seconds: int, patience: float = PATIENCE
    ) -> None:
        """`kind`: of its messages. `closed`: what is said where this is closed under way.

        send_seconds: a process that reads nothing for so long is replaced: it always reads, unless
        it is stopped. patience: see `Watch`.
        """
        self._kind, self._closed_text = kind, closed
        self._send_seconds, self._patience = send_seconds, patience
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._outbox: Outbox | None = None  # of a process that is ready
        self._failure = self._hang = ""
        self._wanted = False
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._first: Future[None] = Future()
        self.deaths = 0
        self.changed: Callable[[], object] = lambda: None
        """Called, on any thread, when a process has died, serves, or is given up."""

    # ---- what it is for; on its thread, but for `_look` ----

    @abstractmethod
    def _launch(self) -> Child:
        """Return a new process; DovetailError where there is none."""

    @abstractmethod
    def _set_up(self, child: Child) -> None:
        """Return when it is ready; DovetailError where it will not be."""

    @abstractmethod
    def _send_waiting(self) -> None:
        """Send what has waited for a process. With the lock."""

    @abstractmethod
    def _hear(self, message: M) -> None:
        """Take what it says."""

    @abstractmethod
    def _look(self) -> Reading:
        """Return the process as its watcher sees it."""

    @abstractmethod
    def _lose(self, why: str) -> None:
        """Fail, or keep for the next one, what the process had; why it ended, in words."""

    @abstractmethod
    def _fail_all(self, error: DovetailError) -> None:
        """Fail all there is."""

    # ---- for any thread ----

    def wait(self) -> None:
        """Return once the first process serves; raises why there is none."""
        self._first.result()

    @property
    def pid(self) -> int | None:
        """Process id, None while there is none."""
        child = self._child
        return None if child is None else child.pid

    @property
    def ready(self) -> bool:
        """False from the death of a process until the next one serves."""
        return self._outbox is not None

    @property
    def given_up(self) -> bool:
        """Whether no process is kept: none could be started, or none was wanted."""
        return self._thread is None and not self._closing.is_set()

    @property
    def failure(self) -> str:
        """Why the last process died, or cannot start, while there is no other; else ""."""
        return "" if self.ready else self._failure

    def _check_open(self) -> None:
        """Raise RequestError where this is closed, or a forked parent has the process."""
        forked = self._thread is not None and not self._thread.is_alive()
        check_usable(closed=self._closing.is_set(), forked=forked)

    def _ensure(self) -> None:
        """Have a process started, unless there is one. With the lock."""
        self._wanted = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep, name="supervisor", daemon=True)
            self._thread.start()
            atexit.register(self._end_at_exit)

    def leave(self) -> None:
        """Have the process end: nobody waits for it any more."""
        with self._lock:
            self._closing.set()
            if self._child is not None:
                self._child.channel.hang_up()

    def close(self) -> None:
        """End the process; what is under way fails. Safe to call twice."""
        self.leave()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _end_at_exit(self) -> None:
        """Close before the interpreter ends, but not in a forked process, which has no thread."""
        if self._thread is not None and self._thread.is_alive():
            self.close()

    # ---- the thread ----

    def _keep(self) -> None:
        """Start a process and read what it tells; when it dies, start the next."""
        restarts = Restarts()
        while True:
            try:
                child = self._start()
            except Exception as failure:  # whatever is wrong, nobody waits for ever
                error = ErrorText.of(failure).make()
                if isinstance(failure, DovetailError):
                    error = failure
                self._failure = str(error)
                # what says why will say so again, unless another one has served before
                pause = restarts.end() if isinstance(failure, StartError) or self.deaths else None
            else:
                error, seconds, worked = self._serve(child)
                pause = restarts.end(seconds, worked=worked)
            if pause is None or self._closing.wait(pause):
                if self._give_up(error):
                    return
            else:
                log.warning("%s; starting another one", error)

    def _start(self) -> Child:
        """Return a process that serves; DovetailError where there is none."""
        child = self._launch()
        with self._lock:
            self._child = child
            if self._closing.is_set():
                child.channel.hang_up()
        try:
            self._set_up(child)
        except BaseException:
            child.end()
            with self._lock:
                self._child = None
            raise
        return child

    def _serve(self, child: Child) -> tuple[DeviceError, float, bool]:
        """Return how a process ended, the seconds that it served, and whether it had work."""
        ended, began, worked = threading.Event(), time.monotonic(), False
        threading.Thread(target=self._watch, args=(child, ended), daemon=True).start()
        try:
            with self._lock:
                self._outbox = Outbox(child.channel, self._send_seconds)
                self._send_waiting()
            if not self._first.done():
                self._first.set_result(None)
            self.changed()
            for message in child.channel.messages(self._kind):
                worked = True
                self._hear(message)
        except Exception:
            log.exception("the messages from or to %s failed because of a bug", child.name)
        ended.set()
        with self._lock:
            self._outbox = self._child = None
        child.channel.hang_up()
        worked |= self._look().busy
        end = child.member.wait(0.0 if self._closing.is_set() else END_SECONDS) or "hung up"
        hang, self._hang = self._hang, ""
        self._failure = why = f"{child.name} {hang or end}"
        self.deaths += not self._closing.is_set()
        self._lose(why)  # at once: to bury the process may take long
        self.changed()
        child.end()
        return DeviceError(why), time.monotonic() - began, worked

    def _watch(self, child: Child, ended: threading.Event) -> None:
        """Look at a process until it ends or hangs, and kill it then; on a thread of its own."""
        watch = Watch(self._patience)
        while not ended.wait(watch.step):
            if hang := watch.look(time.monotonic(), self._look()):
                self._hang = hang
                child.member.kill()
                return

    def _give_up(self, error: DovetailError) -> bool:
        """Have all that waits fail; return whether nobody wants a process any more."""
        with self._lock:
            self._wanted = False
        error = RequestError(self._closed_text) if self._closing.is_set() else error
        self._fail_all(error)
        if not self._first.done():
            self._first.set_exception(error)
        with self._lock:
            if not self._wanted or self._closing.is_set():
                atexit.unregister(self._end_at_exit)
                self._thread = None
        self.changed()
        return self._thread is None
