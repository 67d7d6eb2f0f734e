"""Searches of workflows: their texts as vectors, then probes and scans on the retrieval worker.

In: orders to embed, probe, scan and copy. Out: reports to the control plane; spans on the timeline.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

from dovetail.ir.errors import DovetailError
from dovetail.ir.workflow import Retrieval
from dovetail.runtime.flows.control.messages import (
    Copy,
    Embed,
    Failed,
    FindClusters,
    Finished,
    Probed,
    Report,
    ScanClusters,
    Scanned,
    as_ours,
)
from dovetail.runtime.flows.indexes import EmbedTexts, Indexes
from dovetail.runtime.index.cursor import find_patience
from dovetail.runtime.retrieval.hot import HotSets
from dovetail.runtime.retrieval.process import RetrievalProcess
from dovetail.runtime.retrieval.wire import (
    Body,
    Copied,
    CopyClusters,
    ProbedQueries,
    ProbeQueries,
    ScannedParts,
    ScanParts,
    SearchQuery,
    WorkerReply,
)

BATCH = 64
"""Texts that are embedded together."""


class Retrievals:
    """Probes and scans under way. For the driver's thread alone."""

    def __init__(
        self,
        worker: RetrievalProcess,
        indexes: Indexes,
        hot: HotSets | None,
        tell: Callable[[Report], None],
        scanned: Callable[[ScanClusters, WorkerReply], None],
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        """`scanned` is told of each scan before the control plane is.

        `later` has a function called soon on the driver's thread; it is called on any.
        """
        self._worker, self._indexes, self._hot = worker, indexes, hot
        self._tell, self._scanned, self._later = tell, scanned, later

    def probe(self, orders: Sequence[FindClusters]) -> None:
        """Find the clusters of several queries, those of an index together."""
        groups: dict[str | None, list[FindClusters]] = defaultdict(list)
        for order in orders:
            groups[order.node.index].append(order)
        for name, group in groups.items():
            fail = partial(self._refused, group)
            queries = tuple(
                SearchQuery(o.vector, dict(o.node.filters), o.known, o.node.topk) for o in group
            )
            try:
                index = self._indexes.find(name)
                body = ProbeQueries(index.name, queries, index.nprobe)
                self._ask(body, partial(self._probed, group), fail)
            except Exception as error:  # whatever users gave as filters
                fail(as_ours(error))

    def scan(self, order: ScanClusters) -> None:
        """Scan clusters of several searches together."""
        fail = partial(self._fail, order)
        try:
            index = self._indexes.find(order.index)
            body = ScanParts(index.name, order.parts, hot=order.device == "gpu")
            self._ask(body, partial(self._take_scanned, order), fail)
        except DovetailError as error:
            fail(error)

    def copy(self, order: Copy) -> None:
        """Swap hot clusters of an index."""
        fail = partial(self._fail, order)
        assert self._hot is not None, "there is nothing to copy to"
        try:
            index = self._indexes.find(order.index)
            body = CopyClusters(index.name, order.load, *self._hot.kept(index.name))
            self._ask(body, partial(self._copied, order), fail)
        except DovetailError as error:
            fail(error)

    def _ask(
        self, body: Body, take: Callable[[WorkerReply], None], fail: Callable[[DovetailError], None]
    ) -> None:
        """Have the worker do something; one of the two is called with what comes of it."""

        def told(done: Future[WorkerReply]) -> None:
            if isinstance(error := done.exception(), DovetailError):
                fail(error)
            else:
                take(done.result())

        self._worker.ask(body).add_done_callback(lambda done: self._later(lambda: told(done)))

    def _probed(self, orders: Sequence[FindClusters], reply: WorkerReply) -> None:
        body = reply.body
        assert isinstance(body, ProbedQueries)
        for order, found in zip(orders, body.queries, strict=True):
            told = found.clusters, found.centroids, found.known, body.version
            self._tell(Probed(order.job, *told, patience=self._patience(order.node)))

    def _patience(self, node: Retrieval) -> int | None:
        """Return when a search may end; with filters that was not measured."""
        try:
            index = self._indexes.find(node.index)
        except DovetailError:  # it is gone
            return None
        return None if node.filters else find_patience(index.early, node.topk, index.nprobe)

    def _refused(self, orders: Sequence[FindClusters], error: DovetailError) -> None:
        """Report an error; of several queries one may be wrong, so they are tried one by one."""
        if len(orders) == 1:
            self._fail(orders[0], error)
            return
        for order in orders:
            self.probe([order])

    def _take_scanned(self, order: ScanClusters, reply: WorkerReply) -> None:
        body = reply.body
        assert isinstance(body, ScannedParts)
        self._scanned(order, reply)
        if self._hot is not None:
            hot, clusters = order.device == "gpu", sum(len(part.clusters) for part in order.parts)
            name = self._indexes.find(order.index).name
            self._hot.scanned(name, clusters, body.missed, hot=hot)
        self._tell(Scanned(order.job, body.parts, reply.seconds, body.absent))

    def _copied(self, order: Copy, reply: WorkerReply) -> None:
        body = reply.body
        assert isinstance(body, Copied)
        assert self._hot is not None, "it was copied somewhere"
        came, index = set(order.load).difference(body.missing), self._indexes.find(order.index)
        self._hot.copied(index.name, came, body.held, index.bytes)
        self._tell(Finished(order.job, body.missing))

    def _fail(self, order: FindClusters | ScanClusters | Copy, error: DovetailError) -> None:
        self._tell(Failed(order.job, error))


class EmbeddingThreads:
    """A thread for each encoder, so that one which hangs holds up no other; texts go in batches."""

    def __init__(
        self, tell: Callable[[Report], None], draw: Callable[[Sequence[Embed], float, float], None]
    ) -> None:
        """`tell` and `draw` (a batch, its start and end) are called on the threads."""
        self._tell, self._draw = tell, draw
        self._lanes: dict[EmbedTexts, SimpleQueue[Embed | None]] = {}
        self._closed = False

    def put(self, order: Embed, embed: EmbedTexts) -> None:
        """Have the text of an order embedded."""
        if embed not in self._lanes:
            lane = self._lanes[embed] = SimpleQueue()
            threading.Thread(target=self._serve, args=(lane, embed), daemon=True).start()
        self._lanes[embed].put(order)

    def close(self) -> None:
        """Leave what waits; batches under way may end."""
        self._closed = True
        for lane in self._lanes.values():
            lane.put(None)

    def _serve(self, lane: SimpleQueue[Embed | None], embed: EmbedTexts) -> None:
        while not self._closed:
            taken = [lane.get()]
            with suppress(Empty):
                while len(taken) < BATCH:
                    taken.append(lane.get_nowait())
            if not self._closed:
                self._run([order for order in taken if order is not None], embed)

    def _run(self, orders: Sequence[Embed], embed: EmbedTexts) -> None:
        """Embed texts together, and those of a batch that fails one by one."""
        start = time.perf_counter()
        try:
            rows = embed([order.text for order in orders])
        except Exception as error:
            if len(orders) == 1:
                self._tell(Failed(orders[0].job, as_ours(error)))
                return
            for order in orders:
                self._run([order], embed)
            return
        self._draw(orders, start, time.perf_counter())
        for order, row in zip(orders, rows, strict=True):
            self._tell(Finished(order.job, row))
