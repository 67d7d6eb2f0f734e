"""x86 operations that treat lanes alike: arithmetic, shifts, comparisons, conversions.

In: what tells operations of a kind apart, the shape and the arguments. Out: a new vector.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from dovetail.codegen.lift.emit import VL, Address, call, cast, num, op, pick
from dovetail.codegen.lift.lanes import (
    BINARY,
    COMPARED,
    SIZES,
    Lanes,
    Made,
    integer_at,
    less,
    minus,
    saturate,
)
from dovetail.codegen.lift.x86_shape import ELEMENTS, PLAIN, Shape, vec
from dovetail.ir.expr import Expr, NamedType, Unary

Lane = Callable[..., Expr]
FUSED: dict[str, tuple[Lane, Lane]] = {
    "fmadd": (partial(call, "vfma"), lambda a, b, c: op("+", op("*", a, b), c)),
    "fnmadd": (partial(call, "vfnma"), lambda a, b, c: op("-", c, op("*", a, b))),
    "fmsub": (
        lambda a, b, c: call("vneg", call("vfnma", a, b, c)),
        lambda a, b, c: op("-", op("*", a, b), c),
    ),
}
"""A product and a sum, of f32 vectors and of lanes."""
SIGNS = {0: "==", 1: "<", 2: "<=", 4: "!=", 5: ">=", 6: ">"}
FLOAT_SIGNS = {0: "==", 1: "<", 2: "<=", 4: "!=", 12: "!=", 13: ">=", 14: ">"}
"""Comparisons by their number in an instruction."""


def float_binary(operation: str, lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    """Return an operation on two vectors of floats."""
    a, b = shape.read(args)
    if shape.elem == "f32":
        return lanes.calls(PLAIN[operation], shape.count, a, b)
    return lanes.each(shape.elem, shape.count, lambda i: BINARY[operation](a.item(i), b.item(i)))


def fused_floats(operation: str, lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    """Return a product and a sum."""
    held, (vectors, lane) = shape.read(args), FUSED[operation]
    if shape.elem == "f32":
        return lanes.floats(shape.count, lambda load: vectors(*map(load, held)))
    return lanes.each(shape.elem, shape.count, lambda i: lane(*(a.item(i) for a in held)))


def lanewise(operation: str, lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    """Return an operation on lanes; numbers among the arguments are the same for all."""
    held = [a.read_as(shape.elem) if isinstance(a, Address) else a for a in args]
    return lanes.each(
        shape.elem,
        shape.count,
        lambda i: LANEWISE[operation](
            shape, *(a.item(i) if isinstance(a, Address) else a for a in held)
        ),
    )


def bitwise(operation: str, lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    """Return an operation on bits."""
    a, b = shape.read(args, "u32")
    made = lanes.each("u32", shape.bits // 32, lambda i: BINARY[operation](a.item(i), b.item(i)))
    return made.read_as(shape.elem if shape.elem in ("f32", "f64") else "u8")


def conversion(
    operation: str, suffix: str, lanes: Lanes, shape: Shape, args: list[Any]
) -> Address | Made:
    """Return a conversion between element types."""
    source = ELEMENTS[re.sub("^cvtt?", "", operation)]
    a, count = args[0].read_as(source), shape.count
    if suffix == "ps" and source == "i32":
        return lanes.floats(
            count, lambda load: call("vcvt_f32", call("vload_i32", *load_i32(load, a)))
        )
    if source == "f32" and shape.elem == "i32":
        if "cvtt" in operation:
            return lanes.each("i32", count, lambda i: cast("i32", a.item(i)))
        return round_lanes(lanes, count, a)
    if SIZES[source] > SIZES[shape.elem]:  # narrowing: the width named is the source's
        count = shape.counted(source)
        made = lanes.each(shape.elem, count, lambda i: cast_to(shape.elem, a.item(i)))
        bits = max(128, count * SIZES[shape.elem] * 8)
        return vec(bits, shape.elem), padded_register(lanes, made, count)
    return lanes.each(shape.elem, count, lambda i: cast_to(shape.elem, a.item(i)))


def load_i32(load: Any, a: Address) -> tuple[Expr, ...]:
    """Return the arguments of vload_i32 for a vector of a group."""
    made = load(a)  # vload(pointer, lanes) with the pointer cast to f32
    pointer = made.args[0]
    return Address(pointer, "f32").read_as("i32").pointer(), made.args[1]


def round_lanes(lanes: Lanes, count: int, a: Address) -> Address:
    """Return f32 lanes to the nearest integers, even ones at ties."""
    out = lanes.new("i32", count)
    used = call("min", VL, num(count))

    def group(u: Expr) -> None:
        step = op("*", u, VL)
        made = call("vcvt_i32", call("vload", a.moved(step).pointer(), used))
        lanes.w.do(call("vstore_i32", out.moved(step).pointer(), made, used))

    lanes.loop_groups(call("max", num(1), op("//", num(count), VL)), group)
    return out


def cast_to(elem: str, value: Expr) -> Expr:
    """Return a lane as another element."""
    return value if elem == "f16" else cast(elem, value)


def padded_register(lanes: Lanes, made: Address, count: int) -> Address:
    """Return a vector of 128 bits or more: zeros follow narrower lanes."""
    total = max(16, count * SIZES[made.elem]) // SIZES[made.elem]
    if total == count:
        return made
    out = lanes.new(made.elem, total)
    lanes.clear(out, total)
    lanes.move(out.read_as("u8"), made.read_as("u8"), count * SIZES[made.elem])
    return out


def cast_register(lanes: Lanes, shape: Shape, args: list[Any]) -> Any:
    """Return a register read as another type."""
    return args[0].read_as(shape.elem)


def makes_mask(operation: str) -> bool:
    """Tell whether an operation compares, and its result is a mask in a number."""
    return operation in ("cmp", "test", "testn", "mov", "movepi8") or (
        operation[:3] == "cmp" and operation[3:] in COMPARED
    )


def mask_of(operation: str, lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    """Return a comparison whose result is a mask in a number."""
    total = lanes.w.temporary(cast("i64", num(0)), "i64", "mask")
    a = args[0].read_as(shape.elem)
    b = args[1].read_as(shape.elem) if len(args) > 1 else a
    sign = COMPARED.get(operation[3:], "")
    if operation == "cmp":
        signs = FLOAT_SIGNS | {6: ">"} if shape.elem in ("f32", "f64") else SIGNS
        sign = signs[integer_at(args[2]) & 15]

    def one(i: Expr) -> None:
        if sign:
            holds = less(a.item(i), b.item(i), sign)
        elif operation in ("test", "testn"):
            holds = less(op("&", a.item(i), b.item(i)), 0, "!=" if operation == "test" else "==")
        else:
            holds = less(a.item(i), 0)
        lanes.w.set(total, op("|", total, op("<<", cast("i64", holds), i)))

    lanes.w.loop(shape.count, one)
    name = f"__mmask{max(8, shape.count)}"
    if shape.count > 32:
        return NamedType(name=name), total
    return NamedType(name=name), cast("u32" if shape.count == 32 else "i32", total)


def shifted(sign: str, shape: Shape, a: Expr, n: Expr) -> Expr:
    """Return a lane shifted by a number, or by a lane of another vector."""
    bits = 8 * SIZES[shape.elem]
    if sign == "sra":
        return op(">>", a, call("min", n, num(bits - 1)))
    if bits == 64:
        mask = op("<<", op("<<", cast("i64", num(-1)), op("-", num(63), n)), num(1))
        right = op("&", op(">>", a, n), Unary(op="~", operand=mask))
        return pick(less(n, bits), right if sign == "srl" else op("<<", a, n), num(0))
    made = op("<<" if sign == "sll" else ">>", cast("u32", cast(f"u{bits}", a)), n)
    return pick(less(n, bits), made, cast("u32", num(0)))


def _shapeless(join: Lane) -> Lane:
    return lambda shape, a, b: join(a, b)


def _compares(sign: str) -> Lane:
    return lambda shape, a, b: pick(less(a, b, sign), num(-1), num(0))


LANEWISE: dict[str, Lane] = {
    **{name: _shapeless(f) for name, f in BINARY.items() if name != "mul"},
    "mullo": lambda s, a, b: op("*", a, b),
    "adds": lambda s, a, b: saturate(op("+", a, b), s.elem),
    "subs": lambda s, a, b: saturate(op("-", a, b), s.elem),
    "avg": lambda s, a, b: op(">>", op("+", op("+", a, b), 1), num(1)),
    "mulhi": lambda s, a, b: op(">>", op("*", cast("i64", a), b), num(8 * SIZES[s.elem])),
    "mulhrs": lambda s, a, b: op(">>", op("+", op(">>", op("*", a, b), num(14)), 1), num(1)),
    "sign": lambda s, a, b: pick(
        less(b, 0), minus(a), pick(less(b, 0, "=="), cast("i32", num(0)), op("+", a, 0))
    ),
    "abs": lambda s, a: pick(less(a, 0), minus(a), op("+", a, 0)),
    **{f"cmp{n}": _compares(sign) for n, sign in COMPARED.items()},
    **{f"{n}{form}": partial(shifted, n) for n in ("sll", "srl", "sra") for form in ("i", "v")},
}
"""Operation to what it makes of lanes; the shape comes first."""
BITS = ("and", "or", "xor", "andnot")
