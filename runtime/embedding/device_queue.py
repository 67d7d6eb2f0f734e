"""The queue of one device: what waits in order, what runs, and the exact counts of both.

In: queries that come and go, batches that run. Out: room, and when all would be done. Pure; only
`QueueManager` changes it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dovetail.runtime.embedding.line import batch_seconds
from dovetail.runtime.embedding.query import Batch, Query, QueueSpec, State

SEEN, LEAST_SEEN = 32, 4
"""Batches of a device by whose lateness new queries are judged; at first the margin counts too."""
HUNG = 10.0
"""A batch that takes so many times its latest predicted seconds will not come back."""
LEAST_LIMIT, FIRST_LIMIT = 5.0, 120.0
"""Seconds that any batch is given, for machines pause; and one of which no line is known."""


@dataclass(slots=True)
class DeviceQueue:
    """A device: what waits, in order; what runs; and how many of each class there are."""

    spec: QueueSpec
    models: tuple[range, ...]  # the classes of each model that is embedded here
    shares: tuple[int, ...] = ()
    capacity: int = 1
    ceiling: int = 0  # the load when depths were last lowered, which may lie above the capacity
    open: bool = True
    waiting: list[Query] = field(default_factory=list)
    running: dict[int, Batch] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)  # of what waits
    held: list[int] = field(default_factory=list)  # of what waits or runs
    load: int = 0  # sum of the shares of what is held
    earliest: float | None = math.inf  # target of what waits; None: to be looked up
    slack: float = 1.0  # what a batch may take, by what its line says
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=SEEN))

    def set_spec(self, spec: QueueSpec) -> None:
        """Take new depths: a query of class k fills capacity / depth_k of a device, exactly."""
        self.spec = spec
        self.capacity = math.lcm(*(depth for depth in spec.depths if depth), 1)
        self.shares = tuple(self.capacity // d if d else self.capacity + 1 for d in spec.depths)
        self.counts = self.counts or [0] * len(spec.depths)
        self.held = self.held or [0] * len(spec.depths)
        self.load = self.ceiling = self.sum_load()

    def sum_load(self) -> int:
        """Return the load that the counts make, added up anew."""
        return sum(n * share for n, share in zip(self.held, self.shares, strict=True))

    def hold(self, kind: int, change: int) -> None:
        """Count a query of a class in (1), or out (-1)."""
        self.held[kind] += change
        self.load += change * self.shares[kind]
        self.ceiling = min(self.ceiling, self.load)

    def seconds(self, counts: Sequence[int]) -> float:
        """Return the predicted seconds of so many queries of each class, a batch for each model."""
        lines = self.spec.lines
        return sum(
            batch_seconds(lines[kinds.start : kinds.stop], counts[kinds.start : kinds.stop])
            for kinds in self.models
        )

    def holds_others(self, query: Query) -> bool:
        """Return whether other models' queries are here: batches follow each other then."""
        return any(
            any(self.held[kinds.start : kinds.stop])
            for kinds in self.models
            if query.kind not in kinds
        )

    def free_at(self, now: float) -> float:
        """Return when an instance is free at the latest, as predicted."""
        if len(self.running) < self.spec.instances:
            return now
        return min(self.late_end(batch, now) for batch in self.running.values())

    def late_end(self, batch: Batch, now: float) -> float:
        """Return when a batch ends at the latest; one overdue may take as long again as it is."""
        end = batch.started + (batch.expected - batch.started) * self.slack
        return end if end >= now else now + (now - end)

    def limit(self, seconds: float) -> float:
        """Return the seconds after which a batch predicted to take `seconds` hangs."""
        return max(LEAST_LIMIT, HUNG * self.slack * seconds) if seconds else FIRST_LIMIT

    def note(self, batch: Batch, now: float) -> None:
        """Learn from a batch how late others may be: as the latest one of some."""
        if batch.expected > batch.started:
            self.ratios.append((now - batch.started) / (batch.expected - batch.started))
            floor = 1.0 if len(self.ratios) >= LEAST_SEEN else self.slack
            self.slack = max(floor, *self.ratios)

    def finish(self, query: Query, now: float) -> float:
        """Return when all that waits, and `query`, would be done at the latest."""
        counts = [n + (k == query.kind) for k, n in enumerate(self.counts)]
        return self.free_at(now) + self.seconds(counts) * self.slack

    def urgent(self) -> float:
        """Return the earliest target of what waits."""
        if self.earliest is None:
            self.earliest = min((query.target for query in self.waiting), default=math.inf)
        return self.earliest

    def push(self, query: Query) -> None:
        """Put a query in its place among those that wait."""
        query.state, query.device = State.WAITING, self.spec.name
        if self.waiting and self.waiting[-1].order > query.order:
            insort(self.waiting, query, key=order_of)
        else:
            self.waiting.append(query)
        self.counts[query.kind] += 1
        if self.earliest is not None:
            self.earliest = min(self.earliest, query.target)

    def pull(self, query: Query) -> None:
        """Take out a query that waits."""
        del self.waiting[bisect_left(self.waiting, query.order, key=order_of)]
        self.counts[query.kind] -= 1
        self.earliest = None

    def pull_batch(self, chosen: Sequence[Query]) -> list[int]:
        """Take out what runs now; return its counts."""
        counts = [0] * len(self.counts)
        for query in chosen:
            query.state = State.RUNNING
            counts[query.kind] += 1
        self.waiting = [query for query in self.waiting if query.state is State.WAITING]
        self.counts = [n - taken for n, taken in zip(self.counts, counts, strict=True)]
        self.earliest = None
        return counts


def order_of(query: Query) -> tuple[float, int]:
    """Return a query's place in a queue."""
    return query.order
