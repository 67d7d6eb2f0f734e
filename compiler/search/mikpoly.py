"""The policy `mikpoly`: polymerize micro-kernel tiles whose costs were measured off line.

Follows MikPoly (ASPLOS 2024): off line, each tile is timed once on one core; at each shape the
schemes are enumerated and the one wins whose busiest thread has the least sum of tile costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dovetail.compiler.measure import Measurer
from dovetail.compiler.schedules import MicroKernel, micro_kernels
from dovetail.compiler.search.policy import PREDICTED, Bench, Choice, SearchResult, SearchTask
from dovetail.compiler.search.space import WHOLE, Program, Scheme
from dovetail.ir.artifact import PhasePlan
from dovetail.ir.model import PANEL


@dataclass(frozen=True, slots=True)
class MikPoly:
    """tile_groups: groups of panels in the stretch that a tile's cost is measured on."""

    tile_groups: int = 16

    def search(self, task: SearchTask, measurer: Measurer) -> SearchResult:
        """Return the cheapest polymerization at each M by the tiles' costs."""
        start = measurer.now()
        costs, trials = self.measure_tiles(task, measurer)
        choices = {m: polymerize(task, m, costs) for m in task.points}
        return SearchResult(choices, trials, measurer.now() - start)

    def measure_tiles(
        self, task: SearchTask, measurer: Measurer
    ) -> tuple[dict[MicroKernel, float], int]:
        """Return the seconds of one tile (all of K) on one core, and the trials it took."""
        costs: dict[MicroKernel, float] = {}
        tiles, trials = micro_kernels(task.op.kind, task.target, task.op.dtype), 0
        end = measurer.now() + task.seconds
        alone = PhasePlan(threads=1, cpus=task.phase.cpus[:1])
        for tile in tiles:
            columns = min(task.op.n, self.tile_groups * tile.panels * PANEL)
            one = replace(task, op=replace(task.op, n=columns), phase=alone)
            bench = Bench(one, measurer, tile.rows, end, final=0.0)
            program = one.program(tile.rows, tile, WHOLE, Scheme())
            (seconds,) = bench.time((program,))
            if seconds < math.inf:
                groups = one.problem(tile.rows).extents(tile, Scheme()).n
                costs[tile] = seconds / groups
            trials += bench.trials
        return costs, trials


def polymerize(task: SearchTask, m: int, costs: dict[MicroKernel, float]) -> Choice:
    """Return the tile and scheme whose busiest thread takes least by the costs of its tiles.

    Its slices are whole, so that there is one order of their loops.
    """
    problem = task.problem(m)

    def busiest(tile: MicroKernel, scheme: Scheme) -> float:
        share = problem.extents(tile, scheme)
        return -(-share.m // tile.rows) * share.n * costs[tile]

    options = [(t, s) for t in costs for s in problem.schemes(split_k=False)]
    if not options:
        return Choice(task.default(m), PREDICTED)
    tile, scheme = min(options, key=lambda option: busiest(*option))
    program: Program = task.program(m, tile, WHOLE, scheme)
    return Choice(program, PREDICTED, busiest(tile, scheme))
