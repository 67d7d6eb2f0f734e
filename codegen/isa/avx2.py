"""The target x86-64-avx2: AVX2, FMA and F16C; 8 float32 lanes, 16 registers."""

from __future__ import annotations

from dovetail.codegen.isa.avx2_intrinsics import CONSTANTS, INTRINSICS
from dovetail.codegen.isa.ops import (
    COMMON_CFLAGS,
    CPU_OPS,
    GLIBC,
    HELPER_OPS,
    SCALAR_OPS,
    SCALAR_SPELLING,
)
from dovetail.codegen.isa.target import Target

OPS = {
    **SCALAR_OPS,
    **HELPER_OPS,
    "load.f16": "_cvtsh_ss(({0})[0])",
    "store.f16": "({0})[0] = _cvtss_sh({1}, 0)",
    "vload.f32": "_mm256_loadu_ps({0})",
    "vstore.f32": "_mm256_storeu_ps({0}, {1})",
    "vload_i32": "_mm256_loadu_si256((const __m256i*)({0}))",
    "vstore_i32": "_mm256_storeu_si256((__m256i*)({0}), {1})",
    "vbroadcast": "_mm256_set1_ps({0})",
    "vzero": "_mm256_setzero_ps()",
    "vadd": "_mm256_add_ps({0}, {1})",
    "vsub": "_mm256_sub_ps({0}, {1})",
    "vmul": "_mm256_mul_ps({0}, {1})",
    "vdiv": "_mm256_div_ps({0}, {1})",
    "vmin": "_mm256_min_ps({0}, {1})",
    "vmax": "_mm256_max_ps({0}, {1})",
    "vfma": "_mm256_fmadd_ps({0}, {1}, {2})",
    "vfnma": "_mm256_fnmadd_ps({0}, {1}, {2})",
    "vabs": "_mm256_andnot_ps(_mm256_set1_ps(-0.0f), {0})",
    "vneg": "_mm256_xor_ps(_mm256_set1_ps(-0.0f), {0})",
    "vsqrt": "_mm256_sqrt_ps({0})",
    "vround": "_mm256_round_ps({0}, 8)",
    "vcvt_i32": "_mm256_cvtps_epi32({0})",
    "vcvt_f32": "_mm256_cvtepi32_ps({0})",
    "vadd_i32": "_mm256_add_epi32({0}, {1})",
    "vsub_i32": "_mm256_sub_epi32({0}, {1})",
    "vshl_i32": "_mm256_slli_epi32({0}, {1})",
    "vbitcast_f32": "_mm256_castsi256_ps({0})",
    "vbitcast_i32": "_mm256_castps_si256({0})",
    "vbroadcast_i32": "_mm256_set1_epi32({0})",
    **CPU_OPS,
    "prefetch_l2": "_mm_prefetch((const char*)({0}), 2)",
    "vload_pairs": "_mm256_loadu_si256((const __m256i*)({0}))",
    "vbroadcast_pair": "_mm256_broadcastd_epi32(_mm_loadu_si32({0}))",
    "vpair_low": "_mm256_castsi256_ps(_mm256_slli_epi32({0}, 16))",
    "vpair_high": "_mm256_castsi256_ps(_mm256_and_si256({0}, _mm256_set1_epi32(-65536)))",
    "viota": "_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)",
}

TARGET = Target(
    name="x86-64-avx2",
    isa="avx2",
    lanes=8,
    registers=16,
    types={**SCALAR_SPELLING, "vec[f32]": "__m256", "vec[i32]": "__m256i"},
    ops=OPS,
    headers=("immintrin.h",),
    cflags=(*COMMON_CFLAGS, "-mavx2", "-mfma", "-mf16c"),
    machine="x86_64",
    zig_target=f"x86_64-linux-gnu.{GLIBC}",
    cpu_features=frozenset({"avx2", "fma", "f16c"}),
    intrinsics=INTRINSICS,
    prelude_files=("prelude_avx2.c",),
    constants=CONSTANTS,
)
