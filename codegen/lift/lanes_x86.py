"""The meaning of SSE, AVX and AVX-512 intrinsics by the pattern of their names, for any width.

`_mm256_adds_epi16` is width, operation, element; an operation is one entry, whatever the width. In:
a name. Out: the rule that writes it, or None.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from dovetail.codegen.lift.emit import Address, call, cast, num, op, pick, zero_of
from dovetail.codegen.lift.lanes import (
    BINARY,
    Handler,
    Lanes,
    Made,
    Register,
    Rule,
    item,
    less,
    wide,
)
from dovetail.codegen.lift.types import SIZES, VOID, refuse
from dovetail.codegen.lift.x86_lanes import (
    ELEMENTS,
    FUSED,
    LANEWISE,
    MASKS,
    PLAIN,
    Shape,
    mask_of,
    vec,
)
from dovetail.codegen.lift.x86_moves import MOVES
from dovetail.codegen.lift.x86_whole import WHOLE
from dovetail.ir.expr import Expr, NamedType

HANDLERS = LANEWISE | MOVES | WHOLE

NAME = re.compile(
    r"_mm(256|512|)_(maskz_|mask_|)([a-z0-9]+?(?:_[a-z0-9]+)*?)_?"
    r"(ep[iu](?:8|16|32|64x?)|p[sdh]|pbh|s[sd]|si(?:16|32|64|128|256|512)|i128)?(_mask)?"
)


def x86_rule(name: str) -> Rule | None:
    """Return what an intrinsic of x86 writes."""
    if name in SPECIAL:
        return lambda lanes, args: SPECIAL[name](lanes, *args)
    found = NAME.fullmatch(name)
    if not found:
        return None
    width, masked, operation, suffix, to_mask = found.groups(default="")
    bits, elem = int(width or 128), ELEMENTS.get(suffix, "u8")
    handler = _handler(operation, suffix, to_mask)
    if handler is None:
        return None

    def rule(lanes: Lanes, args: list[Any]) -> Made:
        shape = Shape(lanes, bits, elem, suffix)
        if masked:
            return _masked(shape, operation, masked, handler, args)
        made = handler(shape, *args)
        return (vec(bits, elem), made) if isinstance(made, Address) else made or (VOID, None)

    return rule


def _masked(
    shape: Shape, operation: str, masked: str, handler: Handler, operands: list[Any]
) -> Made:
    """Write an operation under a mask: lanes without a bit keep the first operand, or are 0."""
    if shape.suffix in ("ss", "sd"):  # it is for the first lane alone
        raise refuse(f"a mask on one lane of {operation}")
    if operation == "blend":  # its mask comes first
        operands, handler = [operands[1], operands[0], operands[2]], HANDLERS["mov"]
    source = None if masked == "maskz_" else operands[0]
    mask, *rest = operands if source is None else operands[1:]
    held = shape.lanes.w.temporary(wide(mask), "i64", "mask")

    def chosen(i: Expr) -> Expr:
        return less(op("&", op(">>", held, i), num(1)), 0, "!=")

    if "store" in operation:
        to, value = shape.read(operands[0], rest[0])
        shape.lanes.store_where(shape.count, chosen, to, value)
        return VOID, None
    if operation in (*FUSED, "permutex2var") and source is not None:
        rest = [source, *rest]  # it is an operand, too
    if "load" in operation:
        made = rest[0].read_as(shape.elem)
    else:
        made = handler(shape, *rest)
        if isinstance(made, tuple):  # the size of its lanes is not the one that the name ends with
            raise refuse(f"a mask on {operation}")
        made = made.read_as(shape.elem)
    kept = zero_of(shape.elem) if source is None else source.read_as(shape.elem)
    lane = shape.each(lambda i: pick(chosen(i), made.item(i), item(kept, i)))
    return vec(shape.bits, shape.elem), lane


def _handler(operation: str, suffix: str, to_mask: str) -> Handler | None:
    if suffix in ("ss", "sd"):  # what computes on one lane keeps the others
        return HANDLERS.get("store" if operation == "store" else f"{operation}_{suffix}")
    if to_mask:
        return partial(mask_of, operation) if operation in MASKS else None
    return HANDLERS.get(f"{operation}_{suffix}") or HANDLERS.get(operation)


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
