"""What a warp does, as intrinsics: `dt_*` functions of templates/warp.cuh and their numpy meanings.

A vector is one value in each of a warp's 32 lanes; scalars are alike in all lanes. In: nothing.
Out: `INTRINSICS` by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dovetail.codegen.isa import meaning as m
from dovetail.codegen.isa.generic import INTRINSICS as SCALAR_BITS
from dovetail.codegen.isa.intrinsics import Intrinsic, intrinsic, table
from dovetail.codegen.isa.memory import Pointer
from dovetail.codegen.isa.x86_rows import shift_right, splat
from dovetail.ir.dtypes import narrow_bf16, widen_bf16

LANES = 32
FLOATS, INTS = "dt_f32x32", "dt_i32x32"
"""The vector types: `float` and `int32_t` on the device, 32 of them for the interpreter."""
F32, I32, U16 = np.float32, np.int32, np.uint16

Meaning = Callable[..., Any]


def _same(v: m.Array) -> m.Array:
    return v


STORED: dict[str, tuple[str, str, Any, Meaning, Meaning]] = {
    "f32": ("float", FLOATS, F32, _same, _same),
    "bf16": ("uint16_t", FLOATS, U16, widen_bf16, narrow_bf16),
    "f16": ("uint16_t", FLOATS, U16, m.f32_of_f16, m.f16_bits),
    "i32": ("int32_t", INTS, I32, _same, _same),
}
"""Element in memory: its C type, vector type, numpy dtype, and the conversions from and to it."""

SCALARS: dict[str, tuple[str, Any]] = {
    "f32": ("float", F32),
    "f64": ("double", np.float64),
    "i32": ("int32_t", I32),
    "i64": ("int64_t", np.int64),
    "u8": ("uint8_t", np.uint8),
    "i8": ("int8_t", np.int8),
    "u16": ("uint16_t", U16),
    "u32": ("uint32_t", np.uint32),
}


def _used(n: int) -> m.Array:
    return np.arange(LANES) < n


def _memory_rows(element: str) -> Iterator[Intrinsic]:
    """Loads and stores, whole and of the first n lanes."""
    c, vector, dtype, widen, narrow = STORED[element]
    yield intrinsic(
        f"dt_vload_{element}", f"const {c}* -> {vector}", lambda p: widen(p.load(dtype, LANES))
    )
    yield intrinsic(
        f"dt_vload_n_{element}",
        f"const {c}*, int64_t -> {vector}",
        lambda p, n: widen(p.load_lanes(dtype, _used(n))),
    )
    yield intrinsic(
        f"dt_vstore_{element}", f"{c}*, {vector} -> void", lambda p, v: p.store(narrow(v))
    )
    yield intrinsic(
        f"dt_vstore_n_{element}",
        f"{c}*, {vector}, int64_t -> void",
        lambda p, v, n: p.store_lanes(narrow(v), _used(n)),
    )


def _strip_rows() -> Iterator[Intrinsic]:
    """Loads of two stretches of 16 elements, the second one `stride` elements after the first."""
    kinds = (("f16", U16, FLOATS, m.f32_of_f16), ("i32", I32, INTS, _same))
    for element, dtype, vector, widen in (*kinds, ("i8", np.int8, INTS, lambda v: v.astype(I32))):
        c = STORED[element][0] if element in STORED else "int8_t"
        yield intrinsic(
            f"dt_vload_strips_{element}",
            f"const {c}*, int64_t -> {vector}",
            _strips(np.dtype(dtype), widen),
        )


def _strips(dtype: np.dtype[Any], widen: Meaning) -> Meaning:
    def load(p: Pointer, stride: Any) -> Any:
        second = p.advance(int(stride) * dtype.itemsize)
        return widen(np.concatenate([p.load(dtype, 16), second.load(dtype, 16)]))

    return load


def _store(dtype: Any, change: Meaning = _same) -> Meaning:
    """Return the meaning of a scalar store, which one lane does for all."""

    def store(p: Pointer, x: Any) -> None:
        p.store(change(np.array([x], dtype)))

    return store


def _scalar_rows() -> Iterator[Intrinsic]:
    for element, (c, dtype) in SCALARS.items():
        yield intrinsic(f"dt_store_{element}", f"{c}*, {c} -> void", _store(dtype))
    for element in ("bf16", "f16"):
        narrow = STORED[element][4]
        yield intrinsic(f"dt_store_{element}", "uint16_t*, float -> void", _store(F32, narrow))
    yield intrinsic("dt_f32_of_f16", "uint16_t -> float", lambda h: m.f32_of_f16(np.array(h))[()])
    yield intrinsic("dt_prefetch", "const void* -> void", lambda p: None)
    yield intrinsic("dt_keep_order", "-> void", lambda: None)


_LANEWISE: dict[str, Meaning] = {
    "vadd": np.add,
    "vsub": np.subtract,
    "vmul": np.multiply,
    "vdiv": np.divide,
    "vmin": m.min_second,
    "vmax": m.max_second,
    "vfma": m.fma,
    "vfnma": lambda a, b, c: m.fma(-a, b, c),
    "vabs": np.abs,
    "vneg": np.negative,
    "vsqrt": np.sqrt,
    "vround": np.rint,
    "vselect_gt": lambda a, b, x, y: np.where(a > b, x, y),
}
_ARITY = {"vfma": 3, "vfnma": 3, "vselect_gt": 4}
_INTEGERS: dict[str, Meaning] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_ONE_OPERAND = ("vabs", "vneg", "vsqrt", "vround")


def _vector_rows() -> Iterator[Intrinsic]:
    for name, meaning in _LANEWISE.items():
        count = 1 if name in _ONE_OPERAND else _ARITY.get(name, 2)
        params = ", ".join([FLOATS] * count)
        yield intrinsic(f"dt_{name}", f"{params} -> {FLOATS}", meaning)
    for name, act in (("add", np.add), ("max", m.max_second), ("min", m.min_second)):
        yield intrinsic(f"dt_vreduce_{name}", f"{FLOATS} -> float", _reduction(act))
    yield intrinsic("dt_vbroadcast", f"float -> {FLOATS}", splat(F32, LANES))
    yield intrinsic("dt_vbroadcast_i32", f"int32_t -> {INTS}", splat(I32, LANES))
    yield intrinsic(
        "dt_vtail",
        f"{FLOATS}, float, int64_t -> {FLOATS}",
        lambda v, fill, n: np.where(_used(n), v, F32(fill)),
    )
    yield intrinsic("dt_viota", f"-> {INTS}", lambda: np.arange(LANES, dtype=I32))
    yield intrinsic("dt_vcvt_i32", f"{FLOATS} -> {INTS}", m.to_i32_saturating)
    yield intrinsic("dt_vcvt_f32", f"{INTS} -> {FLOATS}", lambda v: v.astype(F32))
    for name, act in _INTEGERS.items():
        yield intrinsic(f"dt_v{name}_i32", f"{INTS}, {INTS} -> {INTS}", act)
    yield intrinsic("dt_vshl_i32", f"{INTS}, imm -> {INTS}", np.left_shift)
    yield intrinsic("dt_vshr_i32", f"{INTS}, imm -> {INTS}", shift_right)
    yield intrinsic("dt_vbitcast_f32", f"{INTS} -> {FLOATS}", m.reinterpret(F32))
    yield intrinsic("dt_vbitcast_i32", f"{FLOATS} -> {INTS}", m.reinterpret(I32))


def _reduction(act: Callable[[m.Array, m.Array], m.Array]) -> Meaning:
    return lambda v: m.halves_tree(act, v)


INTRINSICS = table(
    [
        SCALAR_BITS["dt_f32_of_bits"],
        SCALAR_BITS["dt_bits_of_f32"],
        *(row for element in STORED for row in _memory_rows(element)),
        *_strip_rows(),
        *_scalar_rows(),
        *_vector_rows(),
    ]
)
