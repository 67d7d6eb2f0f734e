"""x86 operations on vectors as a whole: loads, shuffles, packs, dot products.

In: the shape and the arguments. Out: a new vector, or nothing for stores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dovetail.codegen.lift.emit import Address, call, cast, num, op, pick
from dovetail.codegen.lift.lanes import (
    BINARY,
    SIZES,
    WORKS_IN,
    Lanes,
    Made,
    integer_at,
    less,
    minus,
    saturate,
    wide,
)
from dovetail.codegen.lift.types import refuse
from dovetail.codegen.lift.x86_lanes import float_binary, padded_register, shifted
from dovetail.codegen.lift.x86_shape import INT, Handler, Shape, vec
from dovetail.ir.expr import Expr, Float, NamedType, Unary


def _store(lanes: Lanes, shape: Shape, args: list[Any]) -> None:
    bits = {"si16": 16, "si32": 32, "si64": 64, "ss": 32, "sd": 64}.get(shape.suffix, shape.bits)
    elem = {"ss": "f32", "sd": "f64"}.get(shape.suffix, shape.elem)
    to, source = args[0].read_as(elem), args[1].read_as(elem)
    lanes.move(to, source, bits // 8 // SIZES[elem])


def _storel(lanes: Lanes, shape: Shape, args: list[Any]) -> None:
    lanes.move(args[0].read_as("u8"), args[1].read_as("u8"), 8)


def _storeh(lanes: Lanes, shape: Shape, args: list[Any]) -> None:
    lanes.move(args[0].read_as("u8"), args[1].read_as("u8").moved(8), 8)


def _load(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    out = lanes.new(shape.elem, shape.count)
    lanes.move(out, args[0].read_as(shape.elem), shape.count)
    return out


def _load_part(size: int) -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
        out = lanes.new("u8", 16)
        lanes.w.loop(16, lambda i: lanes.w.set(out.item(i), num(0)))
        lanes.move(out, args[0].read_as("u8"), size)
        elem = {"ss": "f32", "ps": "f32", "sd": "f64", "pd": "f64"}.get(shape.suffix, "u8")
        return vec(128, elem), out.read_as(elem)

    return handler


def _set1(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    return lanes.spread(args[0], shape.elem, shape.count)


def _zero(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    zero: Expr = Float(value=0.0) if shape.elem in ("f32", "f64") else num(0)
    return lanes.spread(zero, shape.elem, shape.count)


def _setr(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    return lanes.listed(shape.elem, args)


def _set(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    return lanes.listed(shape.elem, args[::-1])


def _sqrt(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    a = args[0].read_as(shape.elem)
    if shape.elem == "f32":
        return lanes.calls("vsqrt", shape.count, a)
    return lanes.each(shape.elem, shape.count, lambda i: call("sqrt", a.item(i)))


def _round(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    a, mode = args[0].read_as("f32"), integer_at(args[1]) & 7 if len(args) > 1 else 1
    if mode in (0, 4):
        return lanes.calls("vround", shape.count, a)
    down: Callable[[Expr], Expr] = lambda x: call("floor", x)  # noqa: E731
    up: Callable[[Expr], Expr] = lambda x: minus(call("floor", minus(x)))  # noqa: E731
    zero = Float(value=0.0)
    to_zero: Callable[[Expr], Expr] = lambda x: pick(less(x, zero), up(x), down(x))  # noqa: E731
    lane = {1: down, 2: up, 3: to_zero}[mode & 3]
    return lanes.each("f32", shape.count, lambda i: lane(a.item(i)))


def _ceil(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    return _round(lanes, shape, [args[0], num(2)])


def _compare(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    control = integer_at(args[2]) & 15
    sign = {0: "==", 1: "<", 2: "<=", 4: "!=", 12: "!=", 13: ">=", 14: ">"}.get(control)
    if sign is None:
        raise refuse(f"comparison {control} of vectors")
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


def _blendv(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    elem = {"f32": "i32", "f64": "i64"}.get(shape.elem, shape.elem)
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


def permuted(elem: str | None, source: Callable[[int, int, int], tuple[int, int]]) -> Handler:
    """Return the handler of a fixed shuffle: lane, lanes, control -> which vector, which lane."""

    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        kind = elem or shape.elem
        vectors = shape.read(args, kind)
        control = integer_at(args[-1]) if not isinstance(args[-1], Address) else 0
        count = shape.bits // 8 // SIZES[kind]
        picked = [source(i, count, control) for i in range(count)]
        made = lanes.listed(kind, [vectors[v % len(vectors)].item(j) for v, j in picked])
        return made.read_as(shape.elem)

    return handler


def _fields(i: int, n: int, control: int) -> tuple[int, int]:
    return 0, (i & ~3) + (control >> (2 * (i & 3)) & 3)


def _unpack(high_half: int) -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        a, b = shape.read(args)
        block = 16 // SIZES[shape.elem]
        picked = []
        for i in range(shape.count):
            base, j = i // block * block, i % block
            at = base + high_half * block // 2 + j // 2
            picked.append((b if j % 2 else a).item(at))
        return lanes.listed(shape.elem, picked)

    return handler


def _pack(elem_of: Callable[[str], str]) -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
        wide_elem = "i" + shape.elem[1:]
        a, b = shape.read(args, wide_elem)
        narrow = elem_of(wide_elem)
        block = 16 // SIZES[wide_elem]
        out = lanes.new(narrow, shape.bits // 8 // SIZES[narrow])
        for base in range(0, shape.count, block):
            for half, source in enumerate((a, b)):
                to = out.moved(2 * base + half * block)
                lanes.saturate(to, source.moved(base), block)
        return vec(shape.bits, narrow), out

    return handler


def _narrow(kind: str) -> str:
    return {"i16": "i8", "i32": "i16"}[kind]


def _narrow_unsigned(kind: str) -> str:
    return {"i16": "u8", "i32": "u16"}[kind]


def _narrowed_lanes(lanes: Lanes, shape: Shape, args: list[Any], source: str) -> Made:
    a = args[0].read_as(source)
    count = shape.bits // 8 // SIZES[source]
    made = lanes.each(shape.elem, count, lambda i: saturate(a.item(i), shape.elem))
    return vec(max(128, count * SIZES[shape.elem] * 8), "u8"), padded_register(lanes, made, count)


def _shuffle_bytes(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    a, b = shape.read(args, "u8")
    return lanes.each(
        "u8",
        shape.count,
        lambda i: pick(
            less(op("&", b.item(i), num(128)), 0, "!="),
            cast("i32", num(0)),
            op("+", a.item(op("+", op("&", i, num(-16)), op("&", b.item(i), num(15)))), 0),
        ),
    )


def _permutexvar(index_first: bool) -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        kind = {"f32": "i32", "f64": "i64"}.get(shape.elem, shape.elem)
        index, source = (args[0], args[1]) if index_first else (args[1], args[0])
        at, a = index.read_as(kind), source.read_as(shape.elem)
        return lanes.each(
            shape.elem, shape.count, lambda i: a.item(op("&", at.item(i), num(shape.count - 1)))
        )

    return handler


def _permute_two(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    kind = {"f32": "i32", "f64": "i64"}.get(shape.elem, shape.elem)
    a, b = args[0].read_as(shape.elem), args[2].read_as(shape.elem)
    at, last = args[1].read_as(kind), shape.count - 1

    def lane(i: Expr) -> Expr:
        index = op("&", at.item(i), num(last))
        other = less(op("&", at.item(i), num(shape.count)), 0, "!=")
        return pick(other, b.item(index), a.item(index))

    return lanes.each(shape.elem, shape.count, lane)


def _pairs(left: str, right: str, to: str, saturates: bool = False) -> Handler:
    """Return the handler of sums of products of neighbours: madd, maddubs."""

    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        a, b = args[0].read_as(left), args[1].read_as(right)

        def lane(i: Expr) -> Expr:
            j = op("*", i, 2)
            first = op("*", a.item(j), b.item(j))
            made = op("+", first, op("*", a.item(op("+", j, 1)), b.item(op("+", j, 1))))
            return saturate(made, to) if saturates else made

        return lanes.each(to, shape.bits // 8 // SIZES[to], lane)

    return handler


def dots(left: str, right: str, each: int) -> Handler:
    """Return the handler of acc + dot products of `each` neighbours."""

    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        acc, a, b = args[0].read_as("i32"), args[1].read_as(left), args[2].read_as(right)

        def lane(i: Expr) -> Expr:
            made: Expr = acc.item(i)
            for k in range(each):
                j = op("+", op("*", i, each), k)
                made = op("+", made, op("*", a.item(j), b.item(j)))
            return made

        return lanes.each("i32", shape.bits // 32, lane)

    return handler


def _hadd(sign: str) -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        a, b = shape.read(args)
        block = 16 // SIZES[shape.elem]
        values = []
        for i in range(shape.count):
            base, j = i // block * block, i % block
            source = a if j < block // 2 else b
            at = base + j % (block // 2) * 2
            values.append(op(sign, source.item(at), source.item(at + 1)))
        return lanes.listed(shape.elem, values)

    return handler


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


def _alignr(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    a, b, n = args[0].read_as("u8"), args[1].read_as("u8"), integer_at(args[2])
    values: list[Expr] = []
    for i in range(shape.bits // 8):
        base, j = i & ~15, (i & 15) + n
        values.append(b.item(base + j) if j < 16 else a.item(base + j - 16) if j < 32 else num(0))
    return lanes.listed("u8", values)


def _byte_shift(sign: int) -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        a, n = args[0].read_as("u8"), integer_at(args[1])
        values: list[Expr] = []
        for i in range(shape.bits // 8):
            j = (i & 15) + sign * n
            values.append(a.item((i & ~15) + j) if 0 <= j < 16 else num(0))
        return lanes.listed("u8", values)

    return handler


def _shift_count(sign: str) -> Handler:
    """Return the handler of shifts by the low lane of a vector."""

    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
        a, n = args[0].read_as(shape.elem), cast("i32", args[1].read_as("i64").item())
        held = lanes.w.temporary(n, "i32", "count")
        return lanes.each(shape.elem, shape.count, lambda i: shifted(sign)(shape, a.item(i), held))

    return handler


def _mul_wide(lanes: Lanes, shape: Shape, args: list[Any]) -> Any:
    if shape.elem in ("f32", "f64"):
        return float_binary("mul")(lanes, shape, args)
    a, b = shape.read(args, shape.elem)
    return lanes.each(
        "i64",
        shape.bits // 64,
        lambda i: op("*", wide(a.item(op("*", i, 2))), wide(b.item(op("*", i, 2)))),
    ).read_as("u8")


def _extract(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    elem = {"i8": "u8", "i16": "u16", "f32": "i32"}.get(shape.elem, shape.elem)
    made = args[0].read_as(elem).item(integer_at(args[1]))
    return (NamedType(name="long long") if elem == "i64" else INT), cast(
        "i64" if elem == "i64" else "i32", made
    )


def _insert(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    out = lanes.new(shape.elem, shape.count)
    lanes.move(out, args[0].read_as(shape.elem), shape.count)
    lanes.put(out, num(integer_at(args[2]) % shape.count), args[1])
    return out


def _part(bits: int) -> Handler:
    """Return the handler that takes 128 or 256 bits out."""

    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
        elem = "f32" if shape.suffix == "ps" else "f64" if shape.suffix == "pd" else "u8"
        size = bits // 8 // SIZES[elem]
        at = integer_at(args[1]) if len(args) > 1 else 0
        return vec(bits, elem), args[0].read_as(elem).moved(at * size)

    return handler


def _insert_part(bits: int) -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
        elem = "f32" if shape.suffix == "ps" else "f64" if shape.suffix == "pd" else "u8"
        total, size = shape.bits // 8 // SIZES[elem], bits // 8 // SIZES[elem]
        out = lanes.new(elem, total)
        lanes.move(out, args[0].read_as(elem), total)
        lanes.move(out.moved(integer_at(args[2]) * size), args[1].read_as(elem), size)
        return vec(shape.bits, elem), out

    return handler


def _repeat(bits: int) -> Handler:
    """Return the handler that repeats 128 or 256 bits, from a register or from memory."""

    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
        elem = "f32" if shape.suffix == "ps" else "f64" if shape.suffix == "pd" else "u8"
        size, source = bits // 8 // SIZES[elem], args[0].read_as(elem)
        out = lanes.new(elem, shape.bits // 8 // SIZES[elem])
        for i in range(shape.bits // bits):
            lanes.move(out.moved(i * size), source, size)
        return vec(shape.bits, elem), out

    return handler


def _first_lane(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    source = args[0].read_as(shape.elem)
    held = lanes.w.temporary(source.item(), WORKS_IN.get(shape.elem, shape.elem))
    return lanes.spread(held, shape.elem, shape.count)


def joined(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    """Return a register of two halves, the upper one first."""
    low, top = args[1], args[0]
    elem = low.elem
    half = shape.bits // 16 // SIZES[elem]
    out = lanes.new(elem, 2 * half)
    lanes.move(out, low, half)
    lanes.move(out.moved(half), top.read_as(elem), half)
    return vec(shape.bits, elem if elem in ("f32", "f64") else "u8"), out


def _reduce(name: str) -> Handler:
    def handler(lanes: Lanes, shape: Shape, args: list[Any]) -> Expr:
        return lanes.total(shape.elem, shape.count, args[0].read_as(shape.elem), BINARY[name])

    return handler


def _movemask(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    elem = {"f32": "i32", "f64": "i64"}.get(shape.elem, shape.elem)
    a = args[0].read_as(elem)
    total = lanes.w.temporary(cast("i64", num(0)), "i64", "mask")
    lanes.w.loop(
        shape.count,
        lambda i: lanes.w.set(total, op("|", total, op("<<", cast("i64", less(a.item(i), 0)), i))),
    )
    return INT, cast("i32", total)


def _halves_to(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    a = args[0].read_as("f16")
    return lanes.floats(shape.count, lambda load: load_halves(load, a))


def load_halves(load: Any, a: Address) -> Expr:
    """Return the load of halves for a vector of a group, given the load of floats."""
    made = load(Address(a.base, "f32", a.at))  # keeps the step; elements are halves
    return call("vload", Address(made.args[0], "f16").pointer(), made.args[1])


def to_halves(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    """Return f32 lanes as halves."""
    a = args[0].read_as("f32")
    made = lanes.each("f16", shape.count, a.item)
    padded = padded_register(lanes, made.read_as("u16"), shape.count)
    return vec(max(128, 16 * shape.count), "u8"), padded.read_as("u8")


def _undefined(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    return _zero(lanes, shape, args)


def _mov_shuffle(odd: int) -> Handler:
    return permuted("f32", lambda i, n, c: (0, (i & ~1) + odd))


def _blocks(i: int, n: int, control: int) -> tuple[int, int]:
    block, blocks = i // 2, n // 2
    field = control >> (2 * block) & 3 if blocks == 4 else control >> block & 1
    return (0 if block < blocks // 2 else 1), 2 * field + i % 2


def _shuffle(lanes: Lanes, shape: Shape, args: list[Any]) -> Any:
    if shape.suffix == "epi8":
        return _shuffle_bytes(lanes, shape, args)
    if shape.suffix == "epi32":
        return permuted(None, _fields)(lanes, shape, args)
    if shape.suffix == "pd":
        picks: Callable[[int, int, int], tuple[int, int]] = lambda i, n, c: (  # noqa: E731
            i % 2,
            (i & ~1) + (c >> i & 1),
        )
        return permuted(None, picks)(lanes, shape, args)
    return permuted(None, lambda i, n, c: ((i & 3) // 2, (i & ~3) + (c >> (2 * (i & 3)) & 3)))(
        lanes, shape, args
    )


def _permute2(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    elem = "f32" if shape.suffix == "ps" else "u8"
    half, control = 16 // SIZES[elem], integer_at(args[2])
    out = lanes.new(elem, 2 * half)
    for i in range(2):
        field = control >> (4 * i) & 15
        if field & 8:
            lanes.clear(out.moved(i * half), half)
        else:
            source = args[field >> 1 & 1].read_as(elem).moved((field & 1) * half)
            lanes.move(out.moved(i * half), source, half)
    return vec(shape.bits, elem), out


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
