"""Parts of the target records that instruction sets share: spellings, scalar operations, flags.

In: nothing. Out: plain dictionaries and tuples for `Target`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from dovetail.codegen.isa.intrinsics import Intrinsic
from dovetail.ir.high.ops import INTS, REALS, STORAGE

SCALAR_SPELLING: Mapping[str, str] = {
    "f32": "float",
    "f64": "double",
    "i32": "int32_t",
    "i64": "int64_t",
    "u8": "uint8_t",
    "i8": "int8_t",
    "u16": "uint16_t",
    "i16": "int16_t",
    "u32": "uint32_t",
    "u64": "uint64_t",
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


def helper(key: str, arguments: int) -> str:
    """Return the call of the prelude's helper for an operation, `vload_n.f32`: `dt_vload_n_f32`."""
    name = key if not key.endswith("_i32_n") else key.replace("_i32_n", "_n_i32")
    return f"dt_{name.replace('.', '_')}({', '.join(f'{{{i}}}' for i in range(arguments))})"


_LOADS = {"vload_n.f32": 2, "vload_i32_n": 2} | {
    f"vload{n}.{dtype}": 1 + bool(n) for n in ("", "_n") for dtype in STORAGE
}
_STORES = {key.replace("load", "store"): count + 1 for key, count in _LOADS.items()}
_OTHERS = {"vselect_gt": 4, "vtail": 3, "vreduce_add": 1, "vreduce_max": 1, "vreduce_min": 1}
HELPER_OPS: Mapping[str, str] = {
    key: helper(key, count) for key, count in (_LOADS | _STORES | _OTHERS).items()
}
"""Operations done in a helper of the prelude, unless an instruction set's own table says otherwise.

Arguments: `vload_n(p, n)`, `vstore_n(p, v, n)`, `vtail(v, fill, n)` with a scalar fill,
`vselect_gt(a, b, x, y)`.
"""

CPU_OPS: Mapping[str, str] = {
    key: helper(key, count)
    for key, count in {
        "vreduce_add4": 5,
        "vreduce_add16": 18,
        "vpair_firsts": 2,
        "vpair_seconds": 2,
        "vdot_pairs": 3,
        "vdot_quads": 3,
        "vstore_i8": 2,
    }.items()
}
"""Helpers of CPUs alone: sums of several vectors at once, pairs of bfloat16, quads of bytes."""


def half_moves(
    load: str, load_n: str, store: str, store_n: str, widen: str, narrow: str
) -> dict[str, str]:
    """Return the loads and stores of 16-bit floats: how 16 bits are moved, how float16 converts.

    bfloat16 converts in two helpers of the prelude.
    """
    found: dict[str, str] = {}
    for dtype, wide, low in (
        ("bf16", "dt_widen_bf16({})", "dt_narrow_bf16({})"),
        ("f16", widen, narrow),
    ):
        for part, get, put in (("", load, store), ("_n", load_n, store_n)):
            found[f"vload{part}.{dtype}"] = wide.format(get)
            found[f"vstore{part}.{dtype}"] = put.replace("{1}", low.format("{1}"))
    return found


def x86_ops(bits: int) -> dict[str, str]:
    """Return what vectors of 256 and of 512 bits do by the same instructions."""
    mm, si = f"_mm{bits}_", f"_si{bits}"
    lower, upper = f"{mm}set1_epi32(65535)", f"{mm}set1_epi32(-65536)"
    load = "_mm_loadl_epi64" if bits == 256 else "_mm_loadu_si128"
    return {
        "prefetch_l2": "_mm_prefetch((const char*)({0}), 2)",
        "vmul_quads": f"{mm}maddubs_epi16({{0}}, {{1}})",
        "vadd_i16": f"{mm}add_epi16({{0}}, {{1}})",
        "vfold_i16": f"{mm}madd_epi16({{0}}, {mm}set1_epi16(1))",
        **{f"vload_{t}8": f"{mm}cvtep{t}8_epi32({load}((const __m128i*)({{0}})))" for t in "iu"},
        "vbroadcast_pair": f"{mm}broadcastd_epi32(_mm_loadu_si32({{0}}))",
        "vpair_low": f"{mm}cast{si[1:]}_ps({mm}slli_epi32({{0}}, 16))",
        "vpair_high": f"{mm}cast{si[1:]}_ps({mm}and{si}({{0}}, {upper}))",
        "vpair_firsts": f"{mm}or{si}({mm}and{si}({{0}}, {lower}), {mm}slli_epi32({{1}}, 16))",
        "vpair_seconds": f"{mm}or{si}({mm}srli_epi32({{0}}, 16), {mm}and{si}({{1}}, {upper}))",
        "viota": f"{mm}setr_epi32({', '.join(map(str, range(bits // 32)))})",
    }


_WHOLE_OP = re.compile(r"(v\w+)\(((?:\{\d\}(?:, )?)*)\)")


def ops_of(intrinsics: Mapping[str, Intrinsic], lanes: int) -> dict[str, str]:
    """Return the operations that one intrinsic on vectors of `lanes` does, by the tables' `op`.

    Of several intrinsics the first one serves.
    """
    found: dict[str, str] = {}
    for row in intrinsics.values():
        op = _WHOLE_OP.fullmatch(row.op)
        if op is None or row.lanes != lanes:
            continue
        name = f"{op[1]}.f32" if op[1] in ("vload", "vstore") else op[1]
        slots = re.findall(r"\d", op[2])
        args = ", ".join(f"{{{slots.index(str(i))}}}" for i in range(len(slots)))
        found.setdefault(name, f"{row.name}({args})")
    return found


ROUNDINGS = {"round": 8, "floor": 9, "ceil": 10, "trunc": 11}
"""Ways to round as x86 instructions number them, without exceptions."""

COMMON_PRELUDE = "prelude_scalars.c"
"""Helpers of all CPU targets."""

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
