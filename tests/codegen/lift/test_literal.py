"""C that is written out as it stands computes, for any target, what gcc's build computes."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from dovetail.codegen.lift import lift, lift_function
from dovetail.codegen.lift.literal_expr import find_rule
from dovetail.codegen.lower import lower
from dovetail.codegen.targets import TARGETS
from dovetail.ir.diagnostics import Source
from dovetail.ir.errors import SpecError, SyntaxDiagnostic
from dovetail.ir.high.print import print_high
from dovetail.ir.low.parse import Pieces, parse_low
from dovetail.ir.low.print import print_low
from tests.codegen.lift.native import compile_c
from tests.codegen.lower.native import HEAD

HEADERS = "#include <immintrin.h>\n" + HEAD
CONSTRUCTS = {
    "vector operators": """
void f(const float *x, const uint8_t *b, float *y, int32_t *z) {
  __m256 acc = _mm256_setzero_ps();
  for (int i = 0; i < 64; i += 8) acc += _mm256_loadu_ps(x + i) * _mm256_loadu_ps(x + i);
  _mm256_storeu_ps(y, acc - _mm256_loadu_ps(x));
}""",
    "void pointers, structs and halves": """
typedef struct { uint16_t d; int8_t qs[30]; } block;
void f(const float *x, const void *v, float *y, int32_t *z) {
  const block *b = v;
  for (int i = 0; i < 4; i++, b++) {
    int sum = 0;
    for (int j = 0; j < 30; ++j) sum += b->qs[j] * b[1].qs[j];
    z[i] = sum;
    y[i] = _cvtsh_ss(b->d & 0x3bff) * (float)(sum & 1023);
  }
}""",
    "products of bytes": """
static inline __m256i dot(__m256i a, __m256i b) {
  const __m256i s = _mm256_maddubs_epi16(_mm256_sign_epi8(a, a), _mm256_sign_epi8(b, a));
  return _mm256_madd_epi16(s, _mm256_set1_epi16(1));
}
void f(const float *x, const uint8_t *b, float *y, int32_t *z) {
  const __m256i *q = (const __m256i *)b;
  __m256i p = dot(_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1));
  p = _mm256_add_epi32(p, _mm256_srai_epi32(p, 3));
  _mm256_storeu_si256((__m256i *)z, p);
  _mm256_storeu_ps(y, _mm256_cvtepi32_ps(p));
}""",
    "shuffles and packs": """
void f(const float *x, const uint8_t *b, float *y, int32_t *z) {
  __m128i v = _mm_loadu_si128((const __m128i *)b), w = _mm_loadu_si128((const __m128i *)(b + 16));
  __m128i t = _mm_shuffle_epi8(v, _mm_and_si128(w, _mm_set1_epi8(15)));
  t = _mm_alignr_epi8(t, _mm_unpacklo_epi8(v, w), 5);
  t = _mm_xor_si128(t, _mm_packs_epi16(_mm_cvtepi8_epi16(v), _mm_srli_epi16(w, 3)));
  t = _mm_adds_epu8(t, _mm_shuffle_epi32(v, _MM_SHUFFLE(0, 1, 2, 3)));
  _mm_storeu_si128((__m128i *)z, _mm_blendv_epi8(t, w, v));
  z[4] = _mm_movemask_epi8(t);
  _mm_storeu_ps(y, _mm_blendv_ps(_mm_loadu_ps(x), _mm_loadu_ps(x + 4), _mm_loadu_ps(x + 8)));
}""",
    "pointers in memory": """
void f(const float *x, const uint8_t *b, float *y, int32_t *z) {
  const float *rows[3], **next = rows;
  struct { float *to; int step; } out = {y, 2};
  for (int i = 0; i < 3; ++i) {
    rows[i] = x + 8 * i;
    if (rows[i] != x + 8) rows[i] = (const float *)((uintptr_t)rows[i] + 4 * (b[i] & 3));
  }
  int n = 3;
  do {
    const float *row = *next++;
    __asm__ volatile("" : "+r"(n));
    *out.to = row[0] - (n & 1 ? rows[n - 1] : row)[5];
    out.to += out.step;
  } while (--n != 0);
}""",
    "parts of memory and of registers": """
void f(const float *x, const uint8_t *b, float *y, int32_t *z) {
  const __m256i bits = _mm256_loadu_si256((const __m256i *)b);
  const __m256 part = _mm256_maskload_ps(x, bits), all = _mm256_loadu_ps(x + 8);
  _mm256_storeu_ps(y, _mm256_add_ps(part, all));
  _mm256_maskstore_ps(y + 4, _mm256_slli_epi32(bits, 1), all);
  _mm256_storeu_ps(y + 16, _mm256_permutevar_ps(all, bits));
  __m128 low = _mm_move_ss(_mm_loadu_ps(x + 16), _mm_loadu_ps(x + 20));
  low = _mm_loadl_pi(low, (const __m64 *)(x + 24));
  low = _mm_and_ps(low, _mm_cmplt_ps(low, _mm_loadh_pi(low, (const __m64 *)(x + 30))));
  _mm256_storeu_ps(y + 24, _mm256_zextps128_ps256(low));
  __m128i words = _mm256_castsi256_si128(bits);
  words = _mm_shufflehi_epi16(_mm_shufflelo_epi16(words, 0x1b), 0x93);
  _mm_storeu_si128((__m128i *)z, words);
}""",
    "control": """
