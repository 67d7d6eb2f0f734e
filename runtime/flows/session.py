"""All workflows under way: what the control plane orders is done, what comes of it is told.

In: runs, and messages of engine, encoder, worker and function threads. Out: orders done; jobs that
are told of events and of their end. One thread owns it (`driver.py`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from dovetail.ir.errors import DovetailError, WorkflowError
from dovetail.ir.workflow import Name
from dovetail.runtime.flows.events import NodeFinished, NodeStarted, NodeText, SubStage
from dovetail.runtime.flows.generations import Generations
from dovetail.runtime.flows.hot import HotIndexes
from dovetail.runtime.flows.indexes import EmbedTexts, Indexes
from dovetail.runtime.flows.job import WorkflowJob
from dovetail.runtime.flows.lanes import EmbeddingLane, FunctionLane
from dovetail.runtime.flows.recorder import FlowRecorder
from dovetail.runtime.flows.retrievals import Retrievals
from dovetail.runtime.generator import Generator
from dovetail.runtime.request import Chunk
from dovetail.runtime.retrieval.process import RetrievalProcess
from dovetail.runtime.retrieval.wire import Reply
from dovetail.runtime.tally import Tally
from dovetail.runtime.wavefront.messages import (
    Cancel,
    Commit,
    Copy,
    Deliver,
    Device,
    Embed,
    Ended,
    Failed,
    Generate,
    Invoke,
    Probe,
    Report,
    Scan,
    Source,
    Started,
)
from dovetail.runtime.wavefront.speculation import Statistics
from dovetail.runtime.wavefront.wavefront import Wavefront
from dovetail.runtime.workflow_run import WorkflowRun

SCAN_SECONDS = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0),
)
"""Bounds between which retrieval sub-stages are counted."""


@dataclass(slots=True)
class Hands:
    """What orders are done with. embed: of embedding nodes; indexes have their own.

    recorder: draws what is done, while an app is recorded. scans: seconds of retrieval sub-stages,
    by device.
    """

    generator: Generator | None
    embed: EmbedTexts
    worker: RetrievalProcess
    indexes: Indexes
    hot: HotIndexes
    recorder: FlowRecorder | None = None
    scans: Mapping[Device, Tally] = field(
        default_factory=lambda: {device: Tally(SCAN_SECONDS) for device in get_args(Device)}
    )


class Session:
    """A control plane with its hands. Everything but `told` is for the thread that owns it."""

    def __init__(
        self, hands: Hands, control: Wavefront, later: Callable[[Callable[[], None]], None]
    ) -> None:
        """`later` has a function called soon on the thread that owns this, from any thread."""
        self._hands, self._control, self._later = hands, control, later
        self._jobs: dict[int, WorkflowJob] = {}
        self._numbers: dict[WorkflowJob, int] = {}
        self._over = False
        self._generations = Generations(
            hands.generator, self.told, self._show, self._note, self._soon
        )
        self._retrievals = Retrievals(
            hands.worker, hands.indexes, hands.hot, self.told, self._scanned, self._soon
        )
        self._embedding = EmbeddingLane(self.told, self._embedded, time.perf_counter)
        self._functions = FunctionLane(self.told)

    def begin(self, run: WorkflowRun, job: WorkflowJob) -> None:
        """Start a run."""
        number = self._control.submit(run, time.perf_counter())
        self._jobs[number], self._numbers[job] = job, number

    def drop(self, job: WorkflowJob) -> None:
        """End a run, if it is under way."""
        if (number := self._numbers.get(job)) is not None:
            self._control.cancel(number)
            name = job.workflow.name
            self._forget(number).fail(WorkflowError(f"workflow {name!r} was cancelled"))

    def cycle(self) -> None:
        """Do what the control plane orders now."""
        probes: list[Probe] = []
        for order in self._control.orders(time.perf_counter()):
            if isinstance(order, Probe):
                probes.append(order)
            else:
                _DO[type(order)](self, order)
        self._retrievals.probe(probes)

    @property
    def statistics(self) -> Statistics:
        """What came of guesses."""
        return self._control.statistics

    @property
    def held(self) -> bool:
        """Whether generations wait for room in the engine's queue; `retry` looks again."""
        return self._generations.held

    def retry(self) -> None:
        """Start generations that the engine had no room for."""
        self._generations.retry()

    def end(self, error: Exception) -> None:
        """Fail what is under way; messages to come are not heard."""
        self._over = True
        for number in tuple(self._jobs):
            self._forget(number).fail(error)
        self._embedding.close()
        self._functions.close()

    # ---- messages ----

    def told(self, report: Report) -> None:
        """Take a report, from any thread."""
        self._soon(lambda: self._control.tell(report, time.perf_counter()))

    def _soon(self, message: Callable[[], None]) -> None:
        self._later(lambda: None if self._over else message())

    def _forget(self, number: int) -> WorkflowJob:
        job = self._jobs.pop(number)
        del self._numbers[job]
        self._generations.forget(number)
        return job

    def _show(self, source: Source, chunk: Chunk) -> None:
        job = self._jobs.get(source.request)
        if job is not None and (chunk.text or chunk.token_ids):
            piece = chunk.text, chunk.token_ids
            job.tell(NodeText(source.node, source.round, *piece, job.seconds))

    def _note(self, source: Source, note: str) -> None:
        if (job := self._jobs.get(source.request)) is not None:
            job.note(f"node {source.node!r}: {note}")

    def _scanned(self, order: Scan, reply: Reply) -> None:
        self._hands.scans[order.device].add(reply.seconds)
        counts: Counter[tuple[int, Name]] = Counter()
        for part in order.parts:  # a search has one on each of several threads
            counts[part.search, part.node.name] += len(part.clusters)
        for (request, node), clusters in counts.items():
            if (job := self._jobs.get(request)) is not None:
                job.tell(SubStage(node, clusters, order.device, reply.seconds, job.seconds))
        if self._hands.recorder is not None:
            self._hands.recorder.scanned(order, reply.began, reply.seconds)

    def _embedded(self, orders: Sequence[Embed], start: float, end: float) -> None:
        """Draw a batch; on the embedding thread."""
        if (recorder := self._hands.recorder) is not None:
            recorder.embedded(orders, start, end)

    # ---- orders ----

    def _generate(self, order: Generate) -> None:
        self._generations.begin(order)

    def _embed(self, order: Embed) -> None:
        try:
            indexes = self._hands.indexes
            embed = indexes.find(order.index).embed if order.query else self._hands.embed
        except DovetailError as error:
            self.told(Failed(order.job, error))
            return
        self._embedding.put(order, embed)

    def _invoke(self, order: Invoke) -> None:
        self._functions.put(order)

    def _scan(self, order: Scan) -> None:
        self._retrievals.scan(order)

    def _copy(self, order: Copy) -> None:
        self._retrievals.copy(order)

    def _stop(self, order: Cancel) -> None:
        """Free what a generation holds; other work ends by itself, and nobody is told of it."""
        self._generations.cancel(order.job)

    def _pass(self, order: Commit) -> None:
        """The node's start follows, and shows its text."""

    def _started(self, order: Started) -> None:
        source = order.source
        if (job := self._jobs.get(source.request)) is not None:
            kind = job.workflow.nodes[source.node].kind
            job.start(NodeStarted(source.node, source.round, kind, job.seconds))
        if order.job is not None:
            self._generations.reveal(order.job)

    def _ended(self, order: Ended) -> None:
        source = order.source
        if (job := self._jobs.get(source.request)) is not None:
            ran = job.finish(NodeFinished(source.node, source.round, order.value, job.seconds))
            if self._hands.recorder is not None:
                self._hands.recorder.ran(source.request, job.workflow.name, ran, job.began)

    def _deliver(self, order: Deliver) -> None:
        if order.request not in self._jobs:  # cancelled at its very end
            return
        job = self._forget(order.request)
        if order.error is not None:
            job.fail(order.error)
        else:
            assert order.state is not None and order.trace is not None
            job.end(order.state, order.trace)


_DO: dict[type, Callable[[Session, Any], None]] = {
    Generate: Session._generate,
    Embed: Session._embed,
    Invoke: Session._invoke,
    Scan: Session._scan,
    Copy: Session._copy,
    Cancel: Session._stop,
    Commit: Session._pass,
    Started: Session._started,
    Ended: Session._ended,
    Deliver: Session._deliver,
}
