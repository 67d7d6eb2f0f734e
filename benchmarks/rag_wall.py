"""The same world on the wall clock: scans are faiss's on this machine, the rest takes its time.

In: as `WorkflowSimulation`. Out: outcomes in real seconds. The accelerator, with the engine and the
encoder on it, is *emulated*: it replies by script at the times of the tables. One thread schedules,
one scans.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import faiss
import numpy as np

from dovetail.runtime.flows.control import messages as m
from dovetail.runtime.flows.workflow_run import WorkflowRun
from dovetail.runtime.index.build import fill_index
from dovetail.runtime.index.ivf import IvfIndex
from dovetail.runtime.index.scans import Part
from dovetail.runtime.retrieval.budget import ScanCost
from rag_script import Corpus, Vectors
from simulated_workflows import WorkflowOutcome, WorkflowSimulation

PATIENCE = 60.0
"""Seconds without any event after which a run has failed."""


class FaissIndex:
    """An index of faiss behind what `Scene` asks of one."""

    def __init__(self, corpus: Corpus) -> None:
        d = corpus.centres.shape[1]
        self._quantizer = faiss.IndexFlatL2(d)  # stays alive beside what refers to it
        self._quantizer.add(corpus.centres)
        trained = faiss.IndexIVFFlat(self._quantizer, d, len(corpus.centres), faiss.METRIC_L2)
        trained.train(corpus.centres)
        self._index: IvfIndex = fill_index(trained, corpus.documents)
        self.sizes = self._index.sizes
        self.homes = self._index.base.homes

    def probe(self, vector: Vectors, nprobe: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """See Index."""
        (found,) = self._index.probe(vector[None], nprobe)
        return found.clusters, found.centroids

    def distances(self, vector: Vectors, ids: Sequence[int]) -> dict[int, float]:
        """See Index."""
        return self._index.distances(vector, ids)

    def scan(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """See Index."""
        rows = self._index.scan(parts, parts[0].depth)
        return tuple(
            Part(hits=tuple(hits), homes=tuple(int(self.homes[i]) for _, i in hits))
            for hits in rows
        )


def measure_scan(index: FaissIndex, queries: Sequence[Vectors]) -> ScanCost:
    """Return what scans take here on one thread, by the lower quartile of a few sizes."""
    points = []
    for width in (1, 8, 64):
        seconds, vectors = [], []
        for query in queries:
            clusters, centroids = index.probe(query, width)
            part = Part(query.tobytes(), clusters, centroids, 20)
            start = time.perf_counter()
            index.scan([part])
            seconds.append(time.perf_counter() - start)
            vectors.append(sum(index.sizes[c] for c in clusters))
        points.append((float(np.median(vectors)), float(np.quantile(seconds, 0.25))))
    (few, brief), (many, long) = points[0], points[-1]
    slope = (long - brief) / (many - few)
    return ScanCost(max(1e-5, brief - few * slope), slope)


class WallSimulation(WorkflowSimulation):
    """One run in real time."""

    def run(
        self,
        arrivals: Sequence[tuple[float, WorkflowRun]],
        watch: Callable[[float, Sequence[m.Order]], None] = lambda now, orders: None,
    ) -> list[WorkflowOutcome]:
        """See WorkflowSimulation."""
        for at, run in arrivals:
            self._at(at, partial(self._arrive, run, at))
        self._done = queue.SimpleQueue[Future[m.Scanned]]()
        start = time.perf_counter()
        with ThreadPoolExecutor(1) as self._scanner:
            while len(self.outcomes) < len(arrivals):
                scanned = self._wait(start)
                self.now = time.perf_counter() - start
                if scanned is not None:
                    self.plane.tell(scanned, self.now)
                self._act()
                self._obey(watch)
        return self.outcomes

    def _wait(self, start: float) -> m.Scanned | None:
        """Return the next report of a scan, None where another event is due before."""
        due = start + self._events[0][0] if self._events else math.inf
        left = max(0.0, due - time.perf_counter())
        try:
            return self._done.get(timeout=min(left, PATIENCE)).result()
        except queue.Empty:
            assert self._events, "nothing is under way, and requests are left"
            return None

    def _scan(self, order: m.ScanClusters) -> None:
        assert order.device == "cpu", "nothing is cached on an accelerator that computes nothing"
        self._count_scan(order)
        self._scanner.submit(self._search, order).add_done_callback(self._done.put)

    def _search(self, order: m.ScanClusters) -> m.Scanned:
        start = time.perf_counter()
        found = self.world.scan(order.parts)
        seconds = time.perf_counter() - start
        self.busy["cpu"] += seconds  # one scan at a time
        return m.Scanned(order.job, found, seconds)
