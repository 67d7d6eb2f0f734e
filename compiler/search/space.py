"""The search space: micro-kernel, computation slice and polymerization scheme of one product.

In: a matrix product, its M, a target and a number of threads. Out: `Program`s, each of which is one
kernel with schedule values. Names follow Sandwich §3.2 and §6.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dovetail.codegen.isa.target import Target
from dovetail.compiler.measure.meter import Candidate, GemmCase
from dovetail.compiler.rules.schedules import (
    FAR_PREFETCH,
    GATED,
    K_UNIT,
    SINGLE_PREFETCH,
    SPREAD_PREFETCH,
    GemmOp,
    MicroKernel,
    built_tiles,
    default_tile,
    make_schedule,
    micro_kernels,
    takes_tiles,
)
from dovetail.ir.model import PANEL, SPLIT_K_ELEMENTS
from dovetail.ir.schedule import ORDERS, SCHEDULE_VALUES

PREFETCHES = (
    *(0, 256, 512, 1024, 2048, 4096),
    *(SPREAD_PREFETCH, SINGLE_PREFETCH, -2048, FAR_PREFETCH, -8192),
)
"""Distances that are tried: what waits for memory, and how far it is, no formula tells."""


@dataclass(frozen=True, slots=True, order=True)
class Slice:
    """Computation slice b_M x b_N x b_K: rows, groups of panels, values of K; 0 = whole."""

    m: int = 0
    n: int = 0
    k: int = 0


WHOLE = Slice(0, 1, 0)
"""Panels outside, all rows inside, K at once: where the rules begin."""


@dataclass(frozen=True, slots=True, order=True)
class Scheme:
    """Polymerization scheme t_M x t_N x t_K: the thread grid; t_K > 1 splits the reduction."""

    m: int = 1
    n: int = 1
    k: int = 1


@dataclass(frozen=True, slots=True, order=True)
class Program:
    """A tensor program of one product: everything a schedule row says.

    order: how the loops over slices are nested, one of `ORDERS`.
    """

    tile: MicroKernel
    slice: Slice
    scheme: Scheme
    prefetch: int
    order: str = ORDERS[0]


@dataclass(frozen=True, slots=True)
class Problem:
    """One matrix product at one M for `threads` threads pinned to `cpus` (empty = unpinned)."""

    op: GemmOp
    m: int
    target: Target
    threads: int
    cpus: tuple[int, ...] = ()

    @property
    def case(self) -> GemmCase:
        """What a Measurer times."""
        op = self.op
        return GemmCase(
            kind=op.kind,
            n=op.n,
            k=op.k,
            m=self.m,
            dtype=op.dtype,
            threads=self.threads,
            cpus=self.cpus,
        )

    @property
    def units(self) -> int:
        """Units that threads share along N: panels of C."""
        return ceil_div(self.op.n, PANEL)

    def candidate(self, program: Program) -> Candidate:
        """Return the kernel and schedule values of `program`."""
        part, scheme = program.slice, program.scheme
        schedule = make_schedule(
            m_tile=program.tile.rows,
            block_m=part.m,
            block_n=part.n,
            block_k=part.k,
            grid_m=scheme.m,
            grid_n=scheme.n,
            grid_k=scheme.k,
            prefetch=program.prefetch,
            order=ORDERS.index(program.order),
        )
        return Candidate(self.op.kernel(self.target, program.tile), schedule)

    def program(self, candidate: Candidate) -> Program | None:
        """Return the program that `candidate` is, None where its kernel holds none of our tiles.

        Schedules of versions before there was a choice of orders are of the first one.
        """
        built = built_tiles(self.op.kind, self.target, self.op.dtype)
        panels = {self.op.kernel(self.target, tile): count for count, tile in built.items()}
        values = dict.fromkeys(("order",), 0) | dict(
            zip(SCHEDULE_VALUES, candidate.schedule, strict=False)
        )
        known = candidate.kernel in panels and values.keys() == set(SCHEDULE_VALUES)
        if not known or values["order"] not in range(len(ORDERS)):
            return None
        return Program(
            MicroKernel(values["m_tile"], panels[candidate.kernel]),
            Slice(values["block_m"], values["block_n"], values["block_k"]),
            Scheme(values["grid_m"], values["grid_n"], values["grid_k"]),
            values["prefetch"],
            ORDERS[values["order"]],
        )

    def extents(self, tile: MicroKernel, scheme: Scheme) -> Slice:
        """Return the largest share of one thread: rows, groups of `tile` and values of K."""
        panels = tile.panels // (2 if self.op.kind in GATED else 1)
        columns = ceil_div(self.units, scheme.n)
        lines = ceil_div(self.op.k, PANEL)
        return Slice(
            ceil_div(self.m, scheme.m),
            ceil_div(columns, panels),
            ceil_div(lines, scheme.k) * PANEL,
        )

    def canonical(self, tile: MicroKernel, part: Slice, scheme: Scheme) -> Slice:
        """Return `part` with 0 for every side that holds a thread's whole share."""
        most = self.extents(tile, scheme)

        def side(size: int, whole: int) -> int:
            return size if 0 < size < whole else 0

        one_group = 1 if most.n == 1 else side(part.n, most.n)
        k = side(part.k, most.k) if self.op.kind not in GATED else 0
        return Slice(side(part.m, most.m), one_group, k)

    def effective(self, program: Program) -> Program:
        """Return what `program` does at this M: one that is equal does the same."""
        rows = program.tile.rows
        part = self.canonical(program.tile, program.slice, program.scheme)
        if not part.m and program.scheme.m == 1:
            rows = ceil_div(self.m, ceil_div(self.m, rows))
        return replace(program, tile=MicroKernel(rows, program.tile.panels), slice=part)

    def orders(self, program: Program) -> tuple[Program, ...]:
        """Return `program` in every order that differs: loops of one slice may lie anywhere."""
        part, whole = program.slice, self.extents(program.tile, program.scheme)
        sliced = {side for side in "mnk" if 0 < getattr(part, side) < getattr(whole, side)}
        nests: dict[tuple[str, ...], str] = {}
        for order in ORDERS:
            nests.setdefault(tuple(side for side in order if side in sliced), order)
        return tuple(replace(program, order=order) for order in nests.values())

    def tiles(self) -> tuple[MicroKernel, ...]:
        """Return the micro-kernels that differ at this M.

        M rows are cut into tiles of nearly equal height, so that all heights which give the same
        number of tiles are one program; the true height stands for them. In tile registers all
        kernels do the same: that of the rules stands for them.
        """
        tiles = micro_kernels(self.op.kind, self.target, self.op.dtype)
        if takes_tiles(self.op, self.target, self.m):
            tiles = (default_tile(self.op, self.target, self.m),)
        heights = {(tile.panels, ceil_div(self.m, ceil_div(self.m, tile.rows))) for tile in tiles}
        return tuple(MicroKernel(rows, panels) for panels, rows in sorted(heights))

    def schemes(self, *, split_k: bool = True) -> tuple[Scheme, ...]:
        """Return all thread grids with a share for every thread, else those that use the most."""
        valid = [s for s in _grids(self.threads) if self._allows(s, split_k)]
        most = max(s.m * s.n * s.k for s in valid)
        return tuple(s for s in valid if s.m * s.n * s.k == most)

    def _allows(self, scheme: Scheme, split_k: bool) -> bool:
        if scheme.m > self.m or scheme.n > self.units:
            return False
        if scheme.k == 1:
            return True
        sums = (scheme.k - 1) * self.m * self.units * PANEL
        long_enough = scheme.k * K_UNIT <= self.op.k
        return split_k and self.op.kind not in GATED and long_enough and sums <= SPLIT_K_ELEMENTS


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def _grids(threads: int) -> Iterator[Scheme]:
    for m in range(1, threads + 1):
        for n in range(1, threads // m + 1):
            for k in range(1, threads // (m * n) + 1):
                yield Scheme(m, n, k)
