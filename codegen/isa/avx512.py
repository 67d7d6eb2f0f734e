"""The target x86-64-avx512: AVX-512 F, BW, DQ and VL; 16 float32 lanes, 32 registers."""

from __future__ import annotations

from dovetail.codegen.isa import avx2, ops
from dovetail.codegen.isa.avx512_intrinsics import INTRINSICS
from dovetail.codegen.isa.target import Target

OPS = {
    **ops.SCALAR_OPS,
    **ops.HELPER_OPS,
    **ops.ops_of(INTRINSICS, 16),
    **ops.half_moves(
        "_mm256_loadu_si256((const __m256i*)({0}))",
        "_mm256_maskz_loadu_epi16(dt_mask({1}), {0})",
        "_mm256_storeu_si256((__m256i*)({0}), {1})",
        "_mm256_mask_storeu_epi16({0}, dt_mask({2}), {1})",
        "_mm512_cvtph_ps({})",
        "_mm512_cvtps_ph({}, 0)",
    ),
    "vload_n.f32": "_mm512_maskz_loadu_ps(dt_mask({1}), {0})",
    "vstore_n.f32": "_mm512_mask_storeu_ps({0}, dt_mask({2}), {1})",
    "vload_i32_n": "_mm512_maskz_loadu_epi32(dt_mask({1}), {0})",
    "vstore_i32_n": "_mm512_mask_storeu_epi32({0}, dt_mask({2}), {1})",
    "vselect_gt": "_mm512_mask_blend_ps(_mm512_cmp_ps_mask({0}, {1}, _CMP_GT_OQ), {3}, {2})",
    "vtail": "_mm512_mask_blend_ps(dt_mask({2}), _mm512_set1_ps({1}), {0})",
    "load.f16": avx2.OPS["load.f16"],
    "store.f16": avx2.OPS["store.f16"],
    "vneg": "_mm512_xor_ps(_mm512_set1_ps(-0.0f), {0})",
    **{f"v{name}": f"_mm512_roundscale_ps({{0}}, {way})" for name, way in ops.ROUNDINGS.items()},
    **ops.CPU_OPS,
    **ops.x86_ops(512),
    "vstore_i8": "_mm_storeu_si128((__m128i*)({0}), _mm512_cvtepi32_epi8({1}))",
    "vload_pairs": "_mm512_loadu_si512({0})",
    "vload_quads": "_mm512_loadu_si512({0})",
    "vbroadcast_quad": "_mm512_broadcastd_epi32(_mm_loadu_si32({0}))",
    "vdot_quads_signed": "dt_vdot_quads(_mm512_abs_epi8({0}), dt_with_sign({1}, {0}), {2})",
}

TARGET = Target(
    name="x86-64-avx512",
    isa="avx512",
    lanes=16,
    registers=32,
    types={**ops.SCALAR_SPELLING, "vec[f32]": "__m512", "vec[i32]": "__m512i"},
    ops=OPS,
    headers=("immintrin.h",),
    cflags=(
        *avx2.TARGET.cflags,
        "-mavx512f",
        "-mavx512bw",
        "-mavx512dq",
        "-mavx512vl",
    ),
    machine="x86_64",
    zig_target=f"x86_64-linux-gnu.{ops.GLIBC}",
    cpu_features=frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    intrinsics={**avx2.TARGET.intrinsics, **INTRINSICS},
    prelude_files=(ops.COMMON_PRELUDE, "prelude_avx512.c"),
    constants=avx2.TARGET.constants,
    sums_16=True,
)
