"""What a tuning job may spend, and how far it has come; nothing here runs anything.

In: the machine and a budget; later the records of trials. Out: core sets for workers, and a
scoreboard of best rates and gains over the default schedules.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean

import msgspec

from dovetail.compiler.measure.recorder import Allowance
from dovetail.compiler.measure.row_ops import GATE_OPS, row_bytes
from dovetail.compiler.rules.schedules import GATED
from dovetail.ir.tuning import OK, TuningRecord, WorkKey
from dovetail.topology.binding import choose_pus
from dovetail.topology.hardware import HardwareSpec


def core_sets(
    hardware: HardwareSpec, threads: int, workers: int
) -> tuple[tuple[tuple[int, ...], ...], str | None]:
    """Return PUs for each worker, no core in two sets, and a note where workers must be fewer."""
    count = max(1, min(workers, hardware.usable_threads // threads))
    note = None
    if count < workers:
        note = (
            f"{count} of {workers} workers: each measures on {threads} cores of its own, and "
            f"this machine has {hardware.usable_threads}"
        )
    cpus = choose_pus(hardware, count * threads)
    return tuple(cpus[i * threads :][:threads] for i in range(count)), note


def allow(budget: float, spent: Mapping[WorkKey, float], deciding: float = 0.0) -> Allowance:
    """Return what is left of a budget: nothing where all but the share for deciding was spent.

    Work that was never tried gets an equal part of the budget, whatever the rest has cost.
    """
    total = math.fsum(spent.values())
    left = budget - total if total < (1 - deciding) * budget else 0.0
    return Allowance(left, {w: budget / len(spent) for w, cost in spent.items() if not cost})


# ---- how far a job has come ----


class TunedPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The best schedule of one shape so far; `gain` is default time / best time, with quartiles.

    gflops: of the best, in 10^9 multiply-add operations counted as two, per second; None where
    they are not known. gbytes: of rows that it reads and writes, in 10^9 bytes per second.
    """

    kind: str
    shape: dict[str, int]
    dtype: str
    threads: int
    kernel: str
    schedule: tuple[int, ...]
    seconds: float
    gflops: float | None
    gbytes: float | None
    gain: float
    gain_low: float
    gain_high: float


class TuneProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A job at one moment. Gains are geometric means over shapes; a band that holds 1 is noise.

    trials: all that were asked for. failed: how many ended in each way but `ok`. eta: seconds.
    """

    items: int
    done: int
    trials: int
    failed: dict[str, int]
    best_gflops: float
    gain: float
    gain_low: float
    gain_high: float
    elapsed: float
    eta: float


def flops(kind: str, shape: Mapping[str, int]) -> float:
    """Return the floating-point operations of a matrix product, a gated one has two, or attention.

    In attention a row meets the keys up to its own, in two products. Of other kernels, which users
    give, nothing is known: 0.
    """
    if "context" in shape:
        keys = shape["rows"] * (shape["context"] - (shape["rows"] - 1) / 2)
        return 4.0 * shape["n_q"] * shape["head_dim"] * keys
    if shape.keys() != {"n", "k", "m"}:
        return 0.0
    return 2.0 * math.prod(shape.values()) * (2 if kind in (*GATED, *GATE_OPS.values()) else 1)


@dataclass(slots=True)
class Scoreboard:
    """Takes in records and tells the best of each shape."""

    trials: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    _shapes: dict[tuple[object, ...], dict[tuple[object, ...], TuningRecord]] = field(
        default_factory=dict
    )

    def add(self, record: TuningRecord) -> None:
        """Count a record; of one candidate the one of most rounds stands."""
        self.trials += 1
        self.statuses[record.status] += 1
        if record.status != OK:
            return
        shape = (record.kind, *sorted(record.shape.items()), record.dtype, record.threads)
        known = self._shapes.setdefault(shape, {})
        candidate = (record.kernel, record.schedule)
        if candidate not in known or known[candidate].rounds <= record.rounds:
            known[candidate] = record

    @property
    def failed(self) -> dict[str, int]:
        """Trials by the way they failed."""
        return {status: n for status, n in sorted(self.statuses.items()) if status != OK}

    def points(self) -> tuple[TunedPoint, ...]:
        """Return the best of each shape, in the order shapes were first met."""
        return tuple(_best_point(tuple(known.values())) for known in self._shapes.values())

    def progress(self, done: int, items: int, elapsed: float, budget: float) -> TuneProgress:
        """Return where a job of so many items stands after `elapsed` of its `budget` seconds."""
        points = self.points()
        left = max(0.0, budget - elapsed)
        return TuneProgress(
            items=items,
            done=done,
            trials=self.trials,
            failed=self.failed,
            best_gflops=max((p.gflops or 0.0 for p in points), default=0.0),
            gain=mean_gain([p.gain for p in points]),
            gain_low=mean_gain([p.gain_low for p in points]),
            gain_high=mean_gain([p.gain_high for p in points]),
            elapsed=elapsed,
            eta=min(left, elapsed / done * (items - done)) if done else left,
        )


def _best_point(records: Sequence[TuningRecord]) -> TunedPoint:
    base = records[0].reference
    best = min(records, key=lambda record: record.low * record.scale_to(base))
    default = next((r for r in records if _is_reference(r)), best)
    scale = default.scale_to(base) / best.scale_to(base)
    same = default is best
    return TunedPoint(
        kind=best.kind,
        shape=best.shape,
        dtype=best.dtype,
        threads=best.threads,
        kernel=best.kernel,
        schedule=best.schedule,
        seconds=best.seconds,
        gflops=flops(best.kind, best.shape) / best.seconds / 1e9 or None,
        gbytes=row_bytes(best.kind, best.shape) / best.seconds / 1e9 or None,
        gain=scale * default.seconds / best.seconds,
        gain_low=1.0 if same else scale * default.low / best.high,
        gain_high=1.0 if same else scale * default.high / best.low,
    )


def _is_reference(record: TuningRecord) -> bool:
    beside = record.reference
    return beside is not None and (beside.kernel, beside.schedule) == (
        record.kernel,
        record.schedule,
    )


def mean_gain(gains: Sequence[float]) -> float:
    """Return the geometric mean of gains, 1 where there are none."""
    return geometric_mean(gains) if gains else 1.0
