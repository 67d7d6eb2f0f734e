"""The embedding service: the queue manager's decisions carried out on threads.

In: texts or token ids, devices with their instances. Out: vectors in order, or BUSY at once. One
lock is around the manager; an instance has a thread that takes, runs and reports batches.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from dovetail.ir.errors import CapacityError, DeviceError, DovetailError, RequestError, SpecError
from dovetail.runtime.embedding.instance import Ids, Instance, Vectors
from dovetail.runtime.embedding.job import EmbedJob, Part, Run, part_of, run_batch
from dovetail.runtime.embedding.query import Batch, Query, State
from dovetail.runtime.embedding.queues import QueueManager
from dovetail.runtime.embedding.tokenizing import TokenPool

RESTARTS = 3
"""Times that a dead instance is started before its device is given up."""
CLOSED = "the embedding service is closed; load it again"

log = logging.getLogger("dovetail")

Observer = Callable[[Batch, float], object]
"""Told of every batch that has run, and its seconds; called on the instance's thread."""


class EmbeddingService:
    """Devices, their queues, and the threads between them."""

    def __init__(
        self,
        instances: Mapping[str, Sequence[Instance]],
        manager: QueueManager,
        *,
        slo: float,
        tokens: TokenPool | None = None,
        observe: Observer | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start a thread for each instance, which the service owns from now on.

        Args:
            instances: of each device of `manager`, as many as its queue says.
            manager: the queues.
            slo: seconds that a query may take.
            tokens: for `embed`, `aembed`; ids can be embedded without it.
            observe: told of batches.
            now: the clock of all times.

        Raises:
            SpecError: other devices or numbers of instances than the manager's.
        """
        wanted = {name: manager.spec(name).instances for name in manager.depths()}
        if {name: len(each) for name, each in instances.items()} != wanted:
            raise SpecError(f"the queues are for these devices and instances: {wanted}")
        self.slo = slo
        self._instances, self._manager = instances, manager
        self._tokens, self._observe, self._now = tokens, observe, now
        self._numbers = itertools.count()
        self._backlog: deque[Query] = deque()
        self._lost = dict.fromkeys(instances, 0)
        self._closed = False
        self._lock = threading.RLock()
        self._work = {name: threading.Condition(self._lock) for name in instances}
        self._timer = threading.Condition(self._lock)
        self.dim = next(iter(instances.values()))[0].dim
        self._threads = [threading.Thread(target=self._keep_deadlines, daemon=True)]
        self._threads += [
            threading.Thread(target=self._drive, args=(name, instance), daemon=True)
            for name, each in instances.items()
            for instance in each
        ]
        for thread in self._threads:
            thread.start()

    # ---- in ----

    def submit(
        self, ids: Sequence[Ids], *, priority: int = 0, timeout: float | None = None
    ) -> EmbedJob:
        """Queue all queries of a call within the SLO, or none.

        Args:
            ids: token ids of each query.
            priority: higher ones go first.
            timeout: seconds after which the answer is of no use.

        Raises:
            CapacityError: BUSY; `retry_after` seconds later there may be room.
            RequestError: a query is empty or too long.
        """
        now = self._now()
        job = EmbedJob(len(ids), self.dim, now)
        deadline = math.inf if timeout is None else now + timeout
        job.queries = self._make_queries(job, ids, now + self.slo, deadline, priority)
        with self._lock:
            self._check_open()
            self._manager.submit(job.queries, now)
            self._wake(timer=timeout is not None)
        self._arm(job)
        return job

    def submit_bulk(self, ids: Sequence[Ids], *, priority: int = 0) -> EmbedJob:
        """Queue any number of queries without an SLO: they run as there is room beside others."""
        job = EmbedJob(len(ids), self.dim, self._now())
        job.queries = self._make_queries(job, ids, math.inf, math.inf, priority)
        longest_first = sorted(job.queries, key=lambda query: -query.tokens)
        limit = self._manager.classes[-1]
        wrong = [query for query in longest_first if not 0 < query.tokens <= limit]
        if wrong:
            raise RequestError(
                f"a query has {wrong[0].tokens} tokens; this model embeds 1 to {limit}"
            )
        with self._lock:
            self._check_open()
            self._backlog.extend(longest_first)
            settled = self._refill()
        self._settle(settled)
        self._arm(job)
        return job

    def embed_tokens(self, ids: Sequence[Ids], *, wait: bool = True) -> Vectors:
        """Return the vectors (n, dim); with `wait`, instead of BUSY as soon as there is room."""
        return self._start(ids, wait).result()

    def embed(self, texts: Sequence[str], *, wait: bool = True) -> Vectors:
        """Return the vectors (n, dim) of texts; see `embed_tokens`."""
        return self.embed_tokens(self._pool().encode(texts), wait=wait)

    async def aembed(self, texts: Sequence[str], *, wait: bool = True) -> Vectors:
        """Return the vectors (n, dim) of texts; a cancelled call leaves the queues."""
        pool = self._pool()
        ids = await asyncio.get_running_loop().run_in_executor(None, pool.encode, texts)
        return await asyncio.wrap_future(self._start(ids, wait).future)

    def cancel(self, job: EmbedJob) -> None:
        """Take out what of a job is still queued; who waits for it gets CancelledError."""
        job.future.cancel()
        with self._lock:
            settled = self._cancel_rest(job)
        self._settle(settled)

    @property
    def held(self) -> dict[str, int]:
        """Queries that wait or run, by device."""
        with self._lock:
            return {name: self._manager.held(name) for name in self._instances}

    @property
    def manager(self) -> QueueManager:
        """The queues; for reading."""
        return self._manager

    def use(self, manager: QueueManager) -> None:
        """Take other queues for the same devices.

        Raises SpecError while queries are held.
        """
        with self._lock:
            if self._manager.queries or self._backlog:
                raise SpecError("queues can only be exchanged while nothing is queued")
            self._manager = manager

    def change(self, decide: Callable[[QueueManager], None]) -> None:
        """Let `decide` change depths or lines between two decisions."""
        with self._lock:
            decide(self._manager)
            settled = self._refill()
        self._settle(settled)

    def close(self) -> None:
        """End the threads and instances; what is queued fails. Safe to call twice."""
        with self._lock:
            self._closed = True
            jobs = {part_of(q).job for q in (*self._backlog, *self._manager.live())}
            settled = [job for job in jobs for job in self._fail_job(job, CapacityError(CLOSED))]
            self._wake(timer=True)
        self._settle(settled)
        for thread in self._threads:
            thread.join()
        for each in self._instances.values():
            for instance in each:
                instance.close()
        if self._tokens:
            self._tokens.close()

    def __enter__(self) -> EmbeddingService:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- helpers of callers ----

    def _pool(self) -> TokenPool:
        if self._tokens is None:
            raise SpecError("this embedding service has no tokenizer; give token ids")
        return self._tokens

    def _start(self, ids: Sequence[Ids], wait: bool) -> EmbedJob:
        try:
            return self.submit(ids)
        except CapacityError:
            if not wait:
                raise
            return self.submit_bulk(ids)

    def _make_queries(
        self, job: EmbedJob, ids: Sequence[Ids], target: float, deadline: float, priority: int
    ) -> list[Query]:
        return [
            Query(
                next(self._numbers), len(each), target, deadline, priority, Part(job, index, each)
            )
            for index, each in enumerate(ids)
        ]

    def _arm(self, job: EmbedJob) -> None:
        """Free the queues when the caller's future is cancelled; an empty job is done."""
        if not job.queries:
            job.settle()
        job.future.add_done_callback(
            lambda future: self.cancel(job) if future.cancelled() else None
        )

    def _check_open(self) -> None:
        if self._closed:
            raise CapacityError(CLOSED)

    def _wake(self, *, timer: bool = False) -> None:
        for condition in self._work.values():
            condition.notify_all()
        if timer:
            self._timer.notify()

    # ---- under the lock: each returns the jobs that are complete ----

    def _end_query(self, query: Query, error: Exception | None = None) -> list[EmbedJob]:
        """Count a query as ended; an error ends the rest of its job."""
        job = part_of(query).job
        first = error is not None and not job.failed
        done = [job] if job.end_one(error) else []
        return done or (self._cancel_rest(job) if first else [])

    def _cancel_rest(self, job: EmbedJob) -> list[EmbedJob]:
        last = False
        for query in job.queries:
            if query.state is State.NEW and not query.cancelled:  # in the backlog
                query.cancelled = True
                last = job.end_one() or last
            elif not query.cancelled and self._manager.cancel(query):
                last = job.end_one() or last
        return [job] if last else []

    def _fail_job(self, job: EmbedJob, error: Exception) -> list[EmbedJob]:
        live = [q for q in job.queries if not q.cancelled and q.state is not State.ENDED]
        if not live:
            return []
        if live[0].state is State.NEW:
            live[0].cancelled = True
        else:
            self._manager.cancel(live[0])
        return self._end_query(live[0], error)

    def _refill(self) -> list[EmbedJob]:
        """Move bulk work into queues that have room."""
        settled: list[EmbedJob] = []
        while self._backlog:
            query = self._backlog[0]
            if not query.cancelled:
                try:
                    self._manager.submit([query], self._now())
                except CapacityError as busy:
                    if busy.retry_after is not None:
                        break
                    query.cancelled = True
                    settled += self._end_query(query, busy)
            self._backlog.popleft()
        self._wake()
        return settled

    # ---- threads ----

    def _settle(self, jobs: Sequence[EmbedJob]) -> None:
        for job in jobs:
            job.settle()

    def _drive(self, name: str, instance: Instance) -> None:
        """Run batches on one instance until the service is closed or the device given up."""
        while (batch := self._next(name)) is not None:
            run = run_batch(instance, batch, self.dim)
            now = self._now()
            if run.lost:
                if not self._revive(name, instance, batch):
                    return
                continue
            if run.rows is not None and self._observe:
                self._observe(batch, now - batch.started)
            self._report(batch, run, now)

    def _next(self, name: str) -> Batch | None:
        with self._lock:
            while not self._closed:
                batch = self._manager.take(name, self._now())
                if batch is not None:
                    return batch
                self._work[name].wait()
        return None

    def _report(self, batch: Batch, run: Run, now: float) -> None:
        if run.rows is None:
            with self._lock:
                settled = [
                    job
                    for query in self._manager.fail(batch)
                    for job in self._end_query(query, run.error)
                ]
                settled += self._refill()
            self._settle(settled)
            return
        sound = [bool(np.isfinite(row).all()) for row in run.rows]
        for query, row in zip(batch.queries, run.rows, strict=True):
            part = part_of(query)
            part.job.put(part.index, row, now)
        with self._lock:
            wanted = set(map(id, self._manager.complete(batch, now)))
            settled = [
                job
                for query, good in zip(batch.queries, sound, strict=True)
                if id(query) in wanted
                for job in self._end_query(query, None if good else _not_finite(query))
            ]
            settled += self._refill()
        self._settle(settled)

    def _revive(self, name: str, instance: Instance, batch: Batch) -> bool:
        """Start a dead instance again; False where it cannot be, or the service is closed."""
        log.warning("%s: an embedding process has died; starting it again", name)
        with self._lock:
            self._lost[name] += 1
            if self._lost[name] == len(self._instances[name]):
                self._manager.close_device(name)
            error = DeviceError(f"{name}: embedding processes died while they ran this query")
            settled = [
                job for query in self._manager.lose(batch) for job in self._end_query(query, error)
            ]
        self._settle(settled)
        for _ in range(RESTARTS):
            try:
                instance.restart()
            except DovetailError as failure:
                log.warning("%s: %s", name, failure)
                continue
            with self._lock:
                self._lost[name] -= 1
                self._manager.open_device(name)
                settled = self._refill()
            self._settle(settled)
            return True
        self._give_up(name)
        return False

    def _give_up(self, name: str) -> None:
        """Go on without one instance, or without its device if that was the last one."""
        with self._lock:
            if self._lost[name] < len(self._instances[name]):
                return
            log.error("%s: cannot be started again; it embeds no more", name)
            spec = self._manager.spec(name)
            self._manager.set_queue(replace(spec, depths=(0,) * len(spec.depths)))
            settled = []
            for query in self._manager.drain_device(name):
                if query.cancelled:  # with another one of its job, just now
                    continue
                try:
                    self._manager.submit([query], self._now())
                except CapacityError:
                    query.cancelled = True
                    error = DeviceError(f"{name}: died, and no other device has room")
                    settled += self._end_query(query, error)
            settled += self._refill()
        self._settle(settled)

    def _keep_deadlines(self) -> None:
        """End queries that wait beyond their deadline."""
        while True:
            with self._lock:
                left = self._manager.next_deadline() - self._now()
                if left > 0 and not self._closed:
                    self._timer.wait(left if left < math.inf else None)
                if self._closed:
                    return
                late = self._manager.expire(self._now())
                settled = [job for query in late for job in self._end_query(query, _too_late())]
            self._settle(settled)


def _not_finite(query: Query) -> RequestError:
    return RequestError(f"text {part_of(query).index}: its vector is not finite")


def _too_late() -> CapacityError:
    return CapacityError("the query was not embedded within its time; allow more, or try later")
