"""The target cuda: a vector is one float in each lane of a warp, a thread of the IR is a warp.

All lanes compute the scalars alike; stores and reductions are `dt_*` functions of
templates/warp.cuh, which also keep the lanes together around memory.
"""

from __future__ import annotations

from dovetail.codegen.isa.cuda_intrinsics import FLOATS, INTRINSICS, INTS, LANES
from dovetail.codegen.isa.ops import HELPER_OPS, SCALAR_OPS, SCALAR_SPELLING
from dovetail.codegen.isa.target import Target

_VECTOR_OPS: dict[str, int] = {
    **dict.fromkeys(("vzero", "viota"), 0),
    **dict.fromkeys(("vbroadcast", "vbroadcast_i32", "vabs", "vneg", "vsqrt", "vround"), 1),
    **dict.fromkeys(("vcvt_i32", "vcvt_f32", "vbitcast_f32", "vbitcast_i32"), 1),
    **dict.fromkeys(("vadd", "vsub", "vmul", "vdiv", "vmin", "vmax"), 2),
    **dict.fromkeys((f"v{op}_i32" for op in "add sub mul and or xor shl shr".split()), 2),
    **dict.fromkeys(("vfma", "vfnma"), 3),
}
"""Operations whose helper takes the operands as they are, and how many."""


def _call(name: str, count: int) -> str:
    return f"dt_{name}({', '.join(f'{{{i}}}' for i in range(count))})"


OPS = {
    **SCALAR_OPS,
    **HELPER_OPS,
    **{name: _call(name, count) for name, count in _VECTOR_OPS.items()},
    **{key: _call(key.replace(".", "_"), 2) for key in SCALAR_OPS if key.startswith("store.")},
    "vload.f32": _call("vload_f32", 1),
    "vstore.f32": _call("vstore_f32", 2),
    "vload_i32": _call("vload_i32", 1),
    "vstore_i32": _call("vstore_i32", 2),
    "vload_strips": _call("vload_strips_f16", 2),
    "vload_strips_i32": _call("vload_strips_i32", 2),
    "vload_strips_i8": _call("vload_strips_i8", 2),
    "vzero": "dt_vbroadcast(0.0f)",
    **dict.fromkeys(("prefetch", "prefetch_l2"), _call("prefetch", 1)),
    "keep_order": "dt_keep_order()",
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
