"""The thread that runs workflows: what the control plane orders is done, what comes of it is told.

In: runs and cancellations, from any thread; messages of engine, encoder, worker and function
threads. Out: jobs that are told of events, and of their end whatever happens.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, get_args

from dovetail.ir.errors import CapacityError, DovetailError, RequestError, WorkflowError
from dovetail.ir.graph import GENERATION
from dovetail.ir.workflow import Generation, Name
from dovetail.runtime.child.supervisor import check_usable
from dovetail.runtime.engine.tally import Tally
from dovetail.runtime.flows.control import messages
from dovetail.runtime.flows.control.front import Statistics
from dovetail.runtime.flows.control.wavefront import Wavefront
from dovetail.runtime.flows.events import NodeFinished, NodeStarted, NodeText, Rewritten, SubStage
from dovetail.runtime.flows.generations import Generations
from dovetail.runtime.flows.indexes import EmbedTexts, Indexes
from dovetail.runtime.flows.job import WorkflowJob
from dovetail.runtime.flows.recorder import FlowRecorder
from dovetail.runtime.flows.reranks import Reranks, StartRerank
from dovetail.runtime.flows.retrievals import EmbeddingThreads, Retrievals
from dovetail.runtime.flows.workflow_run import WorkflowRun
from dovetail.runtime.hosting.generator import Generator
from dovetail.runtime.hosting.inbox import Calls
from dovetail.runtime.retrieval.hot import HotSets
from dovetail.runtime.retrieval.process import RetrievalProcess
from dovetail.runtime.retrieval.wire import WorkerReply
from dovetail.runtime.schedule.request import Chunk

SCAN_SECONDS = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0),
)
"""Bounds between which retrieval sub-stages are counted."""
ROOM_SECONDS = 0.05
"""Between two looks at whether the engine has room again for generations it refused."""
MESSAGES = 64
"""After so many the control plane is asked for orders, even if more have come."""

log = logging.getLogger("dovetail")


@dataclass(slots=True)
class Executors:
    """What orders are done with. embed: of embedding nodes, by `model`; indexes have their own.

    rerank: of rerank nodes. recorder: draws what is done, while an app is recorded. scans: seconds
    of retrieval sub-stages, by device. max_waiting: see FlowSettings.
    """

    generator: Generator | None
    embed: Mapping[str | None, EmbedTexts]
    rerank: StartRerank
    worker: RetrievalProcess
    indexes: Indexes
    hot: HotSets | None
    max_waiting: int | None = None
    recorder: FlowRecorder | None = None
    scans: Mapping[messages.Device, Tally] = field(
        default_factory=lambda: {
            device: Tally(SCAN_SECONDS) for device in get_args(messages.Device)
        }
    )


class Session:
    """A control plane with its executors. Everything but `report` is for the driver's thread."""

    def __init__(
        self, executors: Executors, control: Wavefront, later: Callable[[Callable[[], None]], None]
    ) -> None:
        """`later` has a function called soon on the thread that owns this, from any thread."""
        self._executors, self.control = executors, control
        self._calls = Calls(later)
        self._jobs: dict[int, WorkflowJob] = {}
        self._over = False
        self.generations = Generations(
            executors.generator, self.report, self._show, self._note, self._watcher, self._soon
        )
        self._retrievals = Retrievals(
            executors.worker,
            executors.indexes,
            executors.hot,
            self.report,
            self._scanned,
            self._soon,
        )
        self._embedding = EmbeddingThreads(self.report, self._embedded)
        self._reranks = Reranks(executors.rerank, self.report, self._reranked)
        self._do: dict[type, Callable[[Any], None]] = {
            messages.Generate: self.generations.begin,
            messages.Embed: self._embed,
            messages.RankDocuments: self._reranks.begin,
            messages.Invoke: self._invoke,
            messages.Choose: self._invoke,
            messages.ScanClusters: self._retrievals.scan,
            messages.Copy: self._retrievals.copy,
            messages.Cancel: self._cancel,
            messages.Started: self._started,
            messages.Written: self._written,
            messages.Rewrote: self._rewrote,
            messages.Deliver: self._deliver,
        }

    def begin(self, run: WorkflowRun, job: WorkflowJob) -> None:
        """Start a run; CapacityError where too many wait."""
        self._check_room()
        job.number = self.control.submit(run, time.perf_counter())
        job.writes = not any(isinstance(n, Generation) for n in run.workflow.nodes.values())
        self._jobs[job.number] = job

    def _check_room(self) -> None:
        """Runs that have not come to the engine yet wait as what is in its queue does.

        One whose guess is there counts as that.
        """
        begun = self.generations.requests
        early = [j.seconds for n, j in self._jobs.items() if not j.writes and n not in begun]
        waiting, most = len(early) + self.generations.waiting, self._executors.max_waiting
        if most is not None and waiting >= most:
            raise CapacityError(
                f"{waiting} requests are waiting; send the request again later",
                retry_after=max(early, default=1.0) / 2,  # half of the queue is done by then
            )

    def drop(self, job: WorkflowJob) -> None:
        """End a run, if it is under way."""
        if self._jobs.get(job.number) is job:
            self.control.cancel(job.number)
            self._forget(job.number)
            job.fail(WorkflowError(f"workflow {job.workflow.name!r} was cancelled"))

    def cycle(self) -> None:
        """Do what the control plane orders now."""
        probes: list[messages.FindClusters] = []
        for order in self.control.orders(time.perf_counter()):
            if isinstance(order, messages.FindClusters):
                probes.append(order)
            else:
                self._do[type(order)](order)
        self._retrievals.probe(probes)

    def end(self, error: BaseException) -> None:
        """Fail what is under way; messages to come are not heard."""
        self._over = True
        for number in tuple(self._jobs):
            self._forget(number).fail(error)
        self._embedding.close()
        self._reranks.close()

    # ---- messages ----

    def report(self, report: messages.Report) -> None:
        """Take a report, from any thread."""
        self._soon(lambda: self.control.tell(report, time.perf_counter()))

    def _soon(self, message: Callable[[], None]) -> None:
        self._calls.add(lambda: None if self._over else message())

    def _forget(self, number: int) -> WorkflowJob:
        self.generations.forget(number)
        return self._jobs.pop(number)

    def _show(self, source: messages.Source, chunk: Chunk) -> None:
        job = self._jobs.get(source.request)
        if job is not None and (chunk.text or chunk.token_ids):
            piece = chunk.text, chunk.token_ids
            job.tell(NodeText(source.node, source.round, *piece, job.seconds))

    def _watcher(self, source: messages.Source) -> WorkflowJob | None:
        job = self._jobs.get(source.request)
        return job if job is not None and job.readable else None

    def _note(self, source: messages.Source, note: str, sent: str | None) -> None:
        if (job := self._jobs.get(source.request)) is not None:
            job.note(f"node {source.node!r}: {note}")
            if sent is not None:
                job.sent[source.node, source.round] = sent

    def _scanned(self, order: messages.ScanClusters, reply: WorkerReply) -> None:
        self._executors.scans[order.device].add(reply.seconds)
        counts: Counter[tuple[int, Name]] = Counter()
        for part, source in zip(order.parts, order.sources, strict=True):
            # a search has a part on each of several threads
            counts[source.request, source.node] += len(part.clusters)
        for (request, node), clusters in counts.items():
            if (job := self._jobs.get(request)) is not None:
                job.tell(SubStage(node, clusters, order.device, reply.seconds, job.seconds))
        if self._executors.recorder is not None:
            self._executors.recorder.scanned(order, reply.began, reply.seconds)

    def _embedded(self, orders: Sequence[messages.Embed], start: float, end: float) -> None:
        """Draw a batch; on the embedding thread."""
        if (recorder := self._executors.recorder) is not None:
            recorder.encoded("embed", [order.source for order in orders], start, end, len(orders))

    def _reranked(self, order: messages.RankDocuments, start: float, end: float) -> None:
        """Draw a rerank; on any thread."""
        if (recorder := self._executors.recorder) is not None:
            recorder.encoded("rerank", [order.source], start, end, len(order.documents))

    # ---- orders ----

    def _embed(self, order: messages.Embed) -> None:
        try:
            indexes = self._executors.indexes
            by_model = self._executors.embed
            embed = indexes.find(order.index).embed if order.query else by_model[order.model]
        except DovetailError as error:
            self.report(messages.Failed(order.job, error))
            return
        self._embedding.put(order, embed)

    def _invoke(self, order: messages.Invoke | messages.Choose) -> None:
        def run() -> None:  # one that hangs holds up neither others nor the end of the program
            self.report(call_function(order))

        threading.Thread(target=run, name="dovetail-function", daemon=True).start()

    def _cancel(self, order: messages.Cancel) -> None:
        """Free what generations and reranks hold; other work ends by itself, and nobody hears."""
        self.generations.cancel(order.job)
        self._reranks.cancel(order.job)

    def _started(self, order: messages.Started) -> None:
        source = order.source
        if (job := self._jobs.get(source.request)) is not None:
            kind = job.workflow.nodes[source.node].kind
            job.writes |= kind == GENERATION
            job.start(NodeStarted(source.node, source.round, kind, job.seconds, str(order.prompt)))
        if order.job is not None:
            self.generations.reveal(order.job)

    def _written(self, order: messages.Written) -> None:
        source = order.source
        if (job := self._jobs.get(source.request)) is not None:
            ran = job.finish(NodeFinished(source.node, source.round, order.value, job.seconds))
            if self._executors.recorder is not None:
                self._executors.recorder.ran(source.request, job.workflow.name, ran, job.began)

    def _rewrote(self, order: messages.Rewrote) -> None:
        if (job := self._jobs.get(order.request)) is not None:
            job.tell(Rewritten(*order.rewrite, job.seconds))
        if (recorder := self._executors.recorder) is not None:
            recorder.rewrote(order.rewrite, time.perf_counter())

    def _deliver(self, order: messages.Deliver) -> None:
        if order.request not in self._jobs:  # cancelled at its very end
            return
        job = self._forget(order.request)
        if order.error is not None:
            job.fail(order.error)
        else:
            assert order.state is not None and order.graph is not None
            job.end(order.state, order.graph)


