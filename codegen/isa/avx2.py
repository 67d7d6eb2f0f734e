"""The target x86-64-avx2: AVX2, FMA and F16C; 8 float32 lanes, 16 registers."""

from __future__ import annotations

from dovetail.codegen.isa import ops
from dovetail.codegen.isa.avx2_intrinsics import CONSTANTS, INTRINSICS
from dovetail.codegen.isa.target import Target

OPS = {
    **ops.SCALAR_OPS,
    **ops.HELPER_OPS,
    **ops.ops_of(INTRINSICS, 8),
    **ops.half_moves(
        "_mm_loadu_si128((const __m128i*)({0}))",
        "dt_load_n_u16({0}, {1})",
        "_mm_storeu_si128((__m128i*)({0}), {1})",
        "dt_store_n_u16({0}, {1}, {2})",
        "_mm256_cvtph_ps({})",
        "_mm256_cvtps_ph({}, 0)",
    ),
    "vload_n.f32": "_mm256_maskload_ps({0}, dt_mask({1}))",
    "vstore_n.f32": "_mm256_maskstore_ps({0}, dt_mask({2}), {1})",
    "vload_i32_n": "_mm256_maskload_epi32({0}, dt_mask({1}))",
    "vstore_i32_n": "_mm256_maskstore_epi32({0}, dt_mask({2}), {1})",
    "vselect_gt": "_mm256_blendv_ps({3}, {2}, _mm256_cmp_ps({0}, {1}, _CMP_GT_OQ))",
    "vtail": "_mm256_blendv_ps(_mm256_set1_ps({1}), {0}, _mm256_castsi256_ps(dt_mask({2})))",
    "load.f16": "_cvtsh_ss(({0})[0])",
    "store.f16": "({0})[0] = _cvtss_sh({1}, 0)",
    "vload_i32": "_mm256_loadu_si256((const __m256i*)({0}))",
    "vstore_i32": "_mm256_storeu_si256((__m256i*)({0}), {1})",
    "vabs": "_mm256_andnot_ps(_mm256_set1_ps(-0.0f), {0})",
    "vneg": "_mm256_xor_ps(_mm256_set1_ps(-0.0f), {0})",
    **{f"v{name}": f"_mm256_round_ps({{0}}, {way})" for name, way in ops.ROUNDINGS.items()},
    **ops.CPU_OPS,
    **ops.x86_ops(256),
    "vload_pairs": "_mm256_loadu_si256((const __m256i*)({0}))",
    "vload_quads": "_mm256_loadu_si256((const __m256i*)({0}))",
    "vbroadcast_quad": "_mm256_castps_si256(_mm256_broadcast_ss((const float*)({0})))",
    "vdot_quads_signed": "dt_vdot_quads(_mm256_abs_epi8({0}), _mm256_sign_epi8({1}, {0}), {2})",
}

TARGET = Target(
    name="x86-64-avx2",
    isa="avx2",
    lanes=8,
    registers=16,
    types={**ops.SCALAR_SPELLING, "vec[f32]": "__m256", "vec[i32]": "__m256i"},
    ops=OPS,
    headers=("immintrin.h",),
    cflags=(*ops.COMMON_CFLAGS, "-mavx2", "-mfma", "-mf16c"),
    machine="x86_64",
    zig_target=f"x86_64-linux-gnu.{ops.GLIBC}",
    cpu_features=frozenset({"avx2", "fma", "f16c"}),
    intrinsics=INTRINSICS,
    prelude_files=(ops.COMMON_PRELUDE, "prelude_avx2.c"),
    constants=CONSTANTS,
    sums_16=True,
)
