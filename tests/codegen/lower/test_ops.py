"""Every builtin, lowered for each native target and compared with numpy."""

import math

import numpy as np
import pytest

from dovetail.codegen.targets import ALL_TARGETS, DEVICE_TARGETS, TARGETS
from dovetail.ir.dtypes import narrow_bf16, widen_bf16
from dovetail.ir.high.ops import OPS
from tests.codegen.lower.native import NATIVE, RUNNING, run
from tests.codegen.lower.test_quads import QUAD_TEXT, SUM_TEXT
from tests.codegen.lower.test_tiles import TILE_TEXT

RNG = np.random.default_rng(7)
N = 37
A = RNG.standard_normal(N).astype(np.float32)
B = RNG.standard_normal(N).astype(np.float32) + np.float32(3)
C = RNG.standard_normal(N).astype(np.float32)
I = RNG.integers(-1000, 1000, N).astype(np.int32)  # noqa: E741
J = RNG.integers(-1000, 1000, N).astype(np.int32)

VECTOR = {
    "vzero()": 0 * A,
    "vbroadcast(2.5)": 0 * A + 2.5,
    "vadd(a, b)": A + B,
    "vsub(a, b)": A - B,
    "vmul(a, b)": A * B,
    "vdiv(a, b)": A / B,
    "vmin(a, b)": np.minimum(A, B),
    "vmax(a, b)": np.maximum(A, B),
    "vfma(a, b, c)": A * B + C,
    "vfnma(a, b, c)": C - A * B,
    "vabs(a)": abs(A),
    "vneg(a)": -A,
    "vsqrt(b)": np.sqrt(B),
    "vround(vmul(a, vbroadcast(4.0)))": np.round(A * 4),
    "vfloor(vmul(a, vbroadcast(4.0)))": np.floor(A * 4),
    "vceil(vmul(a, vbroadcast(4.0)))": np.ceil(A * 4),
    "vtrunc(vmul(a, vbroadcast(4.0)))": np.trunc(A * 4),
    "vselect_gt(a, c, b, vneg(b))": np.where(A > C, B, -B),
    "vcvt_f32(vcvt_i32(vmul(a, vbroadcast(4.0))))": np.rint(A * 4),
    "vcvt_f32(vadd_i32(i, j))": I + J,
    "vcvt_f32(vsub_i32(i, j))": I - J,
    "vcvt_f32(vmul_i32(i, j))": I * J,
    "vcvt_f32(vand_i32(i, j))": I & J,
    "vcvt_f32(vor_i32(i, j))": I | J,
    "vcvt_f32(vxor_i32(i, j))": I ^ J,
    "vcvt_f32(vshl_i32(i, 3))": I << 3,
    "vcvt_f32(vshr_i32(i, 9))": I.view(np.uint32) >> 9,
    "vcvt_f32(vbroadcast_i32(7))": 0 * I + 7,
    "vbitcast_f32(vbitcast_i32(a))": A,
}
VECTOR_KERNEL = """
@kernel
def k{}(n: i64, pa: ptr[f32], pb: ptr[f32], pc: ptr[f32], pi: ptr[i32], pj: ptr[i32],
        out: ptr[f32]):
    for x in vrange(n):
        a = vload(pa + x)
        b = vload(pb + x)
        c = vload(pc + x)
        i = vload_i32(pi + x)
        j = vload_i32(pj + x)
        vstore(out + x, {})
"""
VECTOR_TEXT = "".join(VECTOR_KERNEL.format(i, e) for i, e in enumerate(VECTOR))


@pytest.mark.parametrize("target", RUNNING)
@pytest.mark.parametrize("expression", VECTOR)
def test_vector_operations_equal_numpy(expression, target):
    out = np.full(N + 1, 99, np.float32)
    run(VECTOR_TEXT, f"k{list(VECTOR).index(expression)}", target, N, A, B, C, I, J, out)
    np.testing.assert_allclose(out[:N], VECTOR[expression], rtol=2e-6, atol=1e-6)
    assert out[N] == 99


