"""The policy `roller`: scale up one core's slice, then scale it out (Roller, OSDI 2022).

As in Sandwich §8.1 it gets the same micro-kernels and measuring, and differs in how it chooses.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dovetail.compiler.measure import Measurer
from dovetail.compiler.schedules import GATED, MicroKernel
from dovetail.compiler.search.cost_model import CostModel
from dovetail.compiler.search.policy import MEASURED, Bench, Choice, SearchResult, SearchTask
from dovetail.compiler.search.space import K_UNIT, Program, Scheme, Slice
from dovetail.ir.formats import FORMATS
from dovetail.ir.model import PANEL


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
