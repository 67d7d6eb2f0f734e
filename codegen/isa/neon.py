"""The target aarch64-neon: Advanced SIMD of ARMv8.0; 4 float32 lanes, 32 registers."""

from __future__ import annotations

from dovetail.codegen.isa import ops
from dovetail.codegen.isa.neon_intrinsics import INTRINSICS
from dovetail.codegen.isa.target import Target

OPS = {
    **ops.SCALAR_OPS,
    **ops.HELPER_OPS,
    **ops.ops_of(INTRINSICS, 4),
    **ops.half_moves(
        "vld1_u16({0})",
        "dt_load_n_u16({0}, {1})",
        "vst1_u16({0}, {1})",
        "dt_store_n_u16({0}, {1}, {2})",
        "vcvt_f32_f16(vreinterpret_f16_u16({}))",
        "vreinterpret_u16_f16(vcvt_f16_f32({}))",
    ),
    "vzero": "vdupq_n_f32(0.0f)",
    "vselect_gt": "vbslq_f32(vcgtq_f32({0}, {1}), {2}, {3})",
    "vshr_i32": "vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32({0}), {1}))",
    **ops.CPU_OPS,
    "vload_pairs": "vreinterpretq_s32_u16(vld1q_u16({0}))",
    "vbroadcast_pair": "vdupq_n_s32(dt_load_pair({0}))",
    "vload_quads": "vreinterpretq_s32_u8(vld1q_u8((const uint8_t*)({0})))",
    "vbroadcast_quad": "vdupq_n_s32(dt_load_quad((const uint8_t*)({0})))",
    "vdot_quads_signed": "dt_vdot_quads({0}, {1}, {2})",
    "vload_u8": "dt_vload_u8({0})",
    "vload_i8": "dt_vload_i8({0})",
    "vpair_low": "vreinterpretq_f32_s32(vshlq_n_s32({0}, 16))",
    "vpair_high": "vreinterpretq_f32_s32(vandq_s32({0}, vdupq_n_s32(-65536)))",
    "viota": "dt_viota()",
}

TARGET = Target(
    name="aarch64-neon",
    isa="neon",
    lanes=4,
    registers=32,
    types={**ops.SCALAR_SPELLING, "vec[f32]": "float32x4_t", "vec[i32]": "int32x4_t"},
    ops=OPS,
    headers=("arm_neon.h",),
    cflags=ops.COMMON_CFLAGS,
    machine="aarch64",
    zig_target=f"aarch64-linux-gnu.{ops.GLIBC}",
    cpu_features=frozenset({"asimd"}),
    intrinsics=INTRINSICS,
    prelude_files=(ops.COMMON_PRELUDE, "prelude_neon.c"),
)
