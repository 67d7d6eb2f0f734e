"""The app's side of the process that renders chat templates and tries grammars.

In: templates, conversations and forms of answers, from any thread. Out: futures of texts. One
process serves all apps of this one, while there are any. What it is not done with soon moves on to
a second, nice process, where it has the whole deadline, and is ended there: others wait for a
moment, not for a deadline. Nothing that a template or a grammar does stops others.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from dovetail.ir.errors import ArtifactError, DeviceError, DovetailError, RequestError
from dovetail.runtime.child.child import Child, ChildLate, ChildLost, hung_up
from dovetail.runtime.child.supervisor import CLOSED
from dovetail.runtime.machine.cpu_time import process_seconds
from dovetail.runtime.schedule.structured import StructuredOutputs
from dovetail.runtime.text.template_worker import (
    Order,
    Render,
    Rendered,
    RenderLimits,
    Teach,
    TryForm,
)

MODULE = "dovetail.runtime.text.template_worker"
SOON = 0.1
"""Seconds in which the first process is done with nearly all that is asked; they take 1 ms."""
DEADLINE = 1.0
"""CPU seconds that a conversation or a grammar may take."""
DEADLINES = 5
"""How often the second process is waited for so long: on a busy machine it gets little of a CPU."""
MEMORY = 256 << 20
"""Bytes that it may take."""
NICE = 10
"""Of the second process: what burns its deadline there takes a tenth of a CPU from others."""
LEARN_SECONDS = 20.0
"""In which a process begins and learns a template; a nice one takes long on a busy machine."""
MAX_CONVERSATION = 16 << 20
"""Bytes of what is rendered at once."""
FIRST_FORM = TryForm(StructuredOutputs(json_object=True))
FORMS = "forms"
"""What a process begins with before it tries a form of a caller: it has imported all then."""


@dataclass(slots=True)
class _TemplateJob:
    """An order on its way. teach: the template that it needs."""

    order: Order
    teach: Teach | None = None
    future: Future[str] = field(default_factory=Future)


class _RenderProcess:
    """One process at a time, and the thread that speaks to it."""

    def __init__(self, seconds: float, nice: int, beyond: _RenderProcess | None = None) -> None:
        """`beyond`: where jobs go that take more than `seconds`, or whose process ended."""
        self._seconds, self._nice, self._beyond = seconds, nice, beyond
        self._thread = ThreadPoolExecutor(1, "dovetail-templates")
        self._child: Child | None = None
        self._known: set[str] = set()
        self._closed = False

    def put(self, job: _TemplateJob) -> Future[str]:
        """Have a job done; return its future."""
        try:
            self._thread.submit(self._serve, job)
        except RuntimeError:
            _settle(job.future, RequestError(CLOSED))
        return job.future

    @property
    def pid(self) -> int | None:
        """Process id, None while there is none."""
        return None if (child := self._child) is None else child.pid

    def close(self) -> None:
        """End the process; what waits fails."""
        self._closed = True
        if (child := self._child) is not None:
            child.member.kill()
        self._thread.shutdown()
        self._end()

    # ---- the thread ----

    def _serve(self, job: _TemplateJob) -> None:
        if job.future.cancelled():
            return
        try:
            _settle(job.future, self._do(job))
        except ChildLost as lost:
            self._end()
            beyond = None if self._closed else self._beyond
            if beyond is not None and not isinstance(job.order, Teach):
                beyond.put(job)
            else:
                _settle(job.future, self._explain(lost, job.order))
            if beyond is not None:  # the next one finds it there
                with suppress(DovetailError, ChildLost):
                    self._begin()
        except DovetailError as error:
            _settle(job.future, error)
        except Exception as error:  # a bug of ours: nobody is to wait for ever
            _settle(job.future, DeviceError(f"the process of chat templates: {error!r}"))
            raise

    def _explain(self, lost: ChildLost, order: Order) -> DovetailError:
        if self._closed:
            return RequestError(CLOSED)
        if isinstance(lost, ChildLate):
            if isinstance(order, Teach):
                return _wrong(f"it is not read within {LEARN_SECONDS:g} s")
            return _refuse(order, f"it is not done within {self._seconds:g} s")
        if isinstance(order, TryForm):  # Rust ends where memory or its stack is used up
            return _refuse(order, f"it takes too much memory ({MEMORY >> 20} MiB)")
        return DeviceError(f"the process of chat templates {lost}; send the request again")

    def _do(self, job: _TemplateJob) -> str | DovetailError:
        """Return the text, or why there is none."""
        if self._closed:
            return RequestError(CLOSED)
        if self._child is not None and hung_up([self._child.channel.socket]):
            self._end()  # it was killed while it had nothing to do
        child, order = self._child or self._begin(), job.order
        if isinstance(order, Teach):
            return self._learn(child, order) or ""
        if isinstance(order, TryForm) and FORMS not in self._known:
            if (wrong := self._ask(child, FIRST_FORM, LEARN_SECONDS).error) is not None:
                return DeviceError(f"structured output is not available: {wrong}")
            self._known.add(FORMS)
        if job.teach is not None and job.teach.key not in self._known:
            if fault := self._learn(child, job.teach):
                return fault
        found = self._wait(child, order)
        if found.error is not None:
            return _refuse(order, found.error)
        return found.text.decode("utf-8", "surrogatepass")

    def _learn(self, child: Child, teach: Teach) -> DovetailError | None:
        """Have the process learn a template; return what is wrong with it."""
        learnt = self._ask(child, teach, LEARN_SECONDS)
        if learnt.error is not None:
            return _wrong(learnt.error)
        self._known.add(teach.key)
        return None

    def _begin(self) -> Child:
        self._child = child = Child.start(MODULE, "the process {} of chat templates")
        if self._closed:  # `close` may have looked for a process before it was there
            child.member.kill()
        child.tell(RenderLimits(MEMORY, self._nice))
        self._known.clear()
        return child

    def _wait(self, child: Child, order: Order) -> Rendered:
        """Return the answer; ChildLate once the process has used its time, or had its chances."""
        begun, sent = process_seconds(child.pid), False
        for _ in range(DEADLINES if self._beyond is None else 1):
            try:
                return self._ask(child, None if sent else order, self._seconds)
            except ChildLate:
                sent = True
            if process_seconds(child.pid) - begun >= 0.9 * self._seconds:  # it is counted roughly
                break
        raise ChildLate

    def _ask(self, child: Child, order: Order | None, seconds: float) -> Rendered:
        found = child.ask(order, Rendered, seconds)
        if found.full:
            self._end()
            return Rendered(error=f"it takes more than {MEMORY >> 20} MiB of memory")
        return found

    def _end(self) -> None:
        """End the process at once: it may be in the midst of anything."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()


