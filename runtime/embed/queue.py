"""The queue manager: Algorithm 1 of WindVE §IV-B as a pure control plane, and its exact counts.

In: queries, the time, what became of batches. Out: the device of each query or BUSY, and batches.
No threads, no clocks, no tensors; one caller at a time.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import replace

from dovetail.ir.errors import CapacityError, DeviceError, DovetailError, RequestError
from dovetail.runtime.embed.device_queue import (
    FIRST_BATCH,
    DeviceQueue,
    EmbedQuery,
    QueryBatch,
    QueryClass,
    QueryState,
    QueueSpec,
    choose_batch,
    urgency,
)
from dovetail.runtime.embed.line import Arrival

BULK_SHARE = 2
"""Queries without an SLO fill at most one part in so many of a device: others find room."""
LIVES = 3
"""Instances that may die under a query, in ever smaller batches, before it is held the cause."""
SMALLER = 8
"""The part of a batch that is tried together after an instance died under it."""
STARTING = 1.0
"""Seconds after which it is worth to ask again for a device that is being started."""
BUSY = "all embedding queues are full; try again later"
NEVER = (
    "no device embeds a query of this length within the time allowed; allow more time, or shorten "
    "the text"
)
LOST = "no device is left that embeds, for none could be started again; load the artifact again"
TOO_MANY = "{} texts at once are more than the embedding queues hold; send fewer at once"


class QueueManager:
    """Queues of all devices: accelerators first, then the CPU, else BUSY."""

    def __init__(
        self,
        specs: Sequence[QueueSpec],
        classes: Sequence[QueryClass],
        *,
        heterogeneous: bool = True,
        arrival: Arrival = "open",
    ) -> None:
        """Take devices in order of preference, and what they embed.

        classes: those of a model stand together, the shortest first. Models share the devices.
        heterogeneous: whether the CPU is used beside accelerators (WindVE §IV-C).
        arrival: `closed` admits by depth alone, as Algorithm 1 does; `open` also by the predicted
        finish of all that would be in the batch.
        """
        self.classes, self.arrival = tuple(classes), arrival
        self._kinds: dict[str, range] = {}
        for kind, each in enumerate(classes):
            first = self._kinds.get(each.model, range(kind, kind)).start
            self._kinds[each.model] = range(first, kind + 1)
        self._queues = {s.name: DeviceQueue(s, tuple(self._kinds.values())) for s in specs}
        for spec in specs:
            self.set_queue(spec)
        accelerators = [spec.name for spec in specs if spec.accelerator]
        others = [spec.name for spec in specs if not spec.accelerator]
        self._tiers = [accelerators, others if heterogeneous or not accelerators else []]
        self._batches = itertools.count()
        self.spilled = dict.fromkeys(others if accelerators else (), 0)  # no accelerator could
        self._alive: dict[int, EmbedQuery] = {}
        self._backlog: deque[deque[EmbedQuery]] = deque()  # one turn for each call without an SLO

    # ---- what there is ----

    def live(self) -> tuple[EmbedQuery, ...]:
        """Return all queries that wait, here or in the backlog, or run."""
        return (*itertools.chain(*self._backlog), *self._alive.values())

    def depths(self) -> dict[str, tuple[int, ...]]:
        """Return the depths of each device, by class."""
        return {name: queue.spec.depths for name, queue in self._queues.items()}

    def held(self) -> dict[str, tuple[int, float]]:
        """Return for each device the queries that wait or run there, and the part full, 0..1."""
        queues = self._queues.items()
        return {name: (sum(q.held), min(1.0, q.load / q.capacity)) for name, q in queues}

    # ---- in ----

    def submit(self, queries: Sequence[EmbedQuery], now: float) -> None:
        """Put every query into a queue, or none of them.

        Raises:
            CapacityError: BUSY. `retry_after` is None where waiting does not help.
            DeviceError: no device is left.
            RequestError: a query is longer than its model's largest class.
        """
        placed: list[EmbedQuery] = []
        for query in queries:
            try:
                self._place(query, now)
            except DovetailError as error:
                alone = len(self._alive) == len(placed)
                for other in placed:
                    self._drop(other)
                    other.state, other.device = QueryState.NEW, ""
                if placed and alone and isinstance(error, CapacityError):
                    raise CapacityError(TOO_MANY.format(len(queries))) from None
                raise
            placed.append(query)
        for query in placed:
            if query.device in self.spilled:
                self.spilled[query.device] += 1

    def _place(self, query: EmbedQuery, now: float) -> None:
        self._check(query)
        kinds = self._kinds[query.model]
        query.kind = next(kind for kind in kinds if query.tokens <= self.classes[kind].tokens)
        queue = self._choose(query, now)
        if queue is None:
            raise self._busy(query, now)
        query.admitted, query.promised = now, queue.promise(query, now)
        queue.push(query)
        self._alive[query.number] = query

    def _check(self, query: EmbedQuery) -> None:
        """Raise RequestError where its model is unknown, or does not take so many tokens."""
        if query.model not in self._kinds:
            raise RequestError(f"no encoder is called {query.model!r}")
        longest = self.classes[self._kinds[query.model][-1]].tokens
        if not 0 < query.tokens <= longest:
            raise RequestError(
                f"a query has {query.tokens} tokens; this model embeds 1 to {longest}"
            )

    def _choose(self, query: EmbedQuery, now: float) -> DeviceQueue | None:
        """Return the queue of Algorithm 1; among accelerators the one that is done first.

        Where none will be in time, one that has rested is tried, however slow it has become: else
        nobody would see that it is fast again.
        """
        tiers = [[self._queues[name] for name in tier] for tier in self._tiers]
        for tier in tiers:
            if fitting := [queue for queue in tier if self._fits(queue, query, now)]:
                if len(fitting) == 1:
                    return fitting[0]
                return min(fitting, key=lambda queue: queue.finish(query, now))
        able = (q for q in itertools.chain(*tiers) if q.open and q.spec.depths[query.kind])
        return next((queue for queue in able if queue.rested(now)), None)

    def _fits(self, queue: DeviceQueue, query: EmbedQuery, now: float) -> bool:
        load = queue.load
        filled = (load + queue.shares[query.kind]) * (BULK_SHARE if query.bulk else 1)
        if query.bulk and queue.open and not load:
            return True  # however slow the device is
        if not queue.open or filled > queue.capacity:
            return False
        if self.arrival == "closed" and not queue.holds_others(query):
            return True
        first = queue.waiting[0].target if queue.waiting else math.inf
        return queue.finish(query, now) <= min(query.target, first)

    def _busy(self, query: EmbedQuery, now: float) -> DovetailError:
        """Return BUSY with the time until a batch ends, or why waiting does not help."""
        queues = [q for tier in self._tiers for n in tier if not (q := self._queues[n]).gone]
        if not queues:
            return DeviceError(LOST)
        for queue in queues:
            queue.refused += not query.bulk
        able = [queue for queue in queues if query.bulk or queue.spec.depths[query.kind]]
        if not able:
            return CapacityError(NEVER)
        ends = [queue.free_at(now) - now if queue.open else STARTING for queue in able]
        shortest = min(queue.spec.lines[query.kind].seconds(1) for queue in able)
        return CapacityError(BUSY, min(ends) or shortest)

    # ---- without an SLO ----

    def add_bulk(self, queries: Sequence[EmbedQuery]) -> None:
        """Put a call's queries, now without an SLO, into the backlog, the longest first: `refill`.

        Raises RequestError where one cannot be taken at all.
        """
        for query in queries:
            self._check(query)
            query.target = math.inf
        if turn := deque(sorted(queries, key=lambda query: -query.tokens)):
            self._backlog.append(turn)

    def refill(self, now: float) -> list[tuple[EmbedQuery, DovetailError]]:
        """Move the backlog into queues that have room, a query of each call in turn.

        Returns those that no device will ever take, which have ended, and why.
        """
        refused: list[tuple[EmbedQuery, DovetailError]] = []
        while self._backlog:
            query = self._backlog[0][0]
            if not query.cancelled:
                try:
                    self.submit([query], now)
                except (CapacityError, DeviceError) as busy:
                    if _may_wait(busy):
                        break
                    query.state = QueryState.ENDED
                    refused.append((query, busy))
            turn = self._backlog.popleft()
            turn.popleft()
            if turn:
                self._backlog.append(turn)
        return refused

    # ---- batches ----

    def take(self, device: str, now: float) -> QueryBatch | None:
        """Return the next batch for a free instance of `device`; None when there is none."""
        queue = self._queues[device]
        free = queue.spec.instances - len(queue.running)
        if not queue.waiting or free <= 0:
            return None
        most = -(-len(queue.waiting) // free)  # what other free instances are to take is left
        chosen = choose_batch(queue.waiting, queue.spec.token_budget, most)
        counts = queue.pull_batch(chosen)
        seconds = queue.seconds(counts)
        batch = QueryBatch(
            number=next(self._batches),
            device=device,
            queries=tuple(chosen),
            counts=tuple(counts),
            started=now,
            expected=now + seconds,
            predicted=queue.slack * seconds or FIRST_BATCH,
            model=chosen[0].model,
        )
        queue.running[batch.number] = batch
        return batch

    def complete(self, batch: QueryBatch) -> tuple[EmbedQuery, ...]:
        """Note that a batch has run; return the queries that somebody still wants."""
        del self._queues[batch.device].running[batch.number]
        for query in batch.queries:
            self._end(query)
        return tuple(query for query in batch.queries if not query.cancelled)

    def note(self, batch: QueryBatch, now: float) -> None:
        """Note that the vectors of a batch were with their callers at `now`; promises follow it."""
        self._queues[batch.device].note(batch, now)

    def fail(self, batch: QueryBatch) -> tuple[EmbedQuery, ...]:
        """Note that a device could not run a batch: it is tried again in halves.

        So a batch too large for the device's memory runs in parts, and a query that fails alone
        is returned: it has ended.
        """
        alone = len(batch.queries) == 1
        return self._again(batch, {q for q in batch.queries if alone or q.cancelled}, 2)

    def lose(self, batch: QueryBatch) -> tuple[EmbedQuery, ...]:
        """Note that the instance died while it ran `batch`: its queries wait for another one.

        Returns those that have ended: too many instances have died under them.
        """
        for query in batch.queries:
            query.deaths += 1
        ended = {q for q in batch.queries if q.cancelled or q.deaths >= LIVES}
        return self._again(batch, ended, SMALLER)

    def _again(
        self, batch: QueryBatch, ended: Set[EmbedQuery], part: int
    ) -> tuple[EmbedQuery, ...]:
        """Have what of a batch has not ended wait again, for batches smaller by this factor."""
        queue = self._queues[batch.device]
        queue.stretch_promises(math.inf)
        del queue.running[batch.number]
        for query in batch.queries:
            if query in ended:
                self._end(query)
            else:
                query.limit = max(1, len(batch.queries) // part)
                queue.push(query)
        return tuple(q for q in batch.queries if q in ended and not q.cancelled)

    def cancel(self, query: EmbedQuery) -> bool:
        """Take a query out; one that runs stays counted until its batch ends. False if too late."""
        if query.cancelled or query.state is QueryState.ENDED:
            return False
        if query.state is QueryState.WAITING:
            self._drop(query)
        query.cancelled = True
        return True

    # ---- devices that change ----

    def set_queue(self, spec: QueueSpec) -> None:
        """Give a device other depths or lines; what it holds stays, even beyond a lower depth."""
        self._queues[spec.name].set_spec(spec)

    def spec(self, device: str) -> QueueSpec:
        """Return what was set for a device."""
        return self._queues[device].spec

    def close_device(
        self, device: str, now: float, *, gone: bool = False
    ) -> tuple[EmbedQuery, ...]:
        """Admit nothing more to a device; others take what waits there, as far as they have room.

        The rest goes on waiting. A device that is `gone`, for its instances have ended, is taken
        out for good: then what has no SLO waits for room while there is a device, and the rest,
        which is returned, has ended.
        """
        queue, lost = self._queues[device], list[EmbedQuery]()
        queue.open, queue.gone = False, queue.gone or gone
        if gone:
            queue.set_spec(replace(queue.spec, depths=(0,) * len(queue.spec.depths)))
        for query in tuple(queue.waiting):
            if not gone and self._choose(query, now) is None:
                continue
            self._drop(query)
            query.state = QueryState.NEW
            try:
                self.submit([query], now)
            except (CapacityError, DeviceError) as busy:
                if query.bulk and _may_wait(busy):
                    self.add_bulk([query])
                else:
                    query.state = QueryState.ENDED
                    lost.append(query)
        return tuple(lost)

    def open_device(self, device: str) -> None:
        """Admit queries to a device again, unless it is gone."""
        self._queues[device].open = not self._queues[device].gone

    # ---- keeping count ----

    def _drop(self, query: EmbedQuery) -> None:
        queue = self._queues[query.device]
        del queue.waiting[bisect_left(queue.waiting, urgency(query), key=urgency)]
        queue.counts[query.kind] -= 1
        self._end(query)

    def _end(self, query: EmbedQuery) -> None:
        query.state = QueryState.ENDED
        del self._alive[query.number]


def _may_wait(error: DovetailError) -> bool:
    """Tell whether there may be room later for what was refused."""
    return isinstance(error, CapacityError) and error.retry_after is not None