REDUCE = {
    "vreduce_add": ("vadd", "0.0", np.sum),
    "vreduce_max": ("vmax", "-inf", np.max),
    "vreduce_min": ("vmin", "inf", np.min),
}


REDUCE_KERNEL = """
@kernel
def {name}(n: i64, p: ptr[f32], out: ptr[f32]):
    acc = vbroadcast({neutral})
    for i in vrange(n):
        acc = {combine}(acc, vtail(vload(p + i), {neutral}))
    out[0] = v{name}(acc)
"""
REDUCE_TEXT = "".join(
    REDUCE_KERNEL.format(name=name[1:], combine=combine, neutral=neutral)
    for name, (combine, neutral, _) in REDUCE.items()
)


@pytest.mark.parametrize("target", RUNNING)
@pytest.mark.parametrize("name", REDUCE)
def test_reductions_over_any_length_equal_numpy(name, target):
    expected = REDUCE[name][2]
    lanes = ALL_TARGETS[target].lanes
    for n in (1, max(1, lanes - 1), lanes, lanes + 1, N):
        out = np.zeros(1, np.float32)
        run(REDUCE_TEXT, name[1:], target, n, A, out)
        np.testing.assert_allclose(out[0], expected(A[:n].astype(np.float64)), rtol=1e-5)


SCALAR = {
    "min(x, y)": np.minimum(A, B),
    "max(x, y)": np.maximum(A, B),
    "abs(x)": abs(A),
    "exp(x)": np.exp(A),
    "sqrt(y)": np.sqrt(B),
    "log(y)": np.log(B),
    "cos(x)": np.cos(A),
    "sin(x)": np.sin(A),
    "tanh(x)": np.tanh(A),
    "floor(x)": np.floor(A),
    "exp2(x) + expm1(x)": np.exp2(A) + np.expm1(A),
    "log2(y) + log10(y) + log1p(y)": np.log2(B) + np.log10(B) + np.log1p(B),
    "cbrt(y) + erf(x)": np.cbrt(B) + [math.erf(x) for x in A],
    "erfc(x)": [math.erfc(x) for x in A],
    "tan(x / 4.0) + atan(x)": np.tan(A / 4) + np.arctan(A),
    "acos(x / 8.0) + asin(x / 8.0)": np.arccos(A / 8) + np.arcsin(A / 8),
    "cosh(x) + sinh(x)": np.cosh(A) + np.sinh(A),
    "ceil(x) + 4.0 * trunc(y) + 16.0 * rint(z)": np.ceil(A) + 4 * np.trunc(B) + 16 * np.rint(C),
    "pow(y, x) + fmod(y, x)": B**A + np.fmod(B, A),
    "atan2(x, z) + copysign(y, x)": np.arctan2(A, C) + np.copysign(B, A),
    "hypot(x, y)": np.hypot(A, B),
    "asinh(x) + acosh(abs(z) + cast(f32, 1))": np.arcsinh(A) + np.arccosh(abs(C) + 1),
    "atanh(tanh(x))": A,
    "cast(f32, sqrt(cast(f64, y)))": np.sqrt(B),
    "cast(f32, cast(i64, y))": np.trunc(B),
    "x if x > z else z": np.maximum(A, C),
    "-x + 2 * y / 4 - 1e-3": -A + 2 * B / 4 - 1e-3,
    "cast(f32, min(n - i, 5) + abs(i - 9) // 2 % 3)": [
        min(N - i, 5) + abs(i - 9) // 2 % 3 for i in range(N)
    ],
    "cast(f32, (i << 2 | 1) ^ (i & 6) >> 1)": [(i << 2 | 1) ^ (i & 6) >> 1 for i in range(N)],
    "cast(f32, abs(cast(u32, i - 2))) + cast(f32, abs(cast(u64, i)))": [
        (i - 2) % 2**32 + i for i in range(N)
    ],
    "1.0 if (i > 3 and not x > 0.0) or i == 0 else 0.0": [
        float((i > 3 and not A[i] > 0) or i == 0) for i in range(N)
    ],
}
SCALAR_KERNEL = """
@kernel
def k{}(n: i64, pa: ptr[f32], pb: ptr[f32], pc: ptr[f32], out: ptr[f32]):
    for i in range(n):
        x = pa[i]
        y = load(pb + i)
        z = pc[i]
        store(out + i, {})
"""
SCALAR_TEXT = "".join(SCALAR_KERNEL.format(i, e) for i, e in enumerate(SCALAR))


