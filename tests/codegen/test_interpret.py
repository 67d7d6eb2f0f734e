"""The interpreter: C semantics as compiled, bounds, every target's helpers and lowered kernels."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from dovetail.codegen.isa.generic import TARGET as GENERIC
from dovetail.codegen.lower import lower
from dovetail.codegen.targets import ALL_TARGETS, DEVICE_TARGETS, TARGETS
from dovetail.codegen.toolchain import BuildSpec, compile_shared
from dovetail.ir.diagnostics import Source
from dovetail.ir.dtypes import narrow_bf16, widen_bf16
from dovetail.ir.high.parse import parse_high
from dovetail.ir.low.parse import parse_low
from dovetail.ir.low.print import print_low
from tests.codegen.float_targets import FLOAT_TARGETS
from tests.codegen.interp.meanings import TOLD
from tests.codegen.interp.memory import Memory, Pointer
from tests.codegen.interpret import InterpretError, interpret

SEMANTICS = """
struct point { char tag; double x; int32_t cells[3]; };
union bits { float f; uint32_t u; };
static const int64_t PRIMES[5] = {2, 3, 5, 7, 11};

int64_t wrap(int64_t a, int64_t b) {
  uint32_t u = (uint32_t)a * 2654435761u + (uint32_t)b;
  int32_t s = (int32_t)u >> 3;
  uint16_t h = (uint16_t)(u >> 5);
  return (int64_t)s * 3 + h - (int64_t)(u % 97u) + (int64_t)(uint8_t)b;
}
int64_t divide(int64_t a, int64_t b) {
  return a / b * 1000 + a % b + (b < a) + (a == b || a > 100) * 10 + !a * 5 + (~a & 0xf0);
}
int64_t unsigned_compare(int64_t a, int64_t b) {
  size_t n = (size_t)a;
  int i = -1;
  return (n > (size_t)b) + 2 * (i < 1u) + 4 * ((int64_t)n > i);
}
int64_t loops(int64_t a, int64_t b) {
  int64_t total = 0;
  for (int64_t i = 0, j = b; i < a; ++i, j -= 2) {
    if (i % 3 == 1) { continue; }
    if (j < -20) { break; }
    int64_t k = i;
    do { total += k-- * PRIMES[i % 5]; } while (k > 0);
    { int64_t total = 7; total += 1; }
  }
  while (total > 1000) { total /= 2; }
  return total << 2 ^ (total | 3);
}
int64_t memory(int64_t a, int64_t b) {
  struct point p;
  struct point* q = &p;
  int32_t square[2][2] = {{1, 2}, {3}};
  int64_t cell = a;
  int64_t* at = &cell;
  const int32_t* rows[2];
  q->x = (double)a / 4.0;
  q->cells[1] = (int32_t)b;
  *at += square[1][0] * 100 + square[1][1];
  rows[0] = square[0];
  rows[1] = square[1];
  at[0] += rows[a & 1][0];
  int64_t size = (int64_t)sizeof(struct point);
  return cell + p.cells[1] + (int64_t)(p.x * 8.0) + size + (rows[1] - rows[0]);
}
int64_t addresses(int64_t a, int64_t b) {
  float row[16];
  float* p = row;
  for (int i = 0; i < 16; i++) { row[i] = (float)i; }
  p = (float*)((uintptr_t)p + (size_t)(a & 7) * sizeof(float));
  p += 3;
  p = (float*)((uintptr_t)p - 2 * sizeof(float));
  return (int64_t)(*p++ * 100.0f + p[-1]) + (p > row) + (p - row) * 10 + (p == 0 ? 5 : 0);
}
int64_t reals(int64_t a, int64_t b) {
  union bits v;
  float x = (float)a * 0.1f + 1.0e-3f, y = x / 3.0f;
  double z = x * 2.5;
  v.f = x - y;
  int64_t root = (int64_t)(sqrtf(x * x) * 8.0f);
  return (int64_t)(v.u >> 4) + (int64_t)(z * 100) + root + (a > b ? 1 : x > y);
}
int64_t fibonacci(int64_t a, int64_t b) {
  return a < 2 ? a : fibonacci(a - 1, b) + fibonacci(a - 2, b);
}
"""
FUNCTIONS = "wrap divide unsigned_compare loops memory addresses reals fibonacci".split()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> ctypes.CDLL:
    head = "#include <math.h>\n#include <stddef.h>\n#include <stdint.h>\n"
    spec = BuildSpec(
        name="semantics",
        target=GENERIC,
        files=(("probe.c", head + SEMANTICS),),
        flags=("-fwrapv",),
    )
    return ctypes.CDLL(str(compile_shared(spec, tmp_path_factory.mktemp("semantics"))))


@pytest.fixture(scope="module")
def semantics():
    return parse_low(Source("semantics.c", SEMANTICS))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_c_semantics_are_those_of_the_compiler(name, compiled, semantics):
    native = getattr(compiled, name)
    native.restype = ctypes.c_int64
    rng = np.random.default_rng(3)
    pairs = [(int(a), int(b)) for a, b in rng.integers(1, 20, (12, 2))]
    pairs += [(7, -3), (9, 4)] if name == "fibonacci" else [(-7, 3), (7, -3), (-8, -3), (0, 5)]
    for a, b in pairs:
        want = native(ctypes.c_int64(a), ctypes.c_int64(b))
        assert interpret(semantics, name, (a, b), GENERIC) == want, (name, a, b)


def low(text: str):
    return parse_low(Source("test.c", text))


def fault(text: str, *args: object, target=GENERIC) -> str:
    unit = low(text)
    with pytest.raises(InterpretError) as caught:
        interpret(unit, unit.items[-1].name, args, target)
    return str(caught.value)


def test_access_outside_a_buffer_names_the_span():
    text = "float last(const float* x, int64_t n) {\n  return x[n];\n}\n"
    assert interpret(low(text), "last", (np.ones(4, np.float32), 3), GENERIC) == 1
    message = fault(text, np.ones(4, np.float32), 4)
    assert message.startswith("2:10: ")
    assert "bytes [16, 20) of x, which has 16 bytes" in message
    assert "null pointer" in fault(text, None, 0)


def test_vector_access_outside_a_buffer_is_a_fault():
    text = "void f(float* x) {\n  _mm256_storeu_ps(x, _mm256_setzero_ps());\n}\n"
    assert "bytes [0, 32) of x" in fault(
        text, np.ones(7, np.float32), target=TARGETS["x86-64-avx2"]
    )


def test_undefined_behaviour_is_refused():
    assert "division by zero" in fault("int64_t f(int64_t a) { return 1 / a; }", 0)
    assert "shifted by 32" in fault("int32_t f(int32_t a) { return 1 << a; }", 32)
    assert "nan" in fault("int32_t f(float a) { return (int32_t)a; }", float("nan"))
    assert "two different buffers" in fault(
        "int64_t f(float* a, float* b) { return a - b; }", np.ones(1), np.ones(1)
    )


def test_uninitialised_values_spoil_the_result():
    text = "float f(void) { float t[4]; float x; return t[1] + x; }"
    assert np.isnan(interpret(low(text), "f", (), GENERIC))


def test_unknown_function_is_named():
    assert "`nothing`" in fault("float f(float x) { return nothing(x); }", 1.0)


def test_pointer_arguments_may_point_into_a_buffer():
    array = np.arange(4, dtype=np.float32)
    pointer = Pointer(Memory.of("array", array), 8)
    text = "float f(float* x) { x[-1] = 9.0f; return x[0]; }"
    assert interpret(low(text), "f", (pointer,), GENERIC) == 2
    assert array.tolist() == [0, 9, 2, 3]


HALVES = np.unique(
    np.concatenate(
        [np.arange(0, 0x10000, 251), [0, 1, 0x3FF, 0x400, 0x7BFF, 0x7C00, 0x8000, 0xFC00]]
    )
).astype(np.uint16)
SPECIAL = """0 -0 1 -1.5 65504 65519.99 65520 1e9 -1e9 inf -inf nan 1e-8 1e-40 3.3895314e38 3.4e38
    6.1e-5 6.104e-5 0x1p-25 0x1p-24 0x1.8p-24 0x1.4p-23 0x1.004p0 0x1.00cp0 0x1.01p0 0x1.03p0"""
VALUES = np.array(
    [float.fromhex(v) if "0x" in v else float(v) for v in SPECIAL.split()], np.float32
)


def half_bits(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        bits = x.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(x), bits & 0x7FFF, bits)


@pytest.mark.parametrize("name", [*FLOAT_TARGETS, *DEVICE_TARGETS])
def test_scalar_half_formats_are_exact(name):
    target = ALL_TARGETS[name]
    text = "".join(
        f"float get_{t}(const uint16_t* p) {{ return {target.ops[f'load.{t}'].format('p')}; }}\n"
        f"void put_{t}(uint16_t* p, float x) {{ {target.ops[f'store.{t}'].format('p', 'x')}; }}\n"
        for t in ("f16", "bf16")
    )
    unit = low(text)
    out = np.zeros(1, np.uint16)
    for bits in HALVES:
        out[0] = bits
        for got, want in (
            (interpret(unit, "get_f16", (out,), target), out.view(np.float16)[0]),
            (interpret(unit, "get_bf16", (out,), target), widen_bf16(out)[0]),
        ):
            np.testing.assert_array_equal(np.float32(got), np.float32(want))
    for x, half, brain in zip(VALUES, half_bits(VALUES), narrow_bf16(VALUES), strict=True):
        interpret(unit, "put_f16", (out, x), target)
        assert out[0] & (0x7FFF if np.isnan(x) else 0xFFFF) == half, x
        interpret(unit, "put_bf16", (out, x), target)
        assert out[0] == brain, x


TRIAD = parse_high(
    Source(
        "triad.dk",
        '''
@kernel
def triad(N: i64, x: ptr[X], y: ptr[X], out: ptr[X], sums: ptr[f32]):
    """out = x * y, and its sum, maximum and minimum."""
    X: param = choice("f32", "bf16", "f16", default="f32")
    total = vzero()
    high = vbroadcast(-inf)
    low = vbroadcast(inf)
    for i in vrange(0, N):
        v = vmul(vload(x + i), vload(y + i))
        vstore(out + i, v)
        total = vadd(total, v)
        high = vmax(high, vtail(v, -inf))
        low = vmin(low, vtail(v, inf))
    sums[0] = vreduce_add(total)
    sums[1] = vreduce_max(high)
    sums[2] = vreduce_min(low)
''',
    )
)
STORAGE = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("name", [*FLOAT_TARGETS, *DEVICE_TARGETS])
def test_lowered_kernels_run_at_tile_edges_without_touching_more(name, dtype):
    target = ALL_TARGETS[name]
    unit = lower(TRIAD, "triad", {"X": dtype}, target, name="triad")
    unit = parse_low(Source("triad.c", print_low(unit)))
    rng = np.random.default_rng(1)
    lanes = target.lanes
    for n in sorted({0, 1, lanes - 1, lanes, lanes + 1, 2 * lanes + 1}):
        x, y = (rng.integers(-4, 5, n).astype(np.float32) for _ in range(2))
        store = narrow_bf16 if dtype == "bf16" else STORAGE[dtype]
        out, sums = np.zeros(n, STORAGE[dtype]), np.zeros(3, np.float32)
        interpret(unit, "triad", (n, store(x), store(y), out, sums), target)
        np.testing.assert_array_equal(out, store(x * y))
        want = [(x * y).sum(), (x * y).max(initial=-np.inf), (x * y).min(initial=np.inf)]
        np.testing.assert_array_equal(sums, np.float32(want))


HAND_WRITTEN = """
#include <immintrin.h>
union limits { struct { float min[8]; float max[8]; int32_t mask_table[14]; } avx; };

