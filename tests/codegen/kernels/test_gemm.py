"""GEMM kernels against float64 at every tile edge: compiled, and interpreted for all targets."""

from __future__ import annotations

import ctypes
import itertools
import platform
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest

from dovetail.codegen.catalog import load_kernel_module
from dovetail.codegen.interpret import interpret
from dovetail.codegen.library import BuiltLibrary, LibrarySpec, build_library
from dovetail.codegen.lower import lower
from dovetail.codegen.targets import TARGETS, host_features, runs_on
from dovetail.compiler.schedules import (
    LINEAR,
    SILU,
    built_tiles,
    dot_rows,
    gemm_requests,
    kernel_name,
    make_schedule,
    reduce_kernel,
)
from dovetail.ir.dtypes import narrow_bf16, widen_bf16
from dovetail.ir.formats import FORMATS
from dovetail.ir.low.nodes import Unit
from dovetail.ir.schedule import ORDERS, SCHEDULE_VALUES
from dovetail.runtime import abi

NATIVE = [n for n, t in TARGETS.items() if runs_on(t, platform.machine(), host_features())]
DTYPES = ("f32", "bf16")
Call = Callable[[str, list[int | np.ndarray | None], int], None]
GUARD = np.float32(1e30)
"""Fills C around the result, to see stores that go astray."""


@cache
def library(target: str) -> tuple[BuiltLibrary, ctypes.CDLL]:
    requests = gemm_requests(DTYPES, TARGETS[target])
    built = build_library(LibrarySpec(target=TARGETS[target], kernels=requests, tvm_ffi=False))
    return built, ctypes.CDLL(str(built.path))


def own_dtypes(target: str) -> tuple[str, ...]:
    """The dtypes whose kernels the target has to itself: the rest is its fallback's text."""
    return ("bf16",) if TARGETS[target].bf16_dot else DTYPES


OWN = [(target, dtype) for target in NATIVE for dtype in own_dtypes(target)]
PLAIN = [target for target, dtype in OWN if dtype == "f32"]


def kernel_names(kind: str, targets: list[str] = NATIVE) -> list[tuple[str, str]]:
    return [
        (target, request.name)
        for target in targets
        for request in gemm_requests(own_dtypes(target), TARGETS[target])
        if request.kernel == f"gemm_{kind}"
    ]


def pack(weight: np.ndarray, dtype: str) -> np.ndarray:
    """[N][K] -> panels of the format `dtype`."""
    return FORMATS[dtype].pack(narrow_bf16(weight) if dtype == "bf16" else weight)


def rounded(weight: np.ndarray, dtype: str) -> np.ndarray:
    return widen_bf16(narrow_bf16(weight)) if dtype == "bf16" else weight


