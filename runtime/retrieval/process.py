"""The app's side of its retrieval worker: a process that is started anew when it dies.

In: requests (`wire.py`), from any thread. Out: futures of their replies. Searches read only, so
those that a dead worker left unanswered are sent to the next one; each future is resolved once.
Changes of documents that were answered are made again in each worker that follows.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from msgspec.structs import replace

from dovetail.ir.errors import DeviceError, DovetailError, RequestError, SpecError
from dovetail.runtime.retrieval.change_log import ChangeLog
from dovetail.runtime.retrieval.wire import (
    Body,
    Changed,
    ChangeIndex,
    Opened,
    OpenIndex,
    Ready,
    Refused,
    Reply,
    Request,
    Room,
    receive_struct,
    send,
)

START_SECONDS = 120.0
END_SECONDS = 2.0
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

    def __init__(self, threads: int = 1) -> None:
        """`threads`: that search together."""
        self._threads = threads
        self._lock = threading.Lock()
        self._numbers = count()
        self._waiting: deque[_Ask] = deque()
        self._sent: dict[int, _Ask] = {}
        self._opened: dict[str, OpenIndex] = {}
        self._changes: dict[str, ChangeLog] = {}  # since it was opened
        self._suspects: set[int] = set()  # what a worker had that died
        self._closed = False
        self._link: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self.deaths = 0

    @property
    def pid(self) -> int | None:
        """Process id of the worker, None while there is none."""
        process = self._process
        return None if process is None else process.pid

    @property
    def ready(self) -> bool:
        """Whether a worker serves; also while none was ever needed."""
        return self._thread is None or self._link is not None

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
                _hang_up(link)
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
                _hang_up(self._link)
                self._link = None

    def _take(self, reply: Reply) -> None:
        with self._lock:
            asked = self._sent.pop(reply.number)
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
                link, process = self._start()
            except DovetailError as error:
                failed += 1
                if isinstance(error, _DiedOnStart) and failed < STARTS and not self._closed:
                    continue
                self._fail_all(error)
                return
            failed = 0
            self._read(link)
            closed = self._end(link, process)
            if closed:
                self._fail_all(RequestError("the app was closed while the search was running"))
                return
            self.deaths += 1
            why = f"the retrieval worker died ({_ending(process.returncode)})"
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

    def _end(self, link: socket.socket, process: subprocess.Popen[bytes]) -> bool:
        with self._lock:
            self._link = self._process = None
            closed = self._closed
        _end_process(link, process)
        return closed

    def _start(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        """Return a worker that has opened all indexes; DovetailError where that fails."""
        if importlib.util.find_spec("faiss") is None:
            raise SpecError("retrieval needs faiss; install dovetail with its extra `rag`")
        link, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "dovetail.runtime.retrieval.worker"]
        # A session of its own: Ctrl-C in a terminal is for the parent, which ends it. Threads that
        # spin for the next search would slow the engine down.
        try:
            process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": str(self._threads),
                    "OMP_WAIT_POLICY": "passive",
                },
                start_new_session=True,
            )
        except OSError as error:
            link.close()
            raise DeviceError(f"cannot start the retrieval worker ({error})") from None
        finally:
            theirs.close()
        try:
            self._set_up(link)
        except (DovetailError, OSError) as error:
            _end_process(link, process)
            if isinstance(error, DovetailError):
                raise
            raise _DiedOnStart(DIED) from None
        self._process = process
        return link, process

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


def _hang_up(link: socket.socket) -> None:
    with suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)


def _end_process(link: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Hang up, and wait: a worker goes by itself."""
    link.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _ending(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
