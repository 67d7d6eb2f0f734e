"""Products of few rows by generated kernels, where these are faster than a library's.

In: a library of products, the weights, a module with `gemm_skinny`. Out: `SkinnyProducts`, which
stands for the library: for each shape and number of rows in `ROWS` it runs the program that
`polymerize.py` put together, where a comparison on this GPU, kept in the artifact, found it faster.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from dovetail.ir.dtypes import DTYPES
from dovetail.ir.errors import CapacityError
from dovetail.runtime.cuda import CudaDevice, CudaModule
from dovetail.runtime.device_weights import DeviceWeight
from dovetail.runtime.launches import Product, Products, by_family
from dovetail.runtime.polymerize import (
    RESIDENT_WARPS,
    GpuSpec,
    SkinnyPlan,
    assumed_costs,
    plan_skinny,
)
from dovetail.runtime.product_choices import (
    Key,
    Shape,
    choices_path,
    keep_choices,
    read_choices,
)
from dovetail.runtime.streams import GpuStreams

FAMILIES = ("gemm_skinny", "gemm_skinny_merge")
ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of the steps that are recorded as graphs; products of other numbers are the library's."""
GAIN = 0.97
"""Share of the library's time below which a program is taken."""
LEAST_CALLS, ROUNDS = 16, 5
"""Products in a graph that is timed, those of all layers in turn; how often it is."""
CLOCK_RATE, MEMORY_CLOCK_RATE, MEMORY_BUS_WIDTH = 13, 36, 37
"""Device attributes: kHz, kHz, bits."""

Work: TypeAlias = Callable[[], None]
"""Gives work to the compute stream."""
Compare: TypeAlias = Callable[[GpuStreams, Work, Work], float]
"""Returns the first one's time as a share of the second one's."""

log = logging.getLogger("dovetail")


@dataclass(frozen=True, slots=True)
class Bound:
    """A product, and the same as the library bound it, for at most `most` rows."""

    product: Product
    shape: Shape
    most: int
    other: Any


@dataclass(frozen=True, slots=True)
class Program:
    """A plan on the device, as the kernels take it: addresses of partial sums and of regions."""

    warps: int
    splits: int
    partial: int
    n_regions: int
    regions: int


