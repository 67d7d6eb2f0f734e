"""Searches of workflows on the retrieval worker.

In: orders to probe, scan and copy. Out: reports to the control plane; spans on the timeline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from dovetail.ir.errors import DovetailError
from dovetail.runtime.flows.hot import HotIndexes
from dovetail.runtime.flows.indexes import Indexes
from dovetail.runtime.flows.lanes import as_ours
from dovetail.runtime.retrieval.process import RetrievalProcess
from dovetail.runtime.retrieval.wire import (
    Body,
    Copied,
    CopyClusters,
    Piece,
    ProbedQueries,
    ProbeQueries,
    Query,
    Reply,
    ScannedPieces,
    ScanPieces,
    pack_vector,
)
from dovetail.runtime.wavefront.messages import (
    Copy,
    Failed,
    Finished,
    Found,
    Probe,
    Probed,
    Report,
    Scan,
    Scanned,
)


class Retrievals:
    """Probes and scans under way. For the driver's thread alone."""

    def __init__(
        self,
        worker: RetrievalProcess,
        indexes: Indexes,
        hot: HotIndexes,
        tell: Callable[[Report], None],
        scanned: Callable[[Scan, Reply], None],
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        """`scanned` is told of each scan before the control plane is.

        `later` has a function called soon on the driver's thread; it is called on any.
        """
        self._worker, self._indexes, self._hot = worker, indexes, hot
        self._tell, self._scanned, self._later = tell, scanned, later

    def probe(self, orders: Sequence[Probe]) -> None:
        """Find the clusters of several queries, those of an index together."""
        groups: dict[str | None, list[Probe]] = defaultdict(list)
        for order in orders:
            groups[order.node.index].append(order)
        for name, group in groups.items():
            try:
                index = self._indexes.find(name)
                queries = tuple(
                    Query(pack_vector(order.vector), dict(order.node.filters), order.known)
                    for order in group
                )
                take = partial(self._take_probed, group)
                self._ask(ProbeQueries(index.name, queries, index.nprobe), take)
            except Exception as error:  # whatever a function of users gave as a vector
                self._refused(group, as_ours(error))

    def scan(self, order: Scan) -> None:
        """Scan clusters of several searches together."""
        pieces = tuple(
            Piece(
                pack_vector(part.vector),
                dict(part.node.filters),
                part.clusters,
                part.centroids,
                part.depth,
                part.bound,
                part.version,
            )
            for part in order.parts
        )
        try:
            index = self._indexes.find(order.index)
            body = ScanPieces(index.name, pieces, hot=order.device == "gpu")
            self._ask(body, partial(self._take_scanned, order))
        except DovetailError as error:
            self._fail([order], error)

    def copy(self, order: Copy) -> None:
        """Swap hot clusters of an index."""
        try:
            index = self._indexes.find(order.index)
            body = CopyClusters(index.name, order.load, *self._hot.kept(index.name))
            self._ask(body, partial(self._take_copied, order))
        except DovetailError as error:
            self._fail([order], error)

    def _ask(self, body: Body, take: Callable[[Future[Reply]], None]) -> None:
        future = self._worker.ask(body)
        future.add_done_callback(lambda done: self._later(lambda: take(done)))

    def _take_probed(self, orders: Sequence[Probe], future: Future[Reply]) -> None:
        error = future.exception()
        if error is not None:
            self._refused(orders, error)
            return
        body = future.result().body
        assert isinstance(body, ProbedQueries)
        for order, found in zip(orders, body.queries, strict=True):
            told = found.clusters, found.centroids, found.known, body.version
            self._tell(Probed(order.job, *told))

    def _refused(self, orders: Sequence[Probe], error: BaseException) -> None:
        """Report an error; of several queries one may be wrong, so they are tried one by one."""
        if len(orders) == 1:
            self._fail(orders, error)
            return
        for order in orders:
            self.probe([order])

    def _take_scanned(self, order: Scan, future: Future[Reply]) -> None:
        if (error := future.exception()) is not None:
            self._fail([order], error)
            return
        reply = future.result()
        body = reply.body
        assert isinstance(body, ScannedPieces)
        self._scanned(order, reply)
        hot, clusters = order.device == "gpu", sum(len(part.clusters) for part in order.parts)
        name = self._indexes.find(order.index).name
        self._hot.scanned(name, clusters, body.missed, hot=hot)
        found = tuple(Found(piece.hits, piece.homes) for piece in body.pieces)
        seconds = body.seconds if hot else reply.seconds
        self._tell(Scanned(order.job, found, seconds, body.absent))

    def _take_copied(self, order: Copy, future: Future[Reply]) -> None:
        if (error := future.exception()) is not None:
            self._fail([order], error)
            return
        body = future.result().body
        assert isinstance(body, Copied)
        came = set(order.load).difference(body.missing)
        self._hot.copied(self._indexes.find(order.index).name, came, body.held)
        self._tell(Finished(order.job, body.missing))

    def _fail(self, orders: Sequence[Probe | Scan | Copy], error: BaseException) -> None:
        if not isinstance(error, DovetailError):
            raise error
        for order in orders:
            self._tell(Failed(order.job, error))
