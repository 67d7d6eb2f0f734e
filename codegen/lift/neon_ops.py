"""The meaning of NEON intrinsics by the pattern of their names, for 64 and 128 bits.

Here is what operations that compute write; `neon_moves` has those that move lanes. In: a name. Out:
the rule that writes it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dovetail.codegen.lift.emit import Address, call, cast, num, op, pick, zero_of
from dovetail.codegen.lift.lanes import (
    BINARY,
    COMPARED,
    Handler,
    Lanes,
    Made,
    Rule,
    integer_at,
    inverted,
    less,
    minus,
    read_all,
    saturate,
    wide,
)
from dovetail.codegen.lift.neon_moves import ELEMENTS, MOVES, NAME, Shape, scalar_type, vec
from dovetail.codegen.lift.types import SIZES, VOID, WORKS_IN, refuse
from dovetail.codegen.lift.x86_lanes import round_lanes
from dovetail.ir.expr import Expr, Float

Lane = Callable[..., Expr]


def neon_rule(name: str) -> Rule | None:
    """Return what an intrinsic of NEON writes."""
    found = NAME.fullmatch(name)
    if not found:
        return None
    operation, wide, high, form, kinds, group = found.groups()
    listed = kinds[1:].split("_")
    if operation not in HANDLERS and operation + wide in HANDLERS:  # vdupq: `q` may be of the name
        operation, wide = operation + wide, ""
    handler = HANDLERS.get(operation)
    if handler is None or listed[0] not in ELEMENTS:
        return None
    other = listed[1] if len(listed) > 1 else ""
    told = 128 if wide else 64, bool(high), form, other, int(group or 1)

    def rule(lanes: Lanes, args: list[Any]) -> Made:
        shape = Shape(lanes, listed[0], *told)
        made = handler(shape, *args)
        same = isinstance(made, Address)
        return (vec(shape.kind, shape.count), made) if same else made or (VOID, None)

    return rule


# ---- lane by lane ----


def _elementwise(lane: Lane, builtin: str, shape: Shape, *operands: Any) -> Address:
    """Return `lane` of all operands; builtin: what does it with f32 vectors, if anything does."""
    held = read_all(shape.operands(*operands), shape.elem)
    if shape.elem != "f32" or not builtin:
        return shape.map(partial(lane, shape), *held)
    held = [*held[1:], held[0]] if builtin in ("vfma", "vfnma") else held
    return shape.lanes.floats(
        shape.count,
        lambda load: call(
            builtin,
            *(load(a) if isinstance(a, Address) else call("vbroadcast", a) for a in held),
        ),
    )


def _each(lane: Lane, builtin: str = "") -> Handler:
    return partial(_elementwise, lane, builtin)


def _each_widened(lane: Lane) -> Handler:
    """Return `lane` of integers that it may not overflow."""

    def wider(shape: Shape, *held: Expr) -> Expr:
        if shape.elem in ("i64", "u64"):
            raise refuse("a sum or difference of 64-bit lanes that needs more bits")
        narrow = shape.elem in WORKS_IN or shape.elem[0] == "f"
        return lane(shape, *(held if narrow else map(wide, held)))

    return _each(wider)


def _mask(sign: str, side: Lane, shape: Shape, *operands: Any) -> Made:
    """Return where a comparison holds, with 0 if there is nothing else."""
    sides = [*read_all(operands, shape.elem), zero_of(shape.elem)][:2]
    kind = "u" + shape.kind[1:]

    def lane(x: Expr, y: Expr) -> Expr:
        return pick(less(side(x), side(y), sign), num(-1), num(0))

    return vec(kind, shape.count), shape.lanes.map(ELEMENTS[kind], shape.count, lane, *sides)


def _test(shape: Shape, *operands: Any) -> Made:
    """Return where two operands have a bit in common."""
    return _mask("!=", lambda x: x, shape, _bitwise(BINARY["and"], shape, *operands))


def _bitwise(make: Lane, shape: Shape, *operands: Address) -> Address:
    held = [a.read_as("u32") for a in operands]
    return shape.lanes.map("u32", shape.bits // 32, make, *held).read_as(shape.elem)


def _nan_or(shape: Shape, a: Expr, b: Expr, made: Expr) -> Expr:
    """Return `made`, or the one of two floats that is no number."""
    if shape.elem[0] != "f":
        return made
    return pick(less(a, a, "!="), a, pick(less(b, b, "!="), b, made))


def _doubling_high(more: int, shape: Shape, a: Expr, b: Expr) -> Expr:
    bits = 8 * SIZES[shape.elem]
    made = op("+", op("*", wide(a), b), more << (bits - 2))
    return saturate(op(">>", made, num(bits - 1)), shape.elem)


# ---- other widths ----


def _widening(kept: int, lane: Lane, shape: Shape, *operands: Any) -> Made:
    """Return results twice as wide; the first `kept` operands already are."""
    elem, count = ELEMENTS[shape.wider], 8 // SIZES[shape.elem]
    given = shape.operands(*operands)
    held = read_all(given[:kept], elem)
    for a in read_all(given[kept:], shape.elem):
        held.append(shape.upper(a) if isinstance(a, Address) else a)

    def widened(*items: Expr) -> Expr:
        return lane(*(cast(elem, item) if SIZES[elem] == 8 else item for item in items))

    return vec(shape.wider, count), shape.lanes.map(elem, count, widened, *held)


def _left_wide(shape: Shape, a: Address, by: Any) -> Made:
    n = integer_at(by)
    return _widening(0, lambda x: op("<<", x, num(n)), shape, a)


def _narrowing(sign: str, make: Lane, shape: Shape, *operands: Any) -> Made:
    """Return results half as wide; sign: of their kind, if not the operand's."""
    to = (sign or shape.kind[0]) + shape.narrower[1:]
    elem, count = ELEMENTS[to], 16 // SIZES[shape.elem]
    a = operands[shape.high].read_as(shape.elem)
    shift = integer_at(operands[-1]) if shape.form == "_n" else 0
    made = shape.lanes.map(elem, count, lambda x: make(op(">>", x, num(shift)), elem), a)
    if not shape.high:
        return vec(to, count), made
    return vec(to, 2 * count), shape.lanes.joined(operands[0].read_as(elem), made, count)


