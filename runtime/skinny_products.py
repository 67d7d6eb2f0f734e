"""Products of few rows by generated kernels, where these are faster than a library's.

In: a library of products, the weights, a module with `gemm_skinny`. Out: `SkinnyProducts`, which
stands for the library: for each shape and number of rows in `ROWS` it runs the program that
`polymerize.py` put together, where a comparison on this GPU found that faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median
from typing import Any, TypeAlias

from dovetail.ir.artifact import KernelEntry
from dovetail.ir.dtypes import DTYPES
from dovetail.ir.errors import ArtifactError
from dovetail.runtime.cuda import CudaDevice, CudaModule
from dovetail.runtime.device_weights import DeviceWeight
from dovetail.runtime.launches import Product, Products
from dovetail.runtime.polymerize import CostTable, GpuSpec, SkinnyPlan, assumed_costs, plan_skinny
from dovetail.runtime.streams import GpuStreams

ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Rows of the steps that are recorded as graphs; products of other numbers are the library's."""
GAIN = 0.97
"""Share of the library's time below which a program is taken."""
LEAST_CALLS, ROUNDS = 16, 5
"""Products in a graph that is timed, those of all layers in turn; how often it is."""
CLOCK_RATE, MEMORY_CLOCK_RATE, MEMORY_BUS_WIDTH = 13, 36, 37
"""Device attributes: kHz, kHz, bits."""

Shape: TypeAlias = tuple[int, int]
"""Columns of C and steps of K."""
Work: TypeAlias = Callable[[], None]
"""Gives work to the compute stream."""
Compare: TypeAlias = Callable[[GpuStreams, Work, Work], float]
"""Returns the first one's time as a share of the second one's."""


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
        """`others` multiplies what is not faster here; ArtifactError without kernels for it."""
        self._others, self._weights, self._module = others, weights, module
        self._kernels = [find_family(module, name) for name in ("gemm_skinny", "gemm_skinny_merge")]
        self._dtype = str(self._kernels[0].binding["W"])
        self._bound: dict[Shape, list[Bound]] = {}
        self._memory: list[int] = []
        self.programs: dict[tuple[Shape, int], Program] = {}

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

    def choose(self, streams: GpuStreams, compare: Compare | None = None) -> None:
        """Compare every shape's programs with the library; CapacityError without room for them.

        Buffers that products write are overwritten: this comes before the first step.
        """
        compare = compare or compare_in_graphs
        device = self._module.device
        costs = assumed_costs(gpu_rates(device), DTYPES[self._dtype].size)
        plans = dict(self._plan(costs))
        if not plans:
            return
        partial = self._alloc(4 * max(p.splits * rows * n for ((n, _), rows), p in plans.items()))
        for (shape, rows), plan in plans.items():
            program = self._put(plan, partial, costs.slots)
            bound = [b for b in self._bound[shape] if b.most >= rows]
            calls = list(islice(cycle(bound), max(LEAST_CALLS, len(bound))))
            ours, theirs = self._works(program, calls, rows, streams.compute)
            if compare(streams, ours, theirs) < GAIN:
                self.programs[shape, rows] = program

    def close(self) -> None:
        """Give the memory back."""
        while self._memory:
            self._module.device.free(self._memory.pop())

    def _plan(self, costs: CostTable) -> Iterator[tuple[tuple[Shape, int], SkinnyPlan]]:
        for (n, k), bound in self._bound.items():
            most = max(b.most for b in bound)
            for rows in ROWS:
                if rows <= most:
                    yield ((n, k), rows), plan_skinny(rows, n, k, costs)

    def _put(self, plan: SkinnyPlan, partial: int, slots: int) -> Program:
        table = plan.table()
        address = self._alloc(table.nbytes)
        self._module.device.upload(address, table)
        return Program(min(plan.warps, slots), plan.splits, partial, len(table), address)

    def _works(
        self, program: Program, calls: Sequence[Bound], rows: int, stream: int
    ) -> tuple[Work, Work]:
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


def find_family(module: CudaModule, family: str) -> KernelEntry:
    """Return the module's kernel of a family, made for the model's weights."""
    for entry in module.kernels.values():
        if entry.family == family:
            return entry
    raise ArtifactError(
        f"the artifact's kernels for cuda lack {family!r}; run `dovetail compile MODEL` again with "
        "`--target cuda`"
    )


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
    graphs = []
    for work in (ours, theirs):
        work()  # libraries take memory in their first run
        streams.finish()
        with streams.recording() as found:
            work()
        graphs += found
    ratios = []
    for _ in range(ROUNDS):
        seconds = []
        for graph in graphs:
            begun = now()
            streams.replay(graph)
            streams.finish()
            seconds.append(now() - begun)
        ratios.append(seconds[0] / seconds[1])
    for graph in graphs:
        streams.forget(graph)
    return median(ratios)