void gemm_2x8(size_t mr, size_t nc, size_t kc, const float* restrict a, size_t a_stride,
    const float* restrict w, float* restrict c, size_t cm_stride, size_t cn_stride,
    const union limits params[restrict 1])
{
  assert(mr <= 2);
  const float* a0 = a;
  float* c0 = c;
  const float* a1 = (const float*) ((uintptr_t) a0 + a_stride);
  float* c1 = (float*) ((uintptr_t) c0 + cm_stride);
  if (mr != 2) {
    a1 = a0;
    c1 = c0;
  }
  do {
    __m256 vacc0 = _mm256_load_ps(w);
    __m256 vacc1 = vacc0;
    w += 8;
    size_t k = kc;
    do {
      const __m256 vb = _mm256_load_ps(w);
      w += 8;
      vacc0 = _mm256_fmadd_ps(_mm256_broadcast_ss(a0), vb, vacc0);
      a0 += 1;
      vacc1 = _mm256_fmadd_ps(_mm256_broadcast_ss(a1), vb, vacc1);
      a1 += 1;
      k -= sizeof(float);
    } while (k != 0);
    const __m256 vmin = _mm256_load_ps(params->avx.min);
    const __m256 vmax = _mm256_load_ps(params->avx.max);
    vacc0 = _mm256_min_ps(_mm256_max_ps(vacc0, vmin), vmax);
    vacc1 = _mm256_min_ps(_mm256_max_ps(vacc1, vmin), vmax);
    if (nc >= 8) {
      _mm256_storeu_ps(c1, vacc1);
      c1 = (float*) ((uintptr_t) c1 + cn_stride);
      _mm256_storeu_ps(c0, vacc0);
      c0 = (float*) ((uintptr_t) c0 + cn_stride);
      a1 = (const float*) ((uintptr_t) a1 - kc);
      a0 = (const float*) ((uintptr_t) a0 - kc);
      nc -= 8;
    } else {
      const __m256i vmask = _mm256_loadu_si256(
          (const __m256i*) ((uintptr_t) &params->avx.mask_table[7] - nc * sizeof(float)));
      _mm256_maskstore_ps(c1, vmask, vacc1);
      _mm256_maskstore_ps(c0, vmask, vacc0);
      nc = 0;
    }
  } while (nc != 0);
}
"""


@pytest.mark.parametrize("m", [1, 2])
@pytest.mark.parametrize("n", [1, 7, 8, 9, 17])
def test_hand_written_kernel_in_the_style_of_third_parties(m, n):
    """Addresses as integers, a union of parameters, a mask table, `do` loops, dropped asserts."""
    rng = np.random.default_rng(n)
    k, blocks = 5, -(-n // 8)
    a = rng.standard_normal((m, k)).astype(np.float32)
    b = np.zeros((k + 1, blocks * 8), np.float32)  # row 0 is the bias
    b[:, :n] = rng.standard_normal((k + 1, n))
    packed = np.ascontiguousarray(b.reshape(k + 1, blocks, 8).transpose(1, 0, 2))
    params = np.zeros(30, np.float32)
    params[:8], params[8:16] = -1, 1
    params[16:].view(np.int32)[:7] = -1
    c = np.full((m, n), 9, np.float32)
    arguments = (m, n, 4 * k, a, 4 * k, packed, c, 4 * n, 32, params)
    interpret(low(HAND_WRITTEN), "gemm_2x8", arguments, TARGETS["x86-64-avx2"])
    want = np.clip(a.astype(np.float64) @ b[1:, :n] + b[0, :n], -1, 1)
    np.testing.assert_allclose(c, want, rtol=1e-5, atol=1e-6)


def test_each_instruction_means_one_thing():
    rows = {name: row for t in ALL_TARGETS.values() for name, row in t.intrinsics.items()}
    assert {name for name, row in rows.items() if row.meaning is None} == TOLD.keys()