def _convert(shape: Shape, operand: Address, bits: Any = None) -> Made | Address:
    elem, a = shape.elem, operand.read_as(ELEMENTS[shape.other])
    if elem == "f16":
        return vec("f16", 4), shape.lanes.each("f16", 4, a.item)
    if a.elem == "f16":
        a = shape.upper(a)
        return vec("f32", 4), shape.lanes.floats(4, lambda load: load(a))
    if shape.form != "_n":
        return shape.map(partial(cast, elem), a)
    times = Float(value=2.0 ** (integer_at(bits) * (-1 if elem[0] == "f" else 1)))

    def fixed(x: Expr) -> Expr:
        return op("*", cast(elem, x), times) if elem[0] == "f" else cast(elem, op("*", x, times))

    return shape.map(fixed, a)


def _round_to_int(shape: Shape, a: Address) -> Made:
    return vec("s32", shape.count), round_lanes(shape.lanes, shape.count, a.read_as("f32"))


# ---- sums ----


def _pairwise(join: Lane, shape: Shape, a: Address, b: Address) -> Address:
    both = shape.both(a, b)
    return shape.listed([join(both[2 * k], both[2 * k + 1]) for k in range(shape.count)])


def _pair_sums(shape: Shape, *operands: Address) -> Made:
    """Return sums of neighbours, added to what stands before them if there is something."""
    elem, a = ELEMENTS[shape.wider], operands[-1].read_as(shape.elem)
    acc = operands[0].read_as(elem) if len(operands) > 1 else None

    def lane(i: Expr) -> Expr:
        j = op("*", i, 2)
        made = op("+", cast(WORKS_IN.get(elem, elem), a.item(j)), a.item(op("+", j, 1)))
        return op("+", acc.item(i), made) if acc else made

    count = shape.count // 2
    return vec(shape.wider, count), shape.lanes.each(elem, count, lane)


def _across(join: Lane, wide: bool, shape: Shape, a: Address) -> Made:
    total = shape.lanes.total(shape.elem, shape.count, a.read_as(shape.elem), join)
    kind = shape.wider if wide else shape.kind
    if shape.elem in WORKS_IN:
        total = cast("i32", cast(ELEMENTS[kind], total))
    return scalar_type(kind), total


def _dot(shape: Shape, acc: Address, a: Address, b: Address, lane: Any = None) -> Address:
    fixed = 4 * integer_at(lane) if shape.form else None
    at = None if fixed is None else lambda i: (op("*", i, 4), num(fixed))
    return shape.lanes.dots(*_bytes(shape, acc, a, b), shape.count, 4, at)