class Driver:
    """Runs workflows, any number at once. For any thread."""

    def __init__(self, executors: Executors, make_control: Callable[[], Wavefront]) -> None:
        """`make_control` is called on the driver's thread; again after a fault of the program."""
        self._executors, self._make_control = executors, make_control
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()  # nobody submits after the last message
        self._closed = False
        self._thread: threading.Thread | None = None
        self._session: Session | None = None

    def submit(self, run: WorkflowRun, *, events: bool) -> WorkflowJob:
        """Start a run; RequestError when this is closed."""
        job = WorkflowJob(run.workflow, self._cancel, events=events)
        with self._lock:
            thread = self._thread
            forked = thread is not None and not thread.is_alive()
            check_usable(closed=self._closed, forked=forked)
            self._inbox.put(lambda: self._begin(run, job))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="dovetail-workflows", daemon=True
                )
                self._thread.start()
        return job

    def exchange(self, index: str, swap: Callable[[], object]) -> None:
        """Have `swap` put an index in the place of the one of its name, when none searches that."""
        with self._lock:
            if self._thread is not None and not self._closed:
                self._inbox.put(lambda: self._exchange(index, swap))
                return
        swap()

    @property
    def statistics(self) -> Statistics:
        """What came of guesses, since the last fault of the program."""
        session = self._session
        return Statistics() if session is None else session.control.statistics

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
            except BaseException as error:  # nobody else would tell those who wait
                log.exception("workflows failed because of a bug")
                self._leave(error)
        self._end()

    def _next(self) -> Callable[[], None]:
        session = self._session
        if session is None or not session.generations.held:
            return self._inbox.get()
        try:
            return self._inbox.get(timeout=ROOM_SECONDS)
        except Empty:
            return session.generations.retry

    def _begin(self, run: WorkflowRun, job: WorkflowJob) -> None:
        try:
            if self._session is None:
                self._session = Session(self._executors, self._make_control(), self._inbox.put)
            self._session.begin(run, job)
        except Exception as error:
            job.fail(error)
            if not isinstance(error, DovetailError):
                raise

    def _cancel(self, job: WorkflowJob) -> None:
        self._inbox.put(lambda: self._drop(job))

    def _drop(self, job: WorkflowJob) -> None:
        if self._session is not None:
            self._session.drop(job)

    def _exchange(self, index: str, swap: Callable[[], object]) -> None:
        try:
            if self._session is not None:
                self._session.control.leave(index, time.perf_counter())
        finally:
            swap()

    def _leave(self, error: BaseException) -> None:
        """Fail what is under way; what comes later is served by another session."""
        session, self._session = self._session, None
        if session is not None:
            session.end(error)

    def _end(self) -> None:
        self._leave(RequestError("the app was closed while the workflow was running"))


def call_function(order: messages.Invoke | messages.Choose) -> messages.Report:
    """Return what a function of users came to."""
    try:
        return messages.Finished(order.job, order.run())
    except BaseException as error:  # also sys.exit(): nobody else tells of it
        return messages.Failed(order.job, messages.as_ours(error))
