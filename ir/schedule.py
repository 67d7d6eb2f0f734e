"""Schedule tables: per operator, sorted breakpoints in M, each with a kernel and its schedule."""

from __future__ import annotations

import msgspec

SCHEDULE_VALUES = (
    "m_tile",
    "block_m",
    "block_k",
    "grid_m",
    "grid_n",
    "grid_k",
    "block_n",
    "prefetch",
    "order",
)
"""Names of the nine i64 values a kernel's `sched` parameters may read, in order of `Row.schedule`.

m_tile: rows per micro-kernel call; below 0, as many, and bfloat16 weights are multiplied by the
same instructions at any M. block_m, block_k, block_n: the computation slice, in rows, values of K
and groups of the micro-kernel's panels (0 = whole), which rows pass through one by one; so block_n
= 1 is panels outside, rows inside. grid_*: the thread grid (their product <= threads); prefetch:
bytes ahead in the weight stream, 0 = none, -1 = the next slice of weights into the first cache,
each row tile fetching its share, -n = that into the second, and from there into the first n bytes
before use. order: which of `ORDERS` the loops over slices are nested in. In decode
attention block_k is the fewest keys that a part of a sequence may have (0 = sequences stay whole).
"""
ORDERS = ("mkn", "mnk", "nmk", "nkm")
"""Nestings of the loops over slices, outermost first; a schedule holds the place in this tuple.

A block of A stays in the caches for the loop over n, one of C for k, one of the weight for m, and
what lies inside a loop passes by whole between two of its steps. K outermost is left out: all of a
thread's C would pass by at every slice of K, of which `mkn` and `nkm`, where the same block stays
innermost, hold a slice; with one slice of rows `kmn` is `mkn`, with one of panels `knm` is `nkm`.
"""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """From `m_lo` tokens on: call `kernel` (a name in the kernel index) with `schedule`."""

    m_lo: int
    kernel: str
    schedule: tuple[int, ...]
    reduce_kernel: str | None = None  # second phase after a barrier (split-K, split-KV)
    source: str = "default"  # default | measured | reused | predicted
    seconds: float | None = None
    measured_loss: float | None = None


class ScheduleTable(msgspec.Struct, frozen=True, kw_only=True):
    """All rows of one (target, op, N, K, dtype, phase, threads). `rows[0].m_lo` is 1."""

    target: str
    op: str
    n: int
    k: int
    dtype: str
    phase: str  # prefill | decode | any
    threads: int
    rows: tuple[Row, ...]


class ScheduleFile(msgspec.Struct, frozen=True, kw_only=True):
    """`models/<name>/schedules.json`."""

    schema: int = 1
    tables: tuple[ScheduleTable, ...]