static int choose(int a, int b) { if (a > b) return a - b; if (a == b) return 7; return b; }
void f(const float *x, const uint8_t *b, float *y, int32_t *z) {
  int i = 0, n = 0;
  do { if (b[i] & 1) { i++; n += 2; } else i += 2; } while (0);
  for (i = 0; i < 16; ++i) {
    if (__builtin_expect(!!(b[i] == 3), 0)) continue;
    if (i > 12 && b[i] > 200) break;
    z[n++ & 15] = choose(b[i], b[i + 1]) << (b[i] & 3);
  }
  i = 0;
next:
  z[i] += b[i];
  if (++i < 9) goto next;
  union { float f; uint32_t u; } bits;
  bits.f = x[0];
  for (i = 0; i < 4; i++) {
    bits.u ^= 1u << i;
    y[i] = bits.f > 0 ? bits.f : -__builtin_coshf(bits.f);
  }
}""",
    "unsigned 64 bits": """
void f(const float *x, const uint8_t *b, float *y, int32_t *z) {
  const uint64_t *p = (const uint64_t *)b;
  for (int i = 0; i < 12; ++i) {
    uint64_t u = p[i] | 1ull << 63, v = p[i + 12];
    z[4 * i] = (u > v) + 2 * (u >= 5) + 4 * (v < u);
    z[4 * i + 1] = (int32_t)(u >> 60) + (int32_t)((u / 7) >> 40);
    z[4 * i + 2] = (int32_t)(u % 1000003);
    z[4 * i + 3] = (int32_t)((uint32_t)v * (uint64_t)(uint32_t)u >> 33);
    y[2 * i] = (float)u;
    y[2 * i + 1] = (float)((double)v * 0x1p-60);
  }
}""",
}


GOLDEN = Path(__file__).parent / "kernels/literal.npz"
"""What gcc's build of each text, for AVX2, makes of the arguments of each seed: y and z."""
SEEDS = range(4)


def arguments(seed):
    rng = np.random.default_rng(seed)
    return [
        rng.standard_normal(128).astype(np.float32),
        rng.integers(0, 256, 512).astype(np.uint8),
        np.zeros(64, np.float32),
        np.zeros(64, np.int32),
    ]


def called(library, seed):
    arrays = arguments(seed)
    library.f(*(ctypes.c_void_p(a.ctypes.data) for a in arrays))
    return arrays[2:]


FLAGS = ("-fno-strict-aliasing", "-fwrapv")


def lifted_library(text, target):
    pieces = Pieces()
    pieces.add(Source("k.c", text))
    unit = lift_function(pieces, "f")
    assert unit.notes[0].startswith("written out as it stands")
    chosen = TARGETS[target]
    lowered = print_low(lower(unit, "f", {}, chosen, name="f"))
    includes = "".join(f"#include <{h}>\n" for h in chosen.headers)
    return compile_c(includes + HEAD + lowered, chosen, FLAGS)


def make_golden():
    """Write what gcc says; for a machine with AVX2, when a text changes."""
    found = {}
    for name, text in CONSTRUCTS.items():
        library = compile_c(HEADERS + text, TARGETS["x86-64-avx2"], ("-w", *FLAGS))
        for seed in SEEDS:
            y, z = called(library, seed)
            found |= {f"{name}.{seed}.y": y, f"{name}.{seed}.z": z}
    np.savez_compressed(GOLDEN, **found)


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_constructs_compute_what_gcc_computes(name):
    """Each for one CPU that any machine is, by what gcc made of the same text once."""
    golden, library = np.load(GOLDEN), lifted_library(CONSTRUCTS[name], "generic")
    for seed in SEEDS:
        y, z = called(library, seed)
        assert np.array_equal(z, golden[f"{name}.{seed}.z"]), seed
        np.testing.assert_allclose(y, golden[f"{name}.{seed}.y"], rtol=2e-6, atol=1e-6)


def test_a_product_and_sum_under_a_mask_keeps_its_first_factor():
    text = """void f(const float *x, const unsigned char *u, float *y, int *z) {
        unsigned char mask = u[0];
        __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16), c = _mm512_loadu_ps(x + 32);
        _mm512_storeu_ps(y, _mm512_mask_fmadd_ps(a, mask | 0x5a00, b, c));
    }"""
    arrays = arguments(0)
    y, _ = called(lifted_library(text, "generic"), 0)
    a, b, c = arrays[0][:16], arrays[0][16:32], arrays[0][32:48]
    chosen = (int(arrays[1][0]) | 0x5A00) >> np.arange(16) & 1
    np.testing.assert_allclose(y[:16], np.where(chosen, a * b + c, a), rtol=2e-6)


