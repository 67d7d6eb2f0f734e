"""Products with quantised weights: integer activations and float32 ones, on every target."""

from __future__ import annotations

import copy
import ctypes
import itertools
from functools import cache

import numpy as np
import pytest

from dovetail.codegen.catalog import kernel_request, load_kernel_module
from dovetail.codegen.library import LibrarySpec, build_library
from dovetail.codegen.lower import lower
from dovetail.codegen.targets import TARGETS, host_target
from dovetail.compiler.rules.schedules import (
    LINEAR,
    SILU,
    GemmOp,
    built_tiles,
    default_row,
    gemm_requests,
    make_schedule,
    micro_kernels,
    reduce_kernel,
)
from dovetail.ir.block_format import BlockFormat
from dovetail.ir.formats import FORMATS, is_quantised
from dovetail.ir.schedule import SCHEDULE_VALUES
from dovetail.runtime.machine import abi
from dovetail.topology.hardware import read_hardware
from tests.blocks import random_blocks, round_activations
from tests.codegen.interpret import interpret
from tests.codegen.kernels.gemm_problem import listen, slot
from tests.shares import in_turns, share

NAMES = [name for name in FORMATS if is_quantised(name)]
GUARD = np.float32(1e30)
PARTIAL = 1 << 14


class Product:
    """A product of random rows and quantised weights, and its float64 values."""

    def __init__(self, kind: str, m: int, n: int, k: int, name: str) -> None:
        self.kind, self.m, self.n, self.k = kind, m, n, k
        self.op = GemmOp("x", kind, n, k, name)
        self.form = FORMATS[name]
        assert isinstance(self.form, BlockFormat)
        rng = np.random.default_rng((m, n, k))
        self.a = rng.standard_normal((m, k + 7), np.float32)
        self.a[0, :32] = 0  # a group without a scale
        sides = range(2 if kind == SILU else 1)
        self.blocks = [random_blocks(self.form, n, k, seed) for seed in sides]
        packed = [self.form.pack(blocks) for blocks in self.blocks]
        self.packed = np.ascontiguousarray(np.stack(packed, 1))
        self.bias = rng.standard_normal((len(packed), -(-n // 16) * 16), np.float32)
        self.r = rng.standard_normal((m, n + 5), np.float32)

    def operands(self, c: np.ndarray, partial: np.ndarray) -> list[int | np.ndarray | None]:
        stride = self.form.panel_elements(self.k)
        bias = np.ascontiguousarray(self.bias.reshape(len(self.bias), -1, 16).swapaxes(0, 1))
        head = [self.m, self.n, self.k, self.a, self.a.shape[1], self.packed, stride, bias]
        if self.kind == SILU:
            return [*head, c, c.shape[1]]
        return [*head, self.r, self.r.shape[1], c, c.shape[1], partial, PARTIAL]

    def first(self, m: int) -> Product:
        """Return the product of the first rows alone."""
        fewer = copy.copy(self)
        fewer.m, fewer.a, fewer.r = m, self.a[:m], self.r[:m]
        return fewer

    def check(self, call, kernel: str, **schedule: int) -> np.ndarray:
        c = np.full((self.m + 1, self.n + 5), GUARD)
        partial = np.empty(PARTIAL, np.float32)
        second = reduce_kernel(self.kind, self.op.dtype, make_schedule(**schedule))
        threads = 2
        for name, tid in itertools.product([kernel, second], range(threads)):
            if name is not None:
                call(name, self.operands(c, partial), make_schedule(**schedule), tid, threads)
        assert (c[self.m] == GUARD).all() and (c[:, self.n :] == GUARD).all()
        wanted, bound = self.wanted(floats=schedule["m_tile"] < 0)
        error = np.abs(c[: self.m, : self.n] - wanted)
        assert (error <= bound).all(), (self.op, schedule, (error / bound).max())
        return c[: self.m, : self.n]

    def wanted(self, *, floats: bool) -> tuple[np.ndarray, np.ndarray]:
        a = self.a[:, : self.k]
        a = (a if floats else round_activations(a)).astype(np.float64)
        values = [
            self.form.values(blocks, whole=not floats).astype(np.float64) for blocks in self.blocks
        ]
        sums = [a @ w.T + b[: self.n] for w, b in zip(values, self.bias, strict=True)]
        sizes = [np.abs(a) @ np.abs(w.T) + 1 for w in values]
        if self.kind == LINEAR:
            return sums[0] + self.r[:, : self.n], 2e-6 * self.k**0.5 * sizes[0]
        gate, up = sums
        bound = 2e-6 * self.k**0.5 * (1 + sizes[0]) * (1 + np.abs(up) + sizes[1])
        return gate / (1 + np.exp(-gate)) * up, bound


@cache
def lowered(target: str, name: str, dtype: str):
    request = next(r for r in gemm_requests([dtype], TARGETS[target]) if r.name == name)
    module = load_kernel_module(request.module)
    params = module.function(request.kernel).params
    special = [p.name for p in params if getattr(p.type, "name", "") in ("sched", "thread")]
    binding = request.binding | {"MR": 1} if "MR" in request.binding else request.binding
    return lower(module, request.kernel, binding, TARGETS[target], name=name), special


def interpreter(target: str, dtype: str):
    def call(kernel, values, schedule, tid, threads) -> None:
        program, special = lowered(target, kernel, dtype)
        given = dict(zip(SCHEDULE_VALUES, schedule, strict=True)) | {"tid": tid, "nth": threads}
        interpret(program, kernel, [*values, *(given[p] for p in special)], TARGETS[target])

    return call


ON_ALL = in_turns(list(TARGETS), [("q4_32", LINEAR), ("q8_32", SILU), ("nf4_32", LINEAR)])
OTHERS = [name for name in NAMES if name not in ("q4_32", "nf4_32")]
ON_ONE = [(t, name, LINEAR) for t, name in zip(itertools.cycle(TARGETS), OTHERS, strict=False)]


@pytest.mark.parametrize(("target", "name", "kind"), share(ON_ONE + ON_ALL, 9))
def test_interpreted_on_every_target(target: str, name: str, kind: str) -> None:
    """All targets compute the sums of integers exactly, so that they agree with numpy's."""
    form = FORMATS[name]
    product = Product(kind, 1, 18, form.unit, name)
    built = built_tiles(kind, TARGETS[target], name)
    kernel = product.op.kernel(TARGETS[target], built[min(built)])
    for m_tile in (1, -1):
        product.check(interpreter(target, name), kernel, m_tile=m_tile, block_n=1)


@pytest.mark.parametrize("name", ["q4_32", "q8_32"])
def test_codes_wait_in_the_second_cache_and_come_into_the_first_as_far_ahead_as_told(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    target, near = "x86-64-avx512", 576
    asked = listen(monkeypatch, target)
    product = Product(LINEAR, 1, 64, 4 * FORMATS[name].unit, name)
    kernel = product.op.kernel(TARGETS[target], built_tiles(LINEAR, TARGETS[target], name)[2])
    schedule = {"m_tile": 1, "block_n": 1}
    product.check(interpreter(target, name), kernel, prefetch=-near, **schedule)
    panel = FORMATS[name].panel_bytes(product.k)
    for first in range(0, 4 * panel, panel):
        assert set(range((first + near) // 64, (first + panel) // 64)) <= set(asked[1])
    assert set(range(2 * panel // 64, 4 * panel // 64)) <= set(asked[2])
    assert min(asked[2]) >= 2 * panel // 64
    asked[2].clear()
    product.check(interpreter(target, name), kernel, prefetch=-1, **schedule)
    assert not asked[2]


@cache
def library(kind: str, name: str) -> ctypes.CDLL:
    requests = gemm_requests([name], host_target(), [kind])
    return ctypes.CDLL(
        str(build_library(LibrarySpec(host_target(), requests, team=False, tvm_ffi=False)).path)
    )


def native(kind: str, name: str):
    def call(kernel, values, schedule, tid, threads) -> None:
        slots = (abi.Slot * len(values))(*(slot(v) for v in values))
        row = (ctypes.c_int64 * abi.SCHEDULE_LENGTH)(*schedule)
        entry = library(kind, name)[f"dt_entry_{kernel}"]
        entry(slots, row, ctypes.c_int64(tid), ctypes.c_int64(threads))

    return call


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("q4_32", LINEAR), ("q6_16k", SILU)),
        pytest.param("nf4_32", LINEAR, marks=pytest.mark.long),
        pytest.param("q8_32", SILU, marks=pytest.mark.long),
        pytest.param("q5_32km", LINEAR, marks=pytest.mark.long),
        pytest.param("q4_32m", LINEAR, marks=pytest.mark.long),
    ],
)
def test_natively_in_every_tile_and_order(name: str, kind: str) -> None:
    """Heights, ragged columns, slices of K in each order, K shared by threads, grids of rows."""
    target, unit, call = host_target(), FORMATS[name].unit, native(kind, name)
    for tile in micro_kernels(kind, target, name):
        for n in (16 * tile.panels, 16 * tile.panels + 17):
            for m in (tile.rows, 2 * tile.rows + 1):
                product = Product(kind, m, n, 2 * unit, name)
                kernel = product.op.kernel(target, tile)
                for sign in (1, -1):
                    rows = sign * tile.rows
                    product.check(call, kernel, m_tile=rows, block_n=1, grid_n=2, prefetch=-1024)
                    product.check(call, kernel, m_tile=rows, block_m=2, grid_m=2, prefetch=512)
                    for order in range(4) if kind == LINEAR else ():
                        cut = {"block_k": unit, "order": order, "block_n": 1}
                        product.check(call, kernel, m_tile=rows, **cut)
                    if kind == LINEAR:
                        product.check(call, kernel, m_tile=rows, grid_k=2)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("q4_32", LINEAR),
        *(pytest.param(name, LINEAR, marks=pytest.mark.long) for name in ("q4_32m", "q8_32")),
        pytest.param("q4_32", SILU, marks=pytest.mark.long),
    ],
)
def test_a_row_has_the_same_bits_beside_others(name: str, kind: str) -> None:
    """By the rules' schedules, whose tiles differ; both near float64 of the same rounded rows."""
    target, machine, call = host_target(), read_hardware(), native(kind, name)
    whole = Product(kind, 17, 69, 18 * FORMATS[name].unit, name)
    found = {}
    for m in (1, 2, 3, 5, 8, 16, 17):
        row = default_row(whole.op, target, m, 2, machine)
        schedule = dict(zip(SCHEDULE_VALUES, row.schedule, strict=True))
        found[m] = whole.first(m).check(call, row.kernel, **schedule)
    for m, rows in found.items():
        assert (rows == found[17][:m]).all()


@pytest.mark.parametrize("name", NAMES)
def test_embedding_reads_a_packed_row(name: str) -> None:
    form, target = FORMATS[name], host_target()
    blocks = random_blocks(form, 37, 2 * form.unit, 0)
    request = kernel_request("embed_packed", target, name)
    library = ctypes.CDLL(str(build_library(LibrarySpec(target, (request,))).path))
    ids = np.array([36, 0, 17, 17], np.int32)
    width = 2 * form.unit
    out = np.full((4, width + 3), GUARD)
    values = [4, width, ids, form.pack(blocks), out, width + 3]
    slots = (abi.Slot * len(values))(*(slot(v) for v in values))
    row = (ctypes.c_int64 * abi.SCHEDULE_LENGTH)(*make_schedule())
    for tid in range(2):
        library[f"dt_entry_{request.name}"](slots, row, ctypes.c_int64(tid), ctypes.c_int64(2))
    assert (out[:, width:] == GUARD).all()
    wanted = form.values(blocks)[ids]
    assert np.abs(out[:, :width] - wanted).max() <= 1e-6 * np.abs(wanted).max()
