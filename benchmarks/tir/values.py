"""How values of the high IR look in TensorIR: dtypes, constants and conversions.

In: types as text (`f32`, `vec[f32]`, `ptr[bf16]`). Out: TVM dtypes and expressions. Pointers are
their addresses, as int64: they can be compared with null, kept and changed like any number.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from tvm import tirx as tir
from tvm.ir import PointerType, PrimType

from dovetail.ir.errors import ScheduleError
from dovetail.ir.high.rules import is_pointer

Tir = Any
"""A TVM expression, buffer or statement: the bindings of TVM carry no types."""

SCALARS = {
    "f32": "float32",
    "f64": "float64",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "i8": "int8",
    "u16": "uint16",
    "u32": "uint32",
    "bool": "int32",
}
"""Type to dtype; truth values are kept as C keeps them."""
STORED = {**SCALARS, "bf16": "uint16", "f16": "float16"}
"""Element type to dtype in memory."""
SIZES = {"u8": 1, "i8": 1, "u16": 2, "bf16": 2, "f16": 2, "i32": 4, "u32": 4, "f32": 4}
SIZES |= {"i64": 8, "f64": 8}


class Typed(NamedTuple):
    """An expression and its high-IR type; of type `int` or `float` it may be a Python number."""

    expr: Tir
    type: str


def dtype_of(type_: str, lanes: int) -> str:
    """Return the TVM dtype of a variable of the high IR."""
    if is_pointer(type_) or type_ == "null":
        return "int64"
    if type_.startswith("vec["):
        return wide(SCALARS[type_[4:-1]], lanes)
    return SCALARS[type_]


def wide(dtype: str, lanes: int) -> str:
    """Return the vector of `lanes` values of `dtype`; of one lane, `dtype` itself."""
    return f"{dtype}x{lanes}" if lanes > 1 else dtype


def spread(value: Tir, lanes: int) -> Tir:
    """Return `value` in all lanes."""
    return tir.Broadcast(value, lanes) if lanes > 1 else value


def ramp(start: Tir, lanes: int, dtype: str = "int64") -> Tir:
    """Return start, start + 1, ... in the lanes."""
    return tir.Ramp(start, tir.const(1, dtype), lanes) if lanes > 1 else start


def number(value: float, dtype: str) -> Tir:
    """Return the constant `value` of a scalar dtype."""
    return tir.const(int(value) if "int" in dtype else float(value), dtype)


def address_pointer(address: Tir, elem: str) -> tuple[Tir, Tir]:
    """Return a pointer variable's definition: (variable, value) for the `elem` at `address`."""
    kind = PointerType(PrimType(STORED[elem]))
    return tir.Var("p", kind), tir.reinterpret(kind, address)


def view(pointer: Tir, elem: str) -> Tir:
    """Return a buffer of unknown length over `pointer`, aligned to its elements only."""
    return tir.decl_buffer(
        (tir.const(1 << 40, "int64"),),
        STORED[elem],
        "at",
        data=pointer,
        elem_offset=tir.const(0, "int64"),
        data_alignment=SIZES[elem],
    )


def fit(value: Typed, wanted: str) -> Tir:
    """Return the expression of `value` as a `wanted`: literals take its type, integers widen."""
    expr, type_ = value
    if isinstance(expr, int | float):
        return number(expr, SCALARS[wanted] if wanted in SCALARS else "int64")
    if wanted == "bool":
        return expr if type_ == "bool" else expr != number(0, SCALARS[type_])
    if type_ == wanted or wanted not in SCALARS or (type_, wanted) == ("int", "i64"):
        return expr
    if is_pointer(type_) and wanted == "i64":
        return expr
    if type_ not in (*SCALARS, "int", "float"):
        raise ScheduleError(f"a value of type {type_} stands where {wanted} is wanted")
    return tir.Cast(SCALARS[wanted], expr)


def each(items: Iterable[Tir]) -> Tir:
    """Return statements as one."""
    found = list(items)
    if len(found) == 1:
        return found[0]
    return tir.SeqStmt(found) if found else tir.Evaluate(number(0, "int32"))
