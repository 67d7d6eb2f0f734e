"""The TIR backend gives what the C road gives: the language's features, and the bundled kernels."""

from __future__ import annotations

import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dovetail.codegen.catalog import KernelRequest, load_kernel_module, resolve_imports
from dovetail.codegen.library import LibrarySpec, build_library
from dovetail.codegen.targets import TARGETS, host_target
from dovetail.ir.diagnostics import Source
from dovetail.ir.errors import ScheduleError, SpecError, ToolchainError
from dovetail.ir.formats import FORMATS
from dovetail.ir.high.parse import parse_high
from tests.codegen.lower.test_quads import QUAD_TEXT
from tests.repository import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import tir as backend
from tir import build_tir_kernel, has_tvm

needs_tvm = pytest.mark.skipif(not has_tvm(), reason="the extra `tvm` is not installed")

LANGUAGE = '''
"""Statements and scalars of the language, each result in its own place."""


@kernel
def control(N: i64, x: ptr[f32], n: ptr[i32], other: ptr[f32], out: ptr[f32], counts: ptr[i64]):
    """Loops, branches and integer arithmetic."""
    total: f32 = 0.0
    for i in range(N - 1, -1, -2):
        if x[i] < 0.0:
            continue
        if x[i] > 2.5:
            break
        total += x[i]
    out[0] = total
    at = 0
    while at < N and x[at] < 1.0:
        at += 1
    counts[0] = at
    counts[1] = (n[0] // 3) * 10 + n[0] % 3
    counts[2] = (n[1] << 2 ^ n[1] & 6 | 1) >> 1
    big = x[0] > x[1]
    counts[3] = 7 if big and not (N == 3) else -7
    pointer = other
    if N > 4:
        pointer = x + 4
    out[1] = -1.0
    if pointer != null:
        out[1] = pointer[0]
    counts[4] = cast(i64, max(x[0], x[1]) * 10.0) + min(N, 5) + abs(n[0])
    sums = local(4, f32)
    for i in range(4):
        sums[i] = 0.0
    for i in range(N):
        sums[i % 4] = sums[i % 4] + abs(x[i])
    for i in range(0, 4):
        out[2 + i] = sums[i]
    out[6] = exp(x[0]) + log(2.0 + x[0] * x[0]) + sqrt(abs(x[1])) + tanh(x[2]) + floor(x[1])
    out[7] = cos(x[0]) * sin(x[1])
    if N == 3:
        return
    out[8] = 1.0
'''
VECTORS = '''
"""Vector operations over memory of every kind."""
import math_f32


@kernel
def vectors(N: i64, x: ptr[f32], y: ptr[f32], words: ptr[i32], half: ptr[S],
            out: ptr[f32], back: ptr[S], ints: ptr[i32]):
    """Element-wise results in out[k * N ...], sums behind them."""
    S: param = choice("bf16", "f16", default="bf16")
    top = vbroadcast(-inf)
    low = vbroadcast(inf)
    sums = vzero()
    for i in vrange(0, N):
        a = vload(x + i)
        b = vload(y + i)
        vstore(out + i, vsub(vmin(a, b), vmul(vmax(a, b), vbroadcast(0.5))))
        vstore(out + N + i, vsilu(vdiv(a, vadd(vabs(b), vbroadcast(1.0)))))
        vstore(out + 2 * N + i, vselect_gt(a, b, vneg(a), vsqrt(vabs(b))))
        vstore(out + 3 * N + i, vfnma(a, b, vround(vmul(a, vbroadcast(3.0)))))
        vstore(out + 4 * N + i, vload(half + i))
        vstore(back + i, vfma(a, b, vload(half + i)))
        w = vadd_i32(vload_i32(words + i), vsub_i32(viota(), vbroadcast_i32(3)))
        vstore_i32(ints + i, vadd_i32(w, vbitcast_i32(vcvt_f32(vcvt_i32(a)))))
        top = vmax(top, vtail(a, -inf))
        low = vmin(low, vtail(a, inf))
        sums = vadd(sums, vtail(vmul(a, b), 0.0))
    out[5 * N] = vreduce_max(top)
    out[5 * N + 1] = vreduce_min(low)
    out[5 * N + 2] = vreduce_add(sums)
    vreduce_add4(out + 5 * N + 4, sums, vmul(sums, sums), vbroadcast(0.25), vneg(sums))
    vreduce_add16(out + 5 * N + 8, 5, sums, vmul(sums, sums), vbroadcast(0.25), vneg(sums), sums,
                  sums, sums, vneg(sums), sums, sums, sums, sums, sums, sums, sums, vneg(sums))
    prefetch_l2(x)
    keep_order()
    store(back + N, out[0])
    out[5 * N + 3] = load(back + N)
'''
LARGE = '''
"""A local array that no stack frame of TVM holds."""


@kernel
def large(out: ptr[f32]):
    """Needs 2 KiB."""
    kept = local(512, f32)
    kept[0] = 1.0
    out[0] = kept[0]
'''


