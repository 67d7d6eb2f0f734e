"""The policy `sandwich`: micro-kernel, slice and scheme searched jointly (Sandwich §3.2, §6).

For every M: each micro-kernel with the slices of the rules and of the M before, fast start,
finetune under every polymerization scheme, the best of all, then in other orders of its loops. A
sliding window over micro-kernels and the reuse of slices that have settled keep it short.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from dovetail.compiler.measure.meter import Measurer
from dovetail.compiler.rules.schedules import K_UNIT, MOST_ROWS, MicroKernel
from dovetail.compiler.search.cost_model import CostModel
from dovetail.compiler.search.growth import distance, drive, fast_start, finetune, room_for
from dovetail.compiler.search.policy import (
    MEASURED,
    REUSED,
    Bench,
    Choice,
    SearchResult,
    SearchTask,
)
from dovetail.compiler.search.space import PREFETCHES, WHOLE, Program, Scheme, Slice
from dovetail.ir.schedule import ORDERS

RIVAL_DISTANCES = 2
"""How many distances, the best program's best, other panel counts are tried with."""


@dataclass(frozen=True, slots=True)
class Sandwich:
    """The policy and its settings.

    window: sigma, the number of shapes whose micro-kernels stay candidates. breadth: programs timed
    at one M before slices grow, micro-kernels with each of the first slices, best first by the cost
    model. growing: micro-kernels whose slices grow, of the ones within `slack` of the best.
    threshold: a slice that differs less from the average of the last `settled` ones is fixed for
    larger M. Ablations are subclasses without one of the methods.
    """

    window: int = 16
    breadth: int = 64
    growing: int = 8
    slack: float = 0.5
    threshold: float = 0.25
    settled: int = 3
    model: CostModel = field(default_factory=CostModel)

    def search(self, task: SearchTask, measurer: Measurer) -> SearchResult:
        """Return the best program found at each M, smallest first."""
        start, trials = measurer.now(), 0
        history: list[Program] = []
        choices: dict[int, Choice] = {}
        weights = {m: math.sqrt(self.model.seconds(task, m, task.default(m))) for m in task.points}
        for i, m in enumerate(task.points):
            left = start + task.seconds - measurer.now()
            share = weights[m] / sum(weights[later] for later in task.points[i:])
            bench = Bench(task, measurer, m, measurer.now() + max(left, 0) * share)
            tall = [choices[m].program for m in choices if m > MOST_ROWS[task.op.kind]]
            fixed = self.settled_on(tall)
            self._search_at(bench, self.tiles(bench, history), history, fixed)
            choices[m] = bench.choice(REUSED if fixed else MEASURED)
            history.append(choices[m].program)
            trials += bench.trials
        return SearchResult(choices, trials, measurer.now() - start)

    def tiles(self, bench: Bench, history: Sequence[Program]) -> tuple[MicroKernel, ...]:
        """Return the candidates: all for the first sigma shapes, then the last sigma chosen."""
        tiles: Iterable[MicroKernel] = bench.problem.tiles()
        if len(history) >= self.window:
            tiles = dict.fromkeys(program.tile for program in history[-self.window :])
        return tuple(tiles)

    def settled_on(self, history: Sequence[Program]) -> Program | None:
        """Return the last program where its slice is near the average before it, same scheme.

        `history` has shapes of several row tiles only: one tile says nothing about slices.
        """
        last = history[-self.settled - 1 :]
        if len(last) <= self.settled or len({program.scheme for program in last}) > 1:
            return None
        before = [program.slice for program in last[:-1]]
        average = Slice(*(sum(side) // len(before) for side in _sides(before)))
        near = distance(last[-1].slice, average) <= self.threshold
        return last[-1] if near else None

    def _search_at(
        self,
        bench: Bench,
        tiles: Sequence[MicroKernel],
        history: Sequence[Program],
        fixed: Program | None,
    ) -> None:
        """Time programs of one M: with a fixed slice only the micro-kernels are compared."""
        task, m = bench.task, bench.m
        scheme = fixed.scheme if fixed else bench.default.scheme
        known = [fixed] if fixed else [bench.default, *history[-1:]]
        last = [(p.slice, p.order) for p in known]
        seeds = last if fixed else [(WHOLE, ORDERS[0]), *last]
        first = [task.program(m, tile, part, scheme, o) for tile in tiles for part, o in seeds]
        first = self.model.best(task, m, dict.fromkeys(first), self.breadth)
        bench.time((bench.default, *first))
        self.vary_prefetch(bench)  # before slices grow: of few rows they gain most, in few trials
        if fixed is None:
            self.grow_slices(bench)
            self.vary_orders(bench)
        self.vary_prefetch(bench)

    def grow_slices(self, bench: Bench) -> None:
        """Grow the slices of the micro-kernels that promise most."""
        grown = self._fast_start(bench, self._promising(bench))
        self._finetune(bench, grown)

    def _promising(self, bench: Bench) -> list[MicroKernel]:
        """Return the micro-kernels within `slack` of the best, best first."""
        ranked = sorted((bench.default, *bench.found), key=bench.cost)
        limit = (1 + self.slack) * bench.cost(ranked[0])
        tiles = dict.fromkeys(p.tile for p in ranked if bench.cost(p) <= limit)
        return list(tiles)[: self.growing]

    def _fast_start(self, bench: Bench, tiles: Sequence[MicroKernel]) -> dict[MicroKernel, Slice]:
        scheme = bench.default.scheme
        growths = {}
        for tile in tiles:
            room = room_for(
                _unit(tile), bench.problem.extents(tile, Scheme()), bench.task.phase.threads
            )
            growths[tile] = fast_start(room.unit, room)

        def cost(asked: Sequence[tuple[MicroKernel, Slice]]) -> list[float]:
            return bench.time(bench.task.program(bench.m, t, part, scheme) for t, part in asked)

        return drive(growths, cost)

    def vary_orders(self, bench: Bench) -> None:
        """Try the orders of the best program that has several; finetune under a better one.

        Most of the best slices have one loop, or two of which nothing is gained: only one program
        is turned, so that this takes few trials.
        """
        turns = (bench.problem.orders(p) for p in sorted(bench.found, key=bench.cost))
        several = next((found for found in turns if len(found) > 1), ())
        bench.time(several)
        best = bench.best(several)
        if best.order == ORDERS[0]:
            return
        task, tile, scheme = bench.task, best.tile, best.scheme
        room = room_for(_unit(tile), bench.problem.extents(tile, scheme), 1)

        def cost(asked: Sequence[tuple[str, Slice]]) -> list[float]:
            return bench.time(task.program(bench.m, tile, p, scheme, order) for order, p in asked)

        drive({best.order: finetune(best.slice, room)}, cost)

    def schemes(self, bench: Bench) -> tuple[Scheme, ...]:
        """Return the thread grids that slices are finetuned under."""
        return bench.problem.schemes()

    def _finetune(self, bench: Bench, grown: dict[MicroKernel, Slice]) -> None:
        problem, growths = bench.problem, {}
        for tile, part in grown.items():
            for scheme in self.schemes(bench):
                room = room_for(_unit(tile), problem.extents(tile, scheme), 1)
                alike = (tile, scheme, ORDERS[0])  # slices that are good in others may be poor here
                timed = [p for p in bench.found if (p.tile, p.scheme, p.order) == alike]
                best = min(timed, key=bench.cost).slice if timed else part
                growths[tile, scheme] = finetune(best, room)

        def cost(asked: Sequence[tuple[tuple[MicroKernel, Scheme], Slice]]) -> list[float]:
            return bench.time(
                bench.task.program(bench.m, tile, part, scheme) for (tile, scheme), part in asked
            )

        drive(growths, cost)

    def vary_prefetch(self, bench: Bench) -> None:
        """Try all prefetch distances for the best program, the best of them for its rivals.

        These are the best of other panel counts, which are other numbers of streams to fetch.
        """
        best, *others = sorted(dict.fromkeys((bench.default, *bench.found)), key=bench.cost)
        ladder = [replace(best, prefetch=prefetch) for prefetch in PREFETCHES]
        bench.time(ladder)
        nearest = sorted(dict.fromkeys((best, *ladder)), key=bench.cost)[:RIVAL_DISTANCES]
        rivals = {p.tile.panels: p for p in reversed(others)}
        rivals.pop(best.tile.panels, None)
        bench.time(replace(p, prefetch=d.prefetch) for p in rivals.values() for d in nearest)


def _unit(tile: MicroKernel) -> Slice:
    return Slice(tile.rows, 1, K_UNIT)


def _sides(parts: Sequence[Slice]) -> Iterable[tuple[int, ...]]:
    return zip(*((part.m, part.n, part.k) for part in parts), strict=True)
