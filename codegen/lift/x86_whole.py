"""x86 operations that compute on vectors as a whole: comparisons, dot products, sums, masks.

In: what tells operations of a kind apart, the shape and the arguments. Out: a new vector, or a
number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dovetail.codegen.lift.emit import Address, call, cast, num, op, pick
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
    wide,
)
from dovetail.codegen.lift.types import refuse
from dovetail.codegen.lift.x86_lanes import FLOAT_SIGNS, float_binary, shifted
from dovetail.codegen.lift.x86_shape import INT, Handler, Shape
from dovetail.ir.expr import Expr, Float, Unary


def _down(x: Expr) -> Expr:
    return call("floor", x)


def _up(x: Expr) -> Expr:
    return minus(call("floor", minus(x)))


ROUNDED: dict[int, Callable[[Expr], Expr]] = {
    1: _down,
    2: _up,
    3: lambda x: pick(less(x, Float(value=0.0)), _up(x), _down(x)),
}
"""Ways to round a lane by their number in an instruction; the others are to the nearest."""


def _round(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    a, mode = args[0].read_as("f32"), integer_at(args[1]) if len(args) > 1 else 1
    if mode & 0xF0:
        raise refuse("rounding to other than whole numbers")
    if mode & 4 or not mode & 3:  # by the state of the CPU, or to the nearest
        return lanes.calls("vround", shape.count, a)
    lane = ROUNDED[mode & 3]
    return lanes.each("f32", shape.count, lambda i: lane(a.item(i)))


def _ceil(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    return _round(lanes, shape, [args[0], num(2)])


def _sqrt(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    a = args[0].read_as(shape.elem)
    if shape.elem == "f32":
        return lanes.calls("vsqrt", shape.count, a)
    return lanes.each(shape.elem, shape.count, lambda i: call("sqrt", a.item(i)))


def _compare(sign: str, lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    """Return masks of lanes; an immediate tells the sign where the name does not."""
    sign = sign or FLOAT_SIGNS.get(integer_at(args[2]) & 15, "")
    if not sign:
        raise refuse(f"comparison {integer_at(args[2])} of vectors")
    a, b = shape.read(args[:2])
    out = lanes.new(shape.elem, shape.count)
    bits = out.read_as("i32" if shape.elem == "f32" else "i64")
    lanes.w.loop(
        shape.count,
        lambda i: lanes.w.set(
            bits.item(i), pick(less(a.item(i), b.item(i), sign), num(-1), num(0))
        ),
    )
    return out


def _inverse(of: Callable[[Expr], Expr], lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    a = args[0].read_as(shape.elem)
    return lanes.each(shape.elem, shape.count, lambda i: op("/", Float(value=1.0), of(a.item(i))))


def _scalef(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    """Return a * 2 ** floor(b), by three factors: what one or two can hold is too little.

    The last factor takes all it can, so that a product before it is rounded only if it ends as 0.
    """
    made, b = shape.read(args)

    def held(x: Expr, most: float) -> Expr:
        return call("max", call("min", x, Float(value=most)), Float(value=-most))

    for factor in (2, 1, 0):

        def bits(i: Expr, before: float = 126.0 * factor) -> Expr:
            power = call("floor", b.item(i))
            power = held(op("-", power, held(power, before)) if before else power, 126.0)
            return op("<<", op("+", cast("i32", power), 127), num(23))

        made = lanes.calls("vmul", shape.count, made, lanes.each("i32", shape.count, bits))
    return made


def _blendv(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    elem = shape.integer
    a, b, mask = shape.read(args, elem)
    made = lanes.each(
        elem, shape.count, lambda i: pick(less(mask.item(i), 0), b.item(i), a.item(i))
    )
    return made.read_as(shape.elem)


def _blend(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    control = integer_at(args[2])
    a, b = shape.read(args[:2])
    return lanes.listed(
        shape.elem, [(b if control >> (i % 8) & 1 else a).item(i) for i in range(shape.count)]
    )


def _pairs(left: str, right: str, to: str, lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    """Return sums of products of neighbours; those of bytes saturate."""
    a, b = args[0].read_as(left), args[1].read_as(right)

    def lane(i: Expr) -> Expr:
        j = op("*", i, 2)
        first = op("*", a.item(j), b.item(j))
        made = op("+", first, op("*", a.item(op("+", j, 1)), b.item(op("+", j, 1))))
        return saturate(made, to) if SIZES[left] == 1 else made

    return lanes.each(to, shape.counted(to), lane)


def _dots(left: str, right: str, lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    """Return acc + dot products of the neighbours that fill an i32."""
    acc, a, b = args[0].read_as("i32"), args[1].read_as(left), args[2].read_as(right)
    return lanes.dots(shape.bits // 32, acc, a, b)


def _hadd(sign: str, lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    a, b = shape.read(args)
    block = 16 // SIZES[shape.elem]
    values = []
    for i in range(shape.count):
        base, j = i // block * block, i % block
        source = a if j < block // 2 else b
        at = base + j % (block // 2) * 2
        values.append(op(sign, source.item(at), source.item(at + 1)))
    return lanes.listed(shape.elem, values)


def _sad(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    a, b = shape.read(args, "u8")
    sums = []
    for i in range(shape.bits // 64):
        made: Expr = cast("i64", num(0))
        for k in range(8):
            gap = op("-", a.item(8 * i + k), b.item(8 * i + k))
            made = op("+", made, call("max", gap, minus(gap)))
        sums.append(made)
    return lanes.listed("i64", sums).read_as("u8")


def _shift_count(sign: str, lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    """Return lanes shifted by the low lane of a vector."""
    a, n = args[0].read_as(shape.elem), cast("i32", args[1].read_as("i64").item())
    held = lanes.w.temporary(n, "i32", "count")
    return lanes.each(shape.elem, shape.count, lambda i: shifted(sign, shape, a.item(i), held))


def _mul_wide(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    if shape.elem in ("f32", "f64"):
        return float_binary("mul", lanes, shape, args)
    a, b = shape.read(args)
    return lanes.each(
        "i64",
        shape.bits // 64,
        lambda i: op("*", wide(a.item(op("*", i, 2))), wide(b.item(op("*", i, 2)))),
    ).read_as("u8")


def _reduce(name: str, lanes: Lanes, shape: Shape, args: list[Any]) -> Expr:
    return lanes.total(shape.elem, shape.count, args[0].read_as(shape.elem), BINARY[name])


def _movemask(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    a = args[0].read_as(shape.integer)
    total = lanes.w.temporary(cast("i64", num(0)), "i64", "mask")
    lanes.w.loop(
        shape.count,
        lambda i: lanes.w.set(total, op("|", total, op("<<", cast("i64", less(a.item(i), 0)), i))),
    )
    return INT, cast("i32", total)


def _ternary_logic(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    a, b, c = shape.read(args[:3], "u32")
    table = integer_at(args[3])

    def lane(i: Expr) -> Expr:
        made: Expr = cast("u32", num(0))
        for row in range(8):
            if table >> row & 1:
                bits = [
                    v.item(i) if row >> k & 1 else Unary(op="~", operand=v.item(i))
                    for v, k in ((a, 2), (b, 1), (c, 0))
                ]
                made = op("|", made, op("&", op("&", bits[0], bits[1]), bits[2]))
        return made

    return lanes.each("u32", shape.bits // 32, lane).read_as("u8")


def _affine(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    x, rows, added = args[0].read_as("u8"), args[1].read_as("u8"), integer_at(args[2])

    def lane(i: Expr) -> Expr:
        made: Expr = cast("i32", num(added & 255))
        for bit in range(8):
            row = rows.item(op("+", op("&", i, num(-8)), 7 - bit))
            held = op("&", row, x.item(i))
            for shift in (4, 2, 1):
                held = op("^", held, op(">>", held, num(shift)))
            made = op("^", made, op("<<", op("&", held, num(1)), num(bit)))
        return made

    return lanes.each("u8", shape.bits // 8, lane)


FLOATS = ("ps", "pd")
WHOLE: dict[str, Handler] = {
    **dict.fromkeys(("round_ps", "roundscale_ps", "floor_ps"), _round),
    "ceil_ps": _ceil,
    "sqrt": _sqrt,
    "cmp": partial(_compare, ""),
    **{f"cmp{n}_{s}": partial(_compare, sign) for n, sign in COMPARED.items() for s in FLOATS},
    "abs_ps": lambda lanes, shape, args: lanes.calls("vabs", shape.count, args[0]),
    "scalef_ps": _scalef,
    # estimates: the exact value is what the steps after them move towards
    **dict.fromkeys(("rcp", "rcp14"), partial(_inverse, lambda x: x)),
    **dict.fromkeys(("rsqrt", "rsqrt14"), partial(_inverse, lambda x: call("sqrt", x))),
    "blendv": _blendv,
    "blend": _blend,
    "madd": partial(_pairs, "i16", "i16", "i32"),
    "maddubs": partial(_pairs, "u8", "i8", "i16"),
    **dict.fromkeys(("dpbusd", "dpbusd_avx"), partial(_dots, "u8", "i8")),
    "dpbssd": partial(_dots, "i8", "i8"),
    **dict.fromkeys(("dpwssd", "dpwssd_avx"), partial(_dots, "i16", "i16")),
    "hadd": partial(_hadd, "+"),
    "hsub": partial(_hadd, "-"),
    "sad": _sad,
    **{name: partial(_shift_count, name) for name in ("sll", "srl", "sra")},
    "mul": _mul_wide,
    **{f"reduce_{name}": partial(_reduce, name) for name in ("add", "max", "min", "mul")},
    "movemask": _movemask,
    "ternarylogic": _ternary_logic,
    "gf2p8affine_epi64": _affine,
}
"""Operations by their names."""
