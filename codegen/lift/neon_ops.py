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
from dovetail.codegen.lift.neon_moves import MOVES
from dovetail.codegen.lift.neon_shape import (
    ELEMENTS,
    NAME,
    Handler,
    Shape,
    operands,
    scalar_type,
    vec,
)
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
    shape = Shape(listed[0], bool(wide), bool(high), form, other, int(group or 1))

    def rule(lanes: Lanes, args: list[Any]) -> Made:
        made = handler(lanes, shape, args)
        return shape.same(made) if isinstance(made, Address) else made or (VOID, None)

    return rule


# ---- lane by lane ----


def _elementwise(lane: Lane, builtin: str, lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    """Return `lane` of all operands; builtin: what does it with f32 vectors, if anything does."""
    held = read_all(operands(lanes, shape, args), shape.elem)
    if shape.elem != "f32" or not builtin:
        return lanes.map(shape.elem, shape.count, partial(lane, shape), *held)
    held = [*held[1:], held[0]] if builtin in ("vfma", "vfnma") else held
    return lanes.floats(
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


def _mask(
    sign: str, side: Callable[[Expr], Expr], lanes: Lanes, shape: Shape, args: list[Any]
) -> Made:
    """Return where a comparison holds, with 0 if there is nothing else."""
    sides = [*read_all(args, shape.elem), zero_of(shape.elem)][:2]
    kind = "u" + shape.kind[1:]

    def lane(x: Expr, y: Expr) -> Expr:
        return pick(less(side(x), side(y), sign), num(-1), num(0))

    return vec(kind, shape.count), lanes.map(ELEMENTS[kind], shape.count, lane, *sides)


def _bitwise(make: Lane, lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    made = lanes.map("u32", shape.bits // 32, make, *(a.read_as("u32") for a in args))
    return made.read_as(shape.elem)


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


def _widening(kept: int, lane: Lane, lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    """Return results twice as wide; the first `kept` operands already are."""
    elem, count = ELEMENTS[shape.wider], 8 // SIZES[shape.elem]
    given = operands(lanes, shape, args)
    held = read_all(given[:kept], elem)
    for a in read_all(given[kept:], shape.elem):
        held.append(shape.upper(a) if isinstance(a, Address) else a)

    def widened(*items: Expr) -> Expr:
        return lane(*(cast(elem, item) if SIZES[elem] == 8 else item for item in items))

    return vec(shape.wider, count), lanes.map(elem, count, widened, *held)


def _left_wide(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    n = integer_at(args[1])
    return _widening(0, lambda a: op("<<", a, num(n)), lanes, shape, args[:1])


def _narrowing(
    sign: str, make: Callable[[Expr, str], Expr], lanes: Lanes, shape: Shape, args: list[Any]
) -> Made:
    """Return results half as wide; sign: of their kind, if not the operand's."""
    to = (sign or shape.kind[0]) + shape.narrower[1:]
    elem, count = ELEMENTS[to], 16 // SIZES[shape.elem]
    a = args[shape.high].read_as(shape.elem)
    shift = integer_at(args[-1]) if shape.form == "_n" else 0
    made = lanes.map(elem, count, lambda x: make(op(">>", x, num(shift)), elem), a)
    if not shape.high:
        return vec(to, count), made
    return vec(to, 2 * count), lanes.joined(args[0].read_as(elem), made, count)


def _convert(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    elem, count, a = shape.elem, shape.count, args[0].read_as(ELEMENTS[shape.other])
    if elem == "f16":
        return vec("f16", 4), lanes.each("f16", 4, a.item)
    if a.elem == "f16":
        a = shape.upper(a)
        return vec("f32", 4), lanes.floats(4, lambda load: load(a))
    if shape.form != "_n":
        return shape.same(lanes.map(elem, count, partial(cast, elem), a))
    times = Float(value=2.0 ** (integer_at(args[1]) * (-1 if elem[0] == "f" else 1)))

    def fixed(x: Expr) -> Expr:
        return op("*", cast(elem, x), times) if elem[0] == "f" else cast(elem, op("*", x, times))

    return shape.same(lanes.map(elem, count, fixed, a))


def _round_to_int(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    return vec("s32", shape.count), round_lanes(lanes, shape.count, args[0].read_as("f32"))


# ---- sums ----


def _pairwise(join: Lane, lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    a, b = (v.read_as(shape.elem) for v in args)
    both = [s.item(k) for s in (a, b) for k in range(shape.count)]
    pairs = [join(both[2 * k], both[2 * k + 1]) for k in range(shape.count)]
    return lanes.listed(shape.elem, pairs)


def _pair_sums(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    """Return sums of neighbours, added to what stands before them if there is something."""
    elem, a = ELEMENTS[shape.wider], args[-1].read_as(shape.elem)
    acc = args[0].read_as(elem) if len(args) > 1 else None

    def lane(i: Expr) -> Expr:
        j = op("*", i, 2)
        made = op("+", cast(WORKS_IN.get(elem, elem), a.item(j)), a.item(op("+", j, 1)))
        return op("+", acc.item(i), made) if acc else made

    count = shape.count // 2
    return vec(shape.wider, count), lanes.each(elem, count, lane)


def _across(join: Lane, wide: bool, lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    total = lanes.total(shape.elem, shape.count, args[0].read_as(shape.elem), join)
    kind = shape.wider if wide else shape.kind
    if shape.elem in WORKS_IN:
        total = cast("i32", cast(ELEMENTS[kind], total))
    return scalar_type(kind), total


def _dot(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    acc, a, b = _bytes(shape, args)
    fixed = 4 * integer_at(args[3]) if shape.form else None
    at = None if fixed is None else lambda i: (op("*", i, 4), num(fixed))
    return lanes.dots(acc, a, b, shape.count, 4, at)


def _mmla(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    def rows(i: Expr) -> tuple[Expr, Expr]:
        return op("*", op(">>", i, num(1)), 8), op("*", op("&", i, num(1)), 8)

    return lanes.dots(*_bytes(shape, args), 4, 8, rows)


def _bytes(shape: Shape, args: list[Any]) -> tuple[Address, Address, Address]:
    side = ELEMENTS[shape.kind[0] + "8"]
    return args[0].read_as(shape.elem), args[1].read_as(side), args[2].read_as(side)


# ---- shifts ----


def _shift_each(lane: Lane, lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    """Return lanes shifted by a number, or by the low bytes of lanes, which are signed."""
    a, n = args[0].read_as(shape.elem), args[1]
    if not isinstance(n, Address):
        return lanes.map(shape.elem, shape.count, partial(lane, shape), a, n)

    def one(x: Expr, by: Expr) -> Expr:
        return lane(shape, x, cast("i32", cast("i8", by)))

    return lanes.map(shape.elem, shape.count, one, a, n.read_as("i" + shape.elem[1:]))


def _shift_exact(lane: Lane, lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    if SIZES[shape.elem] == 8:
        raise refuse("a rounded or saturated shift of 64-bit lanes")
    return _shift_each(lane, lanes, shape, args)


def _shift(shape: Shape, a: Expr, n: Expr) -> Expr:
    """Return the shift of a lane by a signed number: to the left, or to the right below 0."""
    bits = 8 * SIZES[shape.elem]
    right = op(">>", a, call("min", minus(n), num(bits - 1)))
    if shape.elem[0] == "u":
        right = pick(less(minus(n), bits), op(">>", a, minus(n)), cast("i32", num(0)))
        right = right if bits != 32 else op("&", cast("u32", right), cast("u32", num(-1)))
    left = pick(less(n, bits), op("<<", a, n), cast("i32", num(0)))
    return pick(less(n, 0), right, left)


def _shift_fixed(sign: str, lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    a, n = args[0].read_as(shape.elem), integer_at(args[1])
    top = 8 * SIZES[shape.elem] - 1
    if n > top and shape.elem[0] == "u":
        return lanes.spread(num(0), shape.elem, shape.count)
    return lanes.map(shape.elem, shape.count, lambda x: op(sign, x, num(min(n, top))), a)


def _shift_left(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    if shape.form == "_n":
        return _shift_fixed("<<", lanes, shape, args)
    return _shift_each(_shift, lanes, shape, args)


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


def _shift_and_add(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    made = _shift_fixed(">>", lanes, shape, args[1:])
    return lanes.map(shape.elem, shape.count, _ADD, args[0].read_as(shape.elem), made)


_ADD, _SUB, _MUL, _MAX, _MIN = (BINARY[n] for n in ("add", "sub", "mul", "max", "min"))
HANDLERS: dict[str, Handler] = MOVES | {
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
    "rndm": _each(lambda s, a: call("floor", a)),
    "rndp": _each(lambda s, a: minus(call("floor", minus(a)))),
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
    "rnd": _each(lambda s, a: call("trunc", a)),
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
