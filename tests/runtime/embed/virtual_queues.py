"""The embedding service on a virtual clock: the product's queue manager, devices that are lines.

In: a manager, the true lines of its devices, calls with their times. Out: what was accepted, how
long it took, and what was BUSY. Nothing is computed and nothing sleeps.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dovetail.ir.errors import CapacityError
from dovetail.runtime.embed.device_queue import EmbedQuery, QueryBatch, batch_seconds
from dovetail.runtime.embed.line import Line
from dovetail.runtime.embed.queue import QueueManager

Lines = Mapping[str, Sequence[Line]]
"""Device -> the line of each class."""


@dataclass(frozen=True, slots=True)
class Burst:
    """Queries that come together at `at` seconds: the tokens of each, and the model of all."""

    at: float
    tokens: tuple[int, ...]
    model: str = ""


@dataclass(frozen=True, slots=True)
class QueueOutcome:
    """What the calls came to. `latencies` are the seconds of accepted queries, by device."""

    latencies: dict[str, tuple[float, ...]]
    busy: int
    seconds: float

    @property
    def accepted(self) -> int:
        """Return how many queries were embedded."""
        return sum(map(len, self.latencies.values()))

    @property
    def rate(self) -> float:
        """Return embedded queries per second, from the first arrival to the last vector."""
        return self.accepted / self.seconds if self.seconds else 0.0

    def percentile(self, share: float) -> float:
        """Return the latency that this share of the accepted queries stays within; 0 of none."""
        ordered = sorted(itertools.chain(*self.latencies.values()))
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def simulate(
    manager: QueueManager,
    truth: Lines,
    calls: Sequence[Burst],
    slo: float,
    *,
    noise: float = 0.0,
    pause: float = 0.0,
    pace: Callable[[float], float] = lambda _: 1.0,
    watch: Callable[[QueryBatch, float], object] = lambda *_: None,
    seed: int = 0,
) -> QueueOutcome:
    """Serve `calls` (in order of time); batches take their true line's seconds, give or take.

    Args:
        manager: the queues, empty; they are empty again at the end.
        truth: what batches really take.
        calls: one is accepted as a whole or BUSY as a whole.
        slo: seconds a query may take, from its arrival.
        noise: standard deviation of the logarithm of a batch's seconds.
        pause: seconds from a batch's end until its vectors are with their callers, and the device
            is given the next one.
        pace: of the time: how many times as long as their lines say batches take then.
        watch: told of each batch and its seconds, as a `DriftKeeper` is.
        seed: of the noise.
    """
    draw, numbers, order = random.Random(seed), itertools.count(), itertools.count()
    ends: list[tuple[float, int, QueryBatch]] = []
    arrived: dict[int, float] = {}
    latencies: dict[str, list[float]] = {name: [] for name in manager.depths()}
    waiting, busy, now = iter(calls), 0, 0.0
    call = next(waiting, None)
    while call or ends:
        if call and (not ends or call.at <= ends[0][0]):
            now = call.at
            new = [EmbedQuery(next(numbers), n, now + slo, call.model) for n in call.tokens]
            try:
                manager.submit(new, now)
                arrived |= dict.fromkeys((query.number for query in new), now)
            except CapacityError:
                busy += len(new)
            call = next(waiting, None)
        else:
            now, _, batch = heapq.heappop(ends)
            ended = manager.complete(batch)
            watch(batch, now - pause - batch.started)
            manager.note(batch, now)
            for query in ended:
                latencies[batch.device].append(now - arrived.pop(query.number))
        for name in manager.depths():
            while batch_now := manager.take(name, now):
                seconds = batch_seconds(truth[name], batch_now.counts)
                seconds *= pace(now) * math.exp(draw.gauss(0.0, noise))
                heapq.heappush(ends, (now + seconds + pause, next(order), batch_now))
    start = calls[0].at if calls else 0.0
    return QueueOutcome({n: tuple(each) for n, each in latencies.items()}, busy, now - start)
