"""Calls over the queue manager: whose queries these are, what waits for room, which calls end.

In: queries of jobs, batches and what became of them, the time. Out: batches to run, and the jobs
that are complete, for the caller to settle. No threads; one caller at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from dovetail.ir.errors import CapacityError, DeviceError
from dovetail.runtime.embedding.job import EmbedJob, part_of
from dovetail.runtime.embedding.query import Batch, Query, State
from dovetail.runtime.embedding.queues import QueueManager


class Desk:
    """The queues, and the backlog of work that has no SLO: one turn for each call that waits."""

    def __init__(self, manager: QueueManager) -> None:
        self.manager = manager
        self._backlog: deque[deque[Query]] = deque()

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not self.manager.queries and not self._backlog

    # ---- in ----

    def add_bulk(self, queries: Sequence[Query], now: float) -> list[EmbedJob]:
        """Have all of a call's queries run as there is room, the longest first."""
        if queries:
            self._backlog.append(deque(sorted(queries, key=lambda query: -query.tokens)))
        return self.refill(now)

    def refill(self, now: float) -> list[EmbedJob]:
        """Move work without an SLO into queues that have room, a query of each call in turn."""
        done: list[EmbedJob] = []
        while self._backlog:
            queries = self._backlog[0]
            query = queries[0]
            if not query.cancelled:
                try:
                    self.manager.submit([query], now)
                except CapacityError as busy:
                    if busy.retry_after is not None:
                        break
                    query.cancelled = True
                    done += self._end(query, busy)
            queries.popleft()
            if queries:
                self._backlog.rotate(-1)
            else:
                self._backlog.popleft()
        return done

    # ---- what became of batches ----

    def complete(self, batch: Batch, wrong: dict[int, Exception], now: float) -> list[EmbedJob]:
        """Note that a batch has run; `wrong` has the errors of single queries, by their place."""
        wanted = set(map(id, self.manager.complete(batch)))
        done = [
            job
            for place, query in enumerate(batch.queries)
            if id(query) in wanted
            for job in self._end(query, wrong.get(place))
        ]
        return done + self.refill(now)

    def fail(self, batch: Batch, error: Exception | None, now: float) -> list[EmbedJob]:
        """Note that a batch could not be run: it is tried in parts, what fails alone has ended."""
        return self._end_all(self.manager.fail(batch), error) + self.refill(now)

    def lose(self, batch: Batch) -> list[EmbedJob]:
        """Note that an instance died, or hung, under a batch."""
        error = DeviceError(f"{batch.device}: embedding processes died or hung at this query")
        return self._end_all(self.manager.lose(batch), error)

    def give_up(self, name: str, now: float) -> list[EmbedJob]:
        """Go on without a device: what waits there goes to others, as far as they have room.

        What has no SLO waits for room, while there is a device.
        """
        done: list[EmbedJob] = []
        for query in self.manager.abandon_device(name):
            if query.cancelled:  # with another one of its job, just now
                continue
            try:
                self.manager.submit([query], now)
            except CapacityError as busy:
                if query.bulk and busy.retry_after is not None:
                    self._backlog.append(deque([query]))
                    continue
                query.cancelled = True
                done += self._end(query, DeviceError(f"{name}: died, and no other device has room"))
        return done + self.refill(now)

    # ---- out before the end ----

    def cancel(self, job: EmbedJob) -> list[EmbedJob]:
        """Take out what of a job is still queued."""
        last = False
        for query in job.queries:
            if query.state is State.NEW and not query.cancelled:  # in the backlog
                query.cancelled = True
                last = job.end_one() or last
            elif not query.cancelled and self.manager.cancel(query):
                last = job.end_one() or last
        return [job] if last else []

    def expire(self, now: float) -> list[EmbedJob]:
        """End what waits beyond its deadline."""
        late = self.manager.expire(now)
        what = "the query was not embedded within its time; allow more, or try later"
        return self._end_all(late, CapacityError(what))

    def close(self, error: Exception) -> list[EmbedJob]:
        """End every job with an error."""
        waiting = (query for queries in self._backlog for query in queries)
        jobs = dict.fromkeys(part_of(q).job for q in (*waiting, *self.manager.live()))
        return [job for each in jobs for job in self._fail(each, error)]

    # ---- counting: each returns the jobs that are complete ----

    def _end_all(self, queries: Iterable[Query], error: Exception | None) -> list[EmbedJob]:
        return [job for query in queries for job in self._end(query, error)]

    def _end(self, query: Query, error: Exception | None = None) -> list[EmbedJob]:
        """Count a query as ended; an error ends the rest of its job."""
        job = part_of(query).job
        first = error is not None and not job.failed
        done = [job] if job.end_one(error) else []
        return done or (self.cancel(job) if first else [])

    def _fail(self, job: EmbedJob, error: Exception) -> list[EmbedJob]:
        live = [q for q in job.queries if not q.cancelled and q.state is not State.ENDED]
        if not live:
            return []
        if live[0].state is State.NEW:
            live[0].cancelled = True
        else:
            self.manager.cancel(live[0])
        return self._end(live[0], error)
