"""The target aarch64-neon: Advanced SIMD of ARMv8.0; 4 float32 lanes, 32 registers."""

from __future__ import annotations

from dovetail.codegen.isa.neon_intrinsics import INTRINSICS
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
    "vload.f32": "vld1q_f32({0})",
    "vstore.f32": "vst1q_f32({0}, {1})",
    "vload_i32": "vld1q_s32({0})",
    "vstore_i32": "vst1q_s32({0}, {1})",
    "vbroadcast": "vdupq_n_f32({0})",
    "vzero": "vdupq_n_f32(0.0f)",
    "vadd": "vaddq_f32({0}, {1})",
    "vsub": "vsubq_f32({0}, {1})",
    "vmul": "vmulq_f32({0}, {1})",
    "vdiv": "vdivq_f32({0}, {1})",
    "vmin": "vminq_f32({0}, {1})",
    "vmax": "vmaxq_f32({0}, {1})",
    "vfma": "vfmaq_f32({2}, {0}, {1})",
    "vfnma": "vfmsq_f32({2}, {0}, {1})",
    "vabs": "vabsq_f32({0})",
    "vneg": "vnegq_f32({0})",
    "vsqrt": "vsqrtq_f32({0})",
    "vround": "vrndnq_f32({0})",
    "vreduce_add": "vaddvq_f32({0})",
    "vreduce_max": "vmaxvq_f32({0})",
    "vreduce_min": "vminvq_f32({0})",
    "vselect_gt": "vbslq_f32(vcgtq_f32({0}, {1}), {2}, {3})",
    "vcvt_i32": "vcvtnq_s32_f32({0})",
    "vcvt_f32": "vcvtq_f32_s32({0})",
    "vadd_i32": "vaddq_s32({0}, {1})",
    "vsub_i32": "vsubq_s32({0}, {1})",
    "vshl_i32": "vshlq_n_s32({0}, {1})",
    "vbitcast_f32": "vreinterpretq_f32_s32({0})",
    "vbitcast_i32": "vreinterpretq_s32_f32({0})",
    "vbroadcast_i32": "vdupq_n_s32({0})",
    **CPU_OPS,
    "vload_pairs": "vreinterpretq_s32_u16(vld1q_u16({0}))",
    "vbroadcast_pair": "vdupq_n_s32(dt_load_pair({0}))",
    "vpair_low": "vreinterpretq_f32_s32(vshlq_n_s32({0}, 16))",
    "vpair_high": "vreinterpretq_f32_s32(vandq_s32({0}, vdupq_n_s32(-65536)))",
    "viota": "dt_viota()",
}

TARGET = Target(
    name="aarch64-neon",
    isa="neon",
    lanes=4,
    registers=32,
    types={**SCALAR_SPELLING, "vec[f32]": "float32x4_t", "vec[i32]": "int32x4_t"},
    ops=OPS,
    headers=("arm_neon.h",),
    cflags=COMMON_CFLAGS,
    machine="aarch64",
    zig_target=f"aarch64-linux-gnu.{GLIBC}",
    cpu_features=frozenset({"asimd"}),
    intrinsics=INTRINSICS,
    prelude_files=("prelude_neon.c",),
)
