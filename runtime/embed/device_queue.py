"""The queue of one device: queries in order of urgency, batches that run, exact counts of both.

In: queries that come and go. Out: room, the next batch, and when all would be done. Pure; only
`QueueManager` changes it.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import add, mul
from typing import Any

from dovetail.runtime.embed.line import LEAST_VALUES, Line, upper_bound

SEEN = 128
"""Promises of a device, the latest, by whose keeping new queries are judged; at first the margin
counts too. Of the greatest of 100 that are alike, a further one is beyond in one of 101."""
LONG = 0.125
"""Part of the allowed time that a promise has to span to say anything of those that matter."""
SPARED, MOST_SPARED = 0.05, 2.5
"""Part of a device's throughput that is given, where queries are refused anyhow, for promises that
are kept even where the machine stops; how often such a promise fits into the time, at most."""
PRESSED = 0.1
"""Refused queries for each one of a batch from which on a device counts as pressed."""
REST = 5.0
"""Seconds without work after which a device is tried that is too slow by its lines: seldom enough
that few queries are late, often enough that it serves soon after it has become fast again."""
FIRST_BATCH = 12.0
"""Seconds that a batch is predicted to take of which no line is known."""


class QueryState(Enum):
    """Where a query is. NEW: in no queue, or in the backlog of those without an SLO."""

    NEW = auto()
    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class QueryClass:
    """Queries of one model with up to `tokens` tokens."""

    tokens: int
    model: str = ""


def length_classes(lengths: Iterable[int], model: str = "") -> tuple[QueryClass, ...]:
    """Return the classes of a model with these most tokens of each."""
    return tuple(QueryClass(tokens, model) for tokens in sorted(lengths))


@dataclass(slots=True, eq=False)
class EmbedQuery:
    """One text to embed, as the manager sees it; only the manager changes it.

    target: when it should be done by the caller's clock (the SLO); infinite for bulk work, which
    has no SLO.
    model: the encoder that is asked, of those that share the devices.
    payload: its caller's. kind: its class on every device. limit: the largest batch it may be in.
    admitted, promised: when it was taken, and when it would be done by the lines; infinite where
    that holds no longer.
    """

    number: int
    tokens: int
    target: float = math.inf
    model: str = ""
    payload: Any = None
    state: QueryState = QueryState.NEW
    device: str = ""
    kind: int = 0
    limit: int = 1 << 30
    deaths: int = 0
    cancelled: bool = False
    admitted: float = 0.0
    promised: float = math.inf

    @property
    def bulk(self) -> bool:
        """Whether it has no SLO."""
        return self.target == math.inf


def urgency(query: EmbedQuery) -> tuple[float, int]:
    """Return a query's place in a queue: earliest target first."""
    return query.target, query.number


@dataclass(frozen=True, slots=True)
class QueueSpec:
    """A device's queue. `depths` and `lines` have one value per class of queries.

    token_budget: most tokens of a batch. margin: part by which promises may be exceeded, until
    enough of them have shown by how much they are.
    """

    name: str
    accelerator: bool
    depths: tuple[int, ...]
    lines: tuple[Line, ...]
    instances: int = 1
    token_budget: int = 1 << 30
    margin: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class QueryBatch:
    """Queries of one model that one instance runs together, from `started` to about `expected`.

    counts: of each class. predicted: seconds that it takes at the latest, by what is known.
    """

    number: int
    device: str
    queries: tuple[EmbedQuery, ...]
    counts: tuple[int, ...]
    started: float
    expected: float
    predicted: float = math.inf
    model: str = ""


def batch_seconds(lines: Sequence[Line], counts: Sequence[int]) -> float:
    """Return the seconds of one batch with so many queries of each class; 0 of none."""
    present = [(n, line) for n, line in zip(counts, lines, strict=True) if n]
    alphas = sum(n * line.alpha for n, line in present)
    return alphas + max((line.beta for _, line in present), default=0.0)


def choose_batch(waiting: Sequence[EmbedQuery], budget: int, most: int) -> list[EmbedQuery]:
    """Return at most `most` queries of one model and `budget` tokens, in order of urgency.

    The most urgent one is always among them. Sequences are packed: each costs its own tokens.
    """
    first = waiting[0]
    chosen, total, most = [first], first.tokens, min(most, first.limit)
    for query in waiting[1:]:
        if len(chosen) >= most:
            break
        fits = total + query.tokens <= budget and query.limit > len(chosen)
        if fits and query.model == first.model:
            chosen.append(query)
            total, most = total + query.tokens, min(most, query.limit)
    return chosen


