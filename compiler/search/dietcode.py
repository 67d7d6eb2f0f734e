"""The policy `dietcode`: one set of programs shared by all shapes, a cost model picks at run time.

Follows DietCode (MLSys 2022): micro-kernels are measured on a few shapes; the cost of a shape is
that of its full micro-kernel, times how much of the work is padding in the busiest thread.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from dovetail.compiler.measure import Measurer
from dovetail.compiler.schedules import MicroKernel, micro_kernels
from dovetail.compiler.search.cost_model import estimate_work
from dovetail.compiler.search.policy import PREDICTED, Bench, Choice, SearchResult, SearchTask
from dovetail.compiler.search.space import WHOLE, Program


@dataclass(frozen=True, slots=True)
class DietCode:
    """samples: shapes that are measured, spread over the range of M on a logarithmic scale."""

    samples: int = 4

    def search(self, task: SearchTask, measurer: Measurer) -> SearchResult:
        """Return the program with the least predicted cost at each M."""
        start = measurer.now()
        costs, trials = self.measure(task, measurer)
        choices = {m: choose(task, m, costs) for m in task.points}
        return SearchResult(choices, trials, measurer.now() - start)

    def measure(
        self, task: SearchTask, measurer: Measurer
    ) -> tuple[dict[MicroKernel, dict[int, float]], int]:
        """Return seconds per row of full tiles: micro-kernel -> M -> seconds, and the trials."""
        tiles, trials = micro_kernels(task.op.kind, task.target, task.op.dtype), 0
        costs: dict[MicroKernel, dict[int, float]] = defaultdict(dict)
        points = sample_points(task.points, self.samples)
        for m in points:
            bench = Bench(task, measurer, m, measurer.now() + task.seconds / len(points), final=0.0)
            programs = {tile: program(task, m, tile) for tile in tiles}
            for tile, seconds in zip(programs, bench.time(programs.values()), strict=True):
                if seconds < math.inf:
                    costs[tile][m] = seconds / padded_rows(task, m, tile)
            trials += bench.trials
        return dict(costs), trials


def predict_costs(task: SearchTask, samples: int = 4) -> dict[MicroKernel, dict[int, float]]:
    """Return what `DietCode.measure` returns, by the cost model: for where nothing can be timed."""
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
