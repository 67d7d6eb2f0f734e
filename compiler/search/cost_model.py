"""The cost model: roofline and cache traffic of a program, corrected by what trials have shown.

In: a task, M, a program. Out: predicted seconds. It prunes before measuring and ranks where nothing
can be measured; without a correction (`fit`) it is the analytic estimate alone, whose machine
figures are assumed, so that only its ranking means something.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dovetail.compiler.rules.schedules import GATED
from dovetail.compiler.search.policy import SearchTask
from dovetail.compiler.search.space import PREFETCHES, Program, Scheme, Slice
from dovetail.ir.formats import FORMATS
from dovetail.ir.model import PANEL
from dovetail.ir.schedule import ORDERS

CLOCK = 3e9
FMA_PORTS = {4: 2, 8: 2, 16: 1, 1: 1}
"""Vector lanes to multiply-adds begun in one cycle; the wide ones of many cores fill both ports."""
LOADS, FMA_LATENCY = 2, 4
TILE_CYCLES = 30.0
"""Entering and leaving one micro-kernel."""
BARRIER_SECONDS = 2e-6
LEVEL_BYTES_PER_SECOND = (2e11, 6e10, 2.5e10, 1.2e10)
"""One core's reads from L1, L2, the last level and memory."""
MEMORY_BYTES_PER_SECOND = 4e10
"""What all cores read from memory together."""


Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Work:
    """What the busiest thread does. Seconds: multiply-adds, and reads from each cache level."""

    compute: float
    traffic: tuple[float, ...]
    calls: float
    reduce: float

    @property
    def seconds(self) -> float:
        """The slowest of computing and memory, and a share of the caches' traffic beside it."""
        *near, memory = self.traffic
        return max(self.compute, memory) + 0.3 * sum(near) + self.calls + self.reduce

    @property
    def seconds_without_memory(self) -> float:
        """What it takes where memory is never waited for."""
        return self.compute + 0.3 * sum(self.traffic[:-1]) + self.calls + self.reduce


def estimate_work(task: SearchTask, m: int, program: Program) -> Work:
    """Return the work of `program` on the product at M = m (the roofline, level by level)."""
    op, lanes = task.op, task.target.lanes
    problem, tile = task.problem(m), program.tile
    whole = problem.extents(tile, program.scheme)
    part = [
        size or extent for size, extent in zip(_sides(program.slice), _sides(whole), strict=True)
    ]
    rows, groups, depth = (float(side) for side in _sides(whole))
    slices_m, slices_k = math.ceil(rows / part[0]), math.ceil(depth / part[2])
    tiles = slices_m * math.ceil(min(part[0], rows) / tile.rows)
    height, vectors = rows / tiles, tile.panels * PANEL / lanes
    cycles = max(
        height * vectors / FMA_PORTS[lanes],
        (height + vectors) / LOADS,
        FMA_LATENCY * min(1.0, height * vectors),
    )
    group = tile.panels * PANEL * FORMATS[op.dtype].value_bytes
    weight = groups * group * depth
    seen = part[1] * group * part[2]
    columns = tile.panels * PANEL / (2 if op.kind in GATED else 1)
    sizes = part, (rows, groups, depth)
    per_level = [0.0, 0.0, 0.0, weight]
    again = _level(task, _passing(program.order, "m", sizes) * group)
    per_level[again] += weight * (slices_m - 1)
    per_level[_level(task, seen)] += weight * (tiles - slices_m)
    again = _level(task, 4 * _passing(program.order, "n", sizes))
    per_level[again] += 4 * rows * depth * groups / part[1]
    per_level[_level(task, 4 * height * part[2])] += 4 * rows * depth * groups
    again = _level(task, 4 * _passing(program.order, "k", sizes) * columns)
    per_level[again] += 8 * rows * groups * columns * slices_k
    speeds = list(LEVEL_BYTES_PER_SECOND)
    speeds[3] = min(speeds[3], MEMORY_BYTES_PER_SECOND / task.phase.threads)
    sums = (program.scheme.k - 1) * 8.0 * m * problem.units * PANEL / task.phase.threads
    return Work(
        compute=groups * tiles * depth * cycles / CLOCK,
        traffic=tuple(size / speed for size, speed in zip(per_level, speeds, strict=True)),
        calls=groups * tiles * slices_k * TILE_CYCLES / CLOCK,
        reduce=sums / speeds[2] + BARRIER_SECONDS if sums else 0.0,
    )


def _passing(order: str, side: str, size: tuple[Sequence[float], Sequence[float]]) -> float:
    """Return how much of the operand without `side` passes by from one slice of `side` to the next.

    `size`: m, n, k of one slice and of the whole share. Loops inside that over `side` run through.
    """
    passed = order.index(side)
    return math.prod(
        size[order.index(other) > passed][place]
        for place, other in enumerate("mnk")
        if other != side
    )


def _level(task: SearchTask, size: float) -> int:
    """Return the cache level (0 = L1) that holds `size` bytes beside what streams by; 3 = none."""
    hardware = task.hardware
    for level, held in enumerate((*map(hardware.cache_bytes, (1, 2)), hardware.l3_bytes)):
        if size <= held / 2:
            return level
    return 3


def _sides(part: Slice | Scheme) -> tuple[int, int, int]:
    return part.m, part.n, part.k


@dataclass(frozen=True, slots=True)
class CostModel:
    """Predicts seconds: the analytic estimate, times a fitted correction where there is one.

    correction: what `describe_program` sees of programs, a row each, to the logarithms of factors.
    samples: how many timed programs it was fitted to.
    """

    correction: Callable[[Array], Array] | None = field(default=None, compare=False)
    samples: int = 0

    def seconds(self, task: SearchTask, m: int, program: Program) -> float:
        """Return the predicted seconds of one program."""
        return self.predict(task, m, (program,))[0]

    def predict(self, task: SearchTask, m: int, programs: Sequence[Program]) -> list[float]:
        """Return the predicted seconds of each program."""
        work = [estimate_work(task, m, program).seconds for program in programs]
        if self.correction is None or not programs:
            return work
        rows = np.array([describe_program(task, m, program) for program in programs])
        factors = np.exp(self.correction(rows))
        return [float(w * f) for w, f in zip(work, factors, strict=True)]

    def best(
        self, task: SearchTask, m: int, programs: Iterable[Program], count: int
    ) -> list[Program]:
        """Return the `count` programs predicted fastest, best first."""
        known = list(programs)
        seconds = dict(zip(known, self.predict(task, m, known), strict=True))
        return sorted(known, key=seconds.__getitem__)[:count]


def describe_program(task: SearchTask, m: int, program: Program) -> list[float]:
    """Return what a correction sees: shape, tile, slice, scheme, and shares of the estimate."""
    work = estimate_work(task, m, program)
    whole = task.problem(m).extents(program.tile, program.scheme)
    shares = [work.compute, *work.traffic, work.calls, work.reduce]
    return [
        math.log2(m),
        math.log2(task.op.n),
        math.log2(task.op.k),
        float(task.op.kind in GATED),
        FORMATS[task.op.dtype].value_bytes,
        float(program.tile.rows),
        float(program.tile.panels),
        whole.m / program.tile.rows % 1,
        *(math.log2(1 + size) for size in _sides(program.slice)),
        *(float(size) for size in _sides(program.scheme)),
        float(ORDERS.index(program.order)),
        float(PREFETCHES.index(program.prefetch)) if program.prefetch in PREFETCHES else -1.0,
        *(share / work.seconds for share in shares),
    ]
