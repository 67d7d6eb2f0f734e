"""The app's side of its retrieval worker: a process that is started anew when it dies.

In: requests (`wire.py`), from any thread. Out: futures of their replies. Searches read only, so
those that a dead worker left unanswered are sent to the next one; each future is resolved once.
Changes of documents that were answered are made again in each worker that follows.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import cast

from msgspec.structs import replace

from dovetail.ir.errors import DeviceError, DovetailError
from dovetail.ir.index_file import IndexManifest
from dovetail.runtime.child.child import Child, ChildLost, StartError
from dovetail.runtime.child.framing import pack_value
from dovetail.runtime.child.supervisor import Supervisor
from dovetail.runtime.child.watch import Reading
from dovetail.runtime.index.manifest import read_manifest
from dovetail.runtime.machine.seat import SEARCH_SLOT, Board
from dovetail.runtime.retrieval import wire
from dovetail.runtime.retrieval.change_log import ChangeLog

MODULE = "dovetail.runtime.retrieval.worker"
START_SECONDS = 120.0
SEARCHES = (wire.ProbeQueries, wire.ScanParts)
FIRST_SEARCH = 3.0
"""Seconds that a search is predicted to take before one has told: files may have to be read."""
SEND_SECONDS = 30
DEATHS = 3
"""A request in whose sole company so many workers have died is given up."""


@dataclass(slots=True)
class _PendingRequest:
    """A request on its way, and the message that it is. deaths: workers that died with it alone."""

    request: wire.WorkerRequest
    message: bytes
    future: Future[wire.WorkerReply] = field(default_factory=Future)
    deaths: int = 0


class RetrievalProcess(Supervisor[wire.WorkerReply]):
    """One worker at a time, started with the first index. For several threads.

    After a death requests go to the new worker one by one until all that the old one had are
    answered, so that one that kills workers is found out and fails alone.
    """

    def __init__(
        self, threads: int = 1, cpus: Sequence[int] = (), board: Board | None = None
    ) -> None:
        """`threads`: that search together. cpus: those they may use, () = all of this process's.

        board: of the workers that share the CPUs.
        """
        closed = "the app was closed while the search was running"
        super().__init__(wire.WorkerReply, closed=closed, send_seconds=SEND_SECONDS)
        self._threads, self._cpus, self._board = threads, tuple(cpus), board
        self._numbers = count()
        self._waiting: deque[_PendingRequest] = deque()
        self._sent: dict[int, _PendingRequest] = {}
        self._opened: dict[str, tuple[wire.OpenIndex, ChangeLog]] = {}  # and the changes since
        self._suspects: set[int] = set()  # what a worker had that died
        self._answered = 0
        self._longest: dict[tuple[str, bool], float] = {}  # seconds of searches: see `_kind`

    @property
    def ready(self) -> bool:
        """Whether a worker serves; also while none is needed."""
        return self._thread is None or super().ready

    def open(
        self,
        index: str,
        path: str | os.PathLike[str],
        *,
        manifest: IndexManifest | None = None,
        kernels: bool | None = None,
        room: wire.Room | None = None,
        first: bytes = b"",
        same: bool = False,
        opened: Callable[[wire.Opened], object] = lambda opened: None,
    ) -> wire.Opened:
        """Open an index in the worker, and in those that follow it; see `OpenIndex`.

        A new worker begins with no hot clusters. What fails leaves an index of that name as it was.
        manifest: by default of what is at `path` now. opened: called, on any thread, before the
        worker is heard of anything that it did later.

        Raises:
            ArtifactError: there is no index at `path`, or it is damaged.
            SpecError: the app's encoder makes other vectors.
            DeviceError: the worker cannot be started.
            RequestError: this is closed.
        """
        where = Path(path).resolve()
        meant = manifest or read_manifest(where)
        body = wire.OpenIndex(index, str(where), meant, self._threads, kernels, room, first, same)

        def take(done: Future[wire.WorkerReply]) -> None:
            if done.exception() is None:
                opened(cast("wire.Opened", done.result().body))

        return cast("wire.Opened", self.ask(body, take).result().body)

    def ask(
        self, body: wire.Body, take: Callable[[Future[wire.WorkerReply]], object] | None = None
    ) -> Future[wire.WorkerReply]:
        """Send a request; its future gives the reply, or raises the error that the worker met.

        take: called with the future before anything else is heard of the worker.

        Also DeviceError where workers die of it or cannot be started, RequestError at `close`.
        Raises TypeError or OverflowError at once for values that no message can hold.
        """
        request = wire.WorkerRequest(next(self._numbers), body)
        asked = _PendingRequest(request, pack_value(request))
        asked.future.set_running_or_notify_cancel()
        if take is not None:
            asked.future.add_done_callback(take)
        with self._lock:
            self._check_open()
            self._waiting.append(asked)
            self._ensure()
            self._send_waiting()
        return asked.future

    # ---- a Supervisor: see there ----

    def _launch(self) -> Child:
        """Start a worker."""
        # Threads that spin for the next search would slow the engine down
        words = {"OMP_NUM_THREADS": str(self._threads), "OMP_WAIT_POLICY": "passive"}
        fds = [self._board.memory.fd] if self._board else []
        name = "the retrieval worker's process {}"
        return Child.start(MODULE, name, fds=fds, words=words, cpus=self._cpus)

    def _set_up(self, child: Child) -> None:
        """Have it open all indexes as they are; it tells who searches one that it cannot open."""
        child.set_up(None, wire.WorkerReady, START_SECONDS)
        # Without the lock: this thread alone writes what is read here, one message at a time
        for first, changes in self._opened.values():
            for body in chain([first], changes.replay()):
                try:
                    reply = child.ask(wire.WorkerRequest(-1, body), wire.WorkerReply, START_SECONDS)
                except ChildLost as lost:
                    why = f"{lost} on its start, as it opened {body.index!r}"
                    raise StartError(f"{child.name} {why}") from None
                if reply.error is not None and body is first:
                    break
                if reply.error is not None:
                    raise reply.error.make()

    def _send_waiting(self) -> None:
        """Send what waits, one at a time while there are suspects."""
        outbox = self._outbox
        while outbox and self._waiting and not (self._suspects and self._sent):
            asked = self._waiting.popleft()
            self._sent[asked.request.number] = asked
            outbox.post(asked.message)

    def _hear(self, reply: wire.WorkerReply) -> None:
        """Answer a request."""
        with self._lock:
            asked = self._sent.pop(reply.number)
            body = asked.request.body
            self._answered += 1
            if isinstance(body, SEARCHES) and reply.error is None:
                kind = _kind(body)
                self._longest[kind] = max(self._longest.get(kind, 0.0), reply.seconds)
            self._suspects.discard(reply.number)
            if isinstance(reply.body, wire.Opened) and isinstance(body, wire.OpenIndex):
                # Later workers scan as this one does: a search may go on in one of them
                first = replace(body, kernels=reply.body.kernels)
                self._opened[body.index] = first, ChangeLog(body.index)
                self._longest = {k: s for k, s in self._longest.items() if k[0] != body.index}
            elif isinstance(reply.body, wire.Changed) and isinstance(body, wire.ChangeIndex):
                self._opened[body.index][1].add(body, reply.body.removed)
            self._send_waiting()
        if reply.error is not None:
            asked.future.set_exception(reply.error.make())
        else:
            asked.future.set_result(reply)

    def _look(self) -> Reading:
        """Return the worker as a watcher sees it: only searches are told how long they may take."""
        with self._lock:
            predicted = [self._predict(asked.request.body) for asked in self._sent.values()]
        return Reading(bool(predicted), self._answered, max(predicted, default=0.0))

    def _predict(self, body: wire.Body) -> float:
        """Return the seconds that a request should take; infinity where nothing tells."""
        if not isinstance(body, SEARCHES):
            return math.inf
        kind = _kind(body)
        return self._longest.get(kind, math.inf if kind[1] else FIRST_SEARCH)

    def _lose(self, why: str) -> None:
        """Have what the dead worker had sent again, but what has killed too many."""
        if self._board is not None:
            self._board.clear(SEARCH_SLOT)
        with self._lock:
            self._longest = {kind: s for kind, s in self._longest.items() if not kind[1]}
            lost = [self._sent[number] for number in sorted(self._sent)]
            self._sent.clear()
            if len(lost) == 1:
                lost[0].deaths += 1
            again = [asked for asked in lost if asked.deaths < DEATHS]
            self._waiting.extendleft(reversed(again))
            self._suspects -= {asked.request.number for asked in lost}
            self._suspects |= {asked.request.number for asked in again}
        for asked in lost:
            if asked.deaths >= DEATHS:
                asked.future.set_exception(
                    DeviceError(f"{why} in this search, as others before it; change the query")
                )

    def _fail_all(self, error: DovetailError) -> None:
        """Fail what there is; the next request tries to start a worker again."""
        with self._lock:
            left = [*self._sent.values(), *self._waiting]
            self._sent.clear()
            self._waiting.clear()
            self._suspects.clear()
        for asked in left:
            asked.future.set_exception(error)


def _kind(body: wire.ProbeQueries | wire.ScanParts) -> tuple[str, bool]:
    """Return the index of a search, and whether it has filters.

    The first that has makes a worker read all documents: minutes of millions.
    """
    asked = body.queries if isinstance(body, wire.ProbeQueries) else body.parts
    return body.index, any(each.filters for each in asked)
