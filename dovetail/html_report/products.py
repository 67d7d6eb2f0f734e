"""What products reach over M: by the schedules chosen, by those of the rules, and at most.

In: an inspection and the tuning records of its artifact. Out: for each product of the served plan
the times that were measured, with the limit that the plan's figures of the machine set.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.table import Table

from dovetail.cli.inspection import Inspection, ModelInspection, flops_of
from dovetail.cli.report import make_table, show_count
from dovetail.compiler.rules.schedules import GemmOp, gemm_ops
from dovetail.compiler.search.gain import row_at
from dovetail.ir.artifact import PhasePlan
from dovetail.ir.schedule import ScheduleTable
from dovetail.ir.tuning import (
    OK,
    STATUSES,
    LineFaultError,
    Reference,
    TuningRecord,
    WorkKey,
    decode_record,
)
from dovetail.runtime.native.tape import pick_tables
from dovetail.topology.parameters import MachineParameters

TUNING = "tuning.jsonl"


@dataclass(frozen=True, slots=True)
class ProductPoint:
    """A product at M = m: seconds by the chosen schedule and by the rules', where timed.

    limit: seconds that it takes at least, by the machine's figures.
    """

    m: int
    chosen: float
    default: float | None
    limit: float | None


@dataclass(frozen=True, slots=True)
class ProductCurve:
    """A product of one phase of the served plan over M."""

    model: str
    phase: str
    table: ScheduleTable
    points: tuple[ProductPoint, ...]

    @property
    def title(self) -> str:
        """What is multiplied, by whom."""
        table = self.table
        shape = f"{table.op} {table.n} x {table.k}, {table.dtype}"
        return f"{self.model}: {shape}, {self.phase}, {show_count(table.threads, 'thread')}"

    def rate(self, m: int, seconds: float) -> float:
        """Return GFLOP/s."""
        return 1e-9 * flops_of(self.table, m) / seconds


def read_records(path: Path, listed: Iterable[str]) -> tuple[TuningRecord, ...]:
    """Return the trials behind an artifact's schedules; lines that are none are passed over."""
    if TUNING not in listed:
        return ()
    found = []
    for line in (path / TUNING).read_bytes().splitlines():
        with suppress(LineFaultError):
            found.append(decode_record(line))
    return tuple(found)


def product_curves(
    found: Inspection, records: Sequence[TuningRecord], figures: MachineParameters | None
) -> tuple[ProductCurve, ...]:
    """Return what was timed of each product of the served plan, where anything was."""
    timed: dict[object, list[TuningRecord]] = defaultdict(list)
    for record in records:
        if record.status == OK and "m" in record.shape:
            timed[record.target, record.work].append(record)
    curves: dict[tuple[str, ScheduleTable], ProductCurve] = {}
    for model in found.models:
        for phase, plan in (("prefill", found.plan.prefill), ("decode", found.plan.decode)):
            for curve in _curves(found, model, phase, plan, timed, figures):
                curves.setdefault((model.file.name, curve.table), curve)
    return tuple(curves.values())


def _curves(
    found: Inspection,
    model: ModelInspection,
    phase: str,
    plan: PhasePlan,
    timed: Mapping[object, Sequence[TuningRecord]],
    figures: MachineParameters | None,
) -> Iterator[ProductCurve]:
    listed = gemm_ops(model.file.spec, found.plan.processes_of(phase))
    ops = {(op.op, op.n, op.k, op.dtype): op for op in listed}
    packages = found.hardware.sockets if found.hardware else 1
    for target in found.manifest.targets:
        picked = pick_tables(model.schedules, target, phase, plan.threads)
        for table in (table for tables in picked.values() for table in tables):
            op = ops.get((table.op, table.n, table.k, table.dtype))
            if op is None:
                continue
            trials = timed.get((target, op.work(table.threads)), ())
            points = [
                ProductPoint(m, chosen, default, _limit(op, table, m, figures, packages))
                for m, (chosen, default) in sorted(_times(table, trials).items())
            ]
            if points:
                yield ProductCurve(model.file.name, table.phase, table, tuple(points))


def _times(
    table: ScheduleTable, trials: Sequence[TuningRecord]
) -> dict[int, tuple[float, float | None]]:
    """Return M -> seconds chosen, and of the rules' schedule, which trials were timed beside."""
    if not trials:  # a row's time is of some M that it serves
        return {row.m_lo: (row.seconds, None) for row in table.rows if row.seconds}
    bases: dict[int, Reference | None] = {}
    times: dict[int, tuple[float, float | None]] = {}
    for record in trials:
        m = record.shape["m"]
        base, row = bases.setdefault(m, record.reference), row_at(table, m)
        if base is not None and (record.kernel, record.schedule) == (row.kernel, row.schedule):
            times[m] = record.seconds * record.scale_to(base), base.seconds
    return times


def _limit(
    op: GemmOp, table: ScheduleTable, m: int, figures: MachineParameters | None, packages: int
) -> float | None:
    if figures is None:
        return None
    bandwidth = min(
        table.threads * figures.core_bandwidth.value, packages * figures.package_bandwidth.value
    )
    arithmetic = flops_of(table, m) / (table.threads * figures.core_flops.value)
    return max(arithmetic, op.weight_bytes / bandwidth)


# ---- what was tried before they were chosen ----


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
