"""Numpy meanings of what a warp does: the `dt_*` functions of templates/warp.cuh.

A vector is one value in each of a warp's 32 lanes; scalars are alike in all lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dovetail.codegen.isa.cuda import LANES
from dovetail.codegen.isa.x86_rows import shift_right
from dovetail.ir.dtypes import narrow_bf16, widen_bf16
from tests.codegen.interp import meaning as m
from tests.codegen.interp.meant import Meant, meant
from tests.codegen.interp.memory import Pointer

F32, I32, U16 = np.float32, np.int32, np.uint16

Meaning = Callable[..., Any]


def _same(v: m.Array) -> m.Array:
    return v


STORED: dict[str, tuple[Any, Meaning, Meaning]] = {
    "f32": (F32, _same, _same),
    "bf16": (U16, widen_bf16, narrow_bf16),
    "f16": (U16, m.f32_of_f16, m.f16_bits),
    "i32": (I32, _same, _same),
}
"""Element in memory: its numpy dtype, and the conversions from and to it."""

SCALARS: dict[str, Any] = {
    "f32": F32,
    "f64": np.float64,
    "i32": I32,
    "i64": np.int64,
    "u8": np.uint8,
    "i8": np.int8,
    "u16": U16,
    "i16": np.int16,
    "u32": np.uint32,
    "u64": np.uint64,
}


def _used(n: int) -> m.Array:
    return np.arange(LANES) < n


def _memory_rows(element: str) -> Iterator[Meant]:
    """Loads and stores, whole and of the first n lanes."""
    dtype, widen, narrow = STORED[element]
    yield meant(f"dt_vload_{element}", lambda p: widen(p.load(dtype, LANES)))
    yield meant(
        f"dt_vload_n_{element}",
        lambda p, n: widen(p.load_lanes(dtype, _used(n))),
    )
    yield meant(f"dt_vstore_{element}", lambda p, v: p.store(narrow(v)))
    yield meant(
        f"dt_vstore_n_{element}",
        lambda p, v, n: p.store_lanes(narrow(v), _used(n)),
    )


def _strip_rows() -> Iterator[Meant]:
    """Loads of two stretches of 16 elements, the second one `stride` elements after the first."""
    kinds = (("f16", U16, m.f32_of_f16), ("i32", I32, _same))
    for element, dtype, widen in (*kinds, ("i8", np.int8, lambda v: v.astype(I32))):
        yield meant(
            f"dt_vload_strips_{element}",
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


def _scalar_rows() -> Iterator[Meant]:
    for element, dtype in SCALARS.items():
        yield meant(f"dt_store_{element}", _store(dtype))
    for element in ("bf16", "f16"):
        narrow = STORED[element][2]
        yield meant(f"dt_store_{element}", _store(F32, narrow))
    yield meant("dt_f32_of_f16", lambda h: m.f32_of_f16(np.array(h))[()])
    yield meant("dt_prefetch", lambda p: None)
    yield meant("dt_keep_order", lambda: None)


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
    "vfloor": np.floor,
    "vceil": np.ceil,
    "vtrunc": np.trunc,
    "vselect_gt": lambda a, b, x, y: np.where(a > b, x, y),
}
_INTEGERS: dict[str, Meaning] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def _vector_rows() -> Iterator[Meant]:
    for name, meaning in _LANEWISE.items():
        yield meant(f"dt_{name}", meaning)
    for name, act in (("add", np.add), ("max", m.max_second), ("min", m.min_second)):
        yield meant(f"dt_vreduce_{name}", _reduction(act))
    yield meant("dt_vbroadcast", lambda x: np.full(LANES, x, F32))
    yield meant("dt_vbroadcast_i32", lambda x: np.full(LANES, x, I32))
    yield meant(
        "dt_vtail",
        lambda v, fill, n: np.where(_used(n), v, F32(fill)),
    )
    yield meant("dt_viota", lambda: np.arange(LANES, dtype=I32))
    yield meant("dt_vcvt_i32", m.to_i32_saturating)
    yield meant("dt_vcvt_f32", lambda v: v.astype(F32))
    for name, act in _INTEGERS.items():
        yield meant(f"dt_v{name}_i32", act)
    yield meant("dt_vshl_i32", np.left_shift)
    yield meant("dt_vshr_i32", shift_right)
    yield meant("dt_vlook_quads", m.look_up)
    yield meant("dt_vbitcast_f32", m.reinterpret(F32))
    yield meant("dt_vbitcast_i32", m.reinterpret(I32))


def _reduction(act: Callable[[m.Array, m.Array], m.Array]) -> Meaning:
    return lambda v: m.halves_tree(act, v)


ROWS = (
    *(row for element in STORED for row in _memory_rows(element)),
    *_strip_rows(),
    *_scalar_rows(),
    *_vector_rows(),
)
