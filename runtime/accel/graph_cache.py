"""Decode steps for a fixed number of rows: recorded once as CUDA graphs, replayed from then on.

In: a filled sub-batch of decodes. Out: the rows it is padded to, and a `GraphCache`, which records
and replays where the device can, and else just runs. Rows that nobody asked for, and those of the
CPU's decodes, store their keys in a block that nobody reads.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy.typing as npt
import torch

from dovetail.ir.model import KV_BLOCK
from dovetail.runtime.accel.device import TorchDevice, first_line
from dovetail.runtime.accel.orders import BatchSizes

ROWS = (1, 2, 4, 8, *range(16, 257, 16))
"""Numbers of rows that are recorded; others are padded to the next of them."""

log = logging.getLogger("dovetail")


def padded_rows(sizes: BatchSizes, most: int) -> int | None:
    """Return how many rows a batch is recorded with, at most `most`; None where it is not."""
    if sizes.n_prefill or sizes.n_out != sizes.n_tokens or not 0 < sizes.n_tokens <= ROWS[-1]:
        return None
    rows = ROWS[bisect_left(ROWS, sizes.n_tokens)]
    return rows if rows <= most else None


def pad_arrays(
    arrays: Mapping[str, npt.NDArray[Any]], sizes: BatchSizes, rows: int, unread: int
) -> None:
    """Fill up the arrays of a batch of decodes to so many rows; unread: the block of these."""
    more = slice(sizes.n_tokens, rows)
    for name, value in (("token_ids", 0), ("positions", 0), ("out_rows", 0), ("seq_lengths", 1)):
        arrays[name][more] = value
    arrays["block_tables"][more, 0] = unread
    arrays["kv_slots"][sizes.gpu_decode : rows] = unread * KV_BLOCK + 1  # of place 0 one is cleared


class GraphCache:
    """Runs work under a name; what has run before under that name is replayed, if it was recorded.

    Memory that recorded work takes meanwhile is a pool of its own: one runs after another.
    """

    def __init__(self, device: TorchDevice) -> None:
        self.on = device.records
        self._device, self._held, self._pool = device, dict[Hashable, Any](), None

    def run(self, name: Hashable, work: Callable[[], None]) -> None:
        """Run work that has the same shapes and addresses whenever it has this name."""
        if (graph := self._held.get(name)) is not None:
            graph.replay()
            return
        work()  # libraries take memory and load kernels in their first run
        if self._device.apart and self.on:
            self._record(name, work)

    def _record(self, name: Hashable, work: Callable[[], None]) -> None:
        """Record what has just run; where that fails nothing is recorded any more."""
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        except RuntimeError as error:
            self.on = False
            log.warning("%s: CUDA graphs are disabled: %s", self._device.name, first_line(error))
            return
        self._pool = self._pool or graph.pool()
        self._held[name] = graph
