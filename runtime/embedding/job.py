"""What a caller of the embedding service holds: vectors in order, as they come.

In: rows from the threads of the instances. Out: a future with all of them, or the first error.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dovetail.ir.errors import DeviceError, DovetailError
from dovetail.runtime.embedding.instance import Ids, Instance, InstanceLost, Vectors
from dovetail.runtime.embedding.query import Batch, Query

log = logging.getLogger("dovetail")


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
