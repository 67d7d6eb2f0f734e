"""Schedulers of whole stages, and of stages cut at fixed counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from baselines.plane import Search, StagePlane
from dovetail.ir.workflow import Retrieval
from dovetail.runtime.flows.control.messages import Catalog
from dovetail.runtime.flows.workflow_run import Call
from dovetail.runtime.index.scans import Part
from dovetail.runtime.retrieval.budget import ScanCost, deal_rows


class AsyncUnsplit(StagePlane):
    """FlashRAG made asynchronous (HedraRAG §6.1): no stage waits for another request's.

    Work-conserving: whenever the index is idle, one scan takes all searches that wait, whole.
    """


class AsyncDivided(AsyncUnsplit):
    """The same with each search dealt to threads that would idle, as our sub-stages are.

    Stock faiss does not: it scans a query by one thread. So this is more than the paper's baseline.
    """

    def __init__(self, catalog: Catalog, cost: ScanCost) -> None:
        super().__init__(catalog)
        self._cost = cost

    def divide(self, chosen: Sequence[tuple[Search, int]]) -> Sequence[tuple[int, Part]]:
        """See StagePlane."""
        sizes = self._catalog.sizes(None)
        rows = deal_rows([search.cursor.left for search, _ in chosen], sizes, self._cost)
        return [(row.search, chosen[row.search][0].part_of(row.clusters)) for row in rows]


class FixedSplit(StagePlane):
    """Each scan takes the next `count` clusters of up to `width` searches, the oldest first."""

    def __init__(self, catalog: Catalog, count: int = 32, width: int = 32) -> None:
        super().__init__(catalog)
        self._count, self._width = count, width

    def choose(self) -> Sequence[tuple[Search, int]]:
        """See StagePlane."""
        oldest = self.searches[: self._width]
        return [(search, min(self._count, len(search.cursor.left))) for search in oldest]


class StageSequential(StagePlane):
    """Batches of requests go through their stages together, one kind of work at a time (LangChain).

    A batch takes all that wait, up to `most`; the next one begins when all of it is answered.
    """

    def __init__(self, catalog: Catalog, most: int = 64) -> None:
        super().__init__(catalog)
        self._most = most
        self._queue: deque[int] = deque()
        self._batch: set[int] = set()
        self._outstanding = self._retrievals = 0
        self._done: list[tuple[int, Call, Any]] = []

    def admit(self, request: int) -> None:
        """See StagePlane."""
        self._queue.append(request)
        self._fill()

    def choose(self) -> Sequence[tuple[Search, int]]:
        """Return all searches of the stage once all their clusters are known."""
        if len(self.searches) < self._retrievals:
            return []
        self._retrievals = 0
        return super().choose()

    def finish(self, request: int, call: Call, value: Any) -> None:
        """Hold the result back until the whole stage is done."""
        self._done.append((request, call, value))
        if len(self._done) == self._outstanding:
            self._next_stage()

    def deliver(self, request: int) -> None:
        """See StagePlane."""
        super().deliver(request)
        self._batch.discard(request)

    def _fill(self) -> None:
        if self._batch:
            return
        taken = [self._queue.popleft() for _ in range(min(self._most, len(self._queue)))]
        self._batch.update(taken)
        for request in taken:
            self.advance(request)

    def _next_stage(self) -> None:
        done, self._done, self._outstanding = self._done, [], 0
        for request, call, value in done:
            self._runs[request].finish(call, value)
        for request in dict.fromkeys(request for request, _, _ in done):
            self.advance(request)
        self._fill()

    def _begin(self, request: int, call: Call) -> None:
        self._outstanding += 1
        self._retrievals += isinstance(call.node, Retrieval)
        super()._begin(request, call)
