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
from dovetail.runtime.flows.control import messages
from dovetail.runtime.flows.indexes import BoundIndex, EmbedTexts, Indexes
from dovetail.runtime.index.cursor import find_patience
from dovetail.runtime.retrieval import wire
from dovetail.runtime.retrieval.hot import HotSets
from dovetail.runtime.retrieval.process import RetrievalProcess

BATCH = 64
"""Texts that are embedded together."""


class Retrievals:
    """Probes and scans under way. For the driver's thread alone."""

    def __init__(
        self,
        worker: RetrievalProcess,
        indexes: Indexes,
        hot: HotSets | None,
        tell: Callable[[messages.Report], None],
        scanned: Callable[[messages.ScanClusters, wire.WorkerReply], None],
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        """`scanned` is told of each scan before the control plane is.

        `later` has a function called soon on the driver's thread; it is called on any.
        """
        self._worker, self._indexes, self._hot = worker, indexes, hot
        self._tell, self._scanned, self._later = tell, scanned, later

    def probe(self, orders: Sequence[messages.FindClusters]) -> None:
        """Find the clusters of several queries, those of an index together."""
        groups: dict[str | None, list[messages.FindClusters]] = defaultdict(list)
        for order in orders:
            groups[order.node.index].append(order)
        for name, group in groups.items():
            took, failed = partial(self._probed, group), partial(self._refused, group)
            self._ask(name, partial(_write_probes, group), took, failed)

    def scan(self, order: messages.ScanClusters) -> None:
        """Scan clusters of several searches together."""
        self._ask(
            order.index,
            lambda index: wire.ScanParts(index.name, order.parts, hot=order.device == "gpu"),
            partial(self._take_scanned, order),
            partial(self._fail, order),
        )

    def copy(self, order: messages.Copy) -> None:
        """Swap hot clusters of an index."""
        hot = self._hot
        assert hot is not None, "there is nothing to copy to"
        self._ask(
            order.index,
            lambda index: wire.CopyClusters(index.name, order.load, *hot.kept(index.name)),
            partial(self._copied, order),
            partial(self._fail, order),
        )

    def _ask(
        self,
        name: str | None,
        make: Callable[[BoundIndex], wire.Body],
        take: Callable[[BoundIndex, wire.WorkerReply], None],
        fail: Callable[[DovetailError], None],
    ) -> None:
        """Have the worker do something; one of the last two is called with what comes of it."""

        def answered(done: Future[wire.WorkerReply]) -> None:
            if isinstance(error := done.exception(), DovetailError):
                fail(error)
            else:
                take(index, done.result())

        try:
            index = self._indexes.find(name)
            asked = self._worker.ask(make(index))
        except Exception as error:  # whatever users gave as filters
            fail(messages.as_ours(error))
        else:
            asked.add_done_callback(lambda done: self._later(lambda: answered(done)))

    def _probed(
        self,
        orders: Sequence[messages.FindClusters],
        index: BoundIndex,
        reply: wire.WorkerReply,
    ) -> None:
        body = reply.body
        assert isinstance(body, wire.ProbedQueries)
        for order, found in zip(orders, body.queries, strict=True):
            fields, node = (found.clusters, found.centroids, found.known, body.version), order.node
            # with filters it was not measured when a search may end
            ends = () if node.filters else index.early
            patience = find_patience(ends, node.topk, index.nprobe)
            self._tell(messages.Probed(order.job, *fields, patience))

    def _refused(self, orders: Sequence[messages.FindClusters], error: DovetailError) -> None:
        """Report an error; of several queries one may be wrong, so they are tried one by one."""
        if len(orders) == 1:
            self._fail(orders[0], error)
            return
        for order in orders:
            self.probe([order])

    def _take_scanned(
        self, order: messages.ScanClusters, index: BoundIndex, reply: wire.WorkerReply
    ) -> None:
        body = reply.body
        assert isinstance(body, wire.ScannedParts)
        self._scanned(order, reply)
        if self._hot is not None:
            hot, clusters = order.device == "gpu", sum(len(part.clusters) for part in order.parts)
            self._hot.scanned(index.name, clusters, body.missed, hot=hot)
        self._tell(messages.Scanned(order.job, body.parts, reply.seconds, body.absent))

    def _copied(self, order: messages.Copy, index: BoundIndex, reply: wire.WorkerReply) -> None:
        body = reply.body
        assert isinstance(body, wire.Copied)
        assert self._hot is not None, "it was copied somewhere"
        came, now = set(order.load).difference(body.missing), self._indexes.find(index.name)
        self._hot.copied(index.name, came, body.held, now.bytes)
        self._tell(messages.Finished(order.job, body.missing))

    def _fail(
        self,
        order: messages.FindClusters | messages.ScanClusters | messages.Copy,
        error: DovetailError,
    ) -> None:
        self._tell(messages.Failed(order.job, error))


def _write_probes(orders: Sequence[messages.FindClusters], index: BoundIndex) -> wire.ProbeQueries:
    queries = (
        wire.SearchQuery(o.vector, dict(o.node.filters), o.known, o.node.topk) for o in orders
    )
    return wire.ProbeQueries(index.name, tuple(queries), index.nprobe)


class EmbeddingThreads:
    """A thread for each encoder, so that one which hangs holds up no other; texts go in batches."""

    def __init__(
        self,
        tell: Callable[[messages.Report], None],
        draw: Callable[[Sequence[messages.Embed], float, float], None],
    ) -> None:
        """`tell` and `draw` (a batch, its start and end) are called on the threads."""
        self._tell, self._draw = tell, draw
        # of each index and model, with what embeds there: another one may take its place
        self._queues: dict[object, tuple[EmbedTexts, SimpleQueue[messages.Embed | None]]] = {}
        self._closed = False

    def put(self, order: messages.Embed, embed: EmbedTexts) -> None:
        """Have the text of an order embedded."""
        used = order.query, order.index, order.model
        known, queue = self._queues.get(used, (None, SimpleQueue()))
        if known is not embed:
            queue.put(None)
            queue = SimpleQueue()
            self._queues[used] = embed, queue
            name, given = "dovetail-embedding", (queue, embed)
            threading.Thread(target=self._serve, args=given, name=name, daemon=True).start()
        queue.put(order)

    def close(self) -> None:
        """Leave what waits; batches under way may end."""
        self._closed = True
        for _, queue in self._queues.values():
            queue.put(None)

    def _serve(self, queue: SimpleQueue[messages.Embed | None], embed: EmbedTexts) -> None:
        taken: list[messages.Embed | None] = []
        while not self._closed and None not in taken:
            taken = [queue.get()]
            with suppress(Empty):
                while len(taken) < BATCH:
                    taken.append(queue.get_nowait())
            orders = [order for order in taken if order is not None]
            if orders and not self._closed:
                self._run(orders, embed)

    def _run(self, orders: Sequence[messages.Embed], embed: EmbedTexts) -> None:
        """Embed texts together, and those of a batch that fails one by one."""
        start = time.perf_counter()
        try:
            rows = embed([order.text for order in orders])
        except Exception as error:
            if len(orders) == 1:
                self._tell(messages.Failed(orders[0].job, messages.as_ours(error)))
                return
            for order in orders:
                self._run([order], embed)
            return
        self._draw(orders, start, time.perf_counter())
        for order, row in zip(orders, rows, strict=True):
            self._tell(messages.Finished(order.job, row))