def module(text: str):
    return resolve_imports(parse_high(Source("test.dk", text)))


def both(request: KernelRequest, args: list, unit=None, target=None):
    """Run the C road's and the TIR backend's kernel on copies of the arrays in `args`."""
    target = target or host_target()
    modules = {} if unit is None else {request.module: unit}
    spec = LibrarySpec(target, (request,), modules=modules, team=False, tvm_ffi=False)
    entry = ctypes.CDLL(str(build_library(spec).path))[request.name]
    kernel = build_tir_kernel(request, target.name, unit=unit)

    def run(function, number):
        own = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
        function(*(a.ctypes.data if isinstance(a, np.ndarray) else number(a) for a in own))
        return own

    def to_c(value):
        return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int64(value)

    def call_c(*values):
        entry(*(ctypes.c_void_p(v) if isinstance(v, int) else v for v in values))

    return run(call_c, to_c), run(kernel, lambda value: value)


def assert_alike(pairs) -> None:
    for wanted, got in zip(*pairs, strict=True):
        if isinstance(wanted, np.ndarray):
            np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@needs_tvm
@pytest.mark.parametrize("size", [3, 4, 9])
@pytest.mark.parametrize("null", [True, False])
def test_statements_and_scalars(size, null):
    out, counts = np.zeros(9, np.float32), np.zeros(5, np.int64)
    words = np.array([-17, 45], np.int32)
    other = 0 if null else random(2, seed=3)
    args = [size, random(size), words, other, out, counts]
    pairs = both(KernelRequest("language", "control", {}, "control"), args, module(LANGUAGE))
    assert_alike(pairs)
    assert pairs[1][4].any() and pairs[1][5][0] == pairs[0][5][0]


