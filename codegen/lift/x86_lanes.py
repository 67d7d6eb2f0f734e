"""x86 operations that treat lanes alike: arithmetic, shifts, comparisons, conversions.

In: the shape and the arguments. Out: a new vector.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from dovetail.codegen.lift.emit import VL, Address, call, cast, num, op, pick
from dovetail.codegen.lift.lanes import (
    BINARY,
    COMPARED,
    SIZES,
    Lanes,
    Made,
    halves,
    integer_at,
    less,
    minus,
    saturate,
)
from dovetail.codegen.lift.x86_shape import ELEMENTS, PLAIN, Handler, Shape, vec
from dovetail.ir.expr import Expr, Float, NamedType, Unary

FUSED = {
    "fmadd": lambda v, a, b, c: call("vfma", a, b, c),
    "fnmadd": lambda v, a, b, c: call("vfnma", a, b, c),
    "fmsub": lambda v, a, b, c: call("vneg", call("vfnma", a, b, c)),
}


FUSED_SCALAR: dict[str, Callable[[Expr, Expr, Expr], Expr]] = {
    "fmadd": lambda a, b, c: op("+", op("*", a, b), c),
    "fnmadd": lambda a, b, c: op("-", c, op("*", a, b)),
    "fmsub": lambda a, b, c: op("-", op("*", a, b), c),
}


def float_binary(operation: str) -> Handler:
    """Return the handler of an operation on two vectors of floats."""

    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        a, b = shape.read(args)
        if shape.elem == "f32":
            return lanes.calls(PLAIN[operation], shape.count, a, b)
        return lanes.each(
            shape.elem, shape.count, lambda i: BINARY[operation](a.item(i), b.item(i))
        )

    return handler


def fused_floats(operation: str) -> Handler:
    """Return the handler of a product and a sum."""

    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        a, b, c = shape.read(args)
        if shape.elem == "f32":
            return lanes.floats(
                shape.count, lambda load: FUSED[operation](None, load(a), load(b), load(c))
            )
        return lanes.each(
            shape.elem,
            shape.count,
            lambda i: FUSED_SCALAR[operation](a.item(i), b.item(i), c.item(i)),
        )

    return handler


def lanewise(lane: Callable[..., Expr]) -> Handler:
    """Return the handler of an operation on lanes; numbers among the arguments are the same."""

    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        held = [a.read_as(shape.elem) if isinstance(a, Address) else a for a in args]
        return lanes.each(
            shape.elem,
            shape.count,
            lambda i: lane(shape, *(a.item(i) if isinstance(a, Address) else a for a in held)),
        )

    return handler


def bitwise(operation: str) -> Handler:
    """Return the handler of an operation on bits."""

    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        a, b = shape.read(args, "u32")
        made = lanes.each(
            "u32", shape.bits // 32, lambda i: BINARY[BITS[operation]](a.item(i), b.item(i))
        )
        return made.read_as(shape.elem if shape.elem in ("f32", "f64") else "u8")

    return handler


def conversion(operation: str, suffix: str) -> Handler:
    """Return the handler of a conversion between element types."""
    source = ELEMENTS[re.sub("^cvtt?", "", operation)]

    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address | Made:
        a = args[0].read_as(source)
        if suffix == "ps" and source == "i32":
            return lanes.floats(
                shape.count,
                lambda load: call("vcvt_f32", call("vload_i32", *load_i32(load, a))),
            )
        if source == "f32" and shape.elem == "i32":
            if "cvtt" in operation:
                return lanes.each("i32", shape.count, lambda i: cast("i32", a.item(i)))
            return round_lanes(lanes, shape.count, a)
        count = shape.count
        if SIZES[source] > SIZES[shape.elem]:  # narrowing: the width named is the source's
            count = shape.bits // 8 // SIZES[source]
            if shape.elem == "f32":
                count = shape.bits // 8 // SIZES[source]
            made = lanes.each(shape.elem, count, lambda i: cast_to(shape.elem, a.item(i)))
            return vec(max(128, count * SIZES[shape.elem] * 8), shape.elem), padded_register(
                lanes, made, count
            )
        return lanes.each(shape.elem, count, lambda i: cast_to(shape.elem, halves(a, i)))

    return handler


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
    zero: Expr = Float(value=0.0) if made.elem in ("f32", "f64") else num(0)
    out = lanes.new(made.elem, total)
    lanes.w.loop(total, lambda i: lanes.w.set(out.item(i), zero))
    lanes.move(out.read_as("u8"), made.read_as("u8"), count * SIZES[made.elem])
    return out


def cast_register(lanes: Lanes, shape: Shape, args: list[Any]) -> Any:
    """Return a register read as another type."""
    return args[0].read_as(shape.elem)


def mask_of(operation: str) -> Handler | None:
    """Return the handler of a comparison whose result is a mask in a number."""
    found = re.fullmatch(r"cmp(eq|gt|ge|lt|le|neq)?", operation)
    if not found and operation not in ("test", "testn", "mov", "movepi8"):
        return None

    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
        total = lanes.w.temporary(cast("i64", num(0)), "i64", "mask")
        a = args[0].read_as(shape.elem)
        b = args[1].read_as(shape.elem) if len(args) > 1 else a
        sign = COMPARED.get(found[1], "") if found else ""
        if found and not sign:
            signs = {0: "==", 1: "<", 2: "<=", 4: "!=", 5: ">=", 6: ">"}
            if shape.elem in ("f32", "f64"):
                signs = {0: "==", 1: "<", 2: "<=", 4: "!=", 12: "!=", 13: ">=", 14: ">", 6: ">"}
            sign = signs[integer_at(args[2]) & 15]

        def one(i: Expr) -> None:
            if sign:
                holds = less(a.item(i), b.item(i), sign)
            elif operation in ("test", "testn"):
                holds = less(
                    op("&", a.item(i), b.item(i)), 0, "!=" if operation == "test" else "=="
                )
            else:
                holds = less(a.item(i), 0)
            lanes.w.set(total, op("|", total, op("<<", cast("i64", holds), i)))

        lanes.w.loop(shape.count, one)
        name = f"__mmask{max(8, shape.count)}"
        return NamedType(name=name), total if shape.count > 32 else _mask_value(total, shape.count)

    return handler


def _mask_value(total: Expr, count: int) -> Expr:
    return cast("u32" if count == 32 else "i32", total)


def shifted(sign: str) -> Callable[..., Expr]:
    """Return the shift of a lane by a number, or by a lane of another vector."""

    def lane(shape: Shape, a: Expr, n: Expr) -> Expr:
        bits = 8 * SIZES[shape.elem]
        unsigned = f"u{bits}"
        if sign == "sra":
            return op(">>", a, call("min", n, num(bits - 1)))
        if bits == 64:
            mask = op("<<", op("<<", cast("i64", num(-1)), op("-", num(63), n)), num(1))
            right = op("&", op(">>", a, n), Unary(op="~", operand=mask))
            return pick(less(n, bits), right if sign == "srl" else op("<<", a, n), num(0))
        made = op("<<" if sign == "sll" else ">>", cast("u32", cast(unsigned, a)), n)
        return pick(less(n, bits), made, cast("u32", num(0)))

    return lane


def _shapeless(join: Callable[[Expr, Expr], Expr]) -> Callable[..., Expr]:
    return lambda shape, a, b: join(a, b)


def _compares(sign: str) -> Callable[..., Expr]:
    return lambda shape, a, b: pick(less(a, b, sign), num(-1), num(0))


def _absolute(shape: Shape, a: Expr) -> Expr:
    return pick(less(a, 0), minus(a), op("+", a, 0))


LANEWISE: dict[str, Callable[..., Expr]] = {
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
    "abs": _absolute,
    **{f"cmp{n}": _compares(sign) for n, sign in COMPARED.items()},
    **{f"{n}{form}": shifted(n) for n in ("sll", "srl", "sra") for form in ("i", "v")},
}
"""Operation to what it makes of lanes; the shape comes first."""


BITS = {"and": "and", "or": "or", "xor": "xor", "andnot": "andnot"}
