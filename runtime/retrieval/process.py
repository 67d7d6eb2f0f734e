"""The app's side of its retrieval worker: a process that is started anew when it dies.

In: requests (`wire.py`), from any thread. Out: futures of their replies. Searches read only, so
those that a dead worker left unanswered are sent to the next one; each future is resolved once.
Changes of documents that were answered are made again in each worker that follows.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from msgspec.structs import replace

from dovetail.ir.errors import DeviceError, DovetailError, RequestError
from dovetail.runtime.launch import Child, hang_up
from dovetail.runtime.retrieval.change_log import ChangeLog
from dovetail.runtime.retrieval.manifest import need_faiss
from dovetail.runtime.retrieval.wire import (
    Body,
    Changed,
    ChangeIndex,
    Opened,
    OpenIndex,
    ProbeQueries,
    Ready,
    Refused,
    Reply,
    Request,
    Room,
    ScanPieces,
    receive_struct,
    send,
)
from dovetail.runtime.watch import PATIENCE, Hang, HangWatcher, Reading

MODULE = "dovetail.runtime.retrieval.worker"
START_SECONDS = 120.0
SEARCHES = (ProbeQueries, ScanPieces)
FIRST_SEARCH = 3.0
"""Seconds that a search is predicted to take before one has told: files may have to be read."""
SEND_SECONDS = 30
"""A worker that takes no request for so long is replaced: it always reads, unless it is stopped."""
TIMEOUT = struct.Struct("@ll")
STARTS = 3
"""Workers in a row that die before they are ready; what waits is given up then."""
DEATHS = 3
"""A request in whose sole company so many workers have died is given up."""

DIED = "the retrieval worker died on its start"

log = logging.getLogger("dovetail")


class _DiedOnStart(DeviceError):
    """A worker that was gone, or silent, before it was ready."""


@dataclass(slots=True)
class _Ask:
    """A request on its way. deaths: workers that died with it alone."""

    request: Request
    future: Future[Reply] = field(default_factory=Future)
    deaths: int = 0


class RetrievalProcess:
    """One worker at a time, started with the first index. For several threads.

    After a death requests go to the new worker one by one until all that the old one had are
    answered, so that one that kills workers is found out and fails alone.
    """

    def __init__(self, threads: int = 1, patience: float = PATIENCE) -> None:
        """`threads`: that search together. `patience`: see `Watch`."""
        self._threads = threads
        self._lock = threading.Lock()
        self._numbers = count()
        self._waiting: deque[_Ask] = deque()
        self._sent: dict[int, _Ask] = {}
        self._opened: dict[str, OpenIndex] = {}
        self._changes: dict[str, ChangeLog] = {}  # since it was opened
        self._suspects: set[int] = set()  # what a worker had that died
        self._closed = False
        self._link: socket.socket | None = None  # of a worker that is ready
        self._child: Child | None = None
        self._thread: threading.Thread | None = None
        self.deaths = 0
        self._patience = patience
        self._hang: Hang | None = None
        self._ailment = ""
        self._answered, self._longest = 0, 0.0  # the seconds that a search took

    @property
    def pid(self) -> int | None:
        """Process id of the worker, None while there is none."""
        child = self._child
        return None if child is None else child.pid

    @property
    def ready(self) -> bool:
        """Whether a worker serves; also while none was ever needed."""
        return self._thread is None or self._link is not None

    @property
    def ailment(self) -> str:
        """Why it is not ready, in words; "" where it is."""
        return "" if self.ready else self._ailment

    @property
    def in_hand(self) -> tuple[int, ...]:
        """Numbers of the requests that the worker has and has not answered, in order."""
        with self._lock:
            return tuple(self._sent)

    def open(
        self,
        index: str,
        path: str | os.PathLike[str],
        *,
        kernels: bool | None = None,
        room: Room | None = None,
    ) -> Opened:
        """Open an index in the worker, and in those that follow it.

        Args:
            index: what requests call it.
            path: its folder.
            kernels: whether its kernels scan it, or faiss; None: what is measured to be faster.
            room: memory of a GPU for its hot clusters; a new worker begins with none of them.

        Raises:
            ArtifactError: there is no index at `path`, or it is damaged.
            SpecError: faiss is not installed.
            DeviceError: the worker cannot be started.
            RequestError: this is closed.
        """
        body = OpenIndex(index, str(Path(path).resolve()), self._threads, kernels, room)
        opened = self.ask(body).result().body
        assert isinstance(opened, Opened)
        return opened

    def ask(self, body: Body) -> Future[Reply]:
        """Send a request; its future gives the reply, or raises the error that the worker met.

        Also DeviceError where workers die of it or cannot be started, RequestError at `close`.
        """
        asked = _Ask(Request(next(self._numbers), body))
        asked.future.set_running_or_notify_cancel()
        with self._lock:
            if self._closed:
                raise RequestError("the app is closed; load the artifact again")
            self._waiting.append(asked)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._keep, name="dovetail-retrieval", daemon=True
                )
                self._thread.start()
            self._pump()
        return asked.future

    def close(self) -> None:
        """End the worker; what it had not answered fails. Safe to call twice."""
        with self._lock:
            self._closed = True
            link, thread = self._link, self._thread
            if link is not None:
                hang_up(link)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    # ---- requests ----

    def _pump(self) -> None:
        """Send what waits, one at a time while there are suspects. With the lock."""
        while self._link is not None and self._waiting and not (self._suspects and self._sent):
            asked = self._waiting.popleft()
            self._sent[asked.request.number] = asked
            try:
                send(self._link, asked.request)
            except OSError:  # it is gone, or has read nothing for long: its end is read elsewhere
                hang_up(self._link)
                self._link = None

    def _take(self, reply: Reply) -> None:
        with self._lock:
            asked = self._sent.pop(reply.number)
            self._answered += 1
            if type(asked.request.body) in SEARCHES:
                self._longest = max(self._longest, reply.seconds)
            self._suspects.discard(reply.number)
            body = asked.request.body
            if isinstance(reply.body, Opened) and isinstance(body, OpenIndex):
                # Later workers scan as this one does: a search may go on in one of them
                self._opened[body.index] = replace(body, kernels=reply.body.kernels)
                self._changes[body.index] = ChangeLog(body.index)
            elif isinstance(reply.body, Changed) and isinstance(body, ChangeIndex):
                self._changes[body.index].add(body, reply.body.removed)
            self._pump()
        if isinstance(reply.body, Refused):
            asked.future.set_exception(reply.body.make())
        else:
            asked.future.set_result(reply)

    def _take_back(self) -> list[_Ask]:
        """Have what the dead worker had sent again; return what it cannot be."""
        with self._lock:
            lost = [self._sent[number] for number in sorted(self._sent)]
            self._sent.clear()
            if len(lost) == 1:
                lost[0].deaths += 1
            again = [asked for asked in lost if asked.deaths < DEATHS]
            self._waiting.extendleft(reversed(again))
            self._suspects.difference_update(asked.request.number for asked in lost)
            self._suspects.update(asked.request.number for asked in again)
        return [asked for asked in lost if asked.deaths >= DEATHS]

    def _fail_all(self, error: DovetailError) -> None:
        """Fail what there is, and leave; the next request tries to start a worker again."""
        with self._lock:
            self._thread = None
            left = [*self._sent.values(), *self._waiting]
            self._sent.clear()
            self._waiting.clear()
            self._suspects.clear()
        for asked in left:
            asked.future.set_exception(error)

    # ---- the worker's life, on one thread ----

    def _keep(self) -> None:
        """Start a worker and read its replies; when it dies, start the next."""
        failed = 0
        while True:
            try:
                child = self._start()
            except DovetailError as error:
                failed += 1
                if isinstance(error, _DiedOnStart) and failed < STARTS and not self._closed:
                    continue
                self._fail_all(error)
                return
            failed = 0
            watcher = HangWatcher(self._reading, partial(self._kill, child), self._patience)
            self._read(child.link)
            watcher.end()
            closed, why = self._end(child)
            if closed:
                self._fail_all(RequestError("the app was closed while the search was running"))
                return
            self.deaths += 1
            log.warning("%s; starting another one", why)
            for asked in self._take_back():
                asked.future.set_exception(
                    DeviceError(f"{why} in this search, as others before it; change the query")
                )

    def _read(self, link: socket.socket) -> None:
        with self._lock:
            if self._closed:
                return
            self._link = link
            self._pump()
        try:
            while (reply := receive_struct(link, Reply)) is not None:
                self._take(reply)
        except Exception:
            log.exception("a retrieval worker said what it should not")

    def _end(self, child: Child) -> tuple[bool, str]:
        """Return whether this is closed, and how the worker ended, in words."""
        with self._lock:
            self._link = self._child = None
            closed = self._closed
        fate = child.bury()
        hang, self._hang = self._hang, None
        self._ailment = f"the retrieval worker {hang or fate}"
        return closed, self._ailment

    def _reading(self) -> Reading:
        """Return the worker as a watcher sees it: only searches are told how long they may take."""
        # Without the lock, which who sends to a worker that is stopped holds for long
        kinds = {type(asked.request.body) for asked in list(self._sent.values())}
        longest = self._longest or FIRST_SEARCH
        predicted = longest if kinds <= set(SEARCHES) else math.inf
        return Reading(bool(kinds), self._answered, predicted)

    def _kill(self, child: Child, hang: Hang) -> None:
        self._hang = hang
        child.member.kill()

    def _start(self) -> Child:
        """Return a worker that has opened all indexes; DovetailError where that fails."""
        need_faiss()
        # Threads that spin for the next search would slow the engine down
        words = {"OMP_NUM_THREADS": str(self._threads), "OMP_WAIT_POLICY": "passive"}
        child = Child(MODULE, "the retrieval worker", words=words)
        try:
            self._set_up(child.link)
        except (DovetailError, OSError) as error:
            child.bury()
            if isinstance(error, DovetailError):
                raise
            raise _DiedOnStart(DIED) from None
        self._child = child
        return child

    def _set_up(self, link: socket.socket) -> None:
        link.settimeout(START_SECONDS)
        ready = receive_struct(link, Ready)
        if ready is None:
            raise _DiedOnStart(DIED)
        for body in self._replay():
            send(link, Request(-1, body))
            reply = receive_struct(link, Reply)
            if reply is None:
                raise _DiedOnStart(f"{DIED}, as it opened {body.index!r}")
            if isinstance(reply.body, Refused):
                raise reply.body.make()
        link.settimeout(None)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, TIMEOUT.pack(SEND_SECONDS, 0))

    def _replay(self) -> Iterator[Body]:
        """Yield what opens all indexes as they are, one message at a time: it may be much.

        Without the lock: this thread alone writes what it reads.
        """
        for index, first in self._opened.items():
            yield first
            yield from self._changes[index].replay()