@needs_tvm
@pytest.mark.parametrize("target", [host_target().name, "generic"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_vectors_whole_and_partial(target, dtype):
    size, unit = 21, module(VECTORS)
    half = random(size, seed=2)
    half = half.astype(np.float16).view(np.uint16) if dtype == "f16" else half.view(np.uint16)[::2]
    args = [size, random(size), random(size, seed=1), np.arange(size, dtype=np.int32)]
    half = np.resize(half, size).copy()
    half[0] = 0x3C00
    out = [np.zeros(5 * size + 28, np.float32), np.zeros(size + 1, np.uint16)]
    args += [half, *out, np.zeros(size, np.int32)]
    request = KernelRequest("vectors", "vectors", {"S": dtype}, f"vectors_{dtype}")
    wanted, got = both(request, args, unit, TARGETS[target])
    finite = np.isfinite(wanted[5])
    np.testing.assert_allclose(got[5][finite], wanted[5][finite], rtol=2e-6, atol=1e-6)
    assert got[5].any() and (np.isnan(got[5]) == np.isnan(wanted[5])).all()
    np.testing.assert_array_equal(got[6], wanted[6])
    np.testing.assert_array_equal(got[7], wanted[7])


@needs_tvm
@pytest.mark.parametrize("target", [host_target().name, "generic"])
@pytest.mark.parametrize("kernel", ["dots", "nibbles", "bytes"])
def test_quads_and_bytes(kernel, target):
    rng, lanes = np.random.default_rng(5), TARGETS[target].lanes
    codes = rng.integers(0, 128, 8 * lanes, np.uint8)
    signed = rng.integers(-127, 128, (2, 8 * lanes), np.int8)
    args = {
        "dots": [2, codes, *signed, np.arange(4 * lanes, dtype=np.int32)],
        "nibbles": [codes, signed[0], np.zeros(lanes, np.int32)],
        "bytes": [codes, signed[0], np.zeros(2 * lanes, np.int32), np.zeros(2 * lanes, np.int8)],
    }[kernel]
    request = KernelRequest("quads", kernel, {}, kernel)
    for wanted, got in zip(*both(request, args, module(QUAD_TEXT), TARGETS[target]), strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert got.any()


SCHEDULE = {"m_tile": 4, "block_k": 7, "grid_m": 1, "grid_n": 1, "grid_k": 1, "n_outer": 1}
SCHEDULE |= {"prefetch": 64, "nth": 1}


def gemm_args(weight: np.ndarray, m: int, n: int, k: int, *, silu: bool) -> list:
    panels = -(-n // 16) * (2 if silu else 1)
    head = [m, n, k, random(m, k), k, weight, weight[0].size, random(panels * 16, seed=4)]
    residual = [] if silu else [random(m, n, seed=5), n]
    given = [*head, *residual, np.zeros((m, n), np.float32), n]
    function = load_kernel_module("gemm").function("gemm_silu" if silu else "gemm_linear")
    rest = [p.name for p in function.params][len(given) :]
    return given + [SCHEDULE.get(name, 0) for name in rest]


@needs_tvm
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_gemm_linear_has_the_bits_of_the_c_road(dtype):
    m, n, k = 6, 40, 19
    weight = random(n, k, seed=6)
    if dtype == "bf16":
        weight = (weight.view(np.uint32) >> 16).astype(np.uint16)
    weight = FORMATS[dtype].pack(weight)
    request = KernelRequest("gemm", "gemm_linear", {"W": dtype, "MR": 4, "NP": 2}, "product")
    args = gemm_args(weight, m, n, k, silu=False)
    wanted, got = both(request, args)
    assert got[10].any()
    np.testing.assert_array_equal(got[10], wanted[10])


@needs_tvm
def test_gemm_silu():
    m, n, k = 3, 24, 11
    args = gemm_args(random(2 * -(-n // 16), k, 16, seed=6), m, n, k, silu=True)
    request = KernelRequest("gemm", "gemm_silu", {"W": "f32", "MR": 3, "NP": 2}, "gated")
    pairs = both(request, args)
    assert pairs[1][8].any()
    assert_alike(pairs)


@needs_tvm
def test_threads_share_rmsnorm():
    rows, size = 5, 70
    x, w, out = random(rows, size), random(size, seed=1), np.zeros((rows, size), np.float32)
    kernel = build_tir_kernel(KernelRequest("norm", "rmsnorm", {}, "rmsnorm"))
    head = [rows, size, x.ctypes.data, size, w.ctypes.data, 1e-5, out.ctypes.data, size]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda tid: kernel(*head, tid, 2), range(2)))
    wide = x.astype(np.float64)
    exact = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * w
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-6)
    assert "llvm.fma" in kernel.text


@needs_tvm
def test_what_the_backend_cannot_do_is_said():
    with pytest.raises(ScheduleError, match="use the C backend"):
        build_tir_kernel(KernelRequest("large", "large", {}, "large"), unit=module(LARGE))
    with pytest.raises(SpecError, match="no CPU for aarch64-neon"):
        build_tir_kernel(KernelRequest("norm", "rmsnorm", {}, "rmsnorm"), "aarch64-neon")


def test_without_tvm_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(backend, "has_tvm", lambda: False)
    with pytest.raises(ToolchainError, match=r"dovetail\[tvm\]"):
        build_tir_kernel(KernelRequest("norm", "rmsnorm", {}, "rmsnorm"))