def dots(sums, a, b):
    """Each sum of 32 bits with the products of four bytes; it wraps around."""
    products = (a.astype(np.int64) * b.astype(np.int64)).reshape(-1, 4).sum(1)
    return (sums.astype(np.int64) + products).astype(np.int32)


def test_bytes_are_multiplied_in_fours():
    text = """void f(const float *x, const unsigned char *b, float *y, int *z) {
        __m512i sums = _mm512_loadu_si512(b + 128), *to[1];
        to[0] = (__m512i *)z;
        sums = _mm512_dpbusd_epi32(sums, _mm512_loadu_si512(b), _mm512_loadu_si512(b + 64));
        _mm512_storeu_si512(to[0], sums);
        __m512 all = _mm512_loadu_ps(x);
        all += _mm512_loadu_ps(x + 16);
        _mm512_storeu_ps(y, all);
        int8x16_t p = vld1q_s8((const int8_t *)b), q = vld1q_s8((const int8_t *)(b + 16));
        int32x4_t s = vld1q_s32((const int32_t *)(b + 32));
        vst1q_s32(z + 16, vdotq_s32(s, p, q));
        vst1q_s32(z + 20, vdotq_lane_s32(s, p, vget_high_s8(q), 1));
    }"""
    (x, b), (y, z) = arguments(0)[:2], called(lifted_library(text, "generic"), 0)
    signed, words = b.view(np.int8), b.view(np.int32)
    assert np.array_equal(z[:16], dots(words[32:48], b[:64], signed[64:128]))
    assert np.array_equal(y[:16], x[:16] + x[16:32])
    assert np.array_equal(z[16:20], dots(words[8:12], signed[:16], signed[16:32]))
    assert np.array_equal(z[20:24], dots(words[8:12], signed[:16], np.tile(signed[28:32], 4)))


def test_masks_that_choose_between_vectors():
    text = """void f(const float *x, const unsigned char *u, float *y, int *z) {
        __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
        __m512i at = _mm512_loadu_si512(u);
        _mm512_storeu_ps(y, _mm512_mask_blend_ps(u[0] | 0x5a00, a, b));
        _mm512_storeu_ps(y + 16, _mm512_mask_permutex2var_ps(a, 0x3c3c, at, b));
    }"""
    x, u = arguments(0)[:2]
    y, _ = called(lifted_library(text, "generic"), 0)
    a, b, lanes = x[:16], x[16:32], np.arange(16)
    chosen, moved = (int(u[0]) | 0x5A00) >> lanes & 1, 0x3C3C >> lanes & 1
    both = x[:32][u.view(np.uint32)[:16] % 32]
    assert np.array_equal(y[:32], np.append(np.where(chosen, b, a), np.where(moved, both, a)))


def test_a_wrong_number_of_arguments_is_refused():
    pieces = Pieces()
    text = "void f(float *x) { float *p[2]; p[1] = x; _mm_storeu_ps(p[1], _mm_blend_ps(x[0])); }"
    pieces.add(Source("k.c", text))
    with pytest.raises(SpecError, match="_mm_blend_ps with 1 arguments"):
        lift_function(pieces, "f")


def test_powers_of_two_are_scaled_as_a_whole():
    text = """void f(const float *x, const unsigned char *u, float *y, int *z) {
        __m512 power = _mm512_mul_ps(_mm512_loadu_ps(x + 16), _mm512_set1_ps(60.0f));
        _mm512_storeu_ps(y, _mm512_scalef_ps(_mm512_loadu_ps(x), power));
    }"""
    x, (y, _) = arguments(0)[0], called(lifted_library(text, "generic"), 0)
    assert np.array_equal(y[:16], np.ldexp(x[:16], np.floor(x[16:32] * 60).astype(int)))


def test_exponents_are_those_of_the_instruction():
    text = """void f(const float *x, const unsigned char *u, float *y, int *z) {
        _mm512_storeu_ps(y, _mm512_getexp_ps(_mm512_loadu_ps(x)));
    }"""
    edges = [0, -0.0, 1, -1.9999999, 1e-45, 2**-126, 3.4e38, np.inf, np.nan, 0.99999994, 8388607.5]
    x, y = np.array([*edges, *np.full(5, 0.3)], np.float32), np.zeros(16, np.float32)
    places = (ctypes.c_void_p(v.ctypes.data) for v in (x, x, y, y))
    lifted_library(text, "generic").f(*places)
    with np.errstate(divide="ignore"):
        wanted = np.floor(np.log2(np.abs(x.astype(np.float64))))
    np.testing.assert_array_equal(y, wanted)


