"""The embedding service: the queue manager's decisions carried out on threads.

In: token ids, devices with their instances. Out: vectors in order, or BUSY at once. One lock is
around the desk; an instance has a thread that takes, runs and reports batches.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from dovetail.ir.errors import CapacityError, DovetailError, RequestError, SpecError
from dovetail.runtime.embedding.desk import Desk
from dovetail.runtime.embedding.instance import Ids, Instance, Mortal
from dovetail.runtime.embedding.job import (
    EmbedJob,
    Run,
    Terms,
    deliver,
    make_queries,
    run_batch,
    settle,
)
from dovetail.runtime.embedding.query import Batch
from dovetail.runtime.embedding.queues import QueueManager

RESTARTS = 3
"""Times that a dead instance is started, without a batch done, before it is given up."""
CLOSED = "the app was closed; load the artifact again"

log = logging.getLogger("dovetail")

Observer = Callable[[Batch, float], object]
"""Told of every batch that has run, and its seconds; called on the instance's thread."""


Models = Mapping[str, Instance]
"""One instance of a device: the encoder of each model, of which one runs at a time."""


class EmbeddingService:
    """Devices, their queues, and the threads between them."""

    def __init__(
        self,
        instances: Mapping[str, Sequence[Models]],
        manager: QueueManager,
        *,
        slo: float = math.inf,
        observe: Observer | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start a thread for each instance, which the service owns from now on.

        Args:
            instances: of each device of `manager`, as many as its queue says, each with a copy of
                every model that it embeds for.
            manager: the queues.
            slo: seconds that a query may take; without one nothing is BUSY, and calls wait.
            observe: told of batches.
            now: the clock of all times.

        Raises:
            SpecError: other devices or numbers of instances than the manager's.
        """
        wanted = {name: manager.spec(name).instances for name in manager.depths()}
        if {name: len(each) for name, each in instances.items()} != wanted:
            raise SpecError(f"the queues are for these devices and instances: {wanted}")
        self.slo = slo
        self._instances, self._desk = instances, Desk(manager)
        self._observe, self._now = observe, now
        self._numbers = itertools.count()
        self._lost = dict.fromkeys(instances, 0)
        self._ended = dict.fromkeys(instances, 0)  # of those: never started again
        self._closed = False
        self._lock = threading.RLock()
        self._work = {name: threading.Condition(self._lock) for name in instances}
        self._timer = threading.Condition(self._lock)
        first = next(iter(instances.values()))[0]
        self.dims = {model: instance.dim for model, instance in first.items()}
        self._threads = [threading.Thread(target=self._keep_deadlines, daemon=True)]
        self._threads += [
            threading.Thread(target=self._drive, args=(name, models), daemon=True)
            for name, each in instances.items()
            for models in each
        ]
        for thread in self._threads:
            thread.start()

    # ---- in ----

    def submit(
        self,
        ids: Sequence[Ids],
        types: Sequence[Ids] | None = None,
        *,
        model: str = "",
        priority: int = 0,
        timeout: float | None = None,
    ) -> EmbedJob:
        """Queue all queries of a call within the SLO, or none.

        A device whose instances are all being started again takes nothing: a start may take longer
        than the SLO, so without another device the answer is BUSY. Calls without an SLO wait.

        Args:
            ids: token ids of each query.
            types: the segment of each token, by default 0.
            model: which encoder, where there are several.
            priority: higher ones go first.
            timeout: seconds after which the answer is of no use.

        Raises:
            CapacityError: BUSY; `retry_after` seconds later there may be room.
            RequestError: a query is empty or too long, there is no such model, or the service is
                closed.
        """
        now = self._now()
        deadline = math.inf if timeout is None else now + timeout
        terms = Terms(model, now + self.slo, deadline, priority)
        job = self._make_job(ids, types, terms, now)
        with self._lock:
            self._check_open()
            self.manager.submit(job.queries, now)
            self._wake(timer=timeout is not None)
        self._arm(job)
        return job

    def submit_bulk(
        self,
        ids: Sequence[Ids],
        types: Sequence[Ids] | None = None,
        *,
        model: str = "",
        priority: int = 0,
    ) -> EmbedJob:
        """Queue any number of queries without an SLO: they run as there is room beside others."""
        job = self._make_job(ids, types, Terms(model, priority=priority), self._now())
        for query in job.queries:
            self.manager.check(query)
        with self._lock:
            self._check_open()
            done = self._desk.add_bulk(job.queries, self._now())
            self._wake()
        settle(done)
        self._arm(job)
        return job

    def start(
        self,
        ids: Sequence[Ids],
        types: Sequence[Ids] | None = None,
        *,
        model: str = "",
        wait: bool = False,
    ) -> EmbedJob:
        """Queue a call: within the SLO, or with `wait` instead of BUSY as soon as there is room.

        Raises CapacityError (BUSY), RequestError as `submit` does.
        """
        if self.slo < math.inf:
            try:
                return self.submit(ids, types, model=model)
            except CapacityError:
                if not wait:
                    raise
        return self.submit_bulk(ids, types, model=model)

    def cancel(self, job: EmbedJob) -> None:
        """Take out what of a job is still queued; who waits for it gets CancelledError."""
        job.future.cancel()
        with self._lock:
            done = self._desk.cancel(job)
        settle(done)

    @property
    def held(self) -> dict[str, int]:
        """Queries that wait or run, by device."""
        with self._lock:
            return {name: self.manager.held(name) for name in self._instances}

    @property
    def spilled(self) -> dict[str, int]:
        """How many queries each device has taken because no accelerator could."""
        with self._lock:
            return self.manager.spilled()

    @property
    def ready(self) -> bool:
        """Whether queries are served: no device has died, or one is left that takes them.

        Within an SLO that is one of some depth. Where none ever had any, it is not death's doing.
        """
        with self._lock:
            left = [name for name, each in self._instances.items() if self._lost[name] < len(each)]
            if self.slo < math.inf and len(left) < len(self._instances):
                return any(any(self.manager.spec(name).depths) for name in left)
            return bool(left)

    @property
    def manager(self) -> QueueManager:
        """The queues; for reading."""
        return self._desk.manager

    def use(self, manager: QueueManager) -> None:
        """Take other queues for the same devices.

        Raises SpecError while queries are held.
        """
        with self._lock:
            if not self._desk.idle:
                raise SpecError("queues can only be exchanged while nothing is queued")
            for name, each in self._instances.items():
                if self._ended[name] == len(each):
                    manager.abandon_device(name)
                elif self._lost[name] == len(each):
                    manager.close_device(name, self._now())
            self._desk = Desk(manager)

    def change(self, decide: Callable[[QueueManager], None]) -> None:
        """Let `decide` change depths or lines between two decisions."""
        with self._lock:
            decide(self.manager)
            done = self._desk.refill(self._now())
            self._wake()
        settle(done)

    def close(self) -> None:
        """End the threads and instances; what is queued fails. Safe to call twice."""
        with self._lock:
            self._closed = True
            done = self._desk.close(RequestError(CLOSED))
            self._wake(timer=True)
        settle(done)
        for thread in self._threads:
            thread.join()
        for each in self._instances.values():
            for models in each:
                for instance in models.values():
                    instance.close()

    def __enter__(self) -> EmbeddingService:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- helpers of callers ----

    def _make_job(
        self, ids: Sequence[Ids], types: Sequence[Ids] | None, terms: Terms, now: float
    ) -> EmbedJob:
        if terms.model not in self.dims:
            raise RequestError(f"no encoder is called {terms.model!r}")
        job = EmbedJob(len(ids), self.dims[terms.model], now)
        job.queries = make_queries(job, ids, types, terms, self._numbers)
        return job

    def _arm(self, job: EmbedJob) -> None:
        """Free the queues when the caller's future is cancelled; an empty job is done."""
        if not job.queries:
            job.settle()
        job.future.add_done_callback(
            lambda future: self.cancel(job) if future.cancelled() else None
        )

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError(CLOSED)

    def _wake(self, *, timer: bool = False) -> None:
        for condition in self._work.values():
            condition.notify_all()
        if timer:
            self._timer.notify()

    # ---- threads ----

    def _drive(self, name: str, models: Models) -> None:
        """Run batches on one instance until the service is closed or the device given up."""
        self._watch(name, models)
        idle: Counter[Instance] = Counter()  # deaths with nothing to do since its last batch
        while (batch := self._next(name, models)) is not None:
            if not isinstance(batch, Batch):
                if not self._revive(name, batch, starts=RESTARTS - idle[batch]):
                    return
                idle[batch] += 1
                continue
            instance = models[batch.model]
            run = run_batch(instance, batch, self.dims[batch.model])
            now = self._now()
            if run.lost:
                if not self._revive(name, instance, batch):
                    return
                continue
            del idle[instance]
            if run.rows is not None and self._observe:
                self._observe(batch, now - batch.started)
            self._report(batch, run, now)

    def _next(self, name: str, models: Models) -> Batch | Instance | None:
        """Wait for a batch, or an instance that has died meanwhile; None at the end."""
        with self._lock:
            while not self._closed:
                for instance in models.values():
                    if isinstance(instance, Mortal) and instance.dead:
                        return instance
                batch = self.manager.take(name, self._now())
                if batch is not None:
                    return batch
                self._work[name].wait()
        return None

    def _report(self, batch: Batch, run: Run, now: float) -> None:
        wrong = {} if run.rows is None else deliver(batch, run.rows, now)
        with self._lock:
            if run.rows is None:
                done = self._desk.fail(batch, run.error, now)
            else:
                done = self._desk.complete(batch, wrong, now)
            self._wake()
        settle(done)
        with self._lock:
            self.manager.note(batch, self._now())

    def _watch(self, name: str, models: Models) -> None:
        """Have the thread of an instance notice at once that it has died."""

        def notice() -> None:
            with self._lock:
                self._work[name].notify_all()

        for instance in models.values():
            if isinstance(instance, Mortal):
                instance.watch(notice)

    def _revive(
        self, name: str, instance: Instance, batch: Batch | None = None, starts: int = RESTARTS
    ) -> bool:
        """Start a dead instance again; False where it cannot be, or the service is closed.

        batch: what it ran, which is queued again. starts: how often that may be tried.
        """
        log.warning("%s: an embedding process has died or hangs; starting it again", name)
        with self._lock:
            self._lost[name] += 1
            done = self._desk.lose(batch) if batch is not None else []
            if self._lost[name] == len(self._instances[name]):
                self.manager.close_device(name, self._now())
            self._wake()
            closed = self._closed
        settle(done)
        if closed:
            return False
        for _ in range(starts):
            try:
                instance.restart()
            except DovetailError as failure:
                log.warning("%s: %s", name, failure)
                continue
            with self._lock:
                self._lost[name] -= 1
                self.manager.open_device(name)
                done = self._desk.refill(self._now())
                self._wake()
            settle(done)
            return True
        self._give_up(name)
        return False

    def _give_up(self, name: str) -> None:
        """Go on without one instance, or without its device if that was the last one."""
        with self._lock:
            self._ended[name] += 1
            if self._ended[name] < len(self._instances[name]):
                return
            log.error("%s: cannot be started again; it embeds no more", name)
            done = self._desk.give_up(name, self._now())
            self._wake()
        settle(done)

    def _keep_deadlines(self) -> None:
        """End queries that wait beyond their deadline."""
        while True:
            with self._lock:
                left = self.manager.next_deadline() - self._now()
                if left > 0 and not self._closed:
                    self._timer.wait(left if left < math.inf else None)
                if self._closed:
                    return
                done = self._desk.expire(self._now())
            settle(done)
