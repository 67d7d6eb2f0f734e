"""Which tiles a skinny product is made of: regions of C, each with a micro-kernel, and splits of K.

In: M, N, K and a cost table of the micro-kernels on one GPU. Out: a `SkinnyPlan` for the kernel
`gemm_skinny`. As in MikPoly (ASPLOS 2024) the program for a shape is put together on the fly from a
fixed set of micro-kernels, the cheapest by what its waves cost; nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dovetail.ir.errors import ScheduleError

MAX_ROWS = 64
"""More rows than this are a job for tiles in shared memory."""
LANES = 32
SPLITS = (1, 2, 4, 8, 16, 32)
LEAST_STEPS = 4
"""Vector steps of K below which a further split is all overhead."""


@dataclass(frozen=True, slots=True, order=True)
class Tile:
    """A micro-kernel of gemm_skinny: 2**e rows by 2**f columns."""

    e: int
    f: int

    @property
    def rows(self) -> int:
        """Rows of C."""
        return 1 << self.e

    @property
    def columns(self) -> int:
        """Columns of C."""
        return 1 << self.f


TILES = tuple(Tile(e, f) for e in range(5) for f in range(4) if e + f <= 5)
"""Those the kernel has for row-major weights: at most 32 accumulators."""
PANEL_TILES = tuple(Tile(e, 0) for e in range(5))
"""Those it has for weights in blocks: a column of a plan is two panels there, 32 columns of C."""


@dataclass(frozen=True, slots=True)
class TileCost:
    """Seconds of one tile: `fixed`, and for each step of 32 values of K.

    `alone` is the step's latency with the GPU to itself, `busy` its time when every slot works.
    """

    fixed: float
    alone: float
    busy: float

    def seconds(self, steps: int, load: float) -> float:
        """Return the time of a tile of `steps` while a share `load` of the slots is busy."""
        return self.fixed + steps * max(self.alone, self.busy * load)


@dataclass(frozen=True, slots=True)
class CostTable:
    """A GPU as the planner sees it: `slots` warps run side by side; seconds per launch and element.

    `merge` is the time to read or write one partial sum.
    `columns` of C are one of a plan: 32 where weights are panels of blocks.
    """

    slots: int
    launch: float
    merge: float
    tiles: Mapping[Tile, TileCost]
    columns: int = 1


@dataclass(frozen=True, slots=True)
class Region:
    """`row_tiles` x `column_tiles` tiles from row m and column n on."""

    m: int
    n: int
    row_tiles: int
    column_tiles: int
    tile: Tile

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return self.row_tiles * self.column_tiles


@dataclass(frozen=True, slots=True)
class SkinnyPlan:
    """Regions that cover C once, stretches of K, and the predicted time."""

    regions: tuple[Region, ...]
    splits: int
    seconds: float

    @property
    def warps(self) -> int:
        """Work items: the most warps that have something to do."""
        return self.splits * sum(region.tiles for region in self.regions)

    def table(self) -> npt.NDArray[np.int64]:
        """Return the kernel's operand `regions`, [regions][7]."""
        rows, before = [], 0
        for r in self.regions:
            rows.append((r.m, r.n, r.row_tiles, r.column_tiles, r.tile.e, r.tile.f, before))
            before += r.tiles
        return np.array(rows, np.int64)