SWITCHES = """void f(const float *x, const unsigned char *b, float *y, int *z) {
    for (int i = 0; i < 32; i++) {
        switch (b[i] & 7) {
            case 3: y[i] = x[i];
            case 2: { z[i] += 2; break; }
            case 4: case 5: z[i] = i; if (i > 9) continue; y[i] = 1.0f; break;
            default: z[i] = 9;
            case 1: y[i] += 4.0f;
        }
    }
}"""


@pytest.mark.parametrize("target", ["generic", "x86-64-avx2"])
def test_arms_of_a_switch_fall_through(target):
    wanted = called(compile_c(HEAD + SWITCHES, TARGETS[target], FLAGS), 0)
    for got, want in zip(called(lifted_library(SWITCHES, target), 0), wanted, strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_switch_is_lifted_with_all_cases_that_may_be_read():
    arms = "".join(f"case {i}: z[{i}] += x; break;" for i in range(68))
    unit = parse_low(Source("k.c", f"void f(int x, int *z) {{ switch (x & 255) {{ {arms} }} }}"))
    text = print_high(lift(unit, "f"))
    assert all(f"z[{i}]" in text for i in range(68))


def on_integers(kind, operations, a, b):
    """Return, as Python's integers, what intrinsics of NEON make of two registers, in generic C."""
    lane = f"{'u' if kind[0] == 'u' else ''}int{kind[1:]}_t"
    stores = "".join(
        f"vst1q_{kind}(({lane} *)(z + {4 * k}), v{name}q_{kind}(vld1q_{kind}(({lane} *)b), "
        f"vld1q_{'s' if 'shl' in name else kind[0]}{kind[1:]}((void *)(b + 16))));"
        for k, name in enumerate(operations)
    )
    head = "void f(const float *x, const unsigned char *b, float *y, int *z) {"
    library, z = lifted_library(head + stores + "}", "generic"), np.zeros(64, np.int32)
    held = np.concatenate([a.view(np.uint8), b.view(np.uint8)])
    library.f(None, *(ctypes.c_void_p(v.ctypes.data) for v in (held, held, z)))
    return [z[4 * k :][:4].view(a.dtype).tolist() for k in range(len(operations))]


def registers(kind):
    """Two registers: any lanes, the extremes and 1 among them, and counts of shifts."""
    type_, rng = np.dtype(f"{'u' if kind[0] == 'u' else ''}int{kind[1:]}"), np.random.default_rng(3)
    count, info = 16 // type_.itemsize, np.iinfo(type_)
    for _ in range(6):
        a = np.frombuffer(rng.bytes(16), type_).copy()
        b = np.frombuffer(rng.bytes(16), type_).copy()
        a[rng.integers(count)], b[rng.integers(count)] = info.max, info.min
        a[rng.integers(count)], b[rng.integers(count)] = info.min, info.max
        yield (
            a,
            b,
            rng.choice([-128, -64, -33, -17, -8, -4, -1, 0, 1, 3, 8, 31, 32, 33, 127], count),
        )


INTEGERS = [f"{sign}{bits}" for sign in "su" for bits in (8, 16, 32)]


@pytest.mark.parametrize("kind", [*INTEGERS, "s64", "u64"])
def test_registers_of_neon_shift_by_signed_bytes(kind):
    names = ["shl", "rshl", "qshl"][: 1 if kind[1:] == "64" else 3]
    for a, _, counts in registers(kind):
        info, top = np.iinfo(a.dtype), 1 << int(kind[1:])
        junk = 0x5A00 if top > 256 else 0  # above the byte that counts
        b = ((counts & 255) | junk).astype(a.dtype)
        pairs = list(zip(a.tolist(), counts.tolist(), strict=True))
        down = [x << n if n >= 0 else x >> -n for x, n in pairs]
        near = [x << n if n >= 0 else (x + (1 << (-n - 1))) >> -n for x, n in pairs]
        near, wrapped = ([(v - info.min) % top + info.min for v in w] for w in (near, down))
        held = [min(max(v, info.min), info.max) for v in down]
        expected = [wrapped, near, held][: len(names)]
        assert on_integers(kind, names, a, b) == expected, counts


@pytest.mark.parametrize("kind", INTEGERS)
def test_sums_and_differences_of_neon_do_not_overflow(kind):
    for a, b, _ in registers(kind):
        info, pairs = np.iinfo(a.dtype), list(zip(a.tolist(), b.tolist(), strict=True))
        made = [
            [(x - y) >> 1 for x, y in pairs],
            [(x + y) >> 1 for x, y in pairs],
            [(x + y + 1) >> 1 for x, y in pairs],
            [min(max(x + y, info.min), info.max) for x, y in pairs],
            [min(max(x - y, info.min), info.max) for x, y in pairs],
            [abs(x - y) for x, y in pairs],
        ]
        expected = [[(v - info.min) % 2 ** int(kind[1:]) + info.min for v in w] for w in made]
        names = ("hsub", "hadd", "rhadd", "qadd", "qsub", "abd")
        assert on_integers(kind, names, a, b) == expected


def test_lanes_of_several_registers_tables_and_tests_of_neon():
    text = """void f(const float *x, const unsigned char *b, float *y, int *z) {
        if (x == 0 || *z == INT_MIN) __builtin_unreachable();
        uint32x4x2_t two = vld2q_u32((const uint32_t *)b);
        two = vld2q_lane_u32((const uint32_t *)(b + 32), two, 1);
        vst2q_lane_u32((uint32_t *)z, two, 1);
        vst1q_u32((uint32_t *)z + 4, two.val[1]);
        uint8x16x4_t table = vld1q_u8_x4(b);
        uint8x16_t kept = vld1q_u8(b + 16), at = vld1q_u8(b + 64);
        vst1q_u8((uint8_t *)(z + 8), vqtbx4q_u8(kept, table, at));
        vst1q_u32((uint32_t *)z + 12, vtstq_u32(two.val[0], vdupq_n_u32(2)));
        const uint32x2_t braces = {b[0], 7};
        vst1_u32((uint32_t *)z + 2, braces);
    }"""
    b = np.random.default_rng(5).integers(0, 100, 96, dtype=np.uint8)
    x, z = np.ones(4, np.float32), np.zeros(16, np.int32)
    lifted_library(text, "generic").f(*(ctypes.c_void_p(v.ctypes.data) for v in (x, b, x, z)))
    words = b.view(np.uint32)
    pairs = words[:8].reshape(4, 2).T.copy()
    pairs[:, 1] = words[8:10]
    at = b[64:80]
    looked = np.where(at < 64, b[np.minimum(at, 63)], b[16:32])
    tested = np.where(pairs[0] & 2, -1, 0)
    expected = [*pairs[:, 1], b[0], 7, *pairs[1], *looked.view(np.int32), *tested]
    assert z.view(np.uint32).tolist() == [int(v) & 0xFFFFFFFF for v in expected]


@pytest.mark.parametrize("kind", ["s16", "s32"])
def test_the_high_half_of_a_doubled_product_saturates(kind):
    bits = int(kind[1:])
    for a, b, _ in registers(kind):
        a[0] = b[0] = np.iinfo(a.dtype).min
        exact = [2 * x * y for x, y in zip(a.tolist(), b.tolist(), strict=True)]
        most = np.iinfo(a.dtype).max
        expected = [[min((v + r) >> bits, most) for v in exact] for r in (0, 1 << bits - 1)]
        assert on_integers(kind, ("qdmulh", "qrdmulh"), a, b) == expected


@pytest.mark.parametrize("name", ["rshl", "qshl", "qadd", "qsub"])
@pytest.mark.parametrize("kind", ["s64", "u64"])
def test_lanes_of_64_bits_that_need_more_are_refused(kind, name):
    with pytest.raises(SpecError, match="64-bit lanes"):
        on_integers(kind, [name], *next(registers(kind))[:2])


@pytest.mark.parametrize(
    "value",
    [
        "_mm_sqrt_ss(a)",
        "_mm_rcp_ss(a)",
        "_mm_rsqrt14_ss(a, b)",
        "_mm_ceil_ss(a, b)",
        "_mm_cmp_ss(a, b, 1)",
        "_mm_fmadd_ss(a, b, b)",
        "_mm_mask_move_ss(a, 1, b, b)",
        "_mm_castpd_ps(_mm_floor_pd(_mm_castps_pd(a)))",
        "_mm_roundscale_ps(a, 0x18)",
        "_mm_maskz_mul_ss(1, a, b)",
    ],
)
def test_what_is_for_one_lane_or_not_of_whole_floats_is_refused(value):
    pieces = Pieces()
    text = "__m128 a = _mm_loadu_ps(x), b = _mm_loadu_ps(x + 4); _mm_storeu_ps(x, "
    pieces.add(Source("k.c", f"void f(float *x) {{ float *p[1]; p[0] = x; {text}{value}); }}"))
    with pytest.raises(SpecError, match=r"one lane|_ss|floor_pd|whole numbers"):
        lift_function(pieces, "f")


def test_floats_are_rounded_as_the_immediate_says():
    values = "".join(
        f"_mm_storeu_ps(y + {4 * k}, _mm_round_ps(a, {mode}));"
        for k, mode in enumerate((0, 1, 2, 3, 4, 6, 9, 11))
    )
    text = "void f(const float *x, const unsigned char *u, float *y, int *z) "
    text += f"{{ __m128 a = _mm_add_ps(_mm_loadu_ps(x), _mm_loadu_ps(x)); {values} }}"
    a, (y, _) = 2 * arguments(0)[0][:4], called(lifted_library(text, "generic"), 0)
    near, down, up, toward = np.rint(a), np.floor(a), np.ceil(a), np.trunc(a)
    assert np.array_equal(y[:32], np.ravel([near, down, up, toward, near, near, down, toward]))


def test_doubles_keep_their_lanes_and_round_to_the_nearest():
    text = """void f(const float *x, const unsigned char *u, float *y, int *z) {
        _mm_storeu_ps(y, _mm_set_ps1(x[0]));
        __m256d a = _mm256_cvtps_pd(_mm_mul_ps(_mm_loadu_ps(x), _mm_set1_ps(9.0f)));
        _mm_storeu_ps(y + 4, _mm256_cvtpd_ps(_mm256_permute_pd(a, 9)));
        __m128d low = _mm_loadl_pd(_mm256_castpd256_pd128(a), (const double *)(u + 8));
        _mm_storeu_pd((double *)(y + 8), low);
        _mm_storeu_si128((__m128i *)z, _mm256_cvtpd_epi32(a));
        _mm_storeu_si128((__m128i *)(z + 4), _mm256_cvttpd_epi32(a));
    }"""
    (x, u), (y, z) = arguments(0)[:2], called(lifted_library(text, "generic"), 0)
    a = x[:4] * np.float32(9)
    assert np.array_equal(y[:8], [*[x[0]] * 4, a[1], a[0], a[2], a[3]])
    assert y[8:12].tobytes() == u[8:16].tobytes() + np.float64(a[1]).tobytes()
    assert np.array_equal(z[:8], np.append(np.rint(a), np.trunc(a)))


def test_bfloat16_is_converted_and_multiplied_in_pairs():
    text = """void f(const float *x, const unsigned char *u, float *y, int *z) {
        __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
        __m512bh both = _mm512_cvtne2ps_pbh(b, a);
        _mm512_storeu_ps(y, _mm512_dpbf16_ps(a, both, both));
        _mm512_storeu_ps(y + 16, _mm512_cvtpbh_ps(_mm512_cvtneps_pbh(b)));
        _mm512_storeu_pd((double *)(y + 32), _mm512_abs_pd(_mm512_cvtps_pd(_mm256_loadu_ps(x))));
        y[48] = u[0] > 300 ? NAN : 1.0f;
        y[49] = u[0] < 300 ? NAN : 1.0f;
        z[0] = true;
    }"""
    x, (y, z) = arguments(0)[0], called(lifted_library(text, "generic"), 0)
    halves = bf16(x[:32]).astype(np.float64)
    pairs = (halves**2).reshape(16, 2).sum(1)
    np.testing.assert_allclose(y[:16], x[:16] + pairs, rtol=2e-6)
    np.testing.assert_array_equal(y[16:32], halves[16:])
    np.testing.assert_array_equal(y[32:48].view(np.float64), np.abs(x[:8]))
    np.testing.assert_array_equal(y[48:50], [1, np.nan])
    assert z[0] == 1


def bf16(x):
    bits = x.view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def test_addresses_are_aligned_and_compared_with_none():
    text = """
    static int step(const float **rows, int n) { return rows[n & 1] != (const float *)0; }
    void f(const float *x, const unsigned char *u, float *y, int *z) {
        const float *rows[2] = {x, (const float *)0};
        int ahead = ((32 - ((uintptr_t)(x + 3) & (uintptr_t)31)) >> 2) & 7;
        z[0] = ahead;
        for (int i = 0; i < 4; i++) z[1 + i] = step(rows, i);
    }"""
    arrays = arguments(0)
    lifted_library(text, "generic").f(*(ctypes.c_void_p(a.ctypes.data) for a in arrays))
    ahead = (32 - (arrays[0].ctypes.data + 12) % 32) // 4 % 8
    assert arrays[3][:5].tolist() == [ahead, 1, 0, 1, 0]


def test_parameters_change_where_they_stand():
    text = "int f(long n, long step, float *a) { step = step * 2; a[step * n] = 1; return 0; }"
    pieces = Pieces()
    pieces.add(Source("k.c", text))
    lowered = print_low(lower(lift_function(pieces, "f"), "f", {}, TARGETS["generic"], name="f"))
    a, result = np.zeros(16, np.float32), np.ones(1, np.int32)
    library = compile_c(HEAD + lowered, TARGETS["generic"], FLAGS)
    places = (ctypes.c_void_p(v.ctypes.data) for v in (a, result))
    library.f(ctypes.c_long(3), ctypes.c_long(2), *places)
    assert a.nonzero()[0].tolist() == [12] and result[0] == 0


def test_an_array_is_not_hidden_by_a_parameter_of_its_name():
    text = """
    static void sum(int n, const float **ap, float *y) { *y = ap[0][n] + ap[1][n]; }
    void f(const float *x, const unsigned char *u, float *y, int *z) {
        const float *ap[2] = {x, x + 1};
        sum(3, ap, y);
        ap[1] = x + 2;
        sum(3, ap, y + 1);
    }"""
    x, (y, _) = arguments(0)[0], called(lifted_library(text, "generic"), 0)
    np.testing.assert_array_equal(y[:2], [x[3] + x[4], x[3] + x[5]])


def test_comparisons_by_number_tell_what_is_no_number():
    numbers = (0, 1, 2, 4, 5, 6, 9, 10, 12, 13, 14, 17, 22, 28)
    stores = "".join(f"z[{k}] = _mm512_cmp_ps_mask(a, b, {n});" for k, n in enumerate(numbers))
    stores += "_mm256_storeu_si256((__m256i *)(z + 20), _mm256_castps_si256("
    stores += "_mm256_cmp_ps(_mm512_castps512_ps256(a), _mm512_castps512_ps256(b), _CMP_NLT_UQ)));"
    text = "void f(const float *x, const unsigned char *u, float *y, int *z) "
    text += f"{{ __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16); {stores} }}"
    a, b = np.float32([np.nan, 1, 2, 3] * 4), np.float32([1, 1, 3, np.nan, np.nan, 0, 2, 3] * 2)
    x, z = np.append(a, b), np.zeros(64, np.int32)
    lifted_library(text, "generic").f(*(ctypes.c_void_p(v.ctypes.data) for v in (x, x, x, z)))
    same, less, more = a == b, a < b, a > b
    meant = {0: same, 1: less, 2: less | same, 4: ~same, 5: ~less, 6: ~(less | same)}
    meant |= {9: ~(more | same), 10: ~more, 12: less | more, 13: more | same, 14: more}
    for k, n in enumerate(numbers):
        assert np.array_equal(z[k] >> np.arange(16) & 1, meant[n % 16]), n
    assert np.array_equal(z[20:28], -(~less[:8]).astype(int))


def test_memory_moves_over_itself_and_constants_end_with_their_scope():
    text = """static int four(const int *z) { const int n = 4; int t[n];
        t[3] = z[3]; return t[n - 1]; }
    void f(const float *x, const unsigned char *u, float *y, int *z) {
        for (int i = 0; i < 8; i++) z[i] = u[i];
        memmove(z + 1, z, 4 * 6);
        memmove(z + 2, z + 4, 4 * 3);
        int n = u[0] | 1;
        z[8] = four(z);
        if (n == 4) z[9] = 1;
        { const int n = 5; z[10] = n == 5; }
        z[11] = n;
    }"""
    u, (_, z) = arguments(0)[1], called(lifted_library(text, "generic"), 0)
    want = [*u[:8].tolist()]
    want[1:7] = want[:6]
    want[2:5] = want[4:7]
    assert z[:12].tolist() == [*want, want[3], 0, 1, int(u[0]) | 1]


def test_an_array_of_a_length_that_only_a_helper_knows_is_refused():
    pieces = Pieces()
    text = """static void help(float *x) { const int n = 4; float t[n]; t[0] = x[0]; x[1] = t[0]; }
    void f(float *x, int n) { float *p[1]; p[0] = x; help(x); float t[n]; t[n - 1] = x[0];
        x[2] = t[n - 1]; }"""
    pieces.add(Source("k.c", text))
    with pytest.raises(SpecError, match="whose length is not constant"):
        lift_function(pieces, "f")


@pytest.mark.parametrize("call", ["_mm_adds_epi16(a)", "_mm_and_si128(a, a, a)", "_mm_abs_epi8()"])
def test_operands_that_do_not_fit_an_intrinsic_are_refused(call):
    pieces = Pieces()
    text = f"__m128i a = _mm_loadu_si128((__m128i *)p[0]); _mm_storeu_si128((__m128i *)x, {call});"
    pieces.add(Source("k.c", f"void f(int *x) {{ int *p[1]; p[0] = x; {text} }}"))
    with pytest.raises(SpecError, match=r"a call of _mm_\w+ with \d arguments"):
        lift_function(pieces, "f")


def test_inverses_and_roots_of_all_lanes():
    text = """void f(const float *x, const unsigned char *u, float *y, int *z) {
        __m256 a = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), _mm256_loadu_ps(x));
        _mm256_storeu_ps(y, _mm256_sqrt_ps(a));
        _mm256_storeu_ps(y + 8, _mm256_rcp_ps(a));
        _mm256_storeu_ps(y + 16, _mm256_rsqrt14_ps(a));
    }"""
    x, (y, _) = abs(arguments(0)[0][:8]), called(lifted_library(text, "generic"), 0)
    expected = np.concatenate([np.sqrt(x), 1 / x, 1 / np.sqrt(x)])
    np.testing.assert_allclose(y[:24], expected, rtol=1e-6)


def test_powers_of_two_scale_the_smallest_and_the_largest():
    text = """void f(const float *x, const unsigned char *u, float *y, int *z) {
        for (int i = 0; i < 64; i += 16) {
            __m512 power = _mm512_loadu_ps(x + 64 + i);
            _mm512_storeu_ps(y + i, _mm512_scalef_ps(_mm512_loadu_ps(x + i), power));
        }
    }"""
    powers = [1, -1, 100, -110, -125, -140, -149, 126, 127, 128, 253, 276, -276, -300, 400, -1e9]
    values = np.float32([2.0**-149, 1.9999999, 3e38, -5.4321e-33])
    a, power = np.repeat(values, 16), np.tile(np.float32(powers), 4)
    x, y = np.append(a, power), np.zeros(64, np.float32)
    lifted_library(text, "generic").f(*(ctypes.c_void_p(v.ctypes.data) for v in (x, x, y, y)))
    with np.errstate(over="ignore", under="ignore"):
        whole = np.ldexp(a.astype(np.float64), np.maximum(power, -500).astype(int))
        assert np.array_equal(y, whole.astype(np.float32))


def test_a_pointer_parameter_has_an_address():
    text = """void f(const float *x, const unsigned char *u, float *y, int *z) {
        const float **at = &x;
        *at += 2;
        y[0] = x[1];
    }"""
    y, _ = called(lifted_library(text, "generic"), 0)
    assert y[0] == arguments(0)[0][3]


def test_what_returns_a_value_stores_it():
    pieces = Pieces()
    pieces.add(Source("k.c", "float f(const float *x, int n) { return x[n] + 1.0f; }"))
    kernel = lift_function(pieces, "f").function("f")
    assert [p.name for p in kernel.params] == ["x", "n", "result"]


@pytest.mark.parametrize(
    "name",
    [
        "_mm256_maskstore_ps",
        "vqshlq_s32",
        "vst4q_u32",
        "_mm_adds_epi16",
        "_mm512_mask_add_epi32",
        "vmlal_high_s16",
        "vdotq_s32",
    ],
)
def test_intrinsics_are_known_by_the_pattern_of_their_names(name):
    assert find_rule(name) is not None
    assert find_rule(name + "_of_no_kind") is None


def test_only_what_a_function_needs_is_parsed():
    pieces = Pieces()
    text = 'void g(void) { puts("x"); }\nvoid f(float *x) { x[0] = 1.0f; }\n'
    pieces.add(Source("k.c", text))
    assert lift_function(pieces, "f").function("f")
    with pytest.raises(SyntaxDiagnostic, match="strings"):
        lift_function(pieces, "g")
    with pytest.raises(SpecError, match="no function `h`"):
        lift_function(pieces, "h")


def test_functions_of_headers_are_not_the_texts_own():
    texts = {"a.h": '\n#include "b.h"\n', "b.h": "int b(void) { return 1; }"}
    texts["c.inc"] = "int c(void) { return 2; }"
    pieces = Pieces()
    text = '#include "a.h"\nnamespace n {int f(void) { return b(); }}\n#include "c.inc"\n'
    pieces.add(Source("k.c", text), texts.get)
    assert pieces.own == ["f", "c"]


def test_files_that_include_one_another_without_end_are_told():
    texts = {"a.h": '#include "b.h"\n', "b.h": '\n\n#include "a.h"\n'}
    with pytest.raises(SyntaxDiagnostic, match=r"k\.c:2:1: .*files include one another"):
        Pieces().add(Source("k.c", '\n#include "a.h"\n'), texts.get)


def test_inline_assembly_is_told_as_such():
    pieces = Pieces()
    pieces.add(Source("k.c", 'void f(float *x) { __asm__ __volatile__("nop" : : "r"(x)); }'))
    with pytest.raises(SyntaxDiagnostic, match="inline assembly"):
        lift_function(pieces, "f")


def test_macros_paste_spell_and_take_any_arguments():
    pieces = Pieces()
    text = (
        "#define JOIN(a, b) a ## b\n#define NOTE(...) (void)#__VA_ARGS__\n"
        "#define FIRST(a, ...) a\n#define ALIAS TWICE\n#define TWICE(a) ((a) + (a))\n"
        "void f(float *x) { JOIN(x, )[0] = FIRST(TWICE(1), 2, 3) + ALIAS(x[JOIN(0x, 1)]); }\n"
    )
    pieces.add(Source("k.c", text))
    assert "x[0] = 1 + 1 + (x[0x1] + x[0x1])" in print_low(pieces.unit(["f"])).replace("(1)", "1")


def test_vectors_of_the_kernels_own_are_touched_as_wide_as_the_targets_are():
    """Compilers keep such an array in a register; one that a mask fills goes through memory."""
    text = (
        "void f(const float *x, float *y) { __m256 a = _mm256_permute_ps(_mm256_loadu_ps(x), 27);"
        " _mm256_storeu_ps(y, _mm256_add_ps(a, a)); }"
    )
    unit = lift(parse_low(Source("k.c", text)), "f")
    made = print_low(lower(unit, "f", {}, TARGETS["x86-64-avx512"], name="f"))
    assert made.count("_mm512_maskz_loadu_ps(") == made.count("_mm512_mask_storeu_ps(") == 1
