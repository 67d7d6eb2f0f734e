"""What a caller of the embedding service holds: vectors in order, as they come.

In: rows from the threads of the instances. Out: a future with all of them, or the first error.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dovetail.ir.errors import DeviceError, DovetailError, RequestError
from dovetail.runtime.embedding.instance import Ids, Instance, InstanceLost, Vectors
from dovetail.runtime.embedding.query import Batch, Query

log = logging.getLogger("dovetail")


@dataclass(frozen=True, slots=True)
class Terms:
    """What a call asks for all its queries; times are the service's clock."""

    model: str
    target: float = math.inf
    deadline: float = math.inf
    priority: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A query's place in its job, and what is to be embedded."""

    job: EmbedJob
    index: int
    ids: Ids
    types: Ids | None = None


class EmbedJob:
    """Texts of one call. `seconds` says of each query how long it took, NaN before it is done."""

    def __init__(self, count: int, dim: int, started: float) -> None:
        self.future: Future[Vectors] = Future()
        self.queries: Sequence[Query] = ()
        self.started = started
        self.seconds: npt.NDArray[np.float64] = np.full(count, np.nan)
        self._rows = np.zeros((count, dim), np.float32)
        self._left = count
        self._error: Exception | None = None

    def result(self, timeout: float | None = None) -> Vectors:
        """Return the vectors (n, dim) in the order of the texts; raises what went wrong."""
        return self.future.result(timeout)

    @property
    def failed(self) -> bool:
        """Whether a query of it has ended with an error."""
        return self._error is not None

    def put(self, index: int, row: npt.NDArray[np.float32], now: float) -> None:
        """Take a vector."""
        self._rows[index] = row
        self.seconds[index] = now - self.started

    def end_one(self, error: Exception | None = None) -> bool:
        """Note that a query has ended; return whether it was the last one. One caller at a time."""
        self._error = self._error or error
        self._left -= 1
        return self._left == 0

    def settle(self) -> None:
        """Tell whoever waits, unless they have gone."""
        if self.future.set_running_or_notify_cancel():
            if self._error is not None:
                self.future.set_exception(self._error)
            else:
                self.future.set_result(self._rows)


def make_queries(
    job: EmbedJob,
    ids: Sequence[Ids],
    types: Sequence[Ids] | None,
    terms: Terms,
    numbers: Iterator[int],
) -> list[Query]:
    """Return the queries of a job, one for each text; the next of `numbers` are theirs."""
    kinds: Sequence[Ids | None] = types or [None] * len(ids)
    return [
        Query(
            number=next(numbers),
            tokens=len(each),
            target=terms.target,
            deadline=terms.deadline,
            priority=terms.priority,
            payload=Part(job, index, each, kinds[index]),
            model=terms.model,
        )
        for index, each in enumerate(ids)
    ]


@dataclass(frozen=True, slots=True)
class Run:
    """What became of a batch: vectors, or why there are none."""

    rows: Vectors | None = None
    error: Exception | None = None
    lost: bool = False


def run_batch(instance: Instance, batch: Batch, dim: int) -> Run:
    """Embed a batch; any error is this batch's alone."""
    try:
        rows = instance.embed_tokens(*_inputs(batch), batch.limit)
    except InstanceLost:
        return Run(lost=True)
    except DovetailError as error:
        return Run(error=error)
    except MemoryError:
        return Run(error=DeviceError(f"{batch.device}: out of memory"))
    except Exception as error:  # a fault of the encoder must not end the device
        log.exception("%s: an encoder failed", batch.device)
        return Run(error=DeviceError(f"{batch.device}: the encoder failed ({error!r})"))
    if rows.shape != (len(batch.queries), dim):
        return Run(error=DeviceError(f"{batch.device}: vectors of shape {rows.shape} came"))
    return Run(rows=rows)


def _inputs(batch: Batch) -> tuple[list[Ids], list[Ids] | None]:
    """Return the ids of each query, and the segments where any has them."""
    parts = [part_of(query) for query in batch.queries]
    ids = [part.ids for part in parts]
    if all(part.types is None for part in parts):
        return ids, None
    return ids, [np.zeros_like(p.ids) if p.types is None else p.types for p in parts]


def part_of(query: Query) -> Part:
    """Return what a query of the service stands for."""
    assert isinstance(query.payload, Part)
    return query.payload


def settle(jobs: Sequence[EmbedJob]) -> None:
    """Tell who waits; never under the lock, for callers may call the service again."""
    for job in jobs:
        job.settle()


def deliver(batch: Batch, rows: Vectors, now: float) -> dict[int, Exception]:
    """Put vectors into their jobs; return the errors of those that are no numbers."""
    for query, row in zip(batch.queries, rows, strict=True):
        part = part_of(query)
        part.job.put(part.index, row, now)
    return {
        int(place): RequestError(
            f"text {part_of(batch.queries[place]).index}: its vector is not finite"
        )
        for place in np.flatnonzero(~np.isfinite(rows).all(axis=1))
    }
