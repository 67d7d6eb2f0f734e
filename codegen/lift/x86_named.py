"""x86 intrinsics whose names follow no pattern: casts of registers, their first lanes, halves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dovetail.codegen.lift.emit import Address, call, cast, num
from dovetail.codegen.lift.lanes import BINARY, Lanes, Made, Register
from dovetail.codegen.lift.types import SIZES, VOID
from dovetail.codegen.lift.x86_shape import PLAIN, vec
from dovetail.ir.expr import Expr, NamedType

Special = Callable[..., Made]
"""Writes an intrinsic with `lanes` on its operands."""


def _first(type_: str, elem: str) -> Special:
    """Return the rule of the first lane of a register."""
    return lambda lanes, a: (NamedType(name=type_), a.read_as(elem).item())


def _as_mask(type_: str, elem: str) -> Special:
    return lambda lanes, value: (NamedType(name=type_), cast(elem, value))


def _half_to_float(lanes: Lanes, half: Expr) -> Made:
    bits = lanes.new("u16", 1)
    lanes.w.set(bits.item(), cast("u16", half))
    made = lanes.w.temporary(call("load", bits.read_as("f16").pointer()), "f32")
    return NamedType(name="float"), made


def _float_to_half(lanes: Lanes, value: Expr, rounding: Any = None) -> Made:
    bits = lanes.new("u16", 1)
    lanes.w.do(call("store", bits.read_as("f16").pointer(), value))
    return NamedType(name="unsigned short"), lanes.w.temporary(cast("i32", bits.item()), "i32")


def _low(elem: str, lanes: Lanes, value: Expr) -> Made:
    """Return a register of a number and zeros."""
    count = 16 // SIZES[elem]
    out = lanes.new(elem, count)
    lanes.clear(out, count)
    lanes.put(out, num(0), value)
    return vec(128, elem), out


def _spread(lanes: Lanes, value: Expr) -> Made:
    return vec(128, "f32"), lanes.spread(value, "f32", 4)


def _scalar_op(name: str, elem: str, lanes: Lanes, a: Address, b: Address) -> Made:
    out = Register(lanes, 128, elem).copy(a)
    lanes.put(out, num(0), BINARY[name](a.read_as(elem).item(), b.read_as(elem).item()))
    return vec(128, elem), out


def _widened(part: int, bits: int, elem: str, lanes: Lanes, a: Address) -> Made:
    """Return the lower part of a register; what is above it is 0 where it means anything."""
    out, count = lanes.new(elem, bits // 8 // SIZES[elem]), part // 8 // SIZES[elem]
    lanes.move(out, a.read_as(elem), count)
    lanes.clear(out.moved(count), (bits - part) // 8 // SIZES[elem])
    return vec(bits, elem), out


def _same_bits(bits: int, elem: str, lanes: Lanes, a: Address) -> Made:
    return vec(bits, elem), a.read_as(elem)


KINDS = (("ps", "f32"), ("si", "u8"), ("pd", "f64"))
PARTS = ((256, 128), (512, 128), (512, 256))
WIDTHS = {"": 128, "256": 256, "512": 512}
SPECIAL: dict[str, Special] = {
    "_cvtsh_ss": _half_to_float,
    "_cvtss_sh": _float_to_half,
    **{f"_mm{w}_cvtss_f32": _first("float", "f32") for w in WIDTHS},
    "_mm_cvtsd_f64": _first("double", "f64"),
    **{f"_mm{w}_cvtsi{bits}_si32": _first("int", "i32") for w, bits in WIDTHS.items()},
    **{f"_mm_cvtsi128_si64{x}": _first("long long", "i64") for x in ("", "x")},
    "_mm_cvtsi32_si128": partial(_low, "i32"),
    "_mm_cvtsi64_si128": partial(_low, "i64"),
    "_mm_set_ss": partial(_low, "f32"),
    **dict.fromkeys(
        ("_mm_load1_ps", "_mm_load_ps1"),
        lambda lanes, at: _spread(lanes, at.read_as("f32").item()),
    ),
    "_mm_set_ps1": _spread,
    **{
        f"_mm_{n}_{s}": partial(_scalar_op, n, e)
        for n in PLAIN
        for s, e in (("ss", "f32"), ("sd", "f64"))
    },
    **{
        f"_mm{whole}_{how}{k}{part}_{k}{whole}": partial(_widened, part, whole, e)
        for whole, part in PARTS
        for k, e in KINDS
        for how in ("cast", "zext")
    },
    **{
        f"_mm{whole}_cast{k}{whole}_{k}{part}": partial(_same_bits, part, e)
        for whole, part in PARTS
        for k, e in KINDS
    },
    "_mm256_zeroupper": lambda lanes: (VOID, None),
    **{f"_cvtu32_mask{b}": _as_mask(f"__mmask{b}", "i64") for b in (8, 16, 32)},
    "_cvtu64_mask64": _as_mask("__mmask64", "i64"),
    **{f"_cvtmask{b}_u32": _as_mask("unsigned", "u32") for b in (8, 16, 32)},
}
