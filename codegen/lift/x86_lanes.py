"""x86 operations that treat lanes alike: arithmetic, shifts, comparisons, conversions.

In: what tells operations of a kind apart, the shape and the operands. Out: a new vector.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dovetail.codegen.lift.emit import Address, call, cast, num, op, pick
from dovetail.codegen.lift.lanes import (
    BINARY,
    COMPARED,
    Handler,
    Lanes,
    Made,
    Register,
    integer_at,
    inverted,
    less,
    minus,
    read_all,
    saturate,
)
from dovetail.codegen.lift.types import SIZES, refuse
from dovetail.ir.expr import Binary, Expr, NamedType, Unary

ELEMENTS = {
    **{f"ep{s}{b}": f"{'i' if s == 'i' else 'u'}{b}" for s in "iu" for b in (8, 16, 32)},
    "epi64": "i64",
    "epi64x": "i64",
    "epu64": "u64",
    "ps": "f32",
    "pd": "f64",
    "ph": "f16",
    "pbh": "bf16",
    "ss": "f32",
    "sd": "f64",
    **dict.fromkeys(("si128", "si256", "si512", "si64", "si32", "si16", "i128"), "u8"),
}
PLAIN = ("add", "sub", "mul", "div", "min", "max")
"""Operations on floats that vectors have, with a `v` before them."""


def vec(bits: int, elem: str) -> NamedType:
    """Return the C type of a register."""
    return NamedType(name=f"__m{bits}" + {"f32": "", "f64": "d"}.get(elem, "i"))


class Shape(Register):
    """Width and element of an instruction, and how many lanes that makes.

    integer: the element, its bits as an integer if it is a float. plain: bytes, unless of floats.
    """

    def __init__(self, lanes: Lanes, bits: int, elem: str, suffix: str) -> None:
        super().__init__(lanes, bits, elem)
        self.suffix = suffix
        self.integer = {"f32": "i32", "f64": "i64"}.get(elem, elem)
        self.plain = {"ps": "f32", "pd": "f64"}.get(suffix, "u8")

    def read(self, *operands: Any, elem: str = "") -> list[Address]:
        """Return the vectors among operands, counted in an element."""
        return [a.read_as(elem or self.elem) for a in operands if isinstance(a, Address)]

    def counted(self, elem: str) -> int:
        """Return how many of an element a register has."""
        return self.bits // 8 // SIZES[elem]


Lane = Callable[..., Expr]
SIGNS = {0: "==", 1: "<", 2: "<=", 4: "!=", 13: ">=", 14: ">"}
NEGATED = {5: "<", 6: "<=", 9: ">=", 10: ">"}
"""Comparisons by their number in an instruction; the negated ones hold where one is no number."""


def _floats(vectors: Lane, lane: Lane, shape: Shape, *operands: Address) -> Address:
    """Return an operation on floats: of f32 vectors, or else of lanes."""
    held = [operand.read_as(shape.elem) for operand in operands]
    if shape.elem == "f32":
        return shape.lanes.floats(shape.count, lambda load: vectors(*map(load, held)))
    return shape.map(lane, *held)


def _float_binary(name: str, shape: Shape, a: Address, b: Address) -> Address:
    return _floats(partial(call, f"v{name}"), BINARY[name], shape, a, b)


def _lanewise(lane: Lane, shape: Shape, *operands: Any) -> Address:
    """Return an operation on lanes; numbers among the operands are the same for all."""
    return shape.map(partial(lane, shape), *read_all(operands, shape.elem))


def _bitwise(name: str, shape: Shape, *operands: Address) -> Address:
    held = shape.read(*operands, elem="u32")
    made = shape.lanes.map("u32", shape.bits // 32, BINARY[name], *held)
    return made.read_as(shape.elem if shape.elem in ("f32", "f64") else "u8")


def _convert(source: str, rounds: bool, shape: Shape, operand: Address) -> Address | Made:
    """Return lanes of one element as those of another, rounded to the nearest or to zero."""
    a, count, lanes = operand.read_as(source), shape.count, shape.lanes
    if shape.suffix == "ps" and source == "i32":
        return lanes.floats(count, lambda load: call("vcvt_f32", load(a)))
    rounds = rounds and source[0] == "f" and shape.elem[0] in "iu"
    if rounds and (source, shape.elem) == ("f32", "i32"):
        return round_lanes(lanes, count, a)

    def to(lane: Expr) -> Expr:
        lane = call("rint", lane) if rounds else lane
        return lane if shape.elem == "f16" else cast(shape.elem, lane)

    if SIZES[source] > SIZES[shape.elem]:  # narrowing: the width named is the source's
        count = shape.counted(source)
        return padded_register(lanes, lanes.map(shape.elem, count, to, a), count)
    return shape.map(to, a)


def round_lanes(lanes: Lanes, count: int, a: Address) -> Address:
    """Return f32 lanes to the nearest integers, even ones at ties."""
    return lanes.floats(count, lambda load: call("vcvt_i32", load(a)), "i32")


def padded_register(lanes: Lanes, made: Address, count: int) -> Made:
    """Return a register of 128 bits or more: zeros follow narrower lanes."""
    bits = 8 * max(16, count * SIZES[made.elem])
    return vec(bits, made.elem), lanes.padded(made, count)


MASKS = ("cmp", "test", "testn", "mov", *(f"cmp{name}" for name in COMPARED))
"""Operations whose result is a mask in a number."""


def mask_of(operation: str, shape: Shape, *operands: Any) -> Made:
    """Return a comparison whose result is a mask in a number."""
    a = operands[0].read_as(shape.elem)
    b = operands[1].read_as(shape.elem) if len(operands) > 1 else a

    def holds(i: Expr) -> Expr:
        if operation == "cmp":
            return compared(integer_at(operands[2]), a.item(i), b.item(i))
        if operation[3:] in COMPARED:
            return less(a.item(i), b.item(i), COMPARED[operation[3:]])
        if operation in ("test", "testn"):
            return less(op("&", a.item(i), b.item(i)), 0, "!=" if operation == "test" else "==")
        return less(a.item(i), 0)

    mask = bits_of(shape.lanes, shape.count, holds)
    if shape.count <= 32:
        mask = cast("u32" if shape.count == 32 else "i32", mask)
    return NamedType(name=f"__mmask{max(8, shape.count)}"), mask


def compared(number: int, a: Expr, b: Expr) -> Expr:
    """Return the comparison of two lanes that has a number in an instruction."""
    code = number & 15  # what is above it tells which faults are told
    if code in NEGATED:
        return Unary(op="!", operand=less(a, b, NEGATED[code]))
    if code == 12:  # both are numbers, and differ
        return Binary(op="||", left=less(a, b), right=less(a, b, ">"))
    if code not in SIGNS:
        raise refuse(f"comparison {number} of vectors")
    return less(a, b, SIGNS[code])


def bits_of(lanes: Lanes, count: int, holds: Lane) -> Expr:
    """Return a number with a bit for each lane, 1 where something holds."""
    total = lanes.w.temporary(cast("i64", num(0)), "i64", "mask")

    def add(i: Expr) -> None:
        lanes.w.set(total, op("|", total, op("<<", cast("i64", holds(i)), i)))

    lanes.w.loop(count, add)
    return total


def shifted(sign: str, shape: Shape, a: Expr, n: Expr) -> Expr:
    """Return a lane shifted by a number, or by a lane of another vector."""
    bits = 8 * SIZES[shape.elem]
    if sign == "sra":
        return op(">>", a, call("min", n, num(bits - 1)))
    if bits == 64:
        mask = op("<<", op("<<", cast("i64", num(-1)), op("-", num(63), n)), num(1))
        right = op("&", op(">>", a, n), inverted(mask))
        return pick(less(n, bits), right if sign == "srl" else op("<<", a, n), num(0))
    made = op("<<" if sign == "sll" else ">>", cast("u32", cast(f"u{bits}", a)), n)
    return pick(less(n, bits), made, cast("u32", num(0)))


def _shapeless(join: Lane) -> Lane:
    return lambda shape, a, b: join(a, b)


def _compares(sign: str) -> Lane:
    return lambda shape, a, b: pick(less(a, b, sign), num(-1), num(0))


_NOTHING = cast("i32", num(0))
_LANES: dict[str, Lane] = {
    **{name: _shapeless(f) for name, f in BINARY.items() if name != "mul"},
    "mullo": lambda s, a, b: op("*", a, b),
    "adds": lambda s, a, b: saturate(op("+", a, b), s.elem),
    "subs": lambda s, a, b: saturate(op("-", a, b), s.elem),
    "avg": lambda s, a, b: op(">>", op("+", op("+", a, b), 1), num(1)),
    "mulhi": lambda s, a, b: op(">>", op("*", cast("i64", a), b), num(8 * SIZES[s.elem])),
    "mulhrs": lambda s, a, b: op(">>", op("+", op(">>", op("*", a, b), num(14)), 1), num(1)),
    "sign": lambda s, a, b: pick(less(b, 0), minus(a), pick(less(b, 0, "=="), _NOTHING, a)),
    "abs": lambda s, a: pick(less(a, 0), minus(a), a),
    **{f"cmp{n}": _compares(sign) for n, sign in COMPARED.items()},
    **{f"{n}{form}": partial(shifted, n) for n in ("sll", "srl", "sra") for form in ("i", "v")},
}
"""Operations on integers to what they make of lanes; the shape comes first."""
FUSED: dict[str, Handler] = {
    "fmadd": partial(_floats, partial(call, "vfma"), lambda a, b, c: op("+", op("*", a, b), c)),
    "fnmadd": partial(_floats, partial(call, "vfnma"), lambda a, b, c: op("-", c, op("*", a, b))),
    "fmsub": partial(
        _floats,
        lambda a, b, c: call("vneg", call("vfnma", a, b, c)),
        lambda a, b, c: op("-", op("*", a, b), c),
    ),
}
"""A product and a sum, of f32 vectors and of lanes."""
_INTEGERS = [suffix for suffix in ELEMENTS if suffix.startswith("ep")]
LANEWISE: dict[str, Handler] = {
    **{f"{n}_{s}": partial(_lanewise, lane) for n, lane in _LANES.items() for s in _INTEGERS},
    **{f"{n}_{s}": partial(_float_binary, n) for n in PLAIN for s in ("ps", "pd")},
    "sqrt": partial(_floats, partial(call, "vsqrt"), partial(call, "sqrt")),
    **{
        f"abs_{s}": partial(_floats, partial(call, "vabs"), partial(call, "abs"))
        for s in ("ps", "pd")
    },
    **FUSED,
    **{
        f"{name}_{s}": partial(_bitwise, name)
        for name in ("and", "or", "xor", "andnot")
        for s in ("ps", "pd", *(s for s in ELEMENTS if s.startswith("si")))
    },
    **{f"cvt{s}": partial(_convert, ELEMENTS[s], True) for s in (*_INTEGERS, "ps", "pd", "ph")},
    **{f"cvtt{s}": partial(_convert, ELEMENTS[s], False) for s in ("ps", "pd", "ph")},
    **dict.fromkeys(
        ("castps", "castpd", "castsi128", "castsi256", "castsi512"),
        lambda shape, a: a.read_as(shape.elem),
    ),
}
"""Operations by their names, those of an element alone before it."""
