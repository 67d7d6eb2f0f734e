"""What measuring gained over the default schedules, weighed by the workload, with its noise.

In: a Payload, the schedules that were chosen and the trials behind them. Out: a Gain, or None where
nothing was measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dovetail.compiler.rules.payload import GemmUse, Payload
from dovetail.ir.schedule import Row, ScheduleTable
from dovetail.ir.tuning import OK, Reference, TuningRecord, WorkKey


class Gain(msgspec.Struct, frozen=True, kw_only=True):
    """Matrix-product time of the default schedules / time of the chosen ones, over the workload.

    low, high: the same from the unfavourable and the favourable quartiles: a gain whose band
    holds 1 is noise. points: (product, M) pairs that were measured, of all in the payload.
    """

    ratio: float
    low: float
    high: float
    points: int
    of_points: int


Trials = dict[tuple[str, WorkKey, int | None], list[TuningRecord]]
"""Good trials by target, product and M."""


Times = npt.NDArray[Any]
"""float64 [3]: lower quartile, median and upper quartile of a schedule's seconds."""


def measure_gain(
    payload: Payload, tables: Iterable[ScheduleTable], records: Iterable[TuningRecord]
) -> Gain | None:
    """Compare default and chosen schedules at every M that both were timed at.

    Where the phases have tables of their own, both count.
    """
    trials: Trials = defaultdict(list)
    for record in records:
        if record.status == OK:
            trials[record.target, record.work, record.shape.get("m")].append(record)
    measured = {target for target, *_ in trials}
    by_shape: dict[tuple[str, int, int], list[ScheduleTable]] = defaultdict(list)
    for table in tables:
        if table.target in measured:
            by_shape[table.op, table.n, table.k].append(table)
    pairs: list[list[Times]] = []
    points = set()
    for use in payload.uses:
        for m, share in use.sizes.items():
            for table in by_shape[use.gemm.op, use.gemm.n, use.gemm.k]:
                if found := _timed_pair(use, m, table, trials):
                    pairs.append([use.calls * share * times for times in found])
                    points.add((use.gemm, m))
    if not pairs:
        return None
    before, after = np.sum(pairs, axis=0)
    low, ratio, high = (before / after[::-1]).tolist()
    return Gain(
        ratio=ratio,
        low=low,
        high=high,
        points=len(points),
        of_points=sum(len(use.sizes) for use in payload.uses),
    )


def _timed_pair(
    use: GemmUse, m: int, table: ScheduleTable, trials: Trials
) -> tuple[Times, Times] | None:
    """Return times of the default and of the chosen schedule; the latest trial of each counts."""
    tried = trials.get((table.target, use.gemm.work(table.threads), m))
    if not tried:
        return None
    first = tried[0]  # the search tries the default first
    base = first.reference
    latest = {(r.kernel, r.schedule): r for r in tried}
    row = row_at(table, m)
    default = latest[first.kernel, first.schedule]
    chosen = latest.get((row.kernel, row.schedule))
    return (_times(default, base), _times(chosen, base)) if chosen else None


def _times(record: TuningRecord, base: Reference | None) -> Times:
    return record.scale_to(base) * np.array((record.low, record.seconds, record.high))


def row_at(table: ScheduleTable, m: int) -> Row:
    """Return the row of a table that serves M = m."""
    return [row for row in table.rows if row.m_lo <= m][-1]
