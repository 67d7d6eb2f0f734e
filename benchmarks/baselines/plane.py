"""What all baselines do alike: follow runs of workflows, one order for each call that is ready.

In: runs, reports. Out: orders. When calls begin and which clusters a scan holds is for subclasses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dovetail.ir.workflow import Embedding, Function, Generation, Retrieval, render
from dovetail.runtime.flows.control.messages import (
    Catalog,
    Deliver,
    Embed,
    FindClusters,
    Generate,
    Invoke,
    Order,
    Probed,
    Report,
    ScanClusters,
    Scanned,
    Source,
)
from dovetail.runtime.flows.prompts import pack_vector
from dovetail.runtime.flows.workflow_run import Call, WorkflowRun
from dovetail.runtime.index.cursor import Cursor, Hit, begin_search
from dovetail.runtime.index.scans import Part

Take = Callable[[Any], None]


@dataclass(slots=True, eq=False)
class Search:
    """A search whose clusters are known."""

    source: Source
    call: Call
    vector: bytes
    cursor: Cursor
    centroids: dict[int, float] = field(default_factory=dict)

    def part(self, count: int) -> Part:
        """Return its next clusters."""
        return self.part_of(self.cursor.left[:count])

    def part_of(self, clusters: tuple[int, ...]) -> Part:
        """Return some of its clusters."""
        centroids = tuple(self.centroids[c] for c in clusters)
        return Part(self.vector, clusters, centroids, self.cursor.depth)


class StagePlane:
    """Stages as they become ready. Searches wait in `searches` until `choose` takes them."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._requests, self._jobs = itertools.count(1), itertools.count(1)
        self._runs: dict[int, WorkflowRun] = {}
        self._waiters: dict[int, Take] = {}
        self._orders: list[Order] = []
        self._scanning = False
        self.searches: list[Search] = []

    # ---- for subclasses ----

    def choose(self) -> Sequence[tuple[Search, int]]:
        """Return what the next scan holds: searches, and how many clusters of each."""
        return [(search, len(search.cursor.left)) for search in self.searches]

    def divide(self, chosen: Sequence[tuple[Search, int]]) -> Sequence[tuple[int, Part]]:
        """Return the queries of a scan, each with the place of its search in `chosen`."""
        return [(place, search.part(count)) for place, (search, count) in enumerate(chosen)]

    def admit(self, request: int) -> None:
        """Take a request that has come."""
        self.advance(request)

    def finish(self, request: int, call: Call, value: Any) -> None:
        """Take the result of a call."""
        self._runs[request].finish(call, value)
        self.advance(request)

    def deliver(self, request: int) -> None:
        """Answer a request."""
        self._orders.append(Deliver(request, self._runs.pop(request).result))

    # ---- the plane ----

    def submit(self, run: WorkflowRun, now: float) -> int:
        """Take a request; return its number."""
        request = next(self._requests)
        self._runs[request] = run
        self.admit(request)
        return request

    def tell(self, report: Report, now: float) -> None:
        """Take a report."""
        self._waiters.pop(report.job)(report)

    def orders(self, now: float) -> tuple[Order, ...]:
        """Return what is to be done now."""
        if not self._scanning and (chosen := self.choose()):
            self._scan(chosen)
        orders, self._orders = tuple(self._orders), []
        return orders

    def advance(self, request: int) -> None:
        """Begin what is ready."""
        run = self._runs[request]
        for call in run.ready():
            self._begin(request, call)
        if run.done:
            self.deliver(request)

    def _begin(self, request: int, call: Call) -> None:
        source = Source(request, call.node.name, call.round)
        done: Take = lambda report: self.finish(request, call, report.value)  # noqa: E731
        match call.node:
            case Generation() as node:
                prompt = render(node.prompt, call.state)
                self._post(lambda job: Generate(job, source, node, prompt), done)
            case Embedding() as node:
                text = str(call.state[node.text])
                self._post(lambda job: Embed(job, source, text, node.model), done)
            case Function():
                self._post(lambda job: Invoke(job, source, call), done)
            case Retrieval() as node:
                query = call.state[node.query]
                if isinstance(query, np.ndarray):
                    self._probe(source, call, pack_vector(query))
                    return
                text = str(query)
                self._post(
                    lambda job: Embed(job, source, text, query=True),
                    lambda report: self._probe(source, call, pack_vector(report.value)),
                )

    def _probe(self, source: Source, call: Call, vector: bytes) -> None:
        node = call.node
        assert isinstance(node, Retrieval)

        def found(report: Probed) -> None:
            cursor = begin_search(report.clusters, node.topk)
            centroids = dict(zip(report.clusters, report.centroids, strict=True))
            self.searches.append(Search(source, call, vector, cursor, centroids))

        self._post(lambda job: FindClusters(job, source, node, vector), found)

    def _scan(self, chosen: Sequence[tuple[Search, int]]) -> None:
        divided = self.divide(chosen)
        parts = tuple(part for _, part in divided)
        sources = tuple(chosen[place][0].source for place, _ in divided)
        node = chosen[0][0].call.node
        assert isinstance(node, Retrieval)

        def scanned(report: Scanned) -> None:
            self._scanning = False
            hits: list[list[Hit]] = [[] for _ in chosen]
            for (place, _), found in zip(divided, report.found, strict=True):
                hits[place] += found.hits
            for (search, count), found_hits in zip(chosen, hits, strict=True):
                search.cursor.advance(count, found_hits)
                if search.cursor.done:
                    self._searched(search)

        self._scanning = True
        self._post(lambda job: ScanClusters(job, "cpu", node.index, parts, sources), scanned)

    def _searched(self, search: Search) -> None:
        self.searches.remove(search)
        node = search.call.node
        assert isinstance(node, Retrieval)
        documents = self._catalog.documents(node, search.cursor.partial)
        self.finish(search.source.request, search.call, documents)

    def _post(self, make: Callable[[int], Order], take: Take) -> None:
        job = next(self._jobs)
        self._waiters[job] = take
        self._orders.append(make(job))
