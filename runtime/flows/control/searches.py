"""All searches under way: which clusters of which of them the next sub-stage scans, and where.

In: searches as they come, reports of probes and scans. Out: orders to probe, scan and copy; each
search back when a sub-stage or the whole of it is over. One scan is under way on each device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil, inf

from dovetail.ir.errors import DovetailError
from dovetail.ir.transform import prefetch, reorder
from dovetail.runtime.flows.control.board import Board, Callbacks, Waiter
from dovetail.runtime.flows.control.costs import Learned
from dovetail.runtime.flows.control.messages import (
    Catalog,
    Copy,
    Device,
    FindClusters,
    Probed,
    ScanClusters,
    Scanned,
)
from dovetail.runtime.flows.control.search import Lot, Search, Takes, filter_takes, vectors_of
from dovetail.runtime.flows.control.settings import (
    PREFETCH,
    REORDER,
    SPLIT,
    SPLIT_DEVICES,
    WavefrontSettings,
)
from dovetail.runtime.index.cursor import SearchHistory, begin_search
from dovetail.runtime.retrieval.budget import deal_rows, plan_sub_stage
from dovetail.runtime.retrieval.hot import HotSet

TASTE = 1 / 16
"""Part of a search that is scanned as soon as it comes: mostly it holds what is nearest."""


class Searches:
    """Searches of all requests, oldest request first."""

    def __init__(
        self,
        settings: WavefrontSettings,
        learned: Learned,
        board: Board,
        catalog: Catalog,
        hot: Mapping[str | None, HotSet],
        callbacks: Callbacks[Search],
    ) -> None:
        self._settings, self._learned, self._board = settings, learned, board
        self._catalog, self._hot, self._callbacks = catalog, hot, callbacks
        self._active: list[Search] = []
        self._busy: dict[Device, Lot] = {}
        self._failed: list[Lot] = []  # of the device; the CPU is to scan them
        self._copying: set[str | None] = set()
        self._since_refresh = 0
        self._guesses = False
        self._newest = -inf  # when the first search of a request began last

    @property
    def load(self) -> int:
        """Searches under way."""
        return len(self._active)

    @property
    def active(self) -> Sequence[Search]:
        """Searches under way whose clusters are known."""
        return [search for search in self._active if search.cursor is not None]

    @property
    def budget(self) -> float:
        """Seconds that a sub-stage should take now."""
        return self._learned.budget(self._backlog)

    @property
    def _backlog(self) -> float:
        """Seconds that all threads take for what is left of searches under way."""
        return self._learned.shared_seconds(sum(search.left for search in self._active))

    def begin(self, search: Search, history: SearchHistory | None) -> None:
        """Have the clusters of a search found; `history` is of the request's last one."""
        used = history if self._settings.allows(REORDER) else None
        known = tuple(id_ for _, id_ in used.hits) if used else ()
        source, provisional = search.source, search.call is None
        if not search.earlier and not provisional:
            self._newest = search.began
        self._active.append(search)
        self._active.sort(key=lambda each: (each.source.request, each.began))
        search.job = self._board.post(
            lambda job: FindClusters(job, source, search.node, search.vector, known, provisional),
            Waiter(
                source.request,
                lambda report, now: self._probed(search, used, report, now),
                lambda error, now: self._fail([search], error, now),
            ),
        )

    def drop(self, search: Search) -> None:
        """Forget a search; scans that hold it go on, but nothing comes of them."""
        if not search.over:
            search.over = True
            self._active.remove(search)
            self._board.cancel(search.job)

    def drop_request(self, request: int) -> None:
        """Forget all searches of a request."""
        for search in [s for s in self._active if s.source.request == request]:
            self.drop(search)

    def seconds_left(self) -> dict[Search, float]:
        """Predict how long each search still takes, after those that go before it."""
        ahead, threads, found = 0, self._learned.costs.scan.threads, dict[Search, float]()
        for search in self.active:
            found[search] = self._learned.scan_seconds([(ahead + search.left) // threads])
            ahead += search.left if search.call is not None else 0
        return found

    def dispatch(
        self, replies: int, longest: Callable[[], float], guesses: bool, now: float
    ) -> None:
        """Order the next scans of devices that are idle, and copies of clusters that got hot.

        replies: generations under way, which wait for a scan on their device. longest: returns the
        seconds of the longest reply to a request under way. guesses: whether a generation may be
        begun on part of a search.
        """
        self._guesses = guesses
        if "gpu" not in self._busy:  # a scan under way may use what is to be dropped
            self._prefetch()
        while "cpu" not in self._busy and self._failed:
            self._redo(self._failed.pop(0), now)
        while "cpu" not in self._busy and (chosen := self._chosen(longest, now)):
            lots = self._divided(chosen, replies)
            _begin_stages(lots)
            for lot in lots:
                self._start(lot, now)
            self._since_refresh += 1

    # ---- what a sub-stage holds ----

    def _chosen(self, longest: Callable[[], float], now: float) -> list[Search]:
        """Return the searches of one index that the next sub-stage may scan for.

        The oldest request goes first, so that what ends soonest is not held up by what came later;
        where no more come, the one that has searched least, whose replies will take longest. A
        search that has begun nothing is before those that have, for its `TASTE`. Scouts are sent
        where no other search waits.
        """
        waiting = [search for search in self._active if search.waiting]
        waiting = [search for search in waiting if search.call is not None] or waiting
        same = [s for s in waiting if s.node.index == waiting[0].node.index]
        if self._settings.allows(SPLIT):
            if self._draining(longest(), now):
                same.sort(key=lambda search: search.earlier)
            same.sort(key=self._tasted)  # stable
        return same[: self._settings.width]

    def _draining(self, reply: float, now: float) -> bool:
        """Tell whether requests stopped coming, and all that is left takes less than a reply.

        Searches of one request wait for its replies. Were the oldest request still first, at the
        end only those of the last one would be left, and the index idle between them.
        """
        return self._backlog < reply < now - self._newest

    def _tasted(self, search: Search) -> bool:
        """Tell whether a search has found what a generation can be begun on, or none will be."""
        return search.steps.position > 0 or search.call is None or not self._guesses

    def _divided(self, chosen: Sequence[Search], replies: int) -> list[Lot]:
        """Return the scans of a sub-stage.

        On both devices where searches are predicted to save more than generations lose by it.
        """
        index = chosen[0].node.index
        hot, sizes = self._hot.get(index), self._catalog.sizes(index)
        device = self._learned.costs.device if chosen[0].call is not None else None  # no scouts
        if self._settings.allows(SPLIT_DEVICES) and hot and device and "gpu" not in self._busy:
            takes = self._planned(chosen, _Weighed(sizes, hot, self._learned.device_weight))
            here = filter_takes(takes, lambda cluster: not hot.resident(cluster))
            there = filter_takes(takes, hot.resident)
            seconds = device.seconds(vectors_of(there, sizes)) if there else 0.0
            lots = [self._cpu_lot(here, sizes), Lot("gpu", there, seconds)]
            alone, longest = self._cpu_lot(takes, sizes), max(lot.predicted for lot in lots)
            saved = alone.predicted - longest
            real = sum(search.call is not None for search in self._active)
            if saved * real > seconds * replies:
                return [lot for lot in lots if lot.takes]
        return [self._cpu_lot(self._planned(chosen, sizes), sizes)]

    def _cpu_lot(self, takes: Takes, sizes: Sequence[int]) -> Lot:
        """Return a scan on the CPU, the clusters of a search dealt to threads that would idle."""
        loads = vectors_of(takes, sizes)
        if self._settings.allows(SPLIT) and takes:
            rows = deal_rows([clusters for _, clusters in takes], sizes, self._learned.costs.scan)
            takes = [(takes[row.search][0], row.clusters) for row in rows]
            loads = [row.vectors for row in rows]
        seconds = self._learned.scan_seconds(loads) if takes else 0.0
        return Lot("cpu", takes, seconds, self._learned.shared_seconds(sum(loads)))

    def _planned(self, chosen: Sequence[Search], sizes: Sequence[int]) -> Takes:
        """Return the next clusters of each search, as many as its settings say."""
        if not self._settings.allows(SPLIT):
            return [(search, search.steps.left) for search in chosen]
        if (fixed := self._settings.fixed_clusters) is not None:
            return [(search, search.steps.ahead(fixed)) for search in chosen]
        budget = self.budget / self._learned.speed
        cost, most = self._learned.costs.scan, self._portions(chosen)
        takes = plan_sub_stage([search.steps for search in chosen], sizes, cost, budget, most=most)
        return [(chosen[i], chosen[i].steps.ahead(count)) for i, count in takes]

    def _portions(self, chosen: Sequence[Search]) -> list[int]:
        """Return how many clusters each search may scan: a taste first, on all threads at least."""
        new = sum(not self._tasted(search) for search in chosen)
        least = self._learned.costs.scan.threads // max(1, new)
        return [
            count if self._tasted(search) else max(least, ceil(count * TASTE))
            for search, count in ((search, search.steps.remaining) for search in chosen)
        ]

    def _start(self, lot: Lot, now: float) -> None:
        index = lot.takes[0][0].node.index
        parts = tuple(search.part(clusters) for search, clusters in lot.takes)
        sources = tuple(search.source for search, _ in lot.takes)
        for search, _ in lot.takes:
            search.scans += 1
        self._busy[lot.device] = lot
        self._board.post(
            lambda job: ScanClusters(job, lot.device, index, parts, sources),
            Waiter(
                None,
                lambda report, end: self._scanned(lot, report, end - now, end),
                lambda error, end: self._lost(lot, error, end),
            ),
        )

    def _redo(self, lot: Lot, now: float) -> None:
        """Have the CPU scan what the device failed to scan: it has all vectors."""
        for search, _ in lot.takes:
            search.scans -= 1
            search.leave_device()
        takes = [(search, clusters) for search, clusters in lot.takes if not search.over]
        if takes:
            sizes = self._catalog.sizes(takes[0][0].node.index)
            self._start(self._cpu_lot(takes, sizes), now)

    def _prefetch(self) -> None:
        if self._since_refresh < self._settings.refresh or not self._settings.allows(PREFETCH):
            return
        self._since_refresh = 0
        for index in self._hot:
            hot = self._hot.get(index)
            if hot is not None and index not in self._copying:
                self._copy(index, hot)

    def _copy(self, index: str | None, hot: HotSet) -> None:
        swap = hot.refresh()
        if swap is None:
            return
        self._copying.add(index)
        self._draw_copy(swap.load)
        self._board.post(
            lambda job: Copy(job, index, swap.load, swap.drop),
            Waiter(
                None,
                lambda report, now: self._copied(index, hot, report.value or ()),
                lambda error, now: self._copied(index, hot, swap.load),
            ),
        )

    def _draw_copy(self, clusters: tuple[int, ...]) -> None:
        """Put a copy beside the oldest search, if that may wait for it."""
        for search in self.active[:1]:
            if clusters and search.work.ready and search.call is not None and not search.copied:
                search.copied = True
                search.graph.begin(prefetch(search.graph, search.work, clusters))

    # ---- reports ----

    def _probed(
        self, search: Search, used: SearchHistory | None, report: Probed, now: float
    ) -> None:
        search.centroids = dict(zip(report.clusters, report.centroids, strict=True))
        search.version = report.version
        search.known = used
        search.cursor = begin_search(
            report.clusters,
            search.node.topk,
            used,
            report.known,
            reordered=self._learned.follows_history(search.node.name),
        )
        sizes = self._catalog.sizes(search.node.index)
        search.left = sum(sizes[cluster] for cluster in report.clusters)
        search.work.clusters = report.clusters
        if search.cursor.clusters != report.clusters:
            reorder(search.graph, search.work, search.cursor.clusters)
        if used is not None:
            search.homes.update(used.homes)
        if self._learned.stage is None and search.left:
            self._learned.searched(self._learned.scan_seconds([search.left]))
        if search.cursor.done:
            self._end(search, now)

    def _scanned(self, lot: Lot, report: Scanned, elapsed: float, now: float) -> None:
        del self._busy[lot.device]
        if lot.device == "cpu":
            self._learned.scanned(lot.predicted, report.seconds, elapsed - lot.shared)
        index = lot.takes[0][0].node.index
        sizes, hot = self._catalog.sizes(index), self._hot.get(index)
        if hot is not None:
            hot.lose(report.absent)
        for (search, clusters), found in zip(lot.takes, report.found, strict=True):
            search.left -= sum(sizes[cluster] for cluster in clusters)
            if hot is not None:
                hot.count(clusters)
            if not search.over and search.find(found):
                self._stepped(search, now)

    def _stepped(self, search: Search, now: float) -> None:
        patience = self._settings.patience
        still = patience is not None and search.steps.unchanged >= patience
        if search.steps.done or (still and len(search.steps.partial) == search.node.topk):
            self._end(search, now)
        else:
            self._callbacks.changed(search, now)

    def _end(self, search: Search, now: float) -> None:
        search.end()
        if search.ended is not None:
            self._learned.searched(now - search.began)
            for share, ids in search.seen:
                self._learned.stayed(search.node.name, share, ids == search.partial_ids)
        if search.call is not None:
            self._learned.sought(search.node.name, search.needed())
        search.over = True
        self._active.remove(search)
        self._callbacks.ended(search, now)

    def _lost(self, lot: Lot, error: DovetailError, now: float) -> None:
        del self._busy[lot.device]
        if lot.device == "gpu":
            if (hot := self._hot.get(lot.takes[0][0].node.index)) is not None:
                hot.lose({cluster for _, clusters in lot.takes for cluster in clusters})
            self._failed.append(lot)
        else:
            self._fail([search for search, _ in lot.takes], error, now)

    def _fail(self, searches: Sequence[Search], error: DovetailError, now: float) -> None:
        for search in searches:
            if not search.over:
                self.drop(search)
                self._callbacks.failed(search, error, now)

    def _copied(self, index: str | None, hot: HotSet, missing: Iterable[int]) -> None:
        """Take that a copy is over; clusters that did not arrive may be copied again.

        Another index may have taken the place of the one it was for, with a hot set of its own.
        """
        self._copying.discard(index)
        hot.settle()
        hot.lose(missing)


def _begin_stages(lots: Sequence[Lot]) -> None:
    """Begin the next sub-stage of each search, which may have clusters in several lots."""
    parts: dict[Search, dict[Device, list[int]]] = {}
    for lot in lots:
        for search, clusters in lot.takes:
            parts.setdefault(search, {"cpu": [], "gpu": []})[lot.device].extend(clusters)
    for search, sides in parts.items():
        search.begin_stage(sides["cpu"], sides["gpu"])


class _Weighed(Sequence[int]):
    """Sizes of clusters as a sub-stage feels them: those on the device take `weight` of the time.

    Both devices work at once; counting their times together keeps each of them to the budget.
    """

    def __init__(self, sizes: Sequence[int], hot: HotSet, weight: float) -> None:
        self._sizes, self._hot, self._weight = sizes, hot, weight

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, cluster: int) -> int:  # type: ignore[override]
        size = self._sizes[cluster]
        return round(size * self._weight) if self._hot.resident(cluster) else size