@pytest.mark.parametrize("expression", SCALAR)
def test_scalar_expressions_equal_numpy(expression):
    out = np.zeros(N, np.float32)
    run(SCALAR_TEXT, f"k{list(SCALAR).index(expression)}", NATIVE[0], N, A, B, C, out)
    np.testing.assert_allclose(out, SCALAR[expression], rtol=2e-6, atol=1e-6)


MEMORY_TEXT = """
@kernel
def k(n: i64, p: ptr[W], out: ptr[f32], back: ptr[W]):
    W: param = choice("f32", "bf16", "f16")
    for i in vrange(n):
        v = vload(p + i)
        vstore(out + i, v)
        vstore(back + i, v)

@kernel
def scalar(n: i64, p: ptr[W], out: ptr[f32], back: ptr[W]):
    W: param = choice("f32", "bf16", "f16")
    for i in range(n):
        x = load(p + i)
        prefetch(p + i + 16)
        out[i] = x
        store(back + i, x)
"""


@pytest.mark.parametrize("target", RUNNING)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("kernel", ["k", "scalar"])
def test_loads_and_stores_convert_storage_types(kernel, dtype, target):
    stored = {"f32": A, "bf16": narrow_bf16(A), "f16": A.astype(np.float16)}[dtype]
    value = {"f32": A, "bf16": widen_bf16(narrow_bf16(A)), "f16": stored.astype(np.float32)}[dtype]
    out, back = np.zeros(N, np.float32), np.zeros_like(stored)
    run(MEMORY_TEXT, kernel, target, N, stored, out, back, W=dtype)
    np.testing.assert_array_equal(out, value)
    np.testing.assert_array_equal(back, stored)


@pytest.mark.parametrize("target", RUNNING)
def test_counted_loads_give_zero_and_counted_stores_leave_the_rest(target):
    lanes = ALL_TARGETS[target].lanes
    text = """
@kernel
def k(n: i64, p: ptr[f32], out: ptr[f32], q: ptr[i32], to: ptr[i32]):
    vstore(out, vadd(vload(p, n), vbroadcast(1.0)))
    vstore(out + VL, vload(p), n)
    vstore_i32(to, vload_i32(q, n))
    vstore_i32(to + VL, viota(), n)
"""
    for n in (0, 1, lanes - 1, lanes):
        out, to = np.full(2 * lanes, 9, np.float32), np.full(2 * lanes, 9, np.int32)
        run(text, "k", target, n, A, out, I, to)
        keep = np.arange(lanes) < n
        np.testing.assert_array_equal(out[:lanes], np.where(keep, A[:lanes], 0) + np.float32(1))
        np.testing.assert_array_equal(out[lanes:], np.where(keep, A[:lanes], 9))
        np.testing.assert_array_equal(to[:lanes], np.where(keep, I[:lanes], 0))
        np.testing.assert_array_equal(to[lanes:], np.where(keep, np.arange(lanes), 9))


