"""Open arrivals beyond the capacity of an embedding service, and what its queues cost.

In: a service, queries, a rate. Out: latencies of the accepted ones, how soon BUSY was said, memory.
`overload` and `manager_overhead` are for `embed.py` and the tests to call.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import psutil

from dovetail.ir.errors import CapacityError
from dovetail.runtime.embed.device_queue import EmbedQuery, QueueSpec, length_classes
from dovetail.runtime.embed.line import Line
from dovetail.runtime.embed.queue import QueueManager
from dovetail.runtime.embed.service import EmbeddingService, EmbedJob
from dovetail.runtime.native.encoder import Ids, Rows

DEPTHS = (300, 60)
"""Depths at which the manager's overhead is taken: an accelerator's and a CPU's."""
ROUNDS = 20


def overload(
    service: EmbeddingService, queries: Sequence[Ids], rate: float, seconds: float, seed: int = 0
) -> dict[str, Any]:
    """Offer single queries at random times, `rate` a second; return what came of them.

    Latencies are those of callers: until the future is set. The first tenth of the time warms up:
    memory is compared from there on, and `p99_warm` is of queries that were offered since, when the
    service has seen how late batches are beside this load.
    """
    draw = random.Random(seed)
    start = time.monotonic()
    at, offered, accepted, memory = start, 0, 0, 0
    refused, done, warm = list[float](), list[float](), list[float]()
    ended = threading.Semaphore(0)

    def note(job: EmbedJob, _: object) -> None:
        done.append(time.monotonic() - job.started)
        if job.started > start + seconds / 10:
            warm.append(done[-1])
        ended.release()

    while (at := at + draw.expovariate(rate)) < start + seconds:
        if (left := at - time.monotonic()) > 0.0005:
            time.sleep(left)
        offered += 1
        asked = time.perf_counter()
        try:
            job = service.submit([queries[offered % len(queries)]])
            job.future.add_done_callback(partial(note, job))
            accepted += 1
        except CapacityError:
            refused.append(time.perf_counter() - asked)
        if not memory and at > start + seconds / 10:
            memory = _memory()
    spent = time.monotonic() - start
    for _ in range(accepted):
        ended.acquire()
    held = len(service.manager.live())
    grown = _memory() - memory
    return {
        "offered_per_second": offered / spent,
        "accepted_per_second": len(done) / spent,
        "busy": len(refused),
        "p50": _percentile(done, 0.5),
        "p99": _percentile(done, 0.99),
        "p99_warm": _percentile(warm, 0.99),
        "slowest": max(done, default=0.0),
        "busy_p99_ms": 1e3 * _percentile(refused, 0.99),
        "memory_growth_mib": grown / 2**20,
        "held_afterwards": held,
    }


def manager_overhead() -> dict[str, float]:
    """Return milliseconds that a query costs: the manager alone, and all of the service.

    Both queues are filled, run and emptied; the medians of some rounds, BUSY apart.
    """
    manager = QueueManager(_specs(), length_classes([512]), arrival="open")
    alone, busy = list[float](), list[float]()
    for turn in range(ROUNDS):
        queries = [EmbedQuery(turn * 1000 + i, 75, 1e6) for i in range(sum(DEPTHS))]
        start = time.perf_counter()
        for query in queries:
            manager.submit([query], 0.0)
        for name in manager.depths():
            batch = manager.take(name, 0.0)
            assert batch is not None
            manager.complete(batch)
        alone.append((time.perf_counter() - start) / len(queries))
        manager.submit(
            [EmbedQuery(turn * 1000 + 500 + i, 75, 1e6) for i in range(sum(DEPTHS))], 0.0
        )
        start = time.perf_counter()
        for i in range(100):
            try:
                manager.submit([EmbedQuery(turn * 1000 + 900 + i, 75, 1e6)], 0.0)
            except CapacityError:
                continue
        busy.append((time.perf_counter() - start) / 100)
        for name in manager.depths():
            batch = manager.take(name, 0.0)
            assert batch is not None
            manager.complete(batch)
    return {
        "manager_ms": 1e3 * statistics.median(alone),
        "busy_ms": 1e3 * statistics.median(busy),
        "service_ms": 1e3 * _service_seconds(),
    }


class _Nothing:
    """An encoder that takes no time."""

    dim = 384

    def embed_tokens(self, ids: Sequence[Ids], types: Sequence[Ids] | None = None) -> Rows:
        return np.zeros((len(ids), self.dim), np.float32)

    def close(self) -> None:
        """Nothing is held."""


def _service_seconds() -> float:
    """Return the seconds of a query through a service whose encoders take none."""
    query = np.arange(75, dtype=np.int32)
    devices = {spec.name: [{"": _Nothing()}] for spec in _specs()}
    with EmbeddingService(
        devices, QueueManager(_specs(), length_classes([512])), slo=100.0
    ) as service:
        found = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            service.submit([query] * sum(DEPTHS)).result()
            found.append((time.perf_counter() - start) / sum(DEPTHS))
    return statistics.median(found)


def _specs() -> list[QueueSpec]:
    line = Line(1e-6, 1e-6)
    return [
        QueueSpec("npu", True, (DEPTHS[0],), (line,)),
        QueueSpec("cpu", False, (DEPTHS[1],), (line,)),
    ]


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.floor(share * len(ordered)))] if ordered else 0.0


def _memory() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)
