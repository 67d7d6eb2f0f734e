"""NEON operations that move lanes: loads, stores, parts of registers, shuffles.

In: what tells operations of a kind apart, the shape and the operands. Out: a new vector, or nothing
for stores.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from dovetail.codegen.lift.emit import Address, cast, num, pick
from dovetail.codegen.lift.lanes import Handler, Lanes, Made, Register, integer_at, less, read_all
from dovetail.codegen.lift.types import SIZES, WORKS_IN
from dovetail.ir.expr import Expr, NamedType

Picks = Callable[[int, int], list[int]]
"""Of a shuffle: lanes of a register, which result -> places in a and b, one behind the other."""


# ---- memory ----


def _load(shape: Shape, at: Address, *kept: Any) -> Made | Address:
    source, lanes = at.read_as(shape.elem), shape.lanes
    if shape.form == "_lane":
        return _set_lane(shape, source.item(0), *kept)
    if shape.form == "_dup":
        return shape.spread(lanes.held(source.item(), shape.elem))
    out = lanes.new(shape.elem, shape.count * shape.group)
    for k in range(shape.group):
        lanes.move(out.moved(k * shape.count), source.moved(k * shape.count), shape.count)
    return shape.grouped(shape.group), out


def _load_apart(ways: int, shape: Shape, at: Address, *kept: Any) -> Made:
    """Return registers to which elements are dealt out: vld2, vld4."""
    if shape.form == "_lane":
        return shape.grouped(ways), _load_lanes(ways, shape, at.read_as(shape.elem), *kept)
    source, step = at.read_as(shape.elem), 0 if shape.form == "_dup" else ways
    out = shape.lanes.new(shape.elem, shape.count * ways)
    for k in range(ways):
        shape.lanes.deal(out.moved(k * shape.count), source.moved(k), shape.count, step)
    return shape.grouped(ways), out


def _load_lanes(ways: int, shape: Shape, source: Address, given: Address, lane: Any) -> Address:
    """Return registers with one lane of each from memory."""
    out, held = shape.lanes.new(shape.elem, shape.count * ways), given.read_as(shape.elem)
    shape.lanes.move(out, held, shape.count * ways)
    for k in range(ways):
        shape.lanes.put(out, num(k * shape.count + integer_at(lane)), source.item(k))
    return out


def _store(shape: Shape, at: Address, given: Address, lane: Any = None) -> None:
    to, source = at.read_as(shape.elem), given.read_as(shape.elem)
    if shape.form == "_lane":
        shape.lanes.move(to, source.moved(integer_at(lane)), 1)
        return
    for k in range(shape.group):
        shape.lanes.move(to.moved(k * shape.count), source.moved(k * shape.count), shape.count)


def _store_apart(ways: int, shape: Shape, at: Address, given: Address, lane: Any = None) -> None:
    """Write registers whose lanes are dealt out in turns, or one lane of each: vst2, vst4."""
    to, source = at.read_as(shape.elem), given.read_as(shape.elem)
    for k in range(ways):
        if shape.form == "_lane":
            shape.lanes.move(to.moved(k), source.moved(k * shape.count + integer_at(lane)), 1)
            continue
        shape.lanes.deal(to.moved(k), source.moved(k * shape.count), shape.count, 1, ways)


# ---- lanes and halves ----


def _half(upper: int, shape: Shape, a: Address) -> Address:
    return a.read_as(shape.elem).moved(8 // SIZES[shape.elem] * upper)


def _get_lane(shape: Shape, a: Address, lane: Any) -> Made:
    made = a.read_as(shape.elem).item(integer_at(lane))
    return scalar_type(shape.kind), cast("i32", made) if shape.elem in WORKS_IN else made


def _set_lane(shape: Shape, value: Expr, a: Address, lane: Any) -> Address:
    out = shape.copy(a)
    shape.lanes.put(out, num(integer_at(lane)), value)
    return out


def _combine(shape: Shape, a: Address, b: Address) -> Made:
    count = 8 // SIZES[shape.elem]
    joined = shape.lanes.joined(a.read_as(shape.elem), b.read_as(shape.elem), count)
    return vec(shape.kind, 2 * count), joined


# ---- shuffles ----


def _ext(shape: Shape, a: Address, b: Address, first: Any) -> Address:
    n = integer_at(first)
    return shape.listed(shape.both(a, b)[n : n + shape.count])


def _shuffle(picks: Picks, part: int, shape: Shape, a: Address, b: Address) -> Address:
    listed = shape.both(a, b)
    return shape.listed([listed[k] for k in picks(shape.count, part)])


def _shuffle_pair(picks: Picks, shape: Shape, a: Address, b: Address) -> Made:
    listed = shape.both(a, b)
    picked = [listed[k] for part in (0, 1) for k in picks(shape.count, part)]
    return shape.grouped(2), shape.listed(picked)


SHUFFLES: dict[str, Picks] = {
    "zip": lambda n, part: [k // 2 + part * n // 2 + (k % 2) * n for k in range(n)],
    "uzp": lambda n, part: [2 * k + part for k in range(n)],
    "trn": lambda n, part: [(k & ~1) + part + (k % 2) * n for k in range(n)],
}


def _reverse(block: int, shape: Shape, a: Address) -> Address:
    listed, size = shape.both(a), block // 8 // SIZES[shape.elem]
    picked = [listed[k // size * size + size - 1 - k % size] for k in range(shape.count)]
    return shape.listed(picked)


def _table(size: int, shape: Shape, table: Address, at: Address) -> Address:
    """Return the bytes of a table at some places, 0 for places beyond it."""
    return _table_over(size, shape, shape.spread(cast("i32", num(0))), table, at)


def _table_over(size: int, shape: Shape, kept: Address, table: Address, at: Address) -> Address:
    """Return the bytes of a table at some places, for places beyond it what is kept."""
    a = table.read_as(shape.elem)

    def lane(j: Expr, other: Expr) -> Expr:
        return pick(less(j, size), a.item(cast("i64", j)), other)

    return shape.map(lane, at.read_as("u8"), kept.read_as(shape.elem))


TABLES = ("", 8), ("q", 16)
"""How names of look-ups begin to the bytes of a register of their tables."""
MOVES: dict[str, Handler] = {
    "ld1": _load,
    **{f"ld{ways}": partial(_load_apart, ways) for ways in (2, 3, 4)},
    "st1": _store,
    **{f"st{ways}": partial(_store_apart, ways) for ways in (2, 3, 4)},
    **dict.fromkeys(("dup", "mov"), lambda shape, *value: shape.spread(shape.operands(*value)[0])),
    "get_low": partial(_half, 0),
    "get_high": partial(_half, 1),
    "get": _get_lane,
    "set": _set_lane,
    "combine": _combine,
    "create": lambda shape, bits: shape.lanes.listed("i64", [bits]).read_as(shape.elem),
    "reinterpret": lambda shape, a: a.read_as(shape.elem),
    "ext": _ext,
    **{name: partial(_shuffle_pair, picks) for name, picks in SHUFFLES.items()},
    **{
        f"{name}{part + 1}": partial(_shuffle, picks, part)
        for name, picks in SHUFFLES.items()
        for part in (0, 1)
    },
    **{f"rev{block}": partial(_reverse, block) for block in (16, 32, 64)},
    **{f"{q}tbl{n}": partial(_table, n * b) for n in range(1, 5) for q, b in TABLES},
    **{f"{q}tbx{n}": partial(_table_over, n * b) for n in range(1, 5) for q, b in TABLES},
}
"""Operations by their names."""


ELEMENTS = {
    **{f"{s}{b}": f"{'i' if s == 's' else 'u'}{b}" for s in "su" for b in (8, 16, 32, 64)},
    **{elem: elem for elem in ("f16", "f32", "f64")},
}
KINDS = {"s": "int", "u": "uint", "f": "float"}
NAME = re.compile(
    r"v(get_low|get_high|[a-z0-9]+?)(q?)(_high)?(_n|_lane|_laneq|_dup|)((?:_[suf](?:8|16|32|64))+)(?:_x([234]))?"
)


def vec(kind: str, count: int) -> NamedType:
    """Return the C type of a register: `vec("s8", 16)` is int8x16_t."""
    return NamedType(name=f"{KINDS[kind[0]]}{kind[1:]}x{count}_t")


def scalar_type(kind: str) -> NamedType:
    """Return the C type of a lane."""
    return NamedType(name=f"{KINDS[kind[0]]}{kind[1:]}_t")


class Shape(Register):
    """The element, and the lanes of the register that the name speaks of."""

    def __init__(
        self, lanes: Lanes, kind: str, bits: int, high: bool, form: str, other: str, group: int
    ) -> None:
        super().__init__(lanes, bits, ELEMENTS[kind])
        self.kind, self.high, self.form, self.other, self.group = kind, high, form, other, group

    @property
    def wider(self) -> str:
        """The kind of lanes twice as wide."""
        return f"{self.kind[0]}{2 * int(self.kind[1:])}"

    @property
    def narrower(self) -> str:
        """The kind of lanes half as wide."""
        return f"{self.kind[0]}{int(self.kind[1:]) // 2}"

    def upper(self, at: Address) -> Address:
        """Return the upper half of a register for a `_high` form."""
        return at.moved(8 // SIZES[at.elem]) if self.high else at

    def grouped(self, group: int) -> NamedType:
        """Return the C type of so many such registers."""
        one = vec(self.kind, self.count)
        return one if group == 1 else NamedType(name=f"{one.name[:-2]}x{group}_t")

    def operands(self, *given: Any) -> list[Any]:
        """Return operands; the lane that a `_lane` form names stands for all lanes."""
        if self.form in ("_lane", "_laneq"):
            lane = given[-2].read_as(self.elem).item(integer_at(given[-1]))
            return [*given[:-2], self.lanes.held(lane, self.elem, "lane")]
        return list(given)

    def both(self, *vectors: Address) -> list[Expr]:
        """Return the lanes of vectors, one behind the other."""
        return [v.item(k) for v in read_all(vectors, self.elem) for k in range(self.count)]