class SkinnyProducts:
    """A library of products; `choose` has to be called once all are bound."""

    def __init__(
        self, others: Products, weights: Mapping[str, DeviceWeight], module: CudaModule
    ) -> None:
        """`others` multiplies what is not faster here: all, where a module has no such kernels."""
        self._others, self._weights, self._module = others, weights, module
        known = by_family(module.kernels)
        self._kernels = [known[f] for f in FAMILIES] if known.keys() >= {*FAMILIES} else []
        self._dtype = str(self._kernels[0].binding["W"]) if self._kernels else ""
        self._bound: dict[Shape, list[Bound]] = {}
        self._memory: list[int] = []
        self.programs: dict[Key, Program] = {}

    def bind(self, product: Product, rows: int) -> Bound:
        """Return what `run` takes for `product` of at most `rows` rows."""
        shape = product.out.columns, product.a.columns
        bound = Bound(product, shape, rows, self._others.bind(product, rows))
        if self._weights[product.weight].dtype == self._dtype:
            self._bound.setdefault(shape, []).append(bound)
        return bound

    def run(self, bound: Bound, rows: int, stream: int) -> None:
        """Give the product of the first `rows` rows to a stream; CapacityError without memory."""
        program = self.programs.get((bound.shape, rows))
        if program is None:
            self._others.run(bound.other, rows, stream)
        else:
            self._launch(program, bound, rows, stream)

    def choose(self, streams: GpuStreams, folder: Path, compare: Compare | None = None) -> None:
        """Compare every shape's programs with the library, or take what a load before this chose.

        The choice is kept in `folder`. Where the GPU has no room for it, all is the library's.
        Buffers that products write are overwritten: this comes before the first step.
        """
        plans = self._plan()
        if not plans:
            return
        digests = [kernel.digest for kernel in self._kernels]
        path = choices_path(folder, self._module.device.name, digests, plans)
        try:
            faster = read_choices(path)
            if faster is None:
                found = self._compare(plans, streams, compare or compare_in_graphs)
                faster = keep_choices(path, found)
            self.programs = self._put({key: plans[key] for key in plans if key in faster})
        except CapacityError as error:
            log.warning("all products on the GPU are the library's: %s", error)
            self.close()

    def close(self) -> None:
        """Give the memory back."""
        while self._memory:
            self._module.device.free(self._memory.pop())

    def _plan(self) -> dict[Key, SkinnyPlan]:
        """Return the plans of what is bound; none for a GPU that does not tell its rates."""
        rates = gpu_rates(self._module.device)
        if not (self._bound and rates.clock and rates.bandwidth):
            return {}
        costs = assumed_costs(rates, DTYPES[self._dtype].size)
        return {
            ((n, k), rows): plan_skinny(rows, n, k, costs)
            for (n, k), bound in self._bound.items()
            for rows in ROWS
            if rows <= max(b.most for b in bound)
        }

    def _compare(
        self, plans: Mapping[Key, SkinnyPlan], streams: GpuStreams, compare: Compare
    ) -> set[Key]:
        """Return what is faster; nothing stays on the device."""
        try:
            return {
                key
                for key, program in self._put(plans).items()
                if compare(streams, *self._works(key, program, streams.compute)) < GAIN
            }
        finally:
            streams.finish()
            self.close()

    def _put(self, plans: Mapping[Key, SkinnyPlan]) -> dict[Key, Program]:
        """Copy plans to the device; those that split K share room for partial sums."""
        slots = self._module.device.multiprocessors * RESIDENT_WARPS
        sums = [p.splits * rows * n for ((n, _), rows), p in plans.items() if p.splits > 1]
        partial = self._alloc(4 * max(sums)) if sums else 0
        programs = {}
        for key, plan in plans.items():
            table = plan.table()
            address = self._alloc(table.nbytes)
            self._module.device.upload(address, table)
            warps = min(plan.warps, slots)
            programs[key] = Program(warps, plan.splits, partial, len(table), address)
        return programs

    def _works(self, key: Key, program: Program, stream: int) -> tuple[Work, Work]:
        shape, rows = key
        bound = [b for b in self._bound[shape] if b.most >= rows]
        calls = list(islice(cycle(bound), max(LEAST_CALLS, len(bound))))

        def ours() -> None:
            for bound in calls:
                self._launch(program, bound, rows, stream)

        def theirs() -> None:
            for bound in calls:
                self._others.run(bound.other, rows, stream)

        return ours, theirs

    def _launch(self, program: Program, bound: Bound, rows: int, stream: int) -> None:
        p, weight = bound.product, self._weights[bound.product.weight]
        bias = self._weights[p.bias].address if p.bias else 0
        residual = (p.residual.address, p.residual.stride) if p.residual else (0, 0)
        operands = (
            *(rows, *bound.shape, p.a.address, p.a.stride, weight.address, weight.k, bias),
            *(*residual, p.out.address, p.out.stride, program.splits, program.partial),
            *(program.n_regions, program.regions),
        )
        for kernel in self._kernels[: 1 if program.splits == 1 else 2]:
            self._module.launch(kernel.name, operands, program.warps, stream)

    def _alloc(self, nbytes: int) -> int:
        self._memory.append(self._module.device.alloc(nbytes))
        return self._memory[-1]


def gpu_rates(device: CudaDevice) -> GpuSpec:
    """Return what a GPU tells of itself; its memory moves data twice in a cycle."""
    clock, memory, width = (
        device.attribute(n) for n in (CLOCK_RATE, MEMORY_CLOCK_RATE, MEMORY_BUS_WIDTH)
    )
    return GpuSpec(device.multiprocessors, 1e3 * clock, 2 * 1e3 * memory * width / 8)


def compare_in_graphs(
    streams: GpuStreams, ours: Work, theirs: Work, now: Callable[[], float] = time.perf_counter
) -> float:
    """Time both as graphs, in turns; return the median of the ratios."""
    graphs: list[int] = []
    ratios = []
    try:
        for work in (ours, theirs):
            work()  # libraries take memory in their first run
            streams.finish()
            with streams.recording() as found:
                work()
            graphs += found
        for _ in range(ROUNDS):
            seconds = []
            for graph in graphs:
                begun = now()
                streams.replay(graph)
                streams.finish()
                seconds.append(now() - begun)
            ratios.append(seconds[0] / seconds[1])
    finally:
        for graph in graphs:
            streams.forget(graph)
    return median(ratios)
