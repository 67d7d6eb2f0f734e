"""What was tried before schedules were chosen.

In: tuning records. Out: a table with a row for each product, and how the best grew with the trials.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean

from rich.table import Table

from dovetail.cli.report import make_table
from dovetail.ir.tuning import OK, STATUSES, TuningRecord, WorkKey

STEPS = 200
"""Points of the curve at most."""


def history_table(records: Sequence[TuningRecord]) -> Table:
    """Return trials by product: how they ended, what they cost, the best of them."""
    works: dict[WorkKey, list[TuningRecord]] = defaultdict(list)
    for record in records:
        works[record.work].append(record)
    rows = []
    for work, found in works.items():
        ends = Counter(record.status for record in found)
        shape = " ".join(f"{name}={size}" for name, size in work.shape)
        rows.append(
            (
                f"{work.kind} {shape} {work.dtype}",
                str(work.threads),
                str(len(found)),
                *(str(ends[status]) for status in STATUSES),
                f"{sum(record.cost for record in found):.2f}",
                f"{max(map(_gain, found)):.2f}x",
                f"{max(record.when for record in found):%Y-%m-%d %H:%M}",
            )
        )
    ends_of = (f">{status}" for status in STATUSES)
    columns = ("work", ">threads", ">trials", *ends_of, ">seconds", ">best", "last")
    return make_table("trials by work; best: of one M, over the default schedule", columns, rows)


def best_so_far(records: Sequence[TuningRecord]) -> list[tuple[float, float]]:
    """Return (seconds spent, mean over products and M of default time / best time so far)."""
    best: dict[object, float] = {
        (record.work, record.shape.get("m")): 1.0 for record in records if record.status == OK
    }
    spent, curve = 0.0, [(0.0, 1.0)]
    every = max(1, len(records) // STEPS)
    for number, record in enumerate(sorted(records, key=lambda r: r.when)):
        spent += record.cost
        if record.status == OK:
            key = record.work, record.shape.get("m")
            best[key] = max(best[key], _gain(record))
        if number % every == 0 or number == len(records) - 1:
            curve.append((spent, fmean(best.values()) if best else 1.0))
    return curve


def _gain(record: TuningRecord) -> float:
    """Return the reference's time / the trial's, which were timed in turns."""
    if record.status != OK or record.reference is None or not record.seconds:
        return 0.0
    return record.reference.seconds / record.seconds
