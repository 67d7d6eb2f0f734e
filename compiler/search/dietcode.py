"""What DietCode (MLSys 2022) picks: `plan/efficiency.py` takes it for what tuning will find.

Micro-kernels are costed on a few shapes; a shape costs what its full micro-kernel does, times
how much of the work is padding in the busiest thread.
"""

from __future__ import annotations

import math
from collections import defaultdict

from dovetail.compiler.rules.schedules import MicroKernel, micro_kernels
from dovetail.compiler.search.cost_model import estimate_work
from dovetail.compiler.search.policy import PREDICTED, Choice, SearchTask
from dovetail.compiler.search.space import WHOLE, Program


def predict_costs(task: SearchTask, samples: int = 4) -> dict[MicroKernel, dict[int, float]]:
    """Return predicted seconds per row of full tiles: micro-kernel -> M -> seconds."""
    costs: dict[MicroKernel, dict[int, float]] = defaultdict(dict)
    for m in sample_points(task.points, samples):
        for tile in micro_kernels(task.op.kind, task.target, task.op.dtype):
            seconds = estimate_work(task, m, program(task, m, tile)).seconds
            costs[tile][m] = seconds / padded_rows(task, m, tile)
    return dict(costs)


def sample_points(points: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return at most `count` of the points, the first and the last among them."""
    last = len(points) - 1
    chosen = {round(i * last / max(count - 1, 1)) for i in range(count)}
    return tuple(points[i] for i in sorted(chosen))


def program(task: SearchTask, m: int, tile: MicroKernel) -> Program:
    """Return the program of a micro-kernel in the shared set: whole slices, hence one order."""
    return task.program(m, tile, WHOLE, task.default(m).scheme)


def padded_rows(task: SearchTask, m: int, tile: MicroKernel) -> int:
    """Return M rounded up to whole tiles in every thread's share."""
    rows = task.problem(m).extents(tile, task.default(m).scheme).m
    return -(-rows // tile.rows) * tile.rows


def choose(task: SearchTask, m: int, costs: dict[MicroKernel, dict[int, float]]) -> Choice:
    """Return the micro-kernel of least cost, predicted from its nearest sample."""

    def predicted(tile: MicroKernel) -> float:
        nearest = min(costs[tile], key=lambda sample: abs(math.log(sample / m)))
        return costs[tile][nearest] * padded_rows(task, m, tile)

    if not costs:
        return Choice(task.default(m), PREDICTED)
    tile = min(costs, key=predicted)
    return Choice(program(task, m, tile), PREDICTED, predicted(tile))