@dataclass
class Problem:
    m: int
    n: int
    k: int
    dtype: str
    kind: str = LINEAR
    bias: bool = False
    residual: bool = False
    in_place: bool = False
    seed: int = 0
    partial_size: int = 1 << 16
    a: np.ndarray = field(init=False)
    weights: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng((self.seed, self.m, self.n, self.k))
        self.a = random.standard_normal((self.m, self.k + 3), np.float32)
        count = 2 if self.kind == SILU else 1
        self.weights = [random.standard_normal((self.n, self.k), np.float32) for _ in range(count)]
        panels = -(-self.n // 16)
        self.biases = random.standard_normal((count, panels * 16), np.float32)
        self.r = random.standard_normal((self.m, self.n + 5), np.float32)

    def packed(self) -> np.ndarray:
        panels = [pack(w, self.dtype) for w in self.weights]
        return np.ascontiguousarray(np.stack(panels, 1)) if self.kind == SILU else panels[0]

    def wanted(self, dot: bool) -> tuple[np.ndarray, np.ndarray]:
        """The float64 result, and the bound on what float32 may be off; `dot`: of rounded rows."""
        a = self.a[:, : self.k].astype(np.float64)
        if dot:
            a = widen_bf16(narrow_bf16(self.a[:, : self.k])).astype(np.float64)
        sums, sizes = [], []
        for weight, bias in zip(self.weights, self.biases, strict=True):
            w = rounded(weight, self.dtype).astype(np.float64)
            b = bias[: self.n] if self.bias else np.zeros(self.n)
            sums.append(a @ w.T + b)
            sizes.append(np.abs(a) @ np.abs(w.T) + np.abs(b))
        if self.kind == LINEAR:
            r = self.r[:, : self.n] if self.residual else 0
            return sums[0] + r, 4e-7 * (self.k**0.5 + 2) * (sizes[0] + np.abs(r))
        gate, up = sums
        out = gate / (1 + np.exp(-gate)) * up
        return out, 1e-6 * (self.k**0.5 + 4) * (1 + sizes[0]) * (1 + np.abs(up) + sizes[1])

    def run(self, target: str, name: str, threads: int = 1, **schedule: int) -> np.ndarray:
        """Call the compiled kernel on all threads' shares, then what adds up the parts of K."""

        def call(kernel: str, values: list[int | np.ndarray | None], tid: int) -> None:
            slots = (abi.Slot * len(values))(*(slot(v) for v in values))
            row = (ctypes.c_int64 * abi.SCHEDULE_LENGTH)(*make_schedule(**schedule))
            entry = library(target)[1][f"dt_entry_{kernel}"]
            entry(slots, row, ctypes.c_int64(tid), ctypes.c_int64(threads))

        return self.guarded(call, self.phases(name, schedule), threads)

    def interpret(self, target: str, name: str, threads: int = 1, **schedule: int) -> np.ndarray:
        """Interpret the text lowered for the target, on all threads' shares, and return C."""
        row = dict(zip(SCHEDULE_VALUES, make_schedule(**schedule), strict=True))

        def call(kernel: str, values: list[int | np.ndarray | None], tid: int) -> None:
            program, params = lowered(target, kernel)
            given = {**row, "tid": tid, "nth": threads}
            interpret(program, kernel, [*values, *(given[p] for p in params)], TARGETS[target])

        return self.guarded(call, self.phases(name, schedule), threads)

    def phases(self, name: str, schedule: dict[str, int]) -> list[str]:
        second = reduce_kernel(self.kind, self.dtype, make_schedule(**schedule))
        return [name, second] if second else [name]

    def guarded(self, call: Call, kernels: list[str], threads: int) -> np.ndarray:
        """Return C, after checking that nothing around it was written."""
        ldc = self.n + 5
        c = np.full((self.m + 1, ldc), GUARD)
        r: np.ndarray | None = self.r if self.residual else None
        if self.in_place:
            c[: self.m, : self.n] = self.r[:, : self.n]
            r = c
        bias = np.ascontiguousarray(self.biases.reshape(len(self.weights), -1, 16).swapaxes(0, 1))
        values = [
            self.m,
            self.n,
            self.k,
            self.a,
            self.a.shape[1],
            self.packed(),
            FORMATS[self.dtype].panel_elements(self.k),
        ]
        values += [bias if self.bias else None]
        partial = np.full(self.partial_size + 1, np.nan, np.float32)
        sums = [partial, self.partial_size]
        values += [r, ldc, c, ldc, *sums] if self.kind == LINEAR else [c, ldc]
        for kernel, tid in itertools.product(kernels, reversed(range(threads))):
            call(kernel, values, tid)
        assert (c[self.m] == GUARD).all() and (c[:, self.n :] == GUARD).all()
        assert np.isnan(partial[-1])
        return c[: self.m, : self.n]

    def assert_right(self, got: np.ndarray, target: str) -> None:
        least = dot_rows(self.dtype, TARGETS[target])
        wanted, bound = self.wanted(dot=0 < least <= self.m)
        error = np.abs(got - wanted)
        assert (error <= bound).all(), (self, (error / bound).max())

    def check(self, target: str, name: str, threads: int = 1, **schedule: int) -> None:
        self.assert_right(self.run(target, name, threads, **schedule), target)


def slot(value: int | np.ndarray | None) -> abi.Slot:
    if isinstance(value, np.ndarray):
        return abi.Slot(p=value.ctypes.data)
    return abi.Slot(p=None) if value is None else abi.Slot(i=value)


@cache
def lowered(target: str, name: str) -> tuple[Unit, tuple[str, ...]]:
    """The kernel's low IR, and its schedule and thread parameters."""
    requests = gemm_requests(DTYPES, TARGETS[target])
    request = next(r for r in requests if r.name == name)
    module = load_kernel_module(request.module)
    params = module.function(request.kernel).params
    special = tuple(p.name for p in params if getattr(p.type, "name", "") in ("sched", "thread"))
    return lower(module, request.kernel, request.binding, TARGETS[target], name=name), special


def tile_of(name: str) -> tuple[int, int]:
    rows, panels = name.rsplit("_", 1)[1].split("x")
    return int(rows), int(panels)


def sizes(name: str) -> list[tuple[int, int, int]]:
    """M at every height and past it, N around whole groups of panels, K at 1, 2 and odd."""
    rows, panels = tile_of(name)
    heights = [(m, 16 * panels + 1, 5) for m in range(1, rows + 2)]
    edges = {1, 15, 16, 17, *(16 * panels + d for d in (-17, -16, -1, 0, 1, 15, 16, 17))}
    widths = [(rows + 1, n, 3) for n in sorted(edges) if n > 0]
    return [*heights, *widths, *((2 * rows, 16 * panels, k) for k in (1, 2, 33, 64))]


@pytest.mark.parametrize(("target", "name"), kernel_names(LINEAR), ids=str)
def test_linear_at_tile_edges(target: str, name: str) -> None:
    rows, _ = tile_of(name)
    dtype = name.split("_")[2]
    epilogues = itertools.cycle([(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 1)])
    for size, (bias, residual, in_place) in zip(sizes(name), epilogues, strict=False):
        problem = Problem(*size, dtype, LINEAR, bool(bias), bool(residual), bool(in_place))
        problem.check(target, name, m_tile=rows, block_n=1)


@pytest.mark.parametrize(("target", "name"), kernel_names(SILU), ids=str)
def test_silu_at_tile_edges(target: str, name: str) -> None:
    rows, _ = tile_of(name)
    dtype = name.split("_")[2]
    for i, size in enumerate(sizes(name)):
        Problem(*size, dtype, SILU, bias=bool(i % 2)).check(target, name, m_tile=rows, block_n=1)


PAIRED = [
    (target, name)
    for target, name in kernel_names(LINEAR, list(TARGETS)) + kernel_names(SILU, list(TARGETS))
    if dot_rows(name.split("_")[2], TARGETS[target])
]


@pytest.mark.parametrize(("target", "name"), [p for p in PAIRED if p[0] in NATIVE], ids=str)
def test_rounded_rows_at_tile_edges(target: str, name: str) -> None:
    """Where bfloat16 pairs are multiplied at once: M from the first that is, odd and even K."""
    rows, panels = tile_of(name)
    kind = name.split("_")[1]
    for m, n, k in itertools.product((16, 17, 2 * rows + 17), (1, 16 * panels + 17), (1, 2, 33)):
        problem = Problem(m, n, k, "bf16", kind, bias=n == 1)
        problem.check(target, name, 2, m_tile=rows, block_n=k % 2, grid_n=2, block_k=8)


@pytest.mark.parametrize(("target", "name"), [p for p in PAIRED if tile_of(p[1])[1] > 2], ids=str)
def test_rounded_rows_are_right_in_the_text(target: str, name: str) -> None:
    rows, panels = tile_of(name)
    problem = Problem(17, 16 * panels + 1, 3, "bf16", name.split("_")[1])
    problem.assert_right(problem.interpret(target, name, m_tile=rows, block_n=1), target)


def test_rows_that_do_not_fit_are_rounded_in_parts() -> None:
    """K so large that the buffer of rounded rows holds 3 of them."""
    for target in NATIVE:
        if dot_rows("bf16", TARGETS[target]):
            name = kernel_names(LINEAR, [target])[-1][1]
            Problem(17, 18, 70_001, "bf16").check(target, name, m_tile=8, block_n=1)


SCHEDULES = [
    {"m_tile": 3, "block_n": 1, "prefetch": 256},
    {"m_tile": 3, "block_n": 0, "prefetch": -1},
    {"m_tile": 1, "block_m": 4, "block_n": 1, "prefetch": -1},
    {"m_tile": 99, "grid_n": 2, "block_n": 1},
    {"m_tile": 2, "grid_n": 3, "block_m": 2},
    {"m_tile": 2, "grid_m": 3, "block_n": 1},
    {"m_tile": 2, "grid_m": 2, "grid_n": 2, "block_k": 7},
    {"m_tile": 0, "block_k": 1, "block_n": 1},
    {"m_tile": 3, "block_n": 2, "block_k": 16, "block_m": 5},
    {"m_tile": 3, "grid_k": 2, "block_n": 1},
    {"m_tile": 4, "grid_k": 3, "grid_n": 2, "block_k": 8},
    {},
]


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("target", PLAIN)
def test_every_schedule_gives_the_product(
    target: str, schedule: dict[str, int], threads: int
) -> None:
    for kind in (LINEAR, SILU):
        tile = built_tiles(kind, TARGETS[target])[2 if kind == SILU else 1]
        name = f"gemm_{kind}_f32_{tile.rows}x{tile.panels}"
        problem = Problem(11, 16 * 7 + 3, 20, "f32", kind, bias=True, residual=kind == LINEAR)
        problem.check(target, name, threads, **schedule)


@pytest.mark.parametrize(("target", "dtype"), OWN, ids=str)
def test_bits_do_not_depend_on_tile_rows_or_threads(target: str, dtype: str) -> None:
    whole = Problem(23, 16 * 9 + 5, 301, dtype, bias=True, residual=True)
    names = [
        f"gemm_linear_{dtype}_{t.rows}x{t.panels}"
        for t in built_tiles(LINEAR, TARGETS[target]).values()
    ]
    reference = whole.run(target, names[0], m_tile=2, block_n=1)
    for name, threads in itertools.product(names, (1, 3)):
        got = whole.run(target, name, threads, m_tile=14, grid_n=threads, block_n=threads == 1)
        assert (got.view(np.uint32) == reference.view(np.uint32)).all()


@pytest.mark.parametrize(("target", "dtype"), OWN, ids=str)
def test_split_k_adds_its_parts_in_one_order(target: str, dtype: str) -> None:
    """Whatever M, tile, grid and threads: for one grid_k the bits are the same."""
    whole = Problem(9, 16 * 5 + 7, 133, dtype, bias=True, residual=True, in_place=True)
    names = [name for _, name in kernel_names(LINEAR, [target]) if f"_{dtype}_" in name]
    reference = whole.run(target, names[0], m_tile=2, grid_k=3)
    whole.assert_right(reference, target)
    assert (reference != whole.run(target, names[0], m_tile=2)).any()  # K was really split
    for name, threads in itertools.product(names, (1, 4)):
        got = whole.run(target, name, threads, m_tile=5, grid_k=3, grid_n=2, grid_m=2, block_n=1)
        assert (got.view(np.uint32) == reference.view(np.uint32)).all()


@pytest.mark.parametrize("slices", [(9, 2, 64), (5, 1, 7), (0, 3, 16), (8, 0, 32)], ids=str)
@pytest.mark.parametrize("kind", [LINEAR, SILU])
@pytest.mark.parametrize(("target", "dtype"), OWN, ids=str)
def test_bits_do_not_depend_on_the_order_of_slices(
    target: str, dtype: str, kind: str, slices: tuple[int, int, int]
) -> None:
    """Rounded rows (from 16 on) and plain ones, edges in M, N and K, and in place."""
    name = next(name for _, name in kernel_names(kind, [target]) if f"_{dtype}_" in name)
    block_m, block_n, block_k = slices
    schedule = {"m_tile": 4, "block_m": block_m, "block_n": block_n, "block_k": block_k}
    for m, in_place in ((37, kind == LINEAR), (11, False)):
        problem = Problem(m, 16 * 9 + 5, 301, dtype, kind, bias=True, residual=kind == LINEAR)
        problem = replace(problem, in_place=in_place)
        for grid in ({"grid_n": 2}, {"grid_k": 2} if kind == LINEAR else {"grid_m": 2}):
            first = problem.run(target, name, 2, **schedule, **grid)
            problem.assert_right(first, target)
            for order in range(1, len(ORDERS)):
                got = problem.run(target, name, 2, **schedule, **grid, order=order)
                assert (got.view(np.uint32) == first.view(np.uint32)).all()


@pytest.mark.parametrize("kind", [LINEAR, SILU])
@pytest.mark.parametrize("target", TARGETS)
def test_orders_are_right_on_every_target(target: str, kind: str) -> None:
    name = kernel_names(kind, [target])[0][1]
    problem = Problem(5, 33, 20, name.split("_")[2], kind)
    schedule = {"m_tile": 2, "block_m": 2, "block_n": 1, "block_k": 8}
    for order in range(1, len(ORDERS)):
        problem.assert_right(problem.interpret(target, name, **schedule, order=order), target)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", [LINEAR, SILU])
@pytest.mark.parametrize("target", PLAIN)
def test_slices_come_in_the_order_asked_for(target: str, kind: str, order: str) -> None:
    """C's rows lie a slice of columns apart, R one to the left: so memory tells the order."""
    tile = next(iter(built_tiles(kind, TARGETS[target]).values()))
    width = tile.panels * (16 if kind == LINEAR else 8)
    problem = Problem(3, 3 * width, 6, "f32", kind)
    memory = np.zeros(6 * width, np.float32)
    c, weight = memory[width:], problem.packed()
    values = [3, 3 * width, 6, problem.a, problem.a.shape[1], weight, 6 * 16, None]
    values += [memory, width, c, width, None, 0] if kind == LINEAR else [c, width]
    slots = (abi.Slot * len(values))(*(slot(value) for value in values))
    schedule = {"m_tile": 1, "block_m": 1, "block_n": 1, "block_k": 2}
    row = (ctypes.c_int64 * abi.SCHEDULE_LENGTH)(
        *make_schedule(**schedule, order=ORDERS.index(order))
    )
    entry = library(target)[1][f"dt_entry_{kernel_name(kind, 'f32', tile)}"]
    entry(slots, row, ctypes.c_int64(0), ctypes.c_int64(1))
    outcomes = {other: in_order(problem, width, other) for other in ORDERS}
    assert len({v.tobytes() for v in outcomes.values()}) == (4 if kind == LINEAR else 2)
    np.testing.assert_allclose(memory, outcomes[order], atol=1e-4)


def in_order(problem: Problem, width: int, order: str) -> np.ndarray:
    """Return the memory above as three slices of each side leave it."""
    memory = np.zeros(6 * width)
    whole, _ = problem.wanted(dot=False)
    for at in itertools.product(range(3), repeat=3):
        m, n, k = (at[order.index(side)] for side in "mnk")
        columns, left = slice(n * width, (n + 1) * width), (m + n) * width
        if problem.kind == SILU:
            memory[left + width :][:width] = whole[m, columns]
            continue
        depth = slice(2 * k, 2 * k + 2)
        base = memory[left + (width if k else 0) :][:width]
        product = problem.weights[0][columns, depth] @ problem.a[m, depth]
        memory[left + width :][:width] = base + product
    return memory


@pytest.mark.parametrize("target", PLAIN)
def test_k_is_not_split_without_room_for_its_parts(target: str) -> None:
    """And nothing is written past the room there is."""
    name = kernel_names(LINEAR, [target])[0][1]
    for room in (0, 3 * 48 - 1, 3 * 48):
        problem = Problem(3, 40, 64, "f32", bias=True, partial_size=room)
        got = problem.run(target, name, 2, m_tile=2, grid_k=2)
        problem.assert_right(got, target)
        whole = problem.run(target, name, m_tile=2)
        assert (got == whole).all() == (room < 3 * 48)


@pytest.mark.parametrize("target", TARGETS)
def test_split_k_is_right_on_every_target(target: str) -> None:
    name = kernel_names(LINEAR, [target])[0][1]
    problem = Problem(2, 21, 37, name.split("_")[2], bias=True, residual=True)
    got = problem.interpret(target, name, 2, m_tile=2, grid_k=2, grid_n=2, block_n=1)
    problem.assert_right(got, target)


def test_panels_may_lie_further_apart_than_k() -> None:
    """A K-view of a packed weight: the first 8 of 20 values of each row."""
    problem = Problem(3, 40, 20, "f32")
    target = PLAIN[0]
    name = kernel_names(LINEAR, [target])[0][1]
    packed, c = problem.packed(), np.empty((3, 40), np.float32)
    values = [3, 40, 8, problem.a.ctypes.data, 23, packed.ctypes.data, 320, 0, 0, 0]
    values += [c.ctypes.data, 40, 0, 0]
    slots = (abi.Slot * len(values))(*(abi.Slot(i=v) for v in values))
    row = (ctypes.c_int64 * abi.SCHEDULE_LENGTH)(*make_schedule(m_tile=4, block_n=1))
    library(target)[1][f"dt_entry_{name}"](slots, row, ctypes.c_int64(0), ctypes.c_int64(1))
    wanted = problem.a[:, :8].astype(np.float64) @ problem.weights[0][:, :8].T
    np.testing.assert_allclose(c, wanted, atol=1e-5)


EVERYWHERE = [*kernel_names(LINEAR, list(TARGETS)), *kernel_names(SILU, list(TARGETS))]


@pytest.mark.parametrize(("target", "name"), EVERYWHERE, ids=str)
def test_lowered_text_is_right_on_every_target(target: str, name: str) -> None:
    rows, panels = tile_of(name)
    kind, dtype = name.split("_")[1:3]
    for m, n, k, threads in ((rows, 16 * panels, 3, 1), (rows + 1, 16 * panels + 17, 1, 2)):
        problem = Problem(m, n, k, dtype, kind, bias=k == 1, residual=k == 1, in_place=k == 1)
        got = problem.interpret(
            target, name, threads, m_tile=rows, block_n=1, grid_n=threads, prefetch=64
        )
        problem.assert_right(got, target)
