"""The rival policies of `tuning.py`: roller, dietcode and mikpoly choose as their papers do.

As in Sandwich §8.1 they get the same micro-kernels and measuring, and differ in how they choose.
Roller (OSDI 2022): scale up one core's slice, then scale it out. DietCode (MLSys 2022): one set of
programs shared by all shapes; micro-kernels are measured on a few, a cost model picks at run time.
MikPoly (ASPLOS 2024): off line, each tile is timed once on one core; at each shape the schemes are
enumerated and the one wins whose busiest thread has the least sum of tile costs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace

from dovetail.compiler.measure import Measurer
from dovetail.compiler.schedules import GATED, K_UNIT, MicroKernel, micro_kernels
from dovetail.compiler.search.cost_model import CostModel
from dovetail.compiler.search.dietcode import choose, padded_rows, program, sample_points
from dovetail.compiler.search.policy import (
    MEASURED,
    PREDICTED,
    Bench,
    Choice,
    Policy,
    SearchResult,
    SearchTask,
)
from dovetail.compiler.search.rules import Rules
from dovetail.compiler.search.sandwich import Sandwich
from dovetail.compiler.search.space import WHOLE, Program, Scheme, Slice
from dovetail.ir.artifact import PhasePlan
from dovetail.ir.formats import FORMATS
from dovetail.ir.model import PANEL

# ---- roller ----


@dataclass(frozen=True, slots=True)
class Roller:
    """Scale-up aligned to the caches by data reuse alone, then as many slices as threads.

    measured: the programs timed at one M, in whatever order of their loops, best first by the
    performance model (Roller's top-10).
    """

    measured: int = 10
    model: CostModel = field(default_factory=CostModel)

    def search(self, task: SearchTask, measurer: Measurer) -> SearchResult:
        """Return the fastest of the constructed programs at each M."""
        start, trials = measurer.now(), 0
        choices: dict[int, Choice] = {}
        for i, m in enumerate(task.points):
            left = start + task.seconds - measurer.now()
            bench = Bench(task, measurer, m, measurer.now() + left / (len(task.points) - i))
            tiles = bench.problem.tiles()
            scaled = dict.fromkeys(self.construct(task, m, tile) for tile in tiles)
            built = [other for one in scaled for other in bench.problem.orders(one)]
            bench.time(self.model.best(task, m, built, self.measured))
            choices[m] = bench.choice(MEASURED)
            trials += bench.trials
        return SearchResult(choices, trials, measurer.now() - start)

    def construct(self, task: SearchTask, m: int, tile: MicroKernel) -> Program:
        """Return the program of one micro-kernel: its slice scaled up, then scaled out."""
        part = scale_up(task, m, tile)
        return task.program(m, tile, part, scale_out(task, m, tile, part))


def scale_up(task: SearchTask, m: int, tile: MicroKernel) -> Slice:
    """Grow a slice by one tile along the side of most data reuse while it fits half of L2.

    One core decides alone (Roller §4.2): how many slices are left for other cores does not count.
    """
    whole = task.problem(m).extents(tile, Scheme())
    unit = {"m": tile.rows, "n": 1, "k": K_UNIT}
    part, sides = Slice(tile.rows, 1, K_UNIT), ["m", "n", "k"]
    if task.op.kind in GATED:
        part, sides = Slice(tile.rows, 1, whole.k), ["m", "n"]
    room = task.hardware.cache_bytes(2) // 2
    while True:
        larger = [replace(part, **{s: getattr(part, s) + unit[s]}) for s in sides]
        larger = [
            other
            for other, s in zip(larger, sides, strict=True)
            if getattr(part, s) < getattr(whole, s) and footprint(task, tile, other) <= room
        ]
        if not larger:
            return part
        part = min(larger, key=lambda other: traffic_per_flop(task, tile, other))


def footprint(task: SearchTask, tile: MicroKernel, part: Slice) -> float:
    """Return the bytes of A, B and C that a slice touches."""
    columns = part.n * tile.panels * PANEL
    weight = columns * part.k * FORMATS[task.op.dtype].value_bytes
    return 4 * part.m * part.k + weight + 4 * part.m * columns


def traffic_per_flop(task: SearchTask, tile: MicroKernel, part: Slice) -> float:
    """Return Roller's data reuse score: bytes moved to compute the slice over its operations."""
    return footprint(task, tile, part) / (part.m * part.n * tile.panels * PANEL * part.k)


def scale_out(task: SearchTask, m: int, tile: MicroKernel, part: Slice) -> Scheme:
    """Deal whole slices out to threads, along N first: with fewer slices some threads stay idle."""
    whole = task.problem(m).extents(tile, Scheme())
    along_n, along_m = -(-whole.n // part.n), -(-whole.m // part.m)
    columns = min(task.phase.threads, along_n)
    return Scheme(min(task.phase.threads // columns, along_m), columns, 1)


# ---- dietcode ----


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


# ---- mikpoly ----


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


POLICIES: dict[str, Policy] = {
    "sandwich": Sandwich(),
    "roller": Roller(),
    "dietcode": DietCode(),
    "mikpoly": MikPoly(),
    "default": Rules(),
}
"""All choose among the same micro-kernels with the same Measurer."""
