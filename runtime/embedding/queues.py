"""The queue manager: Algorithm 1 of WindVE §IV-B as a pure control plane, and its exact counts.

In: queries, the time, what became of batches. Out: the device of each query or BUSY, and batches.
No threads, no clocks, no tensors; one caller at a time.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from dovetail.ir.errors import CapacityError, RequestError, SpecError
from dovetail.runtime.embedding.batching import choose_batch
from dovetail.runtime.embedding.device_queue import DeviceQueue, order_of
from dovetail.runtime.embedding.line import Arrival
from dovetail.runtime.embedding.query import Batch, Query, QueryClass, QueueSpec, State

LEAST_PRIORITY, MOST_PRIORITY = -8, 8
BULK_SHARE = 2
"""Queries without an SLO fill at most one part in so many of a device: others find room."""
LIVES = 3
"""Instances that may die under a query, in ever smaller batches, before it is held the cause."""
SMALLER = 8
"""The part of a batch that is tried together after an instance died under it."""
STARTING = 1.0
"""Seconds after which it is worth to ask again for a device that is being started."""
BUSY = "all embedding queues are full; try again later"
NEVER = "no device embeds a query of this length within the time allowed; {}"
LOST = "no device is left that embeds, for none could be started again; load the artifact again"
TOO_MANY = "{} texts at once are more than the embedding queues hold; send fewer, or wait for room"
REMEDY = "allow more time, or shorten the text"


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

        Raises:
            SpecError: no device, a name twice, or not one depth and line per class.
        """
        names = [spec.name for spec in specs]
        if not specs or len(set(names)) < len(names):
            raise SpecError("embedding needs devices, each with a name of its own")
        self.classes, self.arrival = tuple(classes), arrival
        self._kinds = _group(self.classes)
        models = tuple(self._kinds.values())
        self._queues = {s.name: DeviceQueue(s, models) for s in specs}
        for spec in specs:
            self.set_queue(spec)
        accelerators = [spec.name for spec in specs if spec.accelerator]
        others = [spec.name for spec in specs if not spec.accelerator]
        self._tiers = (
            [accelerators, others] if heterogeneous or not accelerators else [accelerators]
        )
        self._batches = itertools.count()
        self._spilled = dict.fromkeys(others if accelerators else (), 0)
        self._alive: dict[int, Query] = {}

    # ---- what there is ----

    @property
    def queries(self) -> int:
        """How many queries wait or run."""
        return len(self._alive)

    def live(self) -> tuple[Query, ...]:
        """Return all queries that wait or run."""
        return tuple(self._alive.values())

    def longest(self, model: str = "") -> int:
        """Return the most tokens of a query of `model`; RequestError where it is unknown."""
        if model not in self._kinds:
            raise RequestError(f"no encoder is called {model!r}")
        return self.classes[self._kinds[model].stop - 1].tokens

    def spilled(self) -> dict[str, int]:
        """Return how many queries each device took so far because no accelerator could."""
        return dict(self._spilled)

    def depths(self) -> dict[str, tuple[int, ...]]:
        """Return the depths of each device, by class."""
        return {name: queue.spec.depths for name, queue in self._queues.items()}

    def held(self, device: str) -> int:
        """Return how many queries wait or run on a device."""
        return sum(self._queues[device].held)

    def waiting(self, device: str) -> int:
        """Return how many queries wait on a device."""
        return len(self._queues[device].waiting)

    def next_deadline(self) -> float:
        """Return the earliest deadline of what waits."""
        waiting = itertools.chain(*(queue.waiting for queue in self._queues.values()))
        return min((query.deadline for query in waiting), default=math.inf)

    # ---- in ----

    def submit(self, queries: Sequence[Query], now: float) -> None:
        """Put every query into a queue, or none of them.

        Raises:
            CapacityError: BUSY. `retry_after` is None where waiting does not help.
            RequestError: a query is longer than its model's largest class, or in use.
        """
        placed: list[Query] = []
        for query in queries:
            try:
                self._place(query, now)
            except (CapacityError, RequestError) as error:
                alone = len(self._alive) == len(placed)
                for other in placed:
                    self._drop(other)
                    other.state, other.device = State.NEW, ""
                if placed and alone and isinstance(error, CapacityError):
                    raise CapacityError(TOO_MANY.format(len(queries))) from None
                raise
            placed.append(query)
        for query in placed:
            if query.device in self._spilled:
                self._spilled[query.device] += 1

    def _place(self, query: Query, now: float) -> None:
        if query.state is not State.NEW or query.number in self._alive:
            raise RequestError(f"query {query.number} was submitted before")
        self.check(query)
        kinds = self._kinds[query.model]
        query.kind = bisect_left(
            self.classes, query.tokens, kinds.start, kinds.stop, key=lambda each: each.tokens
        )
        query.priority = max(LEAST_PRIORITY, min(MOST_PRIORITY, query.priority))
        queue = self._choose(query, now)
        if queue is None:
            raise self._busy(query, now)
        query.admitted, query.promised = now, queue.promise(query, now)
        queue.push(query)
        queue.hold(query.kind, 1)
        self._alive[query.number] = query

    def check(self, query: Query) -> None:
        """Raise RequestError where its model is unknown, or does not take so many tokens."""
        longest = self.longest(query.model)
        if not 0 < query.tokens <= longest:
            raise RequestError(
                f"a query has {query.tokens} tokens; this model embeds 1 to {longest}"
            )

    def _choose(self, query: Query, now: float) -> DeviceQueue | None:
        """Return the queue of Algorithm 1; among accelerators the one that is done first."""
        for tier in self._tiers:
            fitting = [q for name in tier if self._fits(q := self._queues[name], query, now)]
            if len(fitting) == 1:
                return fitting[0]
            if fitting:
                return min(fitting, key=lambda queue: queue.finish(query, now))
        return None

    def _fits(self, queue: DeviceQueue, query: Query, now: float) -> bool:
        share, load = queue.shares[query.kind], queue.load
        if query.bulk and queue.open and not load:
            return True  # however slow the device is
        if not queue.open or load + share > queue.capacity:
            return False
        if query.bulk and (load + share) * BULK_SHARE > queue.capacity:
            return False
        by_depth = self.arrival == "closed" and query.deadline == math.inf
        if by_depth and not queue.holds_others(query):
            return True
        latest = min(query.deadline, query.target, queue.urgent())
        return queue.finish(query, now) <= latest

    def _busy(self, query: Query, now: float) -> CapacityError:
        """Return BUSY with the time until a batch ends, or why waiting does not help."""
        queues = [q for tier in self._tiers for n in tier if not (q := self._queues[n]).gone]
        if not queues:
            return CapacityError(LOST)
        able = [queue for queue in queues if query.bulk or queue.spec.depths[query.kind]]
        allowed = min(query.deadline, query.target) - now
        able = [q for q in able if q.spec.lines[query.kind].seconds(1) <= allowed]
        if not able:
            return CapacityError(NEVER.format(REMEDY))
        ends = [queue.free_at(now) - now if queue.open else STARTING for queue in able]
        shortest = min(queue.spec.lines[query.kind].seconds(1) for queue in able)
        return CapacityError(BUSY, min(ends) or shortest)

    # ---- batches ----

    def take(self, device: str, now: float) -> Batch | None:
        """Return the next batch for a free instance of `device`; None when there is none."""
        queue = self._queues[device]
        free = queue.spec.instances - len(queue.running)
        if not queue.waiting or free <= 0:
            return None
        most = -(-len(queue.waiting) // free)  # what other free instances are to take is left
        chosen = choose_batch(queue.waiting, queue.spec.token_budget, most, pads=queue.spec.pads)
        counts = queue.pull_batch(chosen)
        seconds = queue.seconds(counts)
        batch = Batch(
            number=next(self._batches),
            device=device,
            queries=tuple(chosen),
            counts=tuple(counts),
            started=now,
            expected=now + seconds,
            limit=queue.limit(seconds),
            model=chosen[0].model,
        )
        queue.running[batch.number] = batch
        return batch

    def complete(self, batch: Batch) -> tuple[Query, ...]:
        """Note that a batch has run; return the queries that somebody still wants."""
        self._stop(batch)
        for query in batch.queries:
            self._end(query)
        return tuple(query for query in batch.queries if not query.cancelled)

    def note(self, batch: Batch, now: float) -> None:
        """Note that the vectors of a batch were with their callers at `now`; promises follow it."""
        self._queues[batch.device].note(batch, now)

    def fail(self, batch: Batch) -> tuple[Query, ...]:
        """Note that a device could not run a batch: it is tried again in halves.

        So a batch too large for the device's memory runs in parts, and a query that fails alone
        is returned: it has ended.
        """
        self._stop(batch)
        ended = [query for query in batch.queries if query.cancelled or len(batch.queries) == 1]
        self._again(batch, ended, max(1, len(batch.queries) // 2))
        return tuple(query for query in ended if not query.cancelled)

    def lose(self, batch: Batch) -> tuple[Query, ...]:
        """Note that the instance died while it ran `batch`: its queries wait for another one.

        Returns those that have ended: too many instances have died under them.
        """
        self._stop(batch)
        for query in batch.queries:
            query.deaths += 1
        ended = [q for q in batch.queries if q.cancelled or q.deaths >= LIVES]
        self._again(batch, ended, max(1, len(batch.queries) // SMALLER))
        return tuple(query for query in ended if not query.cancelled)

    def _again(self, batch: Batch, ended: Sequence[Query], limit: int) -> None:
        gone, queue = set(map(id, ended)), self._queues[batch.device]
        queue.void_promises()
        for query in batch.queries:
            query.promised = math.inf
            if id(query) in gone:
                self._end(query)
            else:
                query.limit = limit
                queue.push(query)

    def _stop(self, batch: Batch) -> None:
        del self._queues[batch.device].running[batch.number]

    # ---- out before the end ----

    def cancel(self, query: Query) -> bool:
        """Take a query out; one that runs stays counted until its batch ends. False if too late."""
        if query.state is State.WAITING:
            self._drop(query)
        elif query.state is not State.RUNNING:
            return False
        query.cancelled = True
        return True

    def expire(self, now: float) -> tuple[Query, ...]:
        """Take out, and return, all that waits beyond its deadline."""
        late = [q for d in self._queues.values() for q in d.waiting if q.deadline <= now]
        for query in late:
            self._drop(query)
        return tuple(late)

    # ---- devices that change ----

    def set_queue(self, spec: QueueSpec) -> None:
        """Give a device other depths or lines; what it holds stays, even beyond a lower depth.

        Raises SpecError without one depth and line per class.
        """
        if not len(spec.depths) == len(spec.lines) == len(self.classes) or min(spec.depths) < 0:
            raise SpecError(f"{spec.name}: needs a depth and a line for each class")
        self._queues[spec.name].set_spec(spec)

    def spec(self, device: str) -> QueueSpec:
        """Return what was set for a device."""
        return self._queues[device].spec

    def close_device(self, device: str, now: float) -> None:
        """Admit nothing more to a device; others take what waits there, as far as they have room.

        The rest goes on waiting.
        """
        self._queues[device].open = False
        for query in tuple(self._queues[device].waiting):
            if self._choose(query, now) is not None:
                self._drop(query)
                query.state = State.NEW
                self.submit([query], now)

    def drain_device(self, device: str) -> tuple[Query, ...]:
        """Take out, and return, all that waits on a device; other devices may be given it."""
        waiting = tuple(self._queues[device].waiting)
        for query in waiting:
            self._drop(query)
            query.state = State.NEW
        return waiting

    def open_device(self, device: str) -> None:
        """Admit queries to a device again, unless it was abandoned."""
        self._queues[device].open = not self._queues[device].gone

    def abandon_device(self, device: str) -> tuple[Query, ...]:
        """Take a device out for good, its instances having ended; return what waited there."""
        queue = self._queues[device]
        queue.open, queue.gone = False, True
        queue.set_spec(replace(queue.spec, depths=(0,) * len(queue.spec.depths)))
        return self.drain_device(device)

    # ---- keeping count ----

    def _drop(self, query: Query) -> None:
        self._queues[query.device].pull(query)
        self._end(query)

    def _end(self, query: Query) -> None:
        self._queues[query.device].hold(query.kind, -1)
        query.state = State.ENDED
        del self._alive[query.number]

    def check_integrity(self) -> None:
        """Assert that every query is in exactly one place, and that all counts are exact."""
        found: list[Query] = []
        for name, queue in self._queues.items():
            running = [query for batch in queue.running.values() for query in batch.queries]
            assert len(queue.running) <= queue.spec.instances, name
            assert queue.waiting == sorted(queue.waiting, key=order_of), name
            assert all(query.state is State.WAITING for query in queue.waiting), name
            assert not any(query.cancelled for query in queue.waiting), name
            assert all(query.state is State.RUNNING for query in running), name
            assert queue.counts == self._count(queue.waiting), name
            assert queue.held == self._count([*queue.waiting, *running]), name
            assert queue.load == queue.sum_load(), name
            assert queue.urgent() == min((q.target for q in queue.waiting), default=math.inf)
            assert queue.load <= max(queue.capacity + 1, queue.ceiling), name
            assert all(query.device == name for query in (*queue.waiting, *running)), name
            found += [*queue.waiting, *running]
        assert len(found) == len(self._alive), "a query is in two places, or lost"
        assert {query.number for query in found} == set(self._alive)

    def _count(self, queries: Sequence[Query]) -> list[int]:
        counts = [0] * len(self.classes)
        for query in queries:
            counts[query.kind] += 1
        return counts


def _group(classes: Sequence[QueryClass]) -> dict[str, range]:
    """Return where each model's classes stand; SpecError where they are not in order."""
    found: dict[str, range] = {}
    for place, each in enumerate(classes):
        first = found[each.model].start if each.model in found else place
        found[each.model] = range(first, place + 1)
    in_order = sorted(classes, key=lambda each: (found[each.model].start, each.tokens))
    if list(classes) != in_order:
        raise SpecError("the classes of a model must stand together, the shortest first")
    return found
