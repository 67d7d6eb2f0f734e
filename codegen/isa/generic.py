"""The target generic: plain C, a vector is one float. Runs anywhere."""

from __future__ import annotations

import platform

from dovetail.codegen.isa import ops
from dovetail.codegen.isa.intrinsics import intrinsic, table
from dovetail.codegen.isa.target import Target
from dovetail.ir.high.ops import STORAGE

INTRINSICS = table(
    [
        intrinsic("dt_f32_of_bits", "uint32_t -> float"),
        intrinsic("dt_bits_of_f32", "float -> uint32_t"),
        intrinsic("__builtin_prefetch", "const void* -> void", op="prefetch({0})"),
        intrinsic("__atomic_signal_fence", "int -> void", lambda _: None),
    ]
)
"""Instructions of every target; the first two are written out in templates/unit.c.j2."""

_FLOAT_MOVES = [f"{move}.{type_}" for move in ("load", "store") for type_ in ("f32", *STORAGE)]
OPS = {
    **ops.SCALAR_OPS,
    **ops.HELPER_OPS,
    **{f"v{key}": ops.SCALAR_OPS[key] for key in _FLOAT_MOVES},
    "vload_n.f32": "({1}) > 0 ? ({0})[0] : 0.0f",
    "vload_i32_n": "({1}) > 0 ? ({0})[0] : 0",
    "vload_n.bf16": "({1}) > 0 ? dt_load_bf16({0}) : 0.0f",
    "vload_n.f16": "({1}) > 0 ? dt_load_f16({0}) : 0.0f",
    "vstore_n.bf16": "dt_store_n_bf16({0}, {1}, {2})",
    "vstore_n.f16": "dt_store_n_f16({0}, {1}, {2})",
    "vload_i32": "({0})[0]",
    "vstore_i32": "({0})[0] = ({1})",
    "vbroadcast": "({0})",
    "vzero": "0.0f",
    "vadd": "({0}) + ({1})",
    "vsub": "({0}) - ({1})",
    "vmul": "({0}) * ({1})",
    "vdiv": "({0}) / ({1})",
    "vmin": "dt_vmin({0}, {1})",
    "vmax": "dt_vmax({0}, {1})",
    "vfma": "({0}) * ({1}) + ({2})",
    "vfnma": "({2}) - ({0}) * ({1})",
    "vabs": "fabsf({0})",
    "vneg": "-({0})",
    "vsqrt": "sqrtf({0})",
    "vround": "rintf({0})",
    **{f"v{name}": f"{name}f({{0}})" for name in ("floor", "ceil", "trunc")},
    **dict.fromkeys(("vreduce_add", "vreduce_max", "vreduce_min"), "({0})"),
    "vselect_gt": "({0}) > ({1}) ? ({2}) : ({3})",
    "vtail": "({2}) > 0 ? ({0}) : ({1})",
    "vcvt_i32": "dt_vcvt_i32({0})",
    "vcvt_f32": "(float)({0})",
    "vadd_i32": "(int32_t)((uint32_t)({0}) + (uint32_t)({1}))",
    "vsub_i32": "(int32_t)((uint32_t)({0}) - (uint32_t)({1}))",
    "vmul_i32": "(int32_t)((uint32_t)({0}) * (uint32_t)({1}))",
    "vand_i32": "({0}) & ({1})",
    "vor_i32": "({0}) | ({1})",
    "vxor_i32": "({0}) ^ ({1})",
    "vshl_i32": "(int32_t)((uint32_t)({0}) << ({1}))",
    "vshr_i32": "(int32_t)((uint32_t)({0}) >> ({1}))",
    "vbitcast_f32": "dt_f32_of_bits((uint32_t)({0}))",
    "vbitcast_i32": "(int32_t)dt_bits_of_f32({0})",
    "vbroadcast_i32": "({0})",
    **ops.CPU_OPS,
    "vload_pairs": "dt_load_pair({0})",
    "vbroadcast_pair": "dt_load_pair({0})",
    "vload_quads": "dt_load_quad((const uint8_t*)({0}))",
    "vbroadcast_quad": "dt_load_quad((const uint8_t*)({0}))",
    "vdot_quads_signed": "dt_vdot_quads_signed({0}, {1}, {2})",
    "vload_u8": "(int32_t)({0})[0]",
    "vload_i8": "(int32_t)({0})[0]",
    "vstore_i8": "({0})[0] = (int8_t)({1})",
    "vpair_low": "dt_f32_of_bits((uint32_t)({0}) << 16)",
    "vpair_high": "dt_f32_of_bits((uint32_t)({0}) & 0xffff0000u)",
    "viota": "0",
}
"""`vfma` is a product and a sum, each rounded: where hardware lacks it, `fmaf` is a slow call."""

TARGET = Target(
    name="generic",
    isa="generic",
    lanes=1,
    registers=16,
    types={**ops.SCALAR_SPELLING, "vec[f32]": "float", "vec[i32]": "int32_t"},
    ops=OPS,
    headers=(),
    cflags=ops.COMMON_CFLAGS,
    machine="",
    zig_target=f"{platform.machine()}-linux-gnu.{ops.GLIBC}",
    cpu_features=frozenset(),
    intrinsics=INTRINSICS,
    prelude_files=(ops.COMMON_PRELUDE, "prelude_generic.c"),
)
