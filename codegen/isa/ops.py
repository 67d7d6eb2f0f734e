"""Parts of the target records that instruction sets share: spellings, scalar operations, flags.

In: nothing. Out: plain dictionaries and tuples for `Target`.
"""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.ir.high.ops import INTS, REALS

SCALAR_SPELLING: Mapping[str, str] = {
    "f32": "float",
    "f64": "double",
    "i32": "int32_t",
    "i64": "int64_t",
    "u8": "uint8_t",
    "i8": "int8_t",
    "u16": "uint16_t",
    "u32": "uint32_t",
    "bf16": "uint16_t",
    "f16": "uint16_t",
}

SCALAR_OPS: Mapping[str, str] = {
    "load.f32": "({0})[0]",
    "load.bf16": "dt_load_bf16({0})",
    "load.f16": "dt_load_f16({0})",
    **{f"store.{t}": "({0})[0] = ({1})" for t in (*INTS, *REALS)},
    "store.bf16": "dt_store_bf16({0}, {1})",
    "store.f16": "dt_store_f16({0}, {1})",
    "prefetch": "__builtin_prefetch({0})",
    "prefetch_l2": "__builtin_prefetch({0})",
    "keep_order": "__atomic_signal_fence(5)",
}

HELPER_OPS: Mapping[str, str] = {
    **{
        f"vload{n}.{dtype}": f"dt_vload{n}_{dtype}({{0}}{', {1}' if n else ''})"
        for n in ("", "_n")
        for dtype in ("bf16", "f16")
    },
    **{
        f"vstore{n}.{dtype}": f"dt_vstore{n}_{dtype}({{0}}, {{1}}{', {2}' if n else ''})"
        for n in ("", "_n")
        for dtype in ("bf16", "f16")
    },
    "vload_n.f32": "dt_vload_n_f32({0}, {1})",
    "vstore_n.f32": "dt_vstore_n_f32({0}, {1}, {2})",
    "vload_i32_n": "dt_vload_n_i32({0}, {1})",
    "vstore_i32_n": "dt_vstore_n_i32({0}, {1}, {2})",
    "vselect_gt": "dt_vselect_gt({0}, {1}, {2}, {3})",
    "vtail": "dt_vtail({0}, {1}, {2})",
    "vreduce_add": "dt_vreduce_add({0})",
    "vreduce_max": "dt_vreduce_max({0})",
    "vreduce_min": "dt_vreduce_min({0})",
}
"""Operations done in a helper of the prelude, unless an instruction set's own table says otherwise.

Arguments: `vload_n(p, n)`, `vstore_n(p, v, n)`, `vtail(v, fill, n)` with a scalar fill,
`vselect_gt(a, b, x, y)`.
"""

CPU_OPS: Mapping[str, str] = {
    **{
        f"vreduce_add{n}": f"dt_vreduce_add{n}({', '.join(f'{{{i}}}' for i in range(slots))})"
        for n, slots in ((4, 5), (16, 18))
    },
    "vpair_firsts": "dt_vpair_firsts({0}, {1})",
    "vpair_seconds": "dt_vpair_seconds({0}, {1})",
    "vdot_pairs": "dt_vdot_pairs({0}, {1}, {2})",
    "vdot_quads": "dt_vdot_quads({0}, {1}, {2})",
    "vstore_i8": "dt_vstore_i8({0}, {1})",
}
"""Helpers of CPUs alone: sums of several vectors at once, pairs of bfloat16, quads of bytes."""

COMMON_CFLAGS: tuple[str, ...] = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-fomit-frame-pointer",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Werror=implicit-function-declaration",
    "-Wno-unused-function",
)
"""Contraction is off so that every compiler computes what the text says; `vfma` fuses by name."""

GLIBC = "2.28"
"""The oldest C library that cross-built kernel libraries load on."""
