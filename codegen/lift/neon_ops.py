"""The meaning of NEON intrinsics by the pattern of their names, for 64 and 128 bits.

`vmlal_high_s16` is `v`, operation, `q` for 128 bits, a form (`_n`, `_lane`, `_high`), an element.
Here is what each operation writes; `lanes_neon` finds it by its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from dovetail.codegen.lift.emit import Address, call, cast, num, op, pick
from dovetail.codegen.lift.lanes import (
    SIZES,
    WORKS_IN,
    Lanes,
    Made,
    halves,
    integer_at,
    less,
    minus,
    saturate,
)
from dovetail.codegen.lift.types import refuse
from dovetail.codegen.lift.x86_lanes import round_lanes
from dovetail.codegen.lift.x86_whole import load_halves
from dovetail.ir.expr import Expr, Float, NamedType, Unary

VOID = NamedType(name="void")
ELEMENTS = {
    **{f"{s}{b}": f"{'i' if s == 's' else 'u'}{b}" for s in "su" for b in (8, 16, 32)},
    "s64": "i64",
    "u64": "u64",
    "f16": "f16",
    "f32": "f32",
    "f64": "f64",
}
KINDS = {"s": "int", "u": "uint", "f": "float"}
NAME = re.compile(
    r"v(get_low|get_high|[a-z0-9]+?)(q?)(_high)?(_n|_lane|_laneq|_dup|)((?:_[suf](?:8|16|32|64))+)(?:_x([234]))?"
)
WIDER = {"8": "16", "16": "32", "32": "64"}


def vec(kind: str, count: int) -> NamedType:
    """Return the C type of a register: `vec("s8", 16)` is int8x16_t."""
    return NamedType(name=f"{KINDS[kind[0]]}{kind[1:]}x{count}_t")


def scalar_type(kind: str) -> NamedType:
    """Return the C type of a lane."""
    return NamedType(name=f"{KINDS[kind[0]]}{kind[1:]}_t")


class Shape:
    """The element, and the lanes of the register that the name speaks of."""

    def __init__(
        self, kind: str, wide: bool, high: bool, form: str, other: str, group: int
    ) -> None:
        self.kind, self.high, self.form, self.other, self.group = kind, high, form, other, group
        self.elem = ELEMENTS[kind]
        self.bits = 128 if wide else 64
        self.count = self.bits // 8 // SIZES[self.elem]

    @property
    def wider(self) -> str:
        """The kind of lanes twice as wide."""
        return self.kind[0] + WIDER[self.kind[1:]]

    @property
    def narrower(self) -> str:
        """The kind of lanes half as wide."""
        return self.kind[0] + {"64": "32", "32": "16", "16": "8"}[self.kind[1:]]

    def upper(self, at: Address) -> Address:
        """Return the upper half of a register for a `_high` form."""
        return at.moved(8 // SIZES[at.elem]) if self.high else at

    def same(self, made: Address) -> Made:
        """Return a vector of the register that the name speaks of."""
        return vec(self.kind, self.count), made


Handler = Callable[[Lanes, Shape, list[Any]], Any]


def _operands(lanes: Lanes, shape: Shape, args: list[Any]) -> list[Any]:
    """Return the operands; the lane that a `_lane` form names stands for all lanes."""
    if shape.form in ("_lane", "_laneq"):
        lane = args[-2].read_as(shape.elem).item(integer_at(args[-1]))
        kept = lanes.w.temporary(lane, WORKS_IN.get(shape.elem, shape.elem), "lane")
        return [*args[:-2], kept]
    return args


def _elementwise(lane: Callable[..., Expr], fused: str = "") -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        held = [
            a.read_as(shape.elem) if isinstance(a, Address) else a
            for a in _operands(lanes, shape, args)
        ]
        if shape.elem == "f32" and fused:
            order: Any = {"vfma": (1, 2, 0), "vfnma": (1, 2, 0)}.get(fused, range(len(held)))
            return lanes.floats(
                shape.count,
                lambda load: call(
                    fused,
                    *(
                        load(held[k])
                        if isinstance(held[k], Address)
                        else call("vbroadcast", held[k])
                        for k in order
                    ),
                ),
            )
        return lanes.each(
            shape.elem,
            shape.count,
            lambda i: lane(shape, *(halves(a, i) if isinstance(a, Address) else a for a in held)),
        )

    return handler


def _muladd(sign: str, fused: str) -> Handler:
    return _elementwise(lambda s, acc, a, b: op(sign, acc, op("*", a, b)), fused)


def _mask(sign: str, with_zero: bool = False, absolute: bool = False) -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
        a = args[0].read_as(shape.elem)
        b = None if with_zero else args[1].read_as(shape.elem)
        zero: Expr = Float(value=0.0) if shape.elem in ("f32", "f64") else num(0)

        def side(value: Expr) -> Expr:
            return call("abs", value) if absolute else value

        kind = "u" + shape.kind[1:]
        made = lanes.each(
            ELEMENTS[kind],
            shape.count,
            lambda i: pick(
                less(side(a.item(i)), side(b.item(i)) if b else zero, sign), num(-1), num(0)
            ),
        )
        return vec(kind, shape.count), made

    return handler


def _bitwise(make: Callable[..., Expr]) -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        elem = "u32"
        held = [a.read_as(elem) for a in args]
        made = lanes.each(elem, shape.bits // 32, lambda i: make(*(a.item(i) for a in held)))
        return made.read_as(shape.elem)

    return handler


def _widening(lane: Callable[..., Expr], kept: int = 0) -> Handler:
    """Return the handler of results twice as wide; the first `kept` operands already are."""

    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
        to = shape.wider
        elem = ELEMENTS[to]
        count = 8 // SIZES[shape.elem]
        operands = _operands(lanes, shape, args)
        held: list[Any] = []
        for k, a in enumerate(operands):
            if not isinstance(a, Address):
                held.append(a)
            elif k < kept:
                held.append(a.read_as(elem))
            else:
                held.append(shape.upper(a.read_as(shape.elem)))

        def one(i: Expr) -> Expr:
            items = [a.item(i) if isinstance(a, Address) else a for a in held]
            if SIZES[elem] == 8:
                items = [cast(elem, item) for item in items]
            return lane(*items)

        return vec(to, count), lanes.each(elem, count, one)

    return handler


def _narrowing(make: Callable[[Expr, str], Expr], unsigned: bool = False) -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
        to = ("u" if unsigned else shape.kind[0]) + shape.narrower[1:]
        count = 16 // SIZES[shape.elem]
        low = args[0] if shape.high else None
        a = args[1 if shape.high else 0].read_as(shape.elem)
        shift = integer_at(args[-1]) if shape.form == "_n" else 0
        made = lanes.each(
            ELEMENTS[to], count, lambda i: make(op(">>", a.item(i), num(shift)), ELEMENTS[to])
        )
        if low is None:
            return vec(to, count), made
        return vec(to, 2 * count), joined(lanes, low.read_as(made.elem), made, count)

    return handler


def joined(lanes: Lanes, low: Address, top: Address, count: int) -> Address:
    """Return a vector of two halves of `count` lanes."""
    out = lanes.new(low.elem, 2 * count)
    lanes.move(out, low, count)
    lanes.move(out.moved(count), top, count)
    return out


def _load(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    if shape.form == "_lane":
        out = lanes.new(shape.elem, shape.count)
        lanes.move(out, args[1].read_as(shape.elem), shape.count)
        lanes.put(out, num(integer_at(args[2])), halves(args[0].read_as(shape.elem), num(0)))
        return shape.same(out)
    source = args[0].read_as(shape.elem)
    if shape.form == "_dup":
        kept = lanes.w.temporary(source.item(), WORKS_IN.get(shape.elem, shape.elem))
        return shape.same(lanes.spread(kept, shape.elem, shape.count))
    total = shape.count * shape.group
    out = lanes.new(shape.elem, total)
    for k in range(shape.group):
        lanes.move(out.moved(k * shape.count), source.moved(k * shape.count), shape.count)
    return _group(shape), out


def _group(shape: Shape) -> NamedType:
    one = vec(shape.kind, shape.count)
    return one if shape.group == 1 else NamedType(name=f"{one.name[:-2]}x{shape.group}_t")


def _load_apart(ways: int) -> Handler:
    """Return the handler of loads that deal elements out to registers: vld2, vld4."""

    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
        shape.group = ways
        if shape.form == "_lane":
            raise refuse("a load of one lane into several vectors")
        source = args[0].read_as(shape.elem)
        step = 0 if shape.form == "_dup" else ways
        out = lanes.new(shape.elem, shape.count * ways)
        for k in range(ways):
            lanes.deal(out.moved(k * shape.count), source.moved(k), shape.count, step)
        return _group(shape), out

    return handler


def _store(lanes: Lanes, shape: Shape, args: list[Any]) -> None:
    to, source = args[0].read_as(shape.elem), args[1].read_as(shape.elem)
    if shape.form == "_lane":
        lanes.move(to, source.moved(integer_at(args[2])), 1)
        return
    for k in range(shape.group):
        lanes.move(to.moved(k * shape.count), source.moved(k * shape.count), shape.count)


def _dup(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    if shape.form in ("_lane", "_laneq"):
        lane = halves(args[0].read_as(shape.elem), num(integer_at(args[1])))
        args = [lanes.w.temporary(lane, WORKS_IN.get(shape.elem, shape.elem), "lane")]
    return lanes.spread(args[0], shape.elem, shape.count)


def _half(upper: bool) -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        return args[0].read_as(shape.elem).moved(8 // SIZES[shape.elem] * upper)  # type: ignore[no-any-return]

    return handler


def _get_lane(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    made = halves(args[0].read_as(shape.elem), num(integer_at(args[1])))
    kind = {"i8": "i32", "u8": "i32", "i16": "i32", "u16": "i32"}.get(shape.elem)
    return scalar_type(shape.kind), cast(kind, made) if kind else made


def _set_lane(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    out = lanes.new(shape.elem, shape.count)
    lanes.move(out, args[1].read_as(shape.elem), shape.count)
    lanes.put(out, num(integer_at(args[2])), args[0])
    return out


def _combine(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    a, b = (v.read_as(shape.elem) for v in args)
    count = 8 // SIZES[shape.elem]
    return vec(shape.kind, 2 * count), joined(lanes, a, b, count)


def _reinterpret(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    return args[0].read_as(shape.elem)  # type: ignore[no-any-return]


def _convert(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    source, a = ELEMENTS[shape.other], args[0].read_as(ELEMENTS[shape.other])
    if shape.elem == "f16":
        made = lanes.each("f16", 4, a.item)
        return vec("f16", 4), made
    if source == "f16":
        a = shape.upper(a)
        return vec("f32", 4), lanes.floats(4, lambda load: load_halves(load, a))
    count = shape.count
    if shape.form == "_n":
        raise_n = 2.0 ** integer_at(args[1])
        factor = Float(value=1 / raise_n if shape.elem == "f32" else raise_n)
        if shape.elem == "f32":
            return shape.same(
                lanes.each("f32", count, lambda i: op("*", cast("f32", a.item(i)), factor))
            )
        return shape.same(
            lanes.each(shape.elem, count, lambda i: cast(shape.elem, op("*", a.item(i), factor)))
        )
    return shape.same(lanes.each(shape.elem, count, lambda i: cast(shape.elem, a.item(i))))


def _round_to_int(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    return vec("s32", shape.count), round_lanes(lanes, shape.count, args[0].read_as("f32"))


def _floor(sign: int) -> Handler:
    def lane(shape: Shape, a: Expr) -> Expr:
        return call("floor", a) if sign > 0 else minus(call("floor", minus(a)))

    return _elementwise(lane)


def _pairwise(join: Callable[[Expr, Expr], Expr]) -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        a, b = (v.read_as(shape.elem) for v in args)
        both = [s.item(k) for s in (a, b) for k in range(shape.count)]
        pairs = [join(both[2 * k], both[2 * k + 1]) for k in range(shape.count)]
        return lanes.listed(shape.elem, pairs)

    return handler


def _pair_sums(adds: bool) -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
        to = shape.wider
        elem, a = ELEMENTS[to], args[-1].read_as(shape.elem)
        acc = args[0].read_as(elem) if adds else None

        def lane(i: Expr) -> Expr:
            j = op("*", i, 2)
            made = op("+", cast(WORKS_IN.get(elem, elem), a.item(j)), a.item(op("+", j, 1)))
            return op("+", acc.item(i), made) if acc else made

        count = shape.count // 2
        return vec(to, count), lanes.each(elem, count, lane)

    return handler


def _across(join: Callable[[Expr, Expr], Expr], wide: bool = False) -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
        total = lanes.total(shape.elem, shape.count, args[0].read_as(shape.elem), join)
        kind = shape.wider if wide else shape.kind
        if shape.elem in WORKS_IN:
            total = cast("i32", cast(ELEMENTS[kind], total))
        return scalar_type(kind), total

    return handler


def _dot(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    side = ELEMENTS[shape.kind[0] + "8"]
    acc, a, b = args[0].read_as(shape.elem), args[1].read_as(side), args[2].read_as(side)
    fixed = integer_at(args[3]) if shape.form else None

    def lane(i: Expr) -> Expr:
        made: Expr = acc.item(i)
        for k in range(4):
            j = op("+", op("*", i, 4), k)
            other = num(4 * fixed + k) if fixed is not None else j
            made = op("+", made, op("*", a.item(j), b.item(other)))
        return made

    return lanes.each(shape.elem, shape.count, lane)


def _mmla(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    side = ELEMENTS[shape.kind[0] + "8"]
    acc, a, b = args[0].read_as(shape.elem), args[1].read_as(side), args[2].read_as(side)

    def lane(i: Expr) -> Expr:
        row, column = op(">>", i, num(1)), op("&", i, num(1))
        made: Expr = acc.item(i)
        for k in range(8):
            x, y = op("+", op("*", row, 8), k), op("+", op("*", column, 8), k)
            made = op("+", made, op("*", a.item(x), b.item(y)))
        return made

    return lanes.each(shape.elem, 4, lane)


def _ext(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    a, b, n = args[0].read_as(shape.elem), args[1].read_as(shape.elem), integer_at(args[2])
    both = [s.item(k) for s in (a, b) for k in range(shape.count)]
    return lanes.listed(shape.elem, [_value(v) for v in both[n : n + shape.count]])


def _value(item: Expr) -> Expr:
    return item


def _interleave(pairs: Callable[[int, int], list[int]], both: bool) -> Handler:
    """Return the handler of zip, uzp and trn: indices into a and b, one behind the other."""

    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
        a, b = (v.read_as(shape.elem) for v in args)
        listed = [s.item(k) for s in (a, b) for k in range(shape.count)]
        first = [listed[k] for k in pairs(shape.count, 0)]
        if not both:
            return shape.same(lanes.listed(shape.elem, first))
        second = [listed[k] for k in pairs(shape.count, 1)]
        shape.group = 2
        return _group(shape), lanes.listed(shape.elem, first + second)

    return handler


def _zip(n: int, part: int) -> list[int]:
    return [k // 2 + part * n // 2 + (k % 2) * n for k in range(n)]


def _unzip(n: int, part: int) -> list[int]:
    return [2 * k + part for k in range(n)]


def _transpose(n: int, part: int) -> list[int]:
    return [(k & ~1) + part + (k % 2) * n for k in range(n)]


def _fixed(pairs: Callable[[int, int], list[int]], part: int) -> Handler:
    return _interleave(lambda n, _: pairs(n, part), both=False)


def _reverse(block: int) -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        a, size = args[0].read_as(shape.elem), block // 8 // SIZES[shape.elem]
        picked = [a.item(k // size * size + size - 1 - k % size) for k in range(shape.count)]
        return lanes.listed(shape.elem, picked)

    return handler


def _table(size: int) -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        a, at = args[0].read_as(shape.elem), args[1].read_as("u8")
        return lanes.each(
            shape.elem,
            shape.count,
            lambda i: pick(
                less(at.item(i), size),
                op("+", a.item(cast("i64", at.item(i))), 0),
                cast("i32", num(0)),
            ),
        )

    return handler


def _shift(shape: Shape, a: Expr, n: Expr) -> Expr:
    """Return the shift of a lane by a signed number: to the left, or to the right below 0."""
    bits = 8 * SIZES[shape.elem]
    right = op(">>", a, call("min", minus(n), num(bits - 1)))
    if shape.elem[0] == "u":
        right = pick(less(minus(n), bits), op(">>", op("+", a, 0), minus(n)), cast("i32", num(0)))
        right = right if bits != 32 else op("&", cast("u32", right), cast("u32", num(-1)))
    left = pick(less(n, bits), op("<<", op("+", a, 0), n), cast("i32", num(0)))
    return pick(less(n, 0), right, left)


def _shift_fixed(sign: str) -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        a, n = args[0].read_as(shape.elem), integer_at(args[1])
        bits = 8 * SIZES[shape.elem]

        def lane(i: Expr) -> Expr:
            if n >= bits:
                return num(0) if shape.elem[0] == "u" else op(">>", a.item(i), num(bits - 1))
            return op(sign, a.item(i), num(n))

        return lanes.each(shape.elem, shape.count, lane)

    return handler


def _rounded_shift(shape: Shape, a: Expr, n: Expr) -> Expr:
    down = op(
        ">>", op("+", cast("i64", a), op("<<", cast("i64", num(1)), op("-", minus(n), 1))), minus(n)
    )
    return pick(less(n, 0), down, op("<<", cast("i64", a), n))


def _doubling_high(rounds: bool) -> Callable[..., Expr]:
    def lane(shape: Shape, a: Expr, b: Expr) -> Expr:
        bits = 8 * SIZES[shape.elem]
        made = op("*", op("*", cast("i64", a), b), 2)
        made = op("+", made, 1 << (bits - 1)) if rounds else made
        return saturate(op(">>", made, num(bits)), shape.elem)

    return lane


def _select(mask: Expr, a: Expr, b: Expr) -> Expr:
    return op("|", op("&", mask, a), op("&", Unary(op="~", operand=mask), b))


def _create(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    return lanes.listed("i64", [args[0]]).read_as(shape.elem)


def _widen(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    return _widening(lambda a: op("+", a, 0))(lanes, shape, args)  # type: ignore[no-any-return]


def _left_wide(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    n = integer_at(args[1])
    return _widening(lambda a: op("<<", a, num(n)))(lanes, shape, args[:1])  # type: ignore[no-any-return]
