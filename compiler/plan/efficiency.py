"""How fast a machine computes products of few rows, by the schedules that serve before tuning.

In: a model, a target, the rows that steps of a trace have. Out: the machine's figures with a share
of `core_flops` for each number of rows. Schedules are those that the policy `dietcode` picks when
its costs are predicted; what they take from memory is left to the contention model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from dovetail.codegen.isa.target import Target
from dovetail.codegen.targets import get_target
from dovetail.compiler.rules.schedules import GemmOp, count_gemms
from dovetail.compiler.search.cost_model import estimate_work
from dovetail.compiler.search.dietcode import choose, predict_costs
from dovetail.compiler.search.policy import SearchTask
from dovetail.ir.artifact import PhasePlan
from dovetail.ir.model import ModelSpec
from dovetail.ir.plans import Figure
from dovetail.topology.hardware import HardwareSpec
from dovetail.topology.parameters import MachineParameters
from dovetail.topology.replay import Trace, step_rows

FULL_ROWS = 256
"""Rows of the product whose speed is `core_flops` (a calibration measures it): share 1."""
SAMPLES = 2
"""Numbers of rows at which every tile is costed."""
SOURCE = "predicted: dietcode's schedules before tuning, relative to 256 rows"


def with_shares(
    figures: MachineParameters,
    hardware: HardwareSpec,
    spec: ModelSpec,
    target: Target,
    trace: Trace,
) -> MachineParameters:
    """Return the figures with the shares of the rows that steps of `trace` have."""
    shares = predict_shares(hardware, spec, target, step_rows(trace))
    found = tuple((rows, Figure(share, SOURCE)) for rows, share in shares.items())
    return replace(figures, row_shares=found)


def predict_shares(
    hardware: HardwareSpec, spec: ModelSpec, target: Target, rows: Iterable[int]
) -> dict[int, float]:
    """Return rows -> flop/s of all products of a step, relative to those of 256 rows.

    Of one core and unsharded weights; what padding costs a thread's smaller share is not in it.
    """
    points = tuple(sorted({*rows, FULL_ROWS}))
    seconds = dict.fromkeys(points, 0.0)
    for op, count in count_gemms(spec).items():
        for m, value in _seconds(op, hardware, target.name, points).items():
            seconds[m] += count * value
    full = seconds[FULL_ROWS] / FULL_ROWS
    return {m: full * m / seconds[m] for m in points}


@lru_cache(maxsize=64)
def _seconds(
    op: GemmOp, hardware: HardwareSpec, target: str, points: tuple[int, ...]
) -> dict[int, float]:
    """Return what the multiply-adds of a product take at each M, caches and calls included."""
    task = SearchTask(op, get_target(target), PhasePlan(threads=1, cpus=()), hardware, points)
    costs = predict_costs(task, SAMPLES)
    works = {m: estimate_work(task, m, choose(task, m, costs).program) for m in points}
    return {m: work.seconds_without_memory for m, work in works.items()}
