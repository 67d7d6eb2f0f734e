"""NEON operations that move lanes: loads, stores, parts of registers, shuffles.

In: what tells operations of a kind apart, the shape and the arguments. Out: a new vector, or
nothing for stores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from dovetail.codegen.lift.emit import Address, cast, num, pick
from dovetail.codegen.lift.lanes import Lanes, Made, integer_at, less
from dovetail.codegen.lift.neon_shape import Handler, Shape, operands, scalar_type, vec
from dovetail.codegen.lift.types import SIZES, WORKS_IN, refuse
from dovetail.ir.expr import Expr

Picks = Callable[[int, int], list[int]]
"""Of a shuffle: lanes of a register, which result -> places in a and b, one behind the other."""


# ---- memory ----


def _load(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    if shape.form == "_lane":
        lane = args[0].read_as(shape.elem).item(0)
        return shape.same(_set_lane(lanes, shape, [lane, *args[1:]]))
    source = args[0].read_as(shape.elem)
    if shape.form == "_dup":
        kept = lanes.held(source.item(), shape.elem)
        return shape.same(lanes.spread(kept, shape.elem, shape.count))
    out = lanes.new(shape.elem, shape.count * shape.group)
    for k in range(shape.group):
        lanes.move(out.moved(k * shape.count), source.moved(k * shape.count), shape.count)
    return shape.grouped(), out


def _load_apart(ways: int, lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    """Return registers to which elements are dealt out: vld2, vld4."""
    shape.group = ways
    if shape.form == "_lane":
        raise refuse("a load of one lane into several vectors")
    source = args[0].read_as(shape.elem)
    step = 0 if shape.form == "_dup" else ways
    out = lanes.new(shape.elem, shape.count * ways)
    for k in range(ways):
        lanes.deal(out.moved(k * shape.count), source.moved(k), shape.count, step)
    return shape.grouped(), out


def _store(lanes: Lanes, shape: Shape, args: list[Any]) -> None:
    to, source = args[0].read_as(shape.elem), args[1].read_as(shape.elem)
    if shape.form == "_lane":
        lanes.move(to, source.moved(integer_at(args[2])), 1)
        return
    for k in range(shape.group):
        lanes.move(to.moved(k * shape.count), source.moved(k * shape.count), shape.count)


def _store_apart(ways: int, lanes: Lanes, shape: Shape, args: list[Any]) -> None:
    """Write registers whose lanes are dealt out in turns: vst2, vst4."""
    if shape.form == "_lane":
        raise refuse("a store of one lane of several vectors")
    to, source = args[0].read_as(shape.elem), args[1].read_as(shape.elem)
    for k in range(ways):
        lanes.deal(to.moved(k), source.moved(k * shape.count), shape.count, 1, ways)


# ---- lanes and halves ----


def _dup(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    return lanes.spread(operands(lanes, shape, args)[0], shape.elem, shape.count)


def _half(upper: int, lanes: Lanes, shape: Shape, args: list[Any]) -> Any:
    return args[0].read_as(shape.elem).moved(8 // SIZES[shape.elem] * upper)


def _get_lane(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    made = args[0].read_as(shape.elem).item(integer_at(args[1]))
    return scalar_type(shape.kind), cast("i32", made) if shape.elem in WORKS_IN else made


def _set_lane(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    out = lanes.new(shape.elem, shape.count)
    lanes.move(out, args[1].read_as(shape.elem), shape.count)
    lanes.put(out, num(integer_at(args[2])), args[0])
    return out


def _combine(lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    a, b = (v.read_as(shape.elem) for v in args)
    count = 8 // SIZES[shape.elem]
    return vec(shape.kind, 2 * count), lanes.joined(a, b, count)


def _create(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    return lanes.listed("i64", [args[0]]).read_as(shape.elem)


def _reinterpret(lanes: Lanes, shape: Shape, args: list[Any]) -> Any:
    return args[0].read_as(shape.elem)


# ---- shuffles ----


def _both(lanes: Lanes, shape: Shape, args: list[Any]) -> list[Expr]:
    """Return the lanes of two vectors, one behind the other."""
    return [v.read_as(shape.elem).item(k) for v in args[:2] for k in range(shape.count)]


def _ext(lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    n = integer_at(args[2])
    return lanes.listed(shape.elem, _both(lanes, shape, args)[n : n + shape.count])


def _shuffle(picks: Picks, part: int, lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    listed = _both(lanes, shape, args)
    return shape.same(lanes.listed(shape.elem, [listed[k] for k in picks(shape.count, part)]))


def _shuffle_pair(picks: Picks, lanes: Lanes, shape: Shape, args: list[Any]) -> Made:
    listed = _both(lanes, shape, args)
    shape.group = 2
    picked = [listed[k] for part in (0, 1) for k in picks(shape.count, part)]
    return shape.grouped(), lanes.listed(shape.elem, picked)


SHUFFLES: dict[str, Picks] = {
    "zip": lambda n, part: [k // 2 + part * n // 2 + (k % 2) * n for k in range(n)],
    "uzp": lambda n, part: [2 * k + part for k in range(n)],
    "trn": lambda n, part: [(k & ~1) + part + (k % 2) * n for k in range(n)],
}


def _reverse(block: int, lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    a, size = args[0].read_as(shape.elem), block // 8 // SIZES[shape.elem]
    picked = [a.item(k // size * size + size - 1 - k % size) for k in range(shape.count)]
    return lanes.listed(shape.elem, picked)


def _table(size: int, lanes: Lanes, shape: Shape, args: list[Any]) -> Address:
    a, at = args[0].read_as(shape.elem), args[1].read_as("u8")

    def lane(j: Expr) -> Expr:
        return pick(less(j, size), a.item(cast("i64", j)), cast("i32", num(0)))

    return lanes.map(shape.elem, shape.count, lane, at)


MOVES: dict[str, Handler] = {
    "ld1": _load,
    **{f"ld{ways}": partial(_load_apart, ways) for ways in (2, 3, 4)},
    "st1": _store,
    **{f"st{ways}": partial(_store_apart, ways) for ways in (2, 3, 4)},
    **dict.fromkeys(("dup", "mov"), _dup),
    "get_low": partial(_half, 0),
    "get_high": partial(_half, 1),
    "get": _get_lane,
    "set": _set_lane,
    "combine": _combine,
    "create": _create,
    "reinterpret": _reinterpret,
    "ext": _ext,
    **{name: partial(_shuffle_pair, picks) for name, picks in SHUFFLES.items()},
    **{
        f"{name}{part + 1}": partial(_shuffle, picks, part)
        for name, picks in SHUFFLES.items()
        for part in (0, 1)
    },
    **{f"rev{block}": partial(_reverse, block) for block in (16, 32, 64)},
    **{f"{q}tbl{n}": partial(_table, n * b) for n in range(1, 5) for q, b in (("", 8), ("q", 16))},
}
"""Operations by their names."""