def _mmla(shape: Shape, acc: Address, a: Address, b: Address) -> Address:
    def rows(i: Expr) -> tuple[Expr, Expr]:
        return op("*", op(">>", i, num(1)), 8), op("*", op("&", i, num(1)), 8)

    return shape.lanes.dots(*_bytes(shape, acc, a, b), 4, 8, rows)


def _bytes(shape: Shape, acc: Address, *sides: Address) -> tuple[Address, Address, Address]:
    a, b = read_all(sides, ELEMENTS[shape.kind[0] + "8"])
    return acc.read_as(shape.elem), a, b


# ---- shifts ----


def _shift_each(lane: Lane, shape: Shape, operand: Address, n: Any) -> Address:
    """Return lanes shifted by a number, or by the low bytes of lanes, which are signed."""
    a = operand.read_as(shape.elem)
    if not isinstance(n, Address):
        return shape.map(partial(lane, shape), a, n)

    def one(x: Expr, by: Expr) -> Expr:
        return lane(shape, x, cast("i32", cast("i8", by)))

    return shape.map(one, a, n.read_as("i" + shape.elem[1:]))


def _shift_exact(lane: Lane, shape: Shape, a: Address, n: Any) -> Address:
    if SIZES[shape.elem] == 8:
        raise refuse("a rounded or saturated shift of 64-bit lanes")
    return _shift_each(lane, shape, a, n)


def _shift(shape: Shape, a: Expr, n: Expr) -> Expr:
    """Return the shift of a lane by a signed number: to the left, or to the right below 0."""
    bits = 8 * SIZES[shape.elem]
    right = op(">>", a, call("min", minus(n), num(bits - 1)))
    if shape.elem[0] == "u":
        right = pick(less(minus(n), bits), op(">>", a, minus(n)), cast("i32", num(0)))
        right = right if bits != 32 else op("&", cast("u32", right), cast("u32", num(-1)))
    left = pick(less(n, bits), op("<<", a, n), cast("i32", num(0)))
    return pick(less(n, 0), right, left)


def _shift_fixed(sign: str, shape: Shape, a: Address, by: Any) -> Address:
    n, top = integer_at(by), 8 * SIZES[shape.elem] - 1
    if n > top and shape.elem[0] == "u":
        return shape.spread(num(0))
    return shape.map(lambda x: op(sign, x, num(min(n, top))), a.read_as(shape.elem))


def _shift_left(shape: Shape, a: Address, n: Any) -> Address:
    if shape.form == "_n":
        return _shift_fixed("<<", shape, a, n)
    return _shift_each(_shift, shape, a, n)


def _rounded_shift(shape: Shape, a: Expr, n: Expr) -> Expr:
    by = call("min", minus(n), num(63))
    down = op(">>", op("+", op(">>", wide(a), op("-", by, 1)), 1), num(1))
    left = pick(less(n, 8 * SIZES[shape.elem]), op("<<", wide(a), n), wide(num(0)))
    return pick(less(n, 0), down, left)


def _saturated_shift(shape: Shape, a: Expr, n: Expr) -> Expr:
    right = op(">>", wide(a), call("min", minus(n), num(63)))
    left = saturate(op("<<", wide(a), call("min", n, num(31))), shape.elem)
    left = pick(less(n, 31, ">"), saturate(op("<<", left, num(1)), shape.elem), left)
    return pick(less(n, 0), right, left)


def _shift_and_add(shape: Shape, acc: Address, a: Address, by: Any) -> Address:
    made = _shift_fixed(">>", shape, a, by)
    return shape.map(_ADD, acc.read_as(shape.elem), made)


