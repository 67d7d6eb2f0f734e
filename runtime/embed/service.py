"""The embedding service: the queue manager's decisions carried out on threads.

In: token ids, devices with their instances. Out: vectors in order, or BUSY at once. One lock is
around the manager; an instance has a thread that takes, runs and reports batches.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

import numpy as np
import numpy.typing as npt

from dovetail.ir.errors import CapacityError, DeviceError, DovetailError, RequestError
from dovetail.runtime.child.child import ChildLost
from dovetail.runtime.child.supervisor import CLOSED, check_usable
from dovetail.runtime.embed.device_queue import EmbedQuery, QueryBatch, QueryState, QueueSpec
from dovetail.runtime.embed.encoder import EmbeddingModel
from dovetail.runtime.embed.process import ProcessInstance
from dovetail.runtime.embed.queue import QueueManager
from dovetail.runtime.native.encoder import Ids, Rows

log = logging.getLogger("dovetail")

Observer = Callable[[QueryBatch, float], object]
"""Told of every batch that has run, and its seconds; called on the instance's thread."""
Models = Mapping[str, EmbeddingModel]
"""One instance of a device: the encoder of each model, of which one runs at a time."""


class EmbedJob:
    """Texts of one call: a future with their vectors (n, dim) in order, or the first error.

    Who cancels the future takes out of the queues what still waits there.
    seconds: how long each query took, NaN before it is done.
    """

    def __init__(
        self, ids: Sequence[Ids], types: Sequence[Ids] | None, dim: int, started: float
    ) -> None:
        self.ids, self.types, self.started = ids, types, started
        self.future: Future[Rows] = Future()
        self.queries: Sequence[EmbedQuery] = ()
        self.seconds: npt.NDArray[np.float64] = np.full(len(ids), np.nan)
        self.rows = np.zeros((len(ids), dim), np.float32)
        self.left = len(ids)
        self.error: Exception | None = None

    def result(self, timeout: float | None = None) -> Rows:
        """Return the vectors; raises what went wrong."""
        return self.future.result(timeout)

    def settle(self) -> None:
        """Tell whoever waits, unless they have gone."""
        if self.future.set_running_or_notify_cancel():
            if self.error is not None:
                self.future.set_exception(self.error)
            else:
                self.future.set_result(self.rows)


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

        instances: of each device of `manager`, as many as its queue says, each with a copy of every
        model. slo: seconds that a query may take; without one nothing is
        BUSY, and calls wait. observe: told of batches. now: the clock of all times.
        """
        self.slo, self.manager = slo, manager
        self._instances, self._observe, self._now = instances, observe, now
        self._numbers = itertools.count()
        self._done: list[EmbedJob] = []  # by the decision that is being made
        self._owner, self._closed = os.getpid(), False
        self._work = threading.Condition()
        first = next(iter(instances.values()))[0]
        self.dims = {model: instance.dim for model, instance in first.items()}
        self._threads = [
            threading.Thread(target=self._drive, args=(name, models), daemon=True)
            for name, each in instances.items()
            for models in each
        ]
        for name, process in self._processes():
            process.changed = partial(self._notice, name)
            self._notice(name)  # what had changed before
        for thread in self._threads:
            thread.start()

    # ---- calls ----

    def submit(
        self,
        ids: Sequence[Ids],
        types: Sequence[Ids] | None = None,
        *,
        model: str = "",
        wait: bool = False,
    ) -> EmbedJob:
        """Queue all queries of a call within the SLO, or none.

        A device whose instances are all being started again takes nothing: a start may take longer
        than the SLO, so without another device the answer is BUSY.

        ids: token ids of each query; types: their segments, by default 0. wait: instead of BUSY,
        any number of queries run without an SLO, as there is room beside others.

        Raises:
            CapacityError: BUSY; `retry_after` seconds later there may be room.
            DeviceError: no device is left.
            RequestError: a query is empty or too long, there is no such model, or the service is
                closed.
        """
        if model not in self.dims:
            raise RequestError(f"no encoder is called {model!r}")
        now = self._now()
        job = EmbedJob(ids, types, self.dims[model], now)
        job.queries = [
            EmbedQuery(next(self._numbers), len(each), now + self.slo, model, (job, index))
            for index, each in enumerate(ids)
        ]
        forked = os.getpid() != self._owner  # asked before the lock, which a fork may never get
        check_usable(closed=self._closed, forked=forked)
        with self._deciding() as manager:
            check_usable(closed=self._closed, forked=False)
            try:
                if self.slo < math.inf:
                    manager.submit(job.queries, now)
            except CapacityError:
                if not wait:
                    raise
            if job.queries and job.queries[0].state is QueryState.NEW:
                manager.add_bulk(job.queries)
        if not job.queries:
            job.settle()
        job.future.add_done_callback(partial(self._leave, job))
        return job

    def _leave(self, job: EmbedJob, future: Future[Rows]) -> None:
        """Take out what of a job is still queued if its caller has gone."""
        if future.cancelled():
            with self._deciding():
                self._cancel(job)

    @property
    def spilled(self) -> dict[str, int]:
        """How many queries each device has taken because no accelerator could."""
        with self._work:
            return dict(self.manager.spilled)

    @property
    def held(self) -> dict[str, tuple[int, float]]:
        """How many queries each device has, waiting or running, and how full its queue is."""
        with self._work:
            return self.manager.held()

    @property
    def ready(self) -> bool:
        """Whether queries are served: no device has died, or one is left that takes them.

        Within an SLO that is one of some depth. Where none ever had any, it is not death's doing.
        """
        with self._work:
            left = [name for name, each in self._instances.items() if any(map(_serve, each))]
            if self.slo < math.inf and len(left) < len(self._instances):
                return any(any(self.manager.spec(name).depths) for name in left)
            return bool(left)

    @property
    def failure(self) -> str:
        """Why queries are not served, in words; "" where they are, or the reason is unknown."""
        found = (process.failure for _, process in self._processes())
        return "" if self.ready else next(filter(None, found), "")

    def use(self, manager: QueueManager) -> None:
        """Take other queues for the same devices, while nothing is queued."""
        with self._work:
            assert not self.manager.live(), "what is queued would be lost"
            self.manager = manager
            for name in self._instances:
                self._settle(name)

    def set_queue(self, spec: QueueSpec) -> None:
        """Give a device other depths or lines."""
        with self._deciding() as manager:
            manager.set_queue(spec)

    def close(self) -> None:
        """End the threads and instances; what is queued or runs fails. Safe to call twice."""
        with self._deciding() as manager:
            self._closed = True
            for query in manager.live():
                if manager.cancel(query):
                    self._end(query, RequestError(CLOSED))
        for _, process in self._processes():
            process.leave()  # all at once: each may take a while
        for thread in self._threads:
            thread.join()
        for models in itertools.chain.from_iterable(self._instances.values()):
            for model in models.values():
                model.close()

    def __enter__(self) -> EmbeddingService:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- decisions ----

    @contextmanager
    def _deciding(self) -> Iterator[QueueManager]:
        """Give the manager under the lock; then wake the threads and tell whose jobs have ended.

        An error changes nothing. Callers are told without the lock: they may call again.
        """
        with self._work:
            yield self.manager
            for query, error in self.manager.refill(self._now()):
                self._end(query, error)
            done, self._done = self._done, []
            self._work.notify_all()
        for job in done:
            job.settle()

    def _end(self, query: EmbedQuery, error: Exception | None = None) -> None:
        """Count a query as ended; the first error ends the rest of its job."""
        job, _ = query.payload
        first = error is not None and job.error is None
        job.error = job.error or error
        job.left -= 1
        if not job.left:
            self._done.append(job)
        elif first:
            self._cancel(job)

    def _cancel(self, job: EmbedJob) -> None:
        for query in job.queries:
            if self.manager.cancel(query):
                self._end(query)

    # ---- threads ----

    def _processes(self) -> Iterator[tuple[str, ProcessInstance]]:
        """Yield the processes, and the device of each."""
        for name, each in self._instances.items():
            for models in each:
                yield from ((name, m) for m in models.values() if isinstance(m, ProcessInstance))

    def _drive(self, name: str, models: Models) -> None:
        """Run batches on one instance until the service is closed or the instance given up."""
        while (batch := self._next(name, models)) is not None:
            rows = _embed(models[batch.model], batch, self.dims[batch.model])
            self._report(batch, rows, self._now())

    def _next(self, name: str, models: Models) -> QueryBatch | None:
        """Wait for a batch while an instance serves, or is started; None at its end."""
        with self._work:
            while not (self._closed or _given_up(models)):
                if _serve(models) and (batch := self.manager.take(name, self._now())) is not None:
                    return batch
                self._work.wait()
        return None

    def _notice(self, name: str) -> None:
        """Hear that a process of a device has died, is back, or is given up."""
        with self._deciding():
            self._settle(name)

    def _settle(self, name: str) -> None:
        """Have a device take queries where an instance serves; else others take what waits."""
        each = self._instances[name]
        if any(map(_serve, each)):
            self.manager.open_device(name)
        else:
            gone = all(map(_given_up, each))
            for query in self.manager.close_device(name, self._now(), gone=gone):
                self._end(query, DeviceError(f"{name}: died, and no other device has room"))
            if gone:
                log.error("%s: could not be restarted; it is no longer used", name)

    def _report(self, batch: QueryBatch, rows: Rows | Exception, now: float) -> None:
        if isinstance(rows, Exception):
            with self._deciding() as manager:
                give_back = manager.fail
                if isinstance(rows, ChildLost):
                    rows = DeviceError(f"{rows} at this text, as others before it; change the text")
                    give_back = manager.lose
                for query in give_back(batch):
                    self._end(query, rows)
                self._settle(batch.device)
        else:
            try:
                if self._observe:
                    self._observe(batch, now - batch.started)
            except Exception:  # whoever looks on must not end the device
                log.exception("%s: the observer of its batches failed", batch.device)
            wrong = _deliver(batch, rows, now)
            with self._deciding() as manager:
                for query in manager.complete(batch):
                    self._end(query, wrong.get(query.number))
        with self._work:
            self.manager.note(batch, self._now())


def _serve(models: Models) -> bool:
    """Return whether no encoder of an instance is being started again, or given up."""
    return all(each.ready for each in models.values() if isinstance(each, ProcessInstance))


def _given_up(models: Models) -> bool:
    return any(each.given_up for each in models.values() if isinstance(each, ProcessInstance))


def _embed(model: EmbeddingModel, batch: QueryBatch, dim: int) -> Rows | Exception:
    """Return the vectors of a batch, or why there are none: any error is this batch's alone."""
    payloads = [query.payload for query in batch.queries]
    ids: list[Ids] = [job.ids[index] for job, index in payloads]
    types: list[Ids] | None = None
    if any(job.types is not None for job, _ in payloads):
        types = [job.types[i] if job.types else np.zeros_like(job.ids[i]) for job, i in payloads]
    more = (batch.predicted,) if isinstance(model, ProcessInstance) else ()
    try:
        rows = model.embed_tokens(ids, types, *more)
    except (DovetailError, ChildLost) as error:
        return error
    except MemoryError:
        return DeviceError(f"{batch.device}: out of memory")
    except Exception as error:  # a fault of the encoder must not end the device
        log.exception("%s: an encoder failed", batch.device)
        return DeviceError(f"{batch.device}: the encoder failed ({error!r})")
    if rows.shape != (len(ids), dim):
        return DeviceError(f"{batch.device}: vectors of shape {rows.shape} came")
    return rows


def _deliver(batch: QueryBatch, rows: Rows, now: float) -> dict[int, Exception]:
    """Put vectors into their jobs; return the errors of those that are no numbers, by query."""
    wrong: dict[int, Exception] = {}
    finite = np.asarray(np.isfinite(rows).all(axis=1))
    for query, row, good in zip(batch.queries, rows, finite, strict=True):
        job, index = query.payload
        job.rows[index], job.seconds[index] = row, now - job.started
        if not good:
            wrong[query.number] = RequestError(f"text {index}: its vector is not finite")
    return wrong
