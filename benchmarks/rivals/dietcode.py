"""DietCode (MLSys 2022): one set of micro-kernels for all shapes, and a cost model that is learnt.

A micro-kernel is a register tile with its slice and the order of its loops, whatever M is. A few
shapes are sampled; in rounds the programs that the model likes best are timed on them and it learns
anew. It predicts the seconds of one full tile from what a micro-kernel is; a shape costs that times
the tiles of its busiest thread, padded ones among them (the paper's f_MK, f_PAD and f_OCC).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dovetail.compiler.measure.meter import Measurer
from dovetail.compiler.rules.schedules import GATED, MicroKernel, micro_kernels
from dovetail.compiler.search.dietcode import sample_points
from dovetail.compiler.search.policy import SearchTask
from dovetail.compiler.search.space import Program, Scheme, Slice, ceil_div
from dovetail.ir.formats import FORMATS
from dovetail.ir.model import PANEL
from dovetail.ir.schedule import ORDERS
from rivals.learner import fit_logarithms
from rivals.result import Found, Regions, Trials, whole

ROW_TILES, GROUPS, VALUES = (0, 2, 8), (1, 2, 4), (0, 256, 1024)
"""Sides of the set's slices: tiles of rows, groups of panels, values of K; 0 = whole."""
RANDOM = 0.1
"""Share of a round that the model does not choose."""


@dataclass(frozen=True, slots=True, order=True)
class Shared:
    """One micro-kernel of the shared set."""

    tile: MicroKernel
    slice: Slice
    order: str


@dataclass(frozen=True, slots=True)
class DietCode:
    """samples: shapes that are measured. lessons, batch: rounds, and programs timed in each."""

    samples: int = 4
    lessons: int = 8
    batch: int = 64
    seed: int = 0

    def search(self, task: SearchTask, measurer: Measurer) -> Found:
        """Return a program of the micro-kernels that were timed at each M.

        At a sampled M the fastest, at others that of least predicted cost; none where none was
        right.
        """
        start, draw = measurer.now(), random.Random(self.seed)
        trials = Trials(task, measurer, start + task.seconds)
        sampled = sample_points(task.points, self.samples)
        shared = {m: programs(task, m) for m in task.points}
        model = None
        for _ in range(self.lessons):
            for m in sampled:
                trials.time(m, self._next(task, m, list(shared[m]), trials, model, draw))
            model = learn(task, trials)
        picks: dict[int, Regions] = {m: () for m in task.points}
        tuned = {shared[m][p] for (m, p), seconds in trials.found.items() if seconds < math.inf}
        for m in task.points if tuned else ():
            best = trials.fastest(m)
            if best is None:
                known = [instantiate(task, m, each) for each in sorted(tuned)]
                best = known[int(np.argmin(predict(task, m, known, model)))]
            picks[m] = whole(task, m, best)
        return Found(picks, trials.count, measurer.now() - start)

    def _next(
        self,
        task: SearchTask,
        m: int,
        shared: Sequence[Program],
        trials: Trials,
        model: Any,
        draw: random.Random,
    ) -> list[Program]:
        """Return a shape's share of a round: what the model likes best, and some at random."""
        count = max(1, self.batch // self.samples)
        new = [program for program in shared if (m, program) not in trials.found]
        draw.shuffle(new)
        if model is None or not new:
            return new[:count]
        luck = min(len(new), math.ceil(RANDOM * count))
        costs = predict(task, m, new[luck:], model)
        ranked = sorted(zip(costs, new[luck:], strict=True))
        return new[:luck] + [program for _, program in ranked[: count - luck]]


def shared_set(task: SearchTask) -> list[Shared]:
    """Return the micro-kernels that all shapes share; loops of one slice have one order."""
    depths = (0,) if task.op.kind in GATED else VALUES
    return [
        Shared(tile, Slice(tiles * tile.rows, groups, values), order)
        for tile in micro_kernels(task.op.kind, task.target, task.op.dtype)
        for tiles in ROW_TILES
        for groups in GROUPS
        for values in depths
        for order in (ORDERS if tiles or values else ORDERS[:1])
    ]


def programs(task: SearchTask, m: int) -> dict[Program, Shared]:
    """Return the programs at one M that differ, and a micro-kernel of each."""
    found: dict[Program, Shared] = {}
    for shared in shared_set(task):
        program = instantiate(task, m, shared)
        found.setdefault(program, shared)
    return found


def instantiate(task: SearchTask, m: int, shared: Shared) -> Program:
    """Return a micro-kernel's program at one M."""
    scheme = occupying_scheme(task, m, shared.tile)
    return task.program(m, shared.tile, shared.slice, scheme, shared.order)


def occupying_scheme(task: SearchTask, m: int, tile: MicroKernel) -> Scheme:
    """Return the thread grid of which the busiest thread has the fewest tiles (f_OCC)."""
    schemes = task.problem(m).schemes(split_k=False)
    return min(schemes, key=lambda scheme: full_tiles(task, m, tile, scheme))


def full_tiles(task: SearchTask, m: int, tile: MicroKernel, scheme: Scheme) -> int:
    """Return the tiles of the busiest thread, each counted as a full one (f_PAD)."""
    share = task.problem(m).extents(tile, scheme)
    return ceil_div(share.m, tile.rows) * share.n


def describe(task: SearchTask, m: int, program: Program) -> list[float]:
    """Return what the model sees of a micro-kernel.

    On a CPU a tile also costs less the more tiles of rows find the same weights in the cache.
    """
    tile, part, op = program.tile, program.slice, task.op
    share = task.problem(m).extents(tile, program.scheme)
    rows, values = part.m or share.m, part.k or op.k
    weight = tile.panels * PANEL * values * FORMATS[op.dtype].value_bytes
    reuse = ceil_div(min(rows, share.m), tile.rows)
    return [
        float(tile.rows),
        float(tile.panels),
        math.log2(reuse),
        math.log2(ceil_div(share.m, rows)),
        float(part.n or share.n),
        math.log2(values),
        math.log2(weight),
        math.log2(4 * rows * values),
        float(ORDERS.index(program.order)),
    ]


def learn(task: SearchTask, trials: Trials) -> Any:
    """Return a model of the logarithm of a full tile's seconds; None without times."""
    timed = [(m, p, s) for (m, p), s in trials.found.items() if s < math.inf]
    return fit_logarithms(
        [describe(task, m, p) for m, p, _ in timed],
        [s / full_tiles(task, m, p.tile, p.scheme) for m, p, s in timed],
    )


def predict(task: SearchTask, m: int, chosen: Sequence[Program], model: Any) -> list[float]:
    """Return the predicted seconds of each program."""
    if not chosen:
        return []
    each = np.exp(model.predict(np.array([describe(task, m, p) for p in chosen])))
    tiles = [full_tiles(task, m, p.tile, p.scheme) for p in chosen]
    return [float(seconds * count) for seconds, count in zip(each, tiles, strict=True)]