PAIR_TEXT = """
@kernel
def k(p: ptr[bf16], q: ptr[bf16], c: ptr[f32], low: ptr[f32], high: ptr[f32], dot: ptr[f32],
      one: ptr[f32], firsts: ptr[f32], seconds: ptr[f32], sums: ptr[f32]):
    prefetch_l2(p)
    keep_order()
    a = vload_pairs(p)
    b = vload_pairs(q)
    start = vload(c)
    vstore(low, vpair_low(a))
    vstore(high, vpair_high(a))
    vstore(dot, vdot_pairs(a, b, start))
    vstore(one, vdot_pairs(a, vbroadcast_pair(q), start))
    unit = vpair_firsts(vbitcast_i32(vbroadcast(1.0)), vbitcast_i32(vbroadcast(1.0)))
    ones = vpair_seconds(vbitcast_i32(vbroadcast(1.0)), vbitcast_i32(vbroadcast(2.0)))
    vstore(firsts, vdot_pairs(vpair_firsts(a, b), ones, vpair_low(unit)))
    vstore(seconds, vdot_pairs(vpair_seconds(a, b), ones, vpair_high(unit)))
    s = regs((16,), f32)
    for i in unroll(16):
        s[i] = vmul(start, vbroadcast(1.0 + i))
    vreduce_add16(sums + 4, 5, s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s[10],
                  s[11], s[12], s[13], s[14], s[15])
    vreduce_add4(sums, vpair_low(a), vpair_high(a), start, vneg(start))
"""


@pytest.mark.parametrize("target", NATIVE)
def test_pairs_and_many_sums_at_once(target):
    lanes = TARGETS[target].lanes
    p, q = (narrow_bf16(RNG.standard_normal((lanes, 2)).astype(np.float32)) for _ in range(2))
    c = RNG.standard_normal(lanes).astype(np.float32)
    outs = [np.zeros(lanes, np.float32) for _ in range(6)]
    sums = np.full(24, 7, np.float32)
    run(PAIR_TEXT, "k", target, p, q, c, *outs, sums)
    a, b = widen_bf16(p), widen_bf16(q)
    np.testing.assert_array_equal(outs[:2], a.T)
    np.testing.assert_allclose(outs[2], c + (a * b).sum(1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(outs[3], c + (a * b[0]).sum(1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(outs[4:], (a + 2 * b).T, rtol=1e-5, atol=1e-5)
    want = [a[:, 0].sum(), a[:, 1].sum(), c.sum(), -c.sum()]
    np.testing.assert_allclose(sums[:4], want, rtol=1e-5, atol=1e-5)
    sixteen = sums[4:].reshape(4, 5)
    want = c.sum() * np.arange(1, 17).reshape(4, 4)
    np.testing.assert_allclose(sixteen[:, :4], want, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(sixteen[:, 4], 7)


STRIPS_TEXT = """
@kernel
def k(f: ptr[f16], i: ptr[i32], b: ptr[i8], n: i64, out: ptr[f32], words: ptr[i32], low: ptr[i32]):
    vstore(out, vload_strips(f, n))
    vstore_i32(words, vload_strips_i32(i, n))
    vstore_i32(low, vload_strips_i8(b, n))
"""


@pytest.mark.parametrize("target", DEVICE_TARGETS)
@pytest.mark.parametrize("stride", [0, 16, 21])
def test_strips_are_two_stretches_of_sixteen(target, stride):
    halves, words = A[:40].astype(np.float16), I[:40].copy()
    small = np.arange(-20, 20, dtype=np.int8)
    found = [np.zeros(32, kind) for kind in (np.float32, np.int32, np.int32)]
    run(STRIPS_TEXT, "k", target, halves, words, small, stride, *found)
    for source, got in zip((halves, words, small), found, strict=True):
        np.testing.assert_array_equal(got, [*source[:16], *source[stride : stride + 16]])


def test_every_builtin_is_exercised_here():
    texts = (
        VECTOR_TEXT,
        REDUCE_TEXT,
        SCALAR_TEXT,
        MEMORY_TEXT,
        PAIR_TEXT,
        QUAD_TEXT,
        SUM_TEXT,
        TILE_TEXT,
        STRIPS_TEXT,
    )
    text = " ".join(texts)
    text += "vload_i32( vstore_i32( viota( vtail("
    missing = [name for name in OPS if f"{name}(" not in text]
    assert missing == []
