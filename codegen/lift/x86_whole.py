"""x86 operations that compute on vectors as a whole: comparisons, dot products, sums, masks.

In: what tells operations of a kind apart, the shape and the operands. Out: a new vector, or a
number.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from dovetail.codegen.lift.emit import Address, call, cast, num, op, pick
from dovetail.codegen.lift.lanes import (
    BINARY,
    COMPARED,
    Handler,
    Made,
    integer_at,
    inverted,
    less,
    minus,
    saturate,
    wide,
)
from dovetail.codegen.lift.types import INT, SIZES, refuse
from dovetail.codegen.lift.x86_lanes import Lane, Shape, bits_of, compared, shifted
from dovetail.ir.expr import Expr, Float, NamedType

DOWN = num(1)
ROUNDED = {1: "vfloor", 2: "vceil", 3: "vtrunc"}
"""Ways to round a vector by their number in an instruction; the others are to the nearest."""


def _round(shape: Shape, operand: Address, way: Any = DOWN) -> Address:
    a, mode = operand.read_as("f32"), integer_at(way)
    if mode & 0xF0:
        raise refuse("rounding to other than whole numbers")
    if mode & 4 or not mode & 3:  # by the state of the CPU, or to the nearest
        return shape.lanes.calls("vround", shape.count, a)
    return shape.lanes.calls(ROUNDED[mode & 3], shape.count, a)


def _compare(sign: str, shape: Shape, *operands: Any) -> Address:
    """Return masks of lanes; an immediate tells the sign where the name does not."""

    def lane(x: Expr, y: Expr) -> Expr:
        holds = less(x, y, sign) if sign else compared(integer_at(operands[2]), x, y)
        return pick(holds, num(-1), num(0))

    held = shape.read(*operands[:2])
    return shape.lanes.map(shape.integer, shape.count, lane, *held).read_as(shape.elem)


def _inverse(of: Lane, shape: Shape, a: Address) -> Address:
    return shape.map(lambda x: op("/", Float(value=1.0), of(x)), a.read_as(shape.elem))


def _scalef(shape: Shape, a: Address, power: Address) -> Address:
    """Return a * 2 ** floor(b), by three factors: what one or two can hold is too little.

    The last factor takes all it can, so that a product before it is rounded only if it ends as 0.
    """
    made, b = shape.read(a, power)

    def held(x: Expr, most: float) -> Expr:
        return call("max", call("min", x, Float(value=most)), Float(value=-most))

    for factor in (2, 1, 0):

        def bits(i: Expr, before: float = 126.0 * factor) -> Expr:
            power = call("floor", b.item(i))
            power = held(op("-", power, held(power, before)) if before else power, 126.0)
            return op("<<", op("+", cast("i32", power), 127), num(23))

        times = shape.lanes.each("i32", shape.count, bits)
        made = shape.lanes.calls("vmul", shape.count, made, times)
    return made


def _getexp(shape: Shape, a: Address) -> Address:
    """Return floor(log2(|a|)), in double: of no float it is rounded to a whole number."""

    def lane(x: Expr) -> Expr:
        return cast("f32", call("floor", call("log2", cast("f64", call("abs", x)))))

    return shape.lanes.map("f32", shape.count, lane, a.read_as("f32"))


def _blendv(shape: Shape, *operands: Address) -> Address:
    held, kind = shape.read(*operands, elem=shape.integer), shape.integer
    made = shape.lanes.map(kind, shape.count, lambda x, y, m: pick(less(m, 0), y, x), *held)
    return made.read_as(shape.elem)


def _pairs(left: str, right: str, to: str, shape: Shape, x: Address, y: Address) -> Address:
    """Return sums of products of neighbours; those of bytes saturate."""
    a, b = x.read_as(left), y.read_as(right)

    def lane(i: Expr) -> Expr:
        j = op("*", i, 2)
        first = op("*", a.item(j), b.item(j))
        made = op("+", first, op("*", a.item(op("+", j, 1)), b.item(op("+", j, 1))))
        return saturate(made, to) if SIZES[left] == 1 else made

    return shape.lanes.each(to, shape.counted(to), lane)


def _dots(left: str, right: str, shape: Shape, acc: Address, a: Address, b: Address) -> Address:
    """Return acc + dot products of the neighbours that fill an i32."""
    held = acc.read_as("i32"), a.read_as(left), b.read_as(right)
    return shape.lanes.dots(*held, shape.bits // 32, 4 // SIZES[left])


def _dots_of_pairs(shape: Shape, acc: Address, a: Address, b: Address) -> Address:
    """Return acc + products of neighbours in bfloat16, in float."""
    held, x, y = acc.read_as("f32"), a.read_as("bf16"), b.read_as("bf16")

    def lane(i: Expr) -> Expr:
        first, second = op("*", i, 2), op("+", op("*", i, 2), 1)
        made = op("+", held.item(i), op("*", x.item(second), y.item(second)))
        return op("+", made, op("*", x.item(first), y.item(first)))

    return shape.each(lane)


def _hadd(sign: str, shape: Shape, *operands: Address) -> Address:
    a, b = shape.read(*operands)
    block = 16 // SIZES[shape.elem]
    values = []
    for i in range(shape.count):
        base, j = i // block * block, i % block
        source = a if j < block // 2 else b
        at = base + j % (block // 2) * 2
        values.append(op(sign, source.item(at), source.item(at + 1)))
    return shape.listed(values)


def _sad(shape: Shape, *operands: Address) -> Address:
    a, b = shape.read(*operands, elem="u8")
    sums = []
    for i in range(shape.bits // 64):
        made: Expr = cast("i64", num(0))
        for k in range(8):
            gap = op("-", a.item(8 * i + k), b.item(8 * i + k))
            made = op("+", made, call("max", gap, minus(gap)))
        sums.append(made)
    return shape.lanes.listed("i64", sums).read_as("u8")


def _shift_count(sign: str, shape: Shape, a: Address, n: Address) -> Address:
    """Return lanes shifted by the low lane of a vector."""
    held = shape.lanes.w.temporary(cast("i32", n.read_as("i64").item()), "i32", "count")
    return shape.map(partial(shifted, sign, shape), a.read_as(shape.elem), held)


def _mul_wide(shape: Shape, *operands: Address) -> Address:
    a, b = shape.read(*operands)
    return shape.lanes.each(
        "i64",
        shape.bits // 64,
        lambda i: op("*", wide(a.item(op("*", i, 2))), wide(b.item(op("*", i, 2)))),
    ).read_as("u8")


def _reduce(name: str, shape: Shape, a: Address) -> Made:
    type_ = {"f32": "float", "f64": "double", "i64": "long long"}.get(shape.elem, "int")
    made = shape.lanes.total(shape.elem, shape.count, a.read_as(shape.elem), BINARY[name])
    return NamedType(name=type_), made


def _movemask(shape: Shape, operand: Address) -> Made:
    a = operand.read_as(shape.integer)
    return INT, cast("i32", bits_of(shape.lanes, shape.count, lambda i: less(a.item(i), 0)))


def _ternary_logic(shape: Shape, a: Address, b: Address, c: Address, by: Any) -> Address:
    table = integer_at(by)

    def lane(*operands: Expr) -> Expr:
        made: Expr = cast("u32", num(0))
        for row in range(8):
            if table >> row & 1:
                x, y, z = (
                    v if row >> k & 1 else inverted(v)
                    for v, k in zip(operands, (2, 1, 0), strict=True)
                )
                made = op("|", made, op("&", op("&", x, y), z))
        return made

    held = shape.read(a, b, c, elem="u32")
    return shape.lanes.map("u32", shape.bits // 32, lane, *held).read_as("u8")


def _affine(shape: Shape, a: Address, matrix: Address, by: Any) -> Address:
    x, rows, added = a.read_as("u8"), matrix.read_as("u8"), integer_at(by)

    def lane(i: Expr) -> Expr:
        made: Expr = cast("i32", num(added & 255))
        for bit in range(8):
            row = rows.item(op("+", op("&", i, num(-8)), 7 - bit))
            held = op("&", row, x.item(i))
            for shift in (4, 2, 1):
                held = op("^", held, op(">>", held, num(shift)))
            made = op("^", made, op("<<", op("&", held, num(1)), num(bit)))
        return made

    return shape.lanes.each("u8", shape.bits // 8, lane)


def _test_zero(shape: Shape, *operands: Address) -> Made:
    count, lanes = shape.bits // 32, shape.lanes
    both = lanes.map("u32", count, BINARY["and"], *shape.read(*operands, elem="u32"))
    return INT, cast("i32", less(lanes.total("u32", count, both, BINARY["or"]), 0, "=="))


def _test_masks(shape: Shape, a: Expr, b: Expr) -> Made:
    return INT, cast("i32", less(op("|", wide(a), wide(b)), 0, "=="))


FLOATS = ("ps", "pd")
WHOLE: dict[str, Handler] = {
    **dict.fromkeys(("round_ps", "roundscale_ps", "floor_ps"), _round),
    "ceil_ps": lambda shape, a: _round(shape, a, num(2)),
    "cmp": partial(_compare, ""),
    **{f"cmp{n}_{s}": partial(_compare, sign) for n, sign in COMPARED.items() for s in FLOATS},
    "scalef_ps": _scalef,
    "getexp_ps": _getexp,
    # estimates: the exact value is what the steps after them move towards
    **dict.fromkeys(("rcp", "rcp14"), partial(_inverse, lambda x: x)),
    **dict.fromkeys(("rsqrt", "rsqrt14"), partial(_inverse, lambda x: call("sqrt", x))),
    "blendv": _blendv,
    "madd": partial(_pairs, "i16", "i16", "i32"),
    "maddubs": partial(_pairs, "u8", "i8", "i16"),
    **dict.fromkeys(("dpbusd", "dpbusd_avx"), partial(_dots, "u8", "i8")),
    "dpbssd": partial(_dots, "i8", "i8"),
    **dict.fromkeys(("dpwssd", "dpwssd_avx"), partial(_dots, "i16", "i16")),
    "dpbf16_ps": _dots_of_pairs,
    "hadd": partial(_hadd, "+"),
    "hsub": partial(_hadd, "-"),
    "sad": _sad,
    **{name: partial(_shift_count, name) for name in ("sll", "srl", "sra")},
    "mul": _mul_wide,
    **{f"reduce_{name}": partial(_reduce, name) for name in ("add", "max", "min", "mul")},
    "movemask": _movemask,
    **dict.fromkeys(("testz_si128", "testz_si256"), _test_zero),
    "kortestz": _test_masks,
    "ternarylogic": _ternary_logic,
    "gf2p8affine_epi64": _affine,
}
"""Operations by their names."""
