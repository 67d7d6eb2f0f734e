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
from dovetail.runtime.embedding.margin import LEAST_VALUES, upper_bound
from dovetail.runtime.embedding.query import Batch, Query, QueueSpec, State

SEEN = 128
"""Promises of a device, the latest, by whose keeping new queries are judged; at first the margin
counts too. Of the greatest of 100 that are alike, a further one is beyond in one of 101."""
LONG = 0.125
"""Part of the allowed time that a promise has to span to say anything of those that matter."""
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
    gone: bool = False  # it will never run anything again
    waiting: list[Query] = field(default_factory=list)
    running: dict[int, Batch] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)  # of what waits
    held: list[int] = field(default_factory=list)  # of what waits or runs
    load: int = 0  # sum of the shares of what is held
    earliest: float | None = math.inf  # target of what waits; None: to be looked up
    slack: float = 1.0  # what a promise may take, by what the lines say
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=SEEN))

    def set_spec(self, spec: QueueSpec) -> None:
        """Take new depths: a query of class k fills capacity / depth_k of a device, exactly.

        Promises by other lines say nothing of these.
        """
        if spec.lines != self.spec.lines or not self.shares:
            self.ratios.clear()
            self.slack = 1 + spec.margin
            self.void_promises()
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
        """Return when an instance is free by the lines; one overdue may last as long again."""
        if len(self.running) < self.spec.instances:
            return now
        ends = (batch.expected for batch in self.running.values())
        return min(end if end >= now else now + (now - end) for end in ends)

    def limit(self, seconds: float) -> float:
        """Return the seconds after which a batch predicted to take `seconds` hangs."""
        return max(LEAST_LIMIT, HUNG * self.slack * seconds) if seconds else FIRST_LIMIT

    def promise(self, query: Query, now: float) -> float:
        """Return when all that waits, and `query`, would be done by the lines."""
        counts = [n + (k == query.kind) for k, n in enumerate(self.counts)]
        return self.free_at(now) + self.seconds(counts)

    def finish(self, query: Query, now: float) -> float:
        """Return when all that waits, and `query`, would be done at the latest.

        A device that has nothing to do is tried, however late it was, or it would stay so for ever.
        """
        slack = self.slack if self.load else min(self.slack, 1 + self.spec.margin)
        return now + (self.promise(query, now) - now) * slack

    def note(self, batch: Batch, now: float) -> None:
        """Learn from a batch, whose vectors have been delivered, how late others may be.

        Of its queries the one admitted last was promised the end of all of them. So what counts is
        what a caller sees: the batch before, this one, and all that came between.
        """
        last = max(batch.queries, key=lambda query: (query.admitted, query.promised))
        span, allowed = last.promised - last.admitted, last.target - last.admitted
        if not LONG * allowed <= span * self.slack < math.inf:
            return
        self.ratios.append((now - last.admitted) / span)
        self.slack = max(1.0, upper_bound(self.ratios))
        if len(self.ratios) < LEAST_VALUES:
            self.slack *= 1 + self.spec.margin

    def void_promises(self) -> None:
        """Note that what was promised so far cannot be held: something else has happened."""
        running = (query for batch in self.running.values() for query in batch.queries)
        for query in (*self.waiting, *running):
            query.promised = math.inf

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