_ADD, _SUB, _MUL, _MAX, _MIN = (BINARY[n] for n in ("add", "sub", "mul", "max", "min"))
HANDLERS: dict[str, Handler] = MOVES | {
    "tst": _test,
    "add": _each(lambda s, a, b: _ADD(a, b), "vadd"),
    "sub": _each(lambda s, a, b: _SUB(a, b), "vsub"),
    "mul": _each(lambda s, a, b: _MUL(a, b), "vmul"),
    "div": _each(lambda s, a, b: op("/", a, b), "vdiv"),
    "max": _each(lambda s, a, b: _nan_or(s, a, b, _MAX(a, b)), "vmax"),
    "min": _each(lambda s, a, b: _nan_or(s, a, b, _MIN(a, b)), "vmin"),
    "maxnm": _each(lambda s, a, b: _MAX(a, b), "vmax"),
    "minnm": _each(lambda s, a, b: _MIN(a, b), "vmin"),
    **dict.fromkeys(("mla", "fma"), _each(lambda s, c, a, b: _ADD(c, op("*", a, b)), "vfma")),
    **dict.fromkeys(("mls", "fms"), _each(lambda s, c, a, b: _SUB(c, op("*", a, b)), "vfnma")),
    "abs": _each(lambda s, a: call("abs", a), "vabs"),
    "neg": _each(lambda s, a: minus(a), "vneg"),
    "sqrt": _each(lambda s, a: call("sqrt", a), "vsqrt"),
    "rndn": _each(lambda s, a: a, "vround"),
    "rndm": _each(lambda s, a: call("floor", a), "vfloor"),
    "rndp": _each(lambda s, a: call("ceil", a), "vceil"),
    # estimates: the exact value is what the steps after them move towards
    "recpe": _each(lambda s, a: op("/", Float(value=1.0), a)),
    "rsqrte": _each(lambda s, a: op("/", Float(value=1.0), call("sqrt", a))),
    "recps": _each(lambda s, a, b: op("-", Float(value=2.0), op("*", a, b))),
    "rsqrts": _each(
        lambda s, a, b: op("/", op("-", Float(value=3.0), op("*", a, b)), Float(value=2.0))
    ),
    "abd": _each_widened(lambda s, a, b: call("abs", op("-", a, b))),
    "qadd": _each_widened(lambda s, a, b: saturate(_ADD(a, b), s.elem)),
    "qsub": _each_widened(lambda s, a, b: saturate(_SUB(a, b), s.elem)),
    "rnd": _each(lambda s, a: call("trunc", a), "vtrunc"),
    "hsub": _each_widened(lambda s, a, b: op(">>", op("-", a, b), num(1))),
    "hadd": _each_widened(lambda s, a, b: op(">>", _ADD(a, b), num(1))),
    "rhadd": _each_widened(lambda s, a, b: op(">>", op("+", _ADD(a, b), 1), num(1))),
    "qdmulh": _each(partial(_doubling_high, 0)),
    "qrdmulh": _each(partial(_doubling_high, 1)),
    "shl": _shift_left,
    "rshl": partial(_shift_exact, _rounded_shift),
    "qshl": partial(_shift_exact, _saturated_shift),
    "sra": _shift_and_add,
    "shr": partial(_shift_fixed, ">>"),
    "and": partial(_bitwise, BINARY["and"]),
    "orr": partial(_bitwise, BINARY["or"]),
    "eor": partial(_bitwise, BINARY["xor"]),
    "bic": partial(_bitwise, lambda a, b: op("&", a, inverted(b))),
    "orn": partial(_bitwise, lambda a, b: op("|", a, inverted(b))),
    "mvn": partial(_bitwise, inverted),
    "bsl": partial(_bitwise, lambda m, a, b: op("|", op("&", m, a), op("&", inverted(m), b))),
    **{f"c{n}{z}": partial(_mask, s, lambda v: v) for n, s in COMPARED.items() for z in ("", "z")},
    **{f"ca{n}": partial(_mask, s, partial(call, "abs")) for n, s in COMPARED.items()},
    "movl": partial(_widening, 0, lambda a: a),
    "mull": partial(_widening, 0, _MUL),
    "mlal": partial(_widening, 1, lambda acc, a, b: op("+", acc, op("*", a, b))),
    "mlsl": partial(_widening, 1, lambda acc, a, b: op("-", acc, op("*", a, b))),
    "addl": partial(_widening, 0, _ADD),
    "subl": partial(_widening, 0, _SUB),
    "addw": partial(_widening, 1, _ADD),
    "subw": partial(_widening, 1, _SUB),
    "shll": _left_wide,
    **dict.fromkeys(("movn", "shrn"), partial(_narrowing, "", lambda v, elem: v)),
    **dict.fromkeys(("qmovn", "qshrn"), partial(_narrowing, "", saturate)),
    **dict.fromkeys(("qmovun", "qshrun"), partial(_narrowing, "u", saturate)),
    "cvt": _convert,
    "cvtn": _round_to_int,
    "padd": partial(_pairwise, _ADD),
    "pmax": partial(_pairwise, _MAX),
    "pmin": partial(_pairwise, _MIN),
    **dict.fromkeys(("paddl", "padal"), _pair_sums),
    "addv": partial(_across, _ADD, False),
    "addlv": partial(_across, _ADD, True),
    "maxv": partial(_across, _MAX, False),
    "minv": partial(_across, _MIN, False),
    "dot": _dot,
    "mmla": _mmla,
}