@dataclass(slots=True)
class DeviceQueue:
    """A device: what waits, in order; what runs; and how many of each class there are."""

    spec: QueueSpec
    models: tuple[range, ...]  # the classes of each model that is embedded here
    shares: tuple[int, ...] = ()
    capacity: int = 1
    open: bool = True
    gone: bool = False  # it will never run anything again
    waiting: list[EmbedQuery] = field(default_factory=list)
    running: dict[int, QueryBatch] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)  # of what waits
    slack: float = 1.0  # what a promise may take, by what the lines say
    refused: int = 0  # queries that were BUSY since the last batch began
    pressed: bool = False  # whether many were, while it was being filled
    delivered: float = -math.inf  # when its last batch was with its callers
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=SEEN))

    def set_spec(self, spec: QueueSpec) -> None:
        """Take new depths: a query of class k fills capacity / depth_k of a device, exactly."""
        if self.shares and spec.lines != self.spec.lines:
            self._retell(spec)
        self.spec = spec
        self._judge()
        self.capacity = math.lcm(*(depth for depth in spec.depths if depth), 1)
        self.shares = tuple(self.capacity // d if d else self.capacity + 1 for d in spec.depths)
        self.counts = self.counts or [0] * len(spec.depths)

    def _retell(self, spec: QueueSpec) -> None:
        """Tell what was promised by other lines, and how it was kept, by those of `spec`.

        A line says what batches take in the mean; how they vary was dear to learn, and is kept.
        """
        pairs = zip(self.spec.lines, spec.lines, spec.depths, strict=True)
        changed = [(old, new, depth or 1) for old, new, depth in pairs if old != new]
        times = max(old.seconds(n) / new.seconds(n) for old, new, n in changed)
        self.ratios = deque((ratio * times for ratio in self.ratios), self.ratios.maxlen)
        self.stretch_promises(1 / times)

    def _judge(self) -> None:
        """Set what a promise may take: by those that are known, and a margin while they are few."""
        few = len(self.ratios) < LEAST_VALUES
        self.slack = max(1.0, upper_bound(self.ratios or [1.0])) * (1 + self.spec.margin * few)

    @property
    def held(self) -> list[int]:
        """How many queries of each class wait or run."""
        held = self.counts
        for batch in self.running.values():
            held = list(map(add, held, batch.counts))
        return held

    @property
    def load(self) -> int:
        """Sum of the shares of what is held; `capacity` at most, but for depths that fell."""
        return sum(map(mul, self.held, self.shares))

    def seconds(self, counts: Sequence[int]) -> float:
        """Return the predicted seconds of so many queries of each class, a batch for each model."""
        lines = self.spec.lines
        return sum(
            batch_seconds(lines[kinds.start : kinds.stop], counts[kinds.start : kinds.stop])
            for kinds in self.models
        )

    def holds_others(self, query: EmbedQuery) -> bool:
        """Return whether other models' queries are here: batches follow each other then."""
        (own,) = (kinds for kinds in self.models if query.kind in kinds)
        return any(count and kind not in own for kind, count in enumerate(self.held))

    def free_at(self, now: float) -> float:
        """Return when an instance is free by the lines; one overdue may last as long again."""
        if len(self.running) < self.spec.instances:
            return now
        return min(now + abs(batch.expected - now) for batch in self.running.values())

    def rested(self, now: float) -> bool:
        """Tell whether it has had nothing to do for REST seconds."""
        return not self.load and now >= self.delivered + REST

    def promise(self, query: EmbedQuery, now: float) -> float:
        """Return when all that waits, and `query`, would be done by the lines."""
        counts = [n + (k == query.kind) for k, n in enumerate(self.counts)]
        return self.free_at(now) + self.seconds(counts)

    def finish(self, query: EmbedQuery, now: float) -> float:
        """Return when all that waits, and `query`, would be done at the latest.

        A device that has nothing to do is tried, however late it was, or it would stay so for ever.
        """
        if not self.waiting and not self.running:
            slack = min(self.slack, 1 + self.spec.margin)
        else:
            slack = max(self.slack, self._spare(query.target - now) if self.pressed else 1.0)
        return now + (self.promise(query, now) - now) * slack

    def _spare(self, allowed: float) -> float:
        """Return by what factor batches of a full queue may be late at the price of `SPARED`.

        Who comes to a full queue waits for two batches, which share the time allowed; each loses
        beta. Shorter ones embed as many queries in all, but for that.
        """
        beta = max(line.beta for line in self.spec.lines)
        return min(MOST_SPARED, SPARED * allowed / (2 * beta)) if beta else MOST_SPARED

    def note(self, batch: QueryBatch, now: float) -> None:
        """Learn from a batch, whose vectors have been delivered, how late others may be.

        Of its queries the one admitted last was promised the end of all of them. So what counts is
        what a caller sees: the batch before, this one, and all that came between.
        """
        self.delivered = now
        last = max(batch.queries, key=lambda query: (query.admitted, query.promised))
        span, allowed = last.promised - last.admitted, last.target - last.admitted
        if LONG * allowed <= span * self.slack < math.inf:
            self.ratios.append((now - last.admitted) / span)
            self._judge()

    def stretch_promises(self, times: float) -> None:
        """Have what was promised so far take so many times as long; infinite: it cannot be held."""
        running = (query for batch in self.running.values() for query in batch.queries)
        for query in (*self.waiting, *running):
            query.promised = query.admitted + (query.promised - query.admitted) * times

    def push(self, query: EmbedQuery) -> None:
        """Put a query in its place among those that wait."""
        query.state, query.device = QueryState.WAITING, self.spec.name
        insort(self.waiting, query, key=urgency)
        self.counts[query.kind] += 1

    def pull_batch(self, chosen: Sequence[EmbedQuery]) -> list[int]:
        """Take out what runs now; return its counts."""
        self.pressed, self.refused = self.refused >= PRESSED * len(chosen), 0
        for query in chosen:
            query.state = QueryState.RUNNING
        taken = Counter(query.kind for query in chosen)
        self.waiting = [query for query in self.waiting if query.state is QueryState.WAITING]
        self.counts = [n - taken[kind] for kind, n in enumerate(self.counts)]
        return [taken[kind] for kind in range(len(self.counts))]