class Renderer:
    """Both processes, while somebody uses them; each is started when it is first needed."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew: in a fork of this process, whose processes are those of the parent."""
        self._lock, self._users = threading.Lock(), 0
        self._open()

    def _open(self) -> None:
        self._patient = _RenderProcess(DEADLINE, NICE)
        self._quick = _RenderProcess(SOON, 0, self._patient)

    @property
    def pids(self) -> tuple[int | None, int | None]:
        """Process ids, None of one that is not there."""
        return self._quick.pid, self._patient.pid

    def learn(self, teach: Teach) -> None:
        """Return once the template is known; ArtifactError where it is none."""
        self._quick.put(_TemplateJob(teach)).result()

    def render(self, teach: Teach, conversation: bytes) -> Future[str]:
        """Return the future of a text.

        It raises RequestError where the template does not take the conversation, DeviceError where
        no process can be started, or it ended.
        """
        order = Render(teach.key, conversation)
        if len(conversation) > MAX_CONVERSATION:
            raise _refuse(order, f"they take more than {MAX_CONVERSATION >> 20} MiB")
        return self._quick.put(_TemplateJob(order, teach))

    def try_form(self, form: StructuredOutputs) -> Future[str]:
        """Return the future of a form's grammar; RequestError where it cannot be followed."""
        return self._quick.put(_TemplateJob(TryForm(form)))

    def take(self) -> None:
        """Note one more user."""
        with self._lock:
            self._users += 1

    def give_back(self) -> None:
        """Hear that a user is gone; the last one ends the processes."""
        with self._lock:
            self._users -= 1
            if self._users > 0:
                return
            ended = self._quick, self._patient
            self._open()
        for process in ended:
            process.close()


SHARED = Renderer()
os.register_at_fork(after_in_child=SHARED.reset)


def _settle(future: Future[str], found: str | DovetailError) -> None:
    if future.set_running_or_notify_cancel():
        if isinstance(found, DovetailError):
            future.set_exception(found)
        else:
            future.set_result(found)


def _refuse(order: Order, why: str) -> RequestError:
    if isinstance(order, TryForm):
        return RequestError(why if why.startswith("the ") else f"structured output: {why}")
    return RequestError(f"the model's chat template does not take these messages: {why}")


def _wrong(why: str) -> ArtifactError:
    return ArtifactError(
        f"the model's chat template is wrong: {why}; mend it in tokenizer_config.json and run "
        "`dovetail compile MODEL` again"
    )
