"""The target cuda: a vector is one float in each lane of a warp, a thread of the IR is a warp.

All lanes compute the scalars alike; stores and reductions are `dt_*` functions of
templates/warp.cuh, which also keep the lanes together around memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from dovetail.codegen.isa import generic
from dovetail.codegen.isa.intrinsics import Intrinsic, intrinsic, signatures, table
from dovetail.codegen.isa.ops import HELPER_OPS, SCALAR_OPS, SCALAR_SPELLING, helper
from dovetail.codegen.isa.target import Target

LANES = 32
FLOATS, INTS = "dt_f32x32", "dt_i32x32"
"""The vector types: `float` and `int32_t` on the device, 32 of them in the interpreter of tests."""
STORED = {
    "f32": ("float", FLOATS),
    "bf16": ("uint16_t", FLOATS),
    "f16": ("uint16_t", FLOATS),
    "i32": ("int32_t", INTS),
}
"""Element in memory: its C type, and that of a vector of such elements."""
STORED_SCALARS = {
    **{name: SCALAR_SPELLING[name] for name in "f32 f64 i32 i64 u8 i8 u16 i16 u32 u64".split()},
    "bf16": "float",
    "f16": "float",
}
"""Element in memory: the C type of a scalar that is stored as such."""


def _memory_rows(element: str, types: tuple[str, str]) -> Iterator[Intrinsic]:
    """Yield loads and stores, whole and of the first n lanes."""
    c, vector = types
    return signatures(
        {
            f"dt_vload_{element}": f"const {c}* -> {vector}",
            f"dt_vload_n_{element}": f"const {c}*, int64_t -> {vector}",
            f"dt_vstore_{element}": f"{c}*, {vector} -> void",
            f"dt_vstore_n_{element}": f"{c}*, {vector}, int64_t -> void",
        }
    )


_WARP_ROWS = tuple(
    signatures(
        {
            "vadd vsub vmul vdiv vmin vmax": f"{FLOATS}, {FLOATS} -> {FLOATS}",
            "vfma vfnma": f"{FLOATS}, {FLOATS}, {FLOATS} -> {FLOATS}",
            "vabs vneg vsqrt vround vfloor vceil vtrunc": f"{FLOATS} -> {FLOATS}",
            "vselect_gt": f"{FLOATS}, {FLOATS}, {FLOATS}, {FLOATS} -> {FLOATS}",
            "vtail": f"{FLOATS}, float, int64_t -> {FLOATS}",
            "vreduce_add vreduce_max vreduce_min": f"{FLOATS} -> float",
            "vadd_i32 vsub_i32 vmul_i32 vand_i32 vor_i32 vxor_i32": f"{INTS}, {INTS} -> {INTS}",
            "vshl_i32 vshr_i32": f"{INTS}, imm -> {INTS}",
            "vlook_quads": f"{INTS}, int32_t, int32_t, int32_t, int32_t -> {INTS}",
            "vbroadcast": f"float -> {FLOATS}",
            "vbroadcast_i32": f"int32_t -> {INTS}",
            "vcvt_i32 vbitcast_i32": f"{FLOATS} -> {INTS}",
            "vcvt_f32 vbitcast_f32": f"{INTS} -> {FLOATS}",
            "viota": f"-> {INTS}",
            "vload_strips_i32": f"const int32_t*, int64_t -> {INTS}",
            "vload_strips_i8": f"const int8_t*, int64_t -> {INTS}",
            "prefetch": "const void* -> void",
            "keep_order": "-> void",
        },
        "dt_",
    )
)
"""Operations of the high IR that a function of its name does, whose operands it takes."""

INTRINSICS = table(
    [
        generic.INTRINSICS["dt_f32_of_bits"],
        generic.INTRINSICS["dt_bits_of_f32"],
        *(row for stored in STORED.items() for row in _memory_rows(*stored)),
        *signatures(
            {
                f"dt_store_{name}": f"{SCALAR_SPELLING[name]}*, {c} -> void"
                for name, c in STORED_SCALARS.items()
            }
        ),
        *_WARP_ROWS,
        intrinsic("dt_vload_strips_f16", f"const uint16_t*, int64_t -> {FLOATS}"),
        intrinsic("dt_f32_of_f16", "uint16_t -> float"),
    ]
)
"""What a warp does: the functions of templates/warp.cuh."""

OPS = {
    **SCALAR_OPS,
    **HELPER_OPS,
    **{row.name[3:]: helper(row.name[3:], len(row.params)) for row in _WARP_ROWS},  # without dt_
    **{key: helper(key, 2) for key in SCALAR_OPS if key.startswith("store.")},
    "vload.f32": helper("vload_f32", 1),
    "vstore.f32": helper("vstore_f32", 2),
    "vload_i32": helper("vload_i32", 1),
    "vstore_i32": helper("vstore_i32", 2),
    "vload_strips": helper("vload_strips_f16", 2),
    "vzero": "dt_vbroadcast(0.0f)",
    "prefetch_l2": helper("prefetch", 1),
}

TARGET = Target(
    name="cuda",
    isa="cuda",
    lanes=LANES,
    registers=128,
    types={**SCALAR_SPELLING, "vec[f32]": FLOATS, "vec[i32]": INTS},
    ops=OPS,
    headers=(),
    cflags=("--fmad=false", "--std=c++17"),
    machine="cuda",
    zig_target="",
    cpu_features=frozenset(),
    intrinsics=INTRINSICS,
    prelude_files=("prelude_cuda.c",),
    device=True,
)
"""`--fmad=false`: the compiler computes what the text says; `vfma` fuses by name."""
