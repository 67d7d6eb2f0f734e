"""The target x86-64-avx512: AVX-512 F, BW, DQ and VL; 16 float32 lanes, 32 registers."""

from __future__ import annotations

from dovetail.codegen.isa import avx2
from dovetail.codegen.isa.avx512_intrinsics import INTRINSICS
from dovetail.codegen.isa.ops import (
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
    "load.f16": avx2.OPS["load.f16"],
    "store.f16": avx2.OPS["store.f16"],
    "vload.f32": "_mm512_loadu_ps({0})",
    "vstore.f32": "_mm512_storeu_ps({0}, {1})",
    "vload_i32": "_mm512_loadu_si512({0})",
    "vstore_i32": "_mm512_storeu_si512({0}, {1})",
    "vbroadcast": "_mm512_set1_ps({0})",
    "vzero": "_mm512_setzero_ps()",
    "vadd": "_mm512_add_ps({0}, {1})",
    "vsub": "_mm512_sub_ps({0}, {1})",
    "vmul": "_mm512_mul_ps({0}, {1})",
    "vdiv": "_mm512_div_ps({0}, {1})",
    "vmin": "_mm512_min_ps({0}, {1})",
    "vmax": "_mm512_max_ps({0}, {1})",
    "vfma": "_mm512_fmadd_ps({0}, {1}, {2})",
    "vfnma": "_mm512_fnmadd_ps({0}, {1}, {2})",
    "vabs": "_mm512_abs_ps({0})",
    "vneg": "_mm512_xor_ps(_mm512_set1_ps(-0.0f), {0})",
    "vsqrt": "_mm512_sqrt_ps({0})",
    "vround": "_mm512_roundscale_ps({0}, 8)",
    "vreduce_add": "_mm512_reduce_add_ps({0})",
    "vreduce_max": "_mm512_reduce_max_ps({0})",
    "vreduce_min": "_mm512_reduce_min_ps({0})",
    "vcvt_i32": "_mm512_cvtps_epi32({0})",
    "vcvt_f32": "_mm512_cvtepi32_ps({0})",
    "vadd_i32": "_mm512_add_epi32({0}, {1})",
    "vsub_i32": "_mm512_sub_epi32({0}, {1})",
    "vshl_i32": "_mm512_slli_epi32({0}, {1})",
    "vbitcast_f32": "_mm512_castsi512_ps({0})",
    "vbitcast_i32": "_mm512_castps_si512({0})",
    "vbroadcast_i32": "_mm512_set1_epi32({0})",
    "prefetch_l2": "_mm_prefetch((const char*)({0}), 2)",
    **CPU_OPS,
    "vload_pairs": "_mm512_loadu_si512({0})",
    "vbroadcast_pair": "_mm512_broadcastd_epi32(_mm_loadu_si32({0}))",
    "vpair_low": "_mm512_castsi512_ps(_mm512_slli_epi32({0}, 16))",
    "vpair_high": "_mm512_castsi512_ps(_mm512_and_si512({0}, _mm512_set1_epi32(-65536)))",
    "viota": "_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)",
}

TARGET = Target(
    name="x86-64-avx512",
    isa="avx512",
    lanes=16,
    registers=32,
    types={**SCALAR_SPELLING, "vec[f32]": "__m512", "vec[i32]": "__m512i"},
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
    zig_target=f"x86_64-linux-gnu.{GLIBC}",
    cpu_features=frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    intrinsics={**avx2.TARGET.intrinsics, **INTRINSICS},
    prelude_files=("prelude_avx512.c",),
    constants=avx2.TARGET.constants,
)
