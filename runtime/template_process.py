"""The app's side of the process that renders chat templates: nothing a template does stops others.

In: templates and conversations, from any thread. Out: futures of texts. One process serves all apps
of this one, while there are any. What it is not done with soon moves on to a second, nice process,
where it has the whole deadline, and is ended there: others wait for a moment, not for a deadline.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue

import msgspec

from dovetail.ir.errors import ArtifactError, DeviceError, DovetailError, RequestError
from dovetail.runtime.framing import MAX_MESSAGE, pack_value, receive_value, send_value
from dovetail.runtime.launch import END_SECONDS, Child
from dovetail.runtime.template_worker import Render, Rendered, RenderLimits, Teach

MODULE = "dovetail.runtime.template_worker"
SOON = 0.1
"""Seconds in which the first process is done with nearly all that is asked; they take 1 ms."""
DEADLINE = 1.0
"""Seconds that a conversation may take."""
MEMORY = 256 << 20
"""Bytes that rendering may take."""
NICE = 10
"""Of the second process: what burns its deadline there takes a tenth of a CPU from others."""
LEARN_SECONDS = 20.0
"""In which a process begins and learns a template that nobody has learnt before."""
AGAIN_SECONDS = 5.0
"""In which the next one does."""
CLOSED = "the app is closed; load the artifact again"


class _Lost(Exception):
    """The process was not done in time, or has ended."""


class _Late(_Lost):
    """It was not done in time."""


@dataclass(slots=True)
class _Job:
    """A conversation, or with None a template alone, on its way."""

    teach: Teach
    conversation: bytes | None
    future: Future[str] = field(default_factory=Future)


class _Lane:
    """One process at a time, and the thread that speaks to it."""

    def __init__(self, seconds: float, nice: int, beyond: _Lane | None = None) -> None:
        """`beyond`: where jobs go that take more than `seconds`, or whose process ended."""
        self._seconds, self._nice, self._beyond = seconds, nice, beyond
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._child: Child | None = None
        self._known: set[str] = set()
        self._lock = threading.Lock()
        self._closed = False  # then no job comes after the last, None
        self._thread = threading.Thread(target=self._serve, name="dovetail-templates", daemon=True)
        self._thread.start()

    def put(self, job: _Job) -> None:
        """Have a job done."""
        with self._lock:
            if not self._closed:
                self._jobs.put(job)
                return
        _settle(job.future, RequestError(CLOSED))

    @property
    def pid(self) -> int | None:
        """Process id, None while there is none."""
        child = self._child
        return None if child is None else child.pid

    def close(self) -> None:
        """End the process; what waits fails."""
        with self._lock:
            self._closed = True
            self._jobs.put(None)
        if (child := self._child) is not None:
            child.member.kill()
        self._thread.join()

    # ---- the thread ----

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.future.cancelled():
                continue
            if self._closed:
                _settle(job.future, RequestError(CLOSED))
                continue
            try:
                _settle(job.future, self._do(job))
            except _Lost as lost:
                self._end()
                if self._beyond is not None and job.conversation is not None:
                    self._beyond.put(job)
                else:
                    _settle(job.future, self._explain(lost, learning=job.conversation is None))
                if self._beyond is not None and not self._closed:  # the next one finds it there
                    with suppress(DovetailError, _Lost):
                        self._begin()
            except DovetailError as error:
                _settle(job.future, error)
        self._end()

    def _explain(self, lost: _Lost, *, learning: bool) -> DovetailError:
        if self._closed:
            return RequestError(CLOSED)
        if isinstance(lost, _Late):
            if learning:
                return _wrong(f"it is not read within {LEARN_SECONDS:g} s")
            return _refuse(f"it is not done within {self._seconds:g} s")
        return DeviceError(f"the process of chat templates {lost}; send the request again")

    def _do(self, job: _Job) -> str | DovetailError:
        """Return the text, or why there is none."""
        child = self._child or self._begin()
        if job.teach.key not in self._known:
            seconds = LEARN_SECONDS if job.conversation is None else AGAIN_SECONDS
            learnt = self._ask(child, job.teach, seconds)
            if learnt.error is not None or learnt.full:
                return _wrong(learnt.error or f"it takes more than {MEMORY >> 20} MiB of memory")
            self._known.add(job.teach.key)
        if job.conversation is None:
            return ""
        found = self._ask(child, Render(job.teach.key, job.conversation), self._seconds)
        if found.full:
            return _refuse(f"it takes more than {MEMORY >> 20} MiB of memory")
        if found.error is not None:
            return _refuse(found.error)
        return found.text.decode("utf-8", "surrogatepass")

    def _begin(self) -> Child:
        self._child = child = Child(MODULE, "the process of chat templates")
        send_value(child.link, RenderLimits(MEMORY, self._nice))
        self._known.clear()
        return child

    def _ask(self, child: Child, order: Teach | Render, seconds: float) -> Rendered:
        """Return the answer to an order; _Lost where none comes, _Late where none comes in time."""
        child.link.settimeout(seconds)
        try:
            child.link.sendall(pack_value(order))
            found = receive_value(child.link, Rendered)
        except TimeoutError:
            raise _Late from None
        except (OSError, msgspec.MsgspecError):
            found = None
        if found is None:
            raise _Lost(child.member.fate(END_SECONDS) or "hung up")
        if found.full:
            self._end()
        return found

    def _end(self) -> None:
        """End the process at once: it may be in the midst of anything."""
        child, self._child = self._child, None
        if child is not None:
            child.member.kill()
            child.bury()


class Renderer:
    """Both processes; the second one is only started when it is needed."""

    def __init__(self) -> None:
        self._patient = _Lane(DEADLINE, NICE)
        self._quick = _Lane(SOON, 0, self._patient)

    @property
    def pids(self) -> tuple[int | None, int | None]:
        """Process ids, None of one that is not there."""
        return self._quick.pid, self._patient.pid

    def learn(self, teach: Teach) -> None:
        """Return once the template is known; ArtifactError where it is none."""
        job = _Job(teach, None)
        self._quick.put(job)
        job.future.result()

    def render(self, teach: Teach, conversation: bytes) -> Future[str]:
        """Return the future of a text.

        It raises RequestError where the template does not take the conversation, DeviceError where
        no process can be started, or it ended.
        """
        if len(conversation) > MAX_MESSAGE - (1 << 10):
            raise _refuse(f"they take more than {MAX_MESSAGE >> 20} MiB")
        job = _Job(teach, conversation)
        self._quick.put(job)
        return job.future

    def close(self) -> None:
        """End the processes."""
        self._quick.close()
        self._patient.close()


class _Shared:
    """The renderer of this process, while somebody uses it."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # processes are those of the parent

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._renderer: Renderer | None = None

    def take(self) -> Renderer:
        """Return it for one more user."""
        with self._lock:
            self._users += 1
            return self._started()

    def use(self) -> Renderer:
        """Return it for somebody who has taken it."""
        with self._lock:
            return self._started()

    def _started(self) -> Renderer:
        self._renderer = self._renderer or Renderer()
        return self._renderer

    def give_back(self) -> None:
        """Hear that a user is gone; the last one ends it."""
        with self._lock:
            self._users -= 1
            ended = None
            if self._users < 1:
                ended, self._renderer = self._renderer, None
        if ended is not None:
            ended.close()


SHARED = _Shared()


def _settle(future: Future[str], found: str | DovetailError) -> None:
    if future.set_running_or_notify_cancel():
        if isinstance(found, DovetailError):
            future.set_exception(found)
        else:
            future.set_result(found)


def _refuse(why: str) -> RequestError:
    return RequestError(f"the model's chat template does not take these messages: {why}")


def _wrong(why: str) -> ArtifactError:
    return ArtifactError(
        f"the model's chat template is wrong: {why}; mend it in tokenizer_config.json and run "
        "`dovetail compile MODEL` again"
    )