def plan_skinny(m: int, n: int, k: int, costs: CostTable) -> SkinnyPlan:
    """Return the cheapest plan of C[m, n] over k; ScheduleError outside 1 <= m <= 64, n, k >= 1."""
    if not (1 <= m <= MAX_ROWS and n >= 1 and k >= 1):
        raise ScheduleError(
            f"a skinny product has 1 to {MAX_ROWS} rows and at least one column and step, "
            f"not M = {m}, N = {n}, K = {k}"
        )
    plans = (
        plan_cover(m, -(-n // costs.columns), k, cover, splits, costs)
        for splits in usable_splits(k)
        for cover in row_covers(m)
    )
    return min(plans, key=lambda plan: plan.seconds)


def usable_splits(k: int) -> tuple[int, ...]:
    """Return the splits that leave each stretch of K enough steps; always 1."""
    steps = -(-k // LANES)
    return tuple(s for s in SPLITS if s == 1 or steps >= s * LEAST_STEPS)


@lru_cache
def row_covers(m: int, below: int = 5) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return every way to stack m rows from bands of (tiles, e), heights falling.

    A band takes as many tiles as fit, so that the next one covers what is left.
    """
    if m == 0:
        return ((),)
    return tuple(
        ((m >> e, e), *rest)
        for e in range(below)
        if m >> e
        for rest in row_covers(m - (m >> e << e), e)
    )


def plan_cover(
    m: int, n: int, k: int, cover: Iterable[tuple[int, int]], splits: int, costs: CostTable
) -> SkinnyPlan:
    """Return the plan of one stack of bands, each as wide in its tiles as is cheapest for it.

    n: columns of the plan.
    """
    steps = -(-k // (LANES * splits))
    regions: list[Region] = []
    at = 0
    for row_tiles, e in cover:
        bands = [tuple(cut_columns(at, n, row_tiles, tile)) for tile in costs.tiles if tile.e == e]
        regions += min(bands, key=lambda band: makespan(band, splits, steps, costs))
        at += row_tiles << e
    seconds = makespan(regions, splits, steps, costs) + costs.launch
    if splits > 1:
        seconds += costs.launch + costs.merge * (2 * splits + 1) * m * n * costs.columns
    return SkinnyPlan(tuple(regions), splits, seconds)


def cut_columns(m: int, n: int, row_tiles: int, tile: Tile) -> Iterator[Region]:
    """Yield the regions of a band of rows: whole tiles, then halved ones for the columns left."""
    at = 0
    for f in range(tile.f, -1, -1):
        count = (n - at) >> f
        if count:
            yield Region(m, at, row_tiles, count, Tile(tile.e, f))
            at += count << f


def makespan(regions: Iterable[Region], splits: int, steps: int, costs: CostTable) -> float:
    """Return when the last warp is done: tiles go round the warps, as the kernel deals them."""
    counts = [(region.tiles * splits, region.tile) for region in regions]
    total = sum(count for count, _ in counts)
    warps = min(total, costs.slots)
    spent = np.zeros(warps)
    first = 0
    for count, tile in counts:
        seconds = costs.tiles[tile].seconds(steps, warps / costs.slots)
        spent += count // warps * seconds
        extra = (first + np.arange(count % warps)) % warps
        spent[extra] += seconds
        first += count
    return float(spent.max())


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """What the assumed cost table is made from: multiprocessors, clock in Hz, bytes per second."""

    multiprocessors: int
    clock: float
    bandwidth: float


RESIDENT_WARPS = 16
"""Warps of a multiprocessor with the registers of the largest tile."""
ISSUE = 4  # warp instructions a multiprocessor starts in a cycle
MEMORY_CYCLES = 600
SHUFFLE_CYCLES = 150  # one reduction over a warp
UNPACK = 6  # instructions that make a code a value
CACHE_FACTOR = 4  # activations come from caches, that much faster than memory
LAUNCH_SECONDS = 4e-6


def assumed_costs(gpu: GpuSpec, weight_bytes: float, rows_bytes: int = 4) -> CostTable:
    """Return a table from the machine's rates alone: memory or issue slots, whichever is short.

    weight_bytes, rows_bytes: of a value of row-major weights, and of activations.
    """
    tiles = {}
    for tile in TILES:
        elements = tile.rows * tile.columns
        weights, rows = tile.columns * LANES * weight_bytes, tile.rows * LANES * rows_bytes
        instructions = elements + 2 * (tile.rows + tile.columns) + 4
        read = weights + rows / CACHE_FACTOR
        tiles[tile] = _assume_cost(gpu, read, instructions, SHUFFLE_CYCLES * elements)
    return _assume_table(gpu, tiles)


def assumed_panel_costs(gpu: GpuSpec, weight_bytes: float) -> CostTable:
    """Return the table of weights in blocks, a value of which takes `weight_bytes`."""
    read = LANES * LANES * weight_bytes
    tiles = {t: _assume_cost(gpu, read, LANES * (2 * t.rows + UNPACK), 0) for t in PANEL_TILES}
    return _assume_table(gpu, tiles, LANES)


def _assume_cost(gpu: GpuSpec, read: float, instructions: int, end: int) -> TileCost:
    """Return a tile's cost; read: bytes for 32 values of K, end: cycles behind the last of them."""
    share = gpu.bandwidth / (gpu.multiprocessors * RESIDENT_WARPS)
    issue = instructions * RESIDENT_WARPS / (ISSUE * gpu.clock)
    fixed, alone = ((MEMORY_CYCLES + cycles) / gpu.clock for cycles in (end, instructions))
    return TileCost(fixed, alone, max(read / share, issue))


def _assume_table(gpu: GpuSpec, tiles: Mapping[Tile, TileCost], columns: int = 1) -> CostTable:
    slots = gpu.multiprocessors * RESIDENT_WARPS
    return CostTable(slots, LAUNCH_SECONDS, 4 / gpu.bandwidth, tiles, columns)
