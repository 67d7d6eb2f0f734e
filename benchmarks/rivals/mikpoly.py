"""MikPoly (ASPLOS 2024): several micro-kernels over regions of one product, chosen by cost.

Off line each micro-kernel is timed on one core, for few and many tiles of rows over a short and a
long K, whatever the product's shape: a plane through these times is its cost model. On line, when a
shape is met, C is cut into at most four rectangles (along M, along N, or a part again), each with
the micro-kernel and thread grid of which the busiest thread takes least; the cheapest cut serves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from dovetail.compiler.measure.meter import Measurer
from dovetail.compiler.rules.schedules import MicroKernel, dot_rows, micro_kernels
from dovetail.compiler.search.policy import SearchTask
from dovetail.compiler.search.space import WHOLE, Scheme, ceil_div
from dovetail.ir.artifact import PhasePlan
from dovetail.ir.model import PANEL
from rivals.result import Found, Region, Regions, Trials

GROUP_COLUMNS = 768
"""Columns that a micro-kernel is timed on: whole groups of 1, 2, 3 and 4 panels."""
LENGTHS = (512, 2048)
"""K that it is timed at."""
MORE_TILES = 4
"""Tiles of rows that its second time has more than the first."""
ROUNDS = 9
"""Times of each, of which all shapes live."""
CUTS = 2
"""How often a rectangle is cut, and each part again: two make patterns of up to four regions."""
REGION_SECONDS = 2e-6
"""What a region more costs: a call, and a barrier of the threads."""


@dataclass(frozen=True, slots=True)
class TileCost:
    """Seconds of a column of row tiles, one group of panels wide, as a plane.

    weights: of 1, K, the number of tiles, and K times that. first: the fewest tiles timed.
    """

    weights: tuple[float, ...]
    first: int = 1

    def seconds(self, tiles: int, k: int) -> float:
        """Return the seconds of so many tiles of rows; fewer than were timed save their share."""
        if tiles < self.first:
            return max(self._plane(tiles, k), self._plane(self.first, k) * tiles / self.first)
        return self._plane(tiles, k)

    def _plane(self, tiles: int, k: int) -> float:
        terms = (1, k, tiles, k * tiles)
        return max(1e-9, sum(w * term for w, term in zip(self.weights, terms, strict=True)))


Costs = Mapping[MicroKernel, TileCost]


@dataclass(frozen=True, slots=True)
class MikPoly:
    """Micro-kernels timed off line, polymerized on line."""

    def search(self, task: SearchTask, measurer: Measurer) -> Found:
        """Return the cheapest polymerization at each M, none where nothing could be timed."""
        start, count = measurer.now(), 0
        picks: dict[int, Regions] = {}
        for rounded in sorted({is_rounded(task, m) for m in task.points}):
            costs, trials = learn(task, measurer, start + task.seconds, rounded=rounded)
            count += trials
            mine = [m for m in task.points if is_rounded(task, m) == rounded]
            picks |= {m: polymerize(task, m, costs) for m in mine}
        return Found({m: picks[m] for m in task.points}, count, measurer.now() - start)


def is_rounded(task: SearchTask, m: int) -> bool:
    """Tell whether rows are rounded to bfloat16 at this M: micro-kernels then do other work."""
    return 0 < dot_rows(task.op.dtype, task.target) <= m


def learn(
    task: SearchTask, measurer: Measurer, end: float, *, rounded: bool
) -> tuple[dict[MicroKernel, TileCost], int]:
    """Return the cost of each micro-kernel that could be timed on one core, and the trials."""
    least = dot_rows(task.op.dtype, task.target)
    alone = PhasePlan(threads=1, cpus=task.phase.cpus[:1])
    by_rows: dict[int, list[tuple[MicroKernel, int]]] = defaultdict(list)
    for tile in micro_kernels(task.op.kind, task.target, task.op.dtype):
        for number in tile_counts(tile.rows, least, rounded=rounded):
            by_rows[number * tile.rows].append((tile, number))
    times: dict[MicroKernel, list[tuple[int, int, float]]] = defaultdict(list)
    count = 0
    for k in LENGTHS:
        op = replace(task.op, n=GROUP_COLUMNS, k=k)
        one = replace(task, op=op, phase=alone, rounds=max(task.rounds, ROUNDS))
        trials = Trials(one, measurer, end)
        for m, cases in by_rows.items():
            problem = one.problem(m)
            programs = [one.program(m, tile, WHOLE, Scheme()) for tile, _ in cases]
            for (tile, number), seconds in zip(cases, trials.time(m, programs), strict=True):
                groups = problem.extents(tile, Scheme()).n
                times[tile].append((number, k, seconds / groups))
        count += trials.count
    timed = {tile: found for tile, found in times.items() if np.isfinite(found).all()}
    return {tile: fit(found) for tile, found in timed.items()}, count


def tile_counts(rows: int, least: int, *, rounded: bool) -> tuple[int, ...]:
    """Return the numbers of row tiles to time.

    least: M from which rows are rounded, 0 = never. Of fewer rows a second number may not fit below
    it: the time of one then counts for half of what another tile adds; a tile so tall has none.
    """
    if least and not rounded:
        return tuple(dict.fromkeys((1, (least - 1) // rows))) if rows < least else ()
    first = ceil_div(least, rows) if rounded else 1
    return first, first + MORE_TILES


def fit(times: list[tuple[int, int, float]]) -> TileCost:
    """Return the plane of least squares (and weights) through times (tiles, K, seconds)."""
    terms = np.array([(1, k, tiles, k * tiles) for tiles, k, _ in times], np.float64)
    scale = terms.max(axis=0)
    weights, *_ = np.linalg.lstsq(terms / scale, np.array([s for *_, s in times]), rcond=None)
    first = min(tiles for tiles, *_ in times)
    return TileCost(tuple(float(w) for w in weights / scale), first)


def polymerize(task: SearchTask, m: int, costs: Costs) -> Regions:
    """Return regions of least cost that cover the product once; none without micro-kernels."""
    return Polymerizer(task, m, costs).cover(m, task.op.n, CUTS)[1] if costs else ()


@dataclass(frozen=True, slots=True)
class Polymerizer:
    """Finds the cheapest cover of a product at one M; remembers rectangles by their size."""

    task: SearchTask
    m: int
    costs: Costs
    known: dict[tuple[int, int, int], tuple[float, Regions]] = field(default_factory=dict)

    def cover(self, rows: int, columns: int, cuts: int) -> tuple[float, Regions]:
        """Return seconds and regions of a rectangle at (0, 0) that is cut at most so often."""
        key = (rows, columns, cuts)
        if key not in self.known:
            options = [self._one_kernel(rows, columns)]
            if cuts:
                options += self._cuts(rows, columns, cuts - 1)
            self.known[key] = min(options, key=lambda option: option[0])
        return self.known[key]

    def _one_kernel(self, rows: int, columns: int) -> tuple[float, Regions]:
        part = replace(self.task, op=replace(self.task.op, n=columns))
        problem, k = part.problem(rows), self.task.op.k

        def busiest(option: tuple[MicroKernel, Scheme]) -> float:
            tile, scheme = option
            share = problem.extents(tile, scheme)
            return share.n * self.costs[tile].seconds(ceil_div(share.m, tile.rows), k)

        schemes = problem.schemes(split_k=False)
        best = min(((tile, scheme) for tile in self.costs for scheme in schemes), key=busiest)
        program = part.program(rows, best[0], WHOLE, best[1])
        return REGION_SECONDS + busiest(best), (Region(0, rows, 0, columns, program),)

    def _cuts(self, rows: int, columns: int, cuts: int) -> Iterator[tuple[float, Regions]]:
        """Yield both parts' covers, of cuts behind whole tiles: as many as fit, or one less."""
        for first in _places(rows, {tile.rows for tile in self.costs}):
            upper, lower = self.cover(first, columns, cuts), self.cover(rows - first, columns, cuts)
            yield upper[0] + lower[0], upper[1] + _moved(lower[1], row=first)
        for first in _places(columns, {tile.panels * PANEL for tile in self.costs}):
            left, right = self.cover(rows, first, cuts), self.cover(rows, columns - first, cuts)
            yield left[0] + right[0], left[1] + _moved(right[1], column=first)


def _places(size: int, tiles: set[int]) -> list[int]:
    """Return where a side is cut, inside it."""
    found = {(size // tile - less) * tile for tile in tiles for less in (0, 1)}
    return sorted(place for place in found if 0 < place < size)


def _moved(regions: Regions, row: int = 0, column: int = 0) -> Regions:
    return tuple(replace(r, row=r.row + row, column=r.column + column) for r in regions)
