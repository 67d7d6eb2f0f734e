"""Roller (OSDI 2022): tiles aligned with the machine, scaled up on one core, then scaled out.

An rTile is a register tile that pads M and N by at most `padding` (alignment with the tensor's
shape; K grows by whole cache lines, the memory transactions). It grows along the side of most data
reuse per byte until it fills half of a cache. Our kernels slice once, so that each cache gives a
program. The best `measured` by the performance model are
timed, and the fastest serves. Where no rTile is aligned there is no program.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from dovetail.compiler.measure.meter import Measurer
from dovetail.compiler.rules.schedules import GATED, MicroKernel, micro_kernels
from dovetail.compiler.search.cost_model import CostModel
from dovetail.compiler.search.policy import SearchTask
from dovetail.compiler.search.space import Program, Scheme, Slice, ceil_div
from dovetail.ir.formats import FORMATS
from dovetail.ir.model import PANEL
from rivals.result import Found, Regions, Trials, whole

LINE_VALUES = 16
"""float32 values in a cache line, the least that memory gives (a transaction)."""
CACHES = (1, 2)
"""Levels that a slice is scaled up to."""


@dataclass(frozen=True, slots=True)
class Roller:
    """padding: what an rTile may add to a side of C, as a share (Roller's epsilon).

    measured: the programs timed at one M, best first by the performance model (Roller's top 10).
    """

    padding: float = 0.25
    measured: int = 10
    model: CostModel = field(default_factory=CostModel)

    def search(self, task: SearchTask, measurer: Measurer) -> Found:
        """Return the fastest of the constructed programs at each M; none without aligned rTiles."""
        start = measurer.now()
        trials = Trials(task, measurer, start + task.seconds)
        picks: dict[int, Regions] = {}
        for m in task.points:
            ranked = self.model.best(task, m, self.programs(task, m), self.measured)
            trials.time(m, ranked)
            best = trials.fastest(m) or next(iter(ranked), None)
            picks[m] = whole(task, m, best) if best else ()
        return Found(picks, trials.count, measurer.now() - start)

    def programs(self, task: SearchTask, m: int) -> list[Program]:
        """Return what is constructed at one M: each rTile at each cache, in whatever loop order."""
        problem = task.problem(m)
        built = dict.fromkeys(
            construct(task, m, tile, level)
            for tile in self.aligned_tiles(task, m)
            for level in CACHES
        )
        return [other for one in built for other in problem.orders(one)]

    def aligned_tiles(self, task: SearchTask, m: int) -> Iterator[MicroKernel]:
        """Yield the micro-kernels that are rTiles: little padding, and a line of K fits the cache.

        A tile that is half empty would be another, lower one: the paper aligns with whole tiles.
        """
        room = task.hardware.cache_bytes(1) // 2
        for tile in micro_kernels(task.op.kind, task.target, task.op.dtype):
            columns = tile.panels * PANEL // (2 if task.op.kind in GATED else 1)
            padded = max(_padding(m, tile.rows), _padding(task.op.n, columns))
            if padded <= self.padding and footprint(task, tile, _first(task, tile)) <= room:
                yield tile


def _padding(size: int, tile: int) -> float:
    """Return by how much whole tiles exceed a side, as a share of it."""
    return ceil_div(size, tile) * tile / size - 1


def _first(task: SearchTask, tile: MicroKernel) -> Slice:
    return Slice(tile.rows, 1, task.op.k if task.op.kind in GATED else _line(task))


def _line(task: SearchTask) -> int:
    """Return the values of K in a line of activations, or in what lies together of weights."""
    return min(max(LINE_VALUES, FORMATS[task.op.dtype].unit), task.op.k)


def construct(task: SearchTask, m: int, tile: MicroKernel, level: int) -> Program:
    """Return the program of an rTile whose slice is scaled up to a cache, then scaled out."""
    part = shrink(task, m, tile, scale_up(task, m, tile, level))
    return task.program(m, tile, part, scale_out(task, m, tile, part))


def scale_up(task: SearchTask, m: int, tile: MicroKernel, level: int) -> Slice:
    """Grow a slice by one tile at a time along the side of the highest data reuse score.

    One core decides alone: how many slices are left for other cores does not count. It ends where
    the next one outgrows half of the cache, or nothing is saved any more.
    """
    extent = task.problem(m).extents(tile, Scheme())
    unit = {"m": tile.rows, "n": 1} | ({} if task.op.kind in GATED else {"k": _line(task)})
    part, room = _first(task, tile), task.hardware.cache_bytes(level) // 2
    while True:
        score = partial(reuse_score, task, m, tile, part)
        larger = [
            other
            for side, step in unit.items()
            if getattr(part, side) < getattr(extent, side)
            if footprint(task, tile, other := _grown(part, side, step)) <= room
        ]
        best = max(larger, key=score, default=part)
        if best == part or score(best) <= 0:
            return part
        part = best


def _grown(part: Slice, side: str, step: int) -> Slice:
    return replace(part, **{side: getattr(part, side) + step})


def footprint(task: SearchTask, tile: MicroKernel, part: Slice) -> float:
    """Return the bytes of A, B and C that a slice touches (F of the paper's score)."""
    columns = part.n * tile.panels * PANEL
    weight = columns * part.k * FORMATS[task.op.dtype].value_bytes
    return 4 * part.m * part.k + weight + 4 * part.m * columns


def traffic(task: SearchTask, m: int, tile: MicroKernel, part: Slice) -> float:
    """Return the bytes that pass from the next memory if all of C is computed slice by slice (Q).

    A passes once for each slice of columns, B for each of rows, C twice for each of K. A part of a
    slice counts as a part, so that each row or column more is worth something.
    """
    extent = task.problem(m).extents(tile, Scheme())
    columns = extent.n * tile.panels * PANEL
    activations = 4 * extent.m * extent.k * max(1, extent.n / part.n)
    weight = columns * extent.k * FORMATS[task.op.dtype].value_bytes
    sums = 8 * extent.m * columns * max(1, extent.k / part.k)
    return activations + weight * max(1, extent.m / part.m) + sums


def reuse_score(task: SearchTask, m: int, tile: MicroKernel, part: Slice, larger: Slice) -> float:
    """Return the traffic that a larger slice saves per byte of cache more (Roller §3.1)."""
    saved = traffic(task, m, tile, part) - traffic(task, m, tile, larger)
    return saved / (footprint(task, tile, larger) - footprint(task, tile, part))


def shrink(task: SearchTask, m: int, tile: MicroKernel, part: Slice) -> Slice:
    """Halve the side that costs least reuse until every core has a slice ("small operators")."""
    extent = task.problem(m).extents(tile, Scheme())
    while ceil_div(extent.m, part.m) * ceil_div(extent.n, part.n) < task.phase.threads:
        smaller = []
        if part.n > 1:
            smaller.append(replace(part, n=ceil_div(part.n, 2)))
        if part.m > tile.rows:
            tiles = ceil_div(ceil_div(part.m, tile.rows), 2)
            smaller.append(replace(part, m=tiles * tile.rows))
        if not smaller:
            break
        part = min(smaller, key=lambda other: traffic(task, m, tile, other))
    return part


def scale_out(task: SearchTask, m: int, tile: MicroKernel, part: Slice) -> Scheme:
    """Deal whole slices out to threads, along N first; K stays on one core, where it is reused."""
    extent = task.problem(m).extents(tile, Scheme())
    along_n, along_m = ceil_div(extent.n, part.n), ceil_div(extent.m, part.m)
    columns = min(task.phase.threads, along_n)
    return Scheme(min(task.phase.threads // columns, along_m), columns, 1)
