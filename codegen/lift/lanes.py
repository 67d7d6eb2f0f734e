"""Vectors as arrays of lanes: what operations on them write, for any target.

In: addresses of vectors. Out: addresses of new ones. Lanes of f32 are computed in groups of VL, all
others in loops that compilers vectorise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dovetail.codegen.lift.emit import VL, WIDE, Address, Writer, call, cast, num, op, zero_of
from dovetail.codegen.lift.types import SIZES, VECTOR_OPS, WORKS_IN, refuse
from dovetail.codegen.lower.fold import fold
from dovetail.ir.expr import COMPARISONS, Binary, Cast, Expr, Float, Int, Name, Type, Unary
from dovetail.ir.high.ops import INTS

Arg = Expr | Address
Load = Callable[[Address], Expr]
Places = Callable[[Expr], tuple[Expr, Expr]]
Made = tuple[Type, Expr | Address | None]
Rule = Callable[["Lanes", list[Any]], Made]
Handler = Callable[..., Any]
"""Writes an operation of a `Register` on its operands; what it gives is of it, or has a type."""


@dataclass(slots=True)
class Lanes:
    """Writes operations on vectors."""

    w: Writer

    def new(self, elem: str, count: int) -> Address:
        """Return an array for a vector."""
        return self.w.array("v", count, elem)

    def each(self, elem: str, count: int, lane: Callable[[Expr], Expr]) -> Address:
        """Return a vector of what `lane` gives for each index."""
        out = self.new(elem, count)
        self.w.loop(count, lambda i: self.put(out, i, lane(i)))
        return out

    def map(self, elem: str, count: int, lane: Callable[..., Expr], *held: Arg) -> Address:
        """Return a vector of `lane` of the lanes of others; a number is the same for all."""
        return self.each(elem, count, lambda i: lane(*(item(a, i) for a in held)))

    def listed(self, elem: str, values: Sequence[Expr]) -> Address:
        """Return a vector of given lanes."""
        out = self.new(elem, len(values))
        for i, value in enumerate(values):
            self.put(out, num(i), value)
        return out

    def put(self, out: Address, index: Expr, value: Expr) -> None:
        """Write a lane."""
        if out.elem in INTS and not (isinstance(value, Int) and value.value >= 0):
            value = cast(out.elem, value)
        self.w.set(out.item(index), value)

    def held(self, value: Expr, elem: str, name: str = "t") -> Expr:
        """Return a variable that holds a lane."""
        return self.w.temporary(value, WORKS_IN.get(elem, elem), name)

    def groups(self, to: Address, count: int, make: Callable[[Load], Expr]) -> None:
        """Write lanes in groups of VL, all unrolled; `make` gets a way to load those of others."""
        used = call("min", VL, num(count))

        def group(u: Expr) -> None:
            def reach(name: str, at: Address, *value: Expr) -> Expr:
                base = at.base.operand if isinstance(at.base, Cast) else at.base
                whole = at.at == num(0) and self.w.sizes.get(base) == count and at.elem in WIDE
                counted = () if whole else (used,)  # an array of our own has room for all lanes
                place = at.moved(op("*", u, VL)).pointer()
                return call(f"{name}{KINDS.get(at.elem, '')}", place, *value, *counted)

            self.w.do(reach("vstore", to, make(partial(reach, "vload"))))

        self.w.loop(call("max", num(1), op("//", num(count), VL)), group, "unroll")

    def floats(self, count: int, make: Callable[[Load], Expr], elem: str = "f32") -> Address:
        """Return a vector of lanes of 32 bits made in groups of VL."""
        out = self.new(elem, count)
        self.groups(out, count, make)
        return out

    def calls(self, name: str, count: int, *args: Address) -> Address:
        """Return a builtin of f32 vectors applied to vectors."""
        return self.floats(count, lambda load: call(name, *(load(a.read_as("f32")) for a in args)))

    def clear(self, to: Address, count: int) -> None:
        """Write zeros."""
        self.w.loop(count, lambda i: self.w.set(to.item(i), zero_of(to.elem)))

    def saturate(self, to: Address, source: Address, count: int) -> None:
        """Write lanes, held in the range of narrower ones."""
        self.w.loop(count, lambda i: self.put(to, i, saturate(source.item(i), to.elem)))

    def deal(self, to: Address, source: Address, count: int, step: int, put: int = 1) -> None:
        """Write every `step`-th element to every `put`-th place."""
        self.w.loop(count, lambda i: self.put(to, op("*", i, put), source.item(op("*", i, step))))

    def move(self, to: Address, source: Address, count: int) -> None:
        """Write a copy of elements."""
        if to.elem == "f32" and count in (2, 4, 8, 16):
            self.groups(to, count, lambda load: load(source))
            return
        if to.elem == "f16":
            to, source = to.read_as("u16"), source.read_as("u16")
        self.w.loop(count, lambda i: self.w.set(to.item(i), source.item(i)))

    def store_where(
        self, count: int, chosen: Callable[[Expr], Expr], to: Address, source: Address
    ) -> None:
        """Write a copy of the elements that are chosen."""

        def put(i: Expr) -> None:
            with self.w.inside() as inner:
                self.w.set(to.item(i), source.item(i))
            self.w.branch(chosen(i), inner, ())

        self.w.loop(count, put)

    def padded(self, made: Address, count: int) -> Address:
        """Return lanes, followed by zeros where they are fewer than 128 bits."""
        size, total = count * SIZES[made.elem], 16 // SIZES[made.elem]
        if size >= 16:
            return made
        out = self.new(made.elem, total)
        self.clear(out, total)
        self.move(out.read_as("u8"), made.read_as("u8"), size)
        return out

    def joined(self, low: Address, top: Address, count: int) -> Address:
        """Return a vector of two halves of `count` lanes."""
        out = self.new(low.elem, 2 * count)
        self.move(out, low, count)
        self.move(out.moved(count), top, count)
        return out

    def dots(
        self, acc: Address, a: Address, b: Address, count: int, each: int, at: Places | None = None
    ) -> Address:
        """Return acc + sums of `each` products; at: where those of a lane begin in a and b."""

        def lane(i: Expr) -> Expr:
            made: Expr = acc.item(i)
            x, y = at(i) if at else (op("*", i, each), op("*", i, each))
            for k in range(each):
                made = op("+", made, op("*", a.item(op("+", x, k)), b.item(op("+", y, k))))
            return made

        return self.each(acc.elem, count, lane)

    def spread(self, value: Expr, elem: str, count: int) -> Address:
        """Return a vector with one number in all lanes."""
        if elem == "f32":
            return self.floats(count, lambda load: call("vbroadcast", value))
        same = value if isinstance(value, Int | Float | Name) else self.held(value, elem)
        return self.each(elem, count, lambda i: same)

    def operate(self, sign: str, elem: str, count: int, sides: Sequence[Address]) -> Address:
        """Return vectors joined by an operator of C."""
        if elem == "f32" and sign in VECTOR_OPS:
            return self.calls(VECTOR_OPS[sign], count, *sides)
        if sign in COMPARISONS:
            raise refuse(f"`{sign}` on vectors")
        sign = "//" if sign == "/" and elem != "f64" else sign
        return self.map(elem, count, partial(op, sign), *sides)

    def total(self, elem: str, count: int, at: Address, join: Callable[[Expr, Expr], Expr]) -> Expr:
        """Return all lanes joined into one number."""
        total = self.held(at.item(0), elem, "total")
        if count > 1:
            self.w.loop(count - 1, lambda i: self.w.set(total, join(total, at.item(op("+", i, 1)))))
        return total


class Register:
    """What an instruction gives: `count` lanes of an element, which `lanes` writes."""

    def __init__(self, lanes: Lanes, bits: int, elem: str) -> None:
        self.lanes, self.bits, self.elem = lanes, bits, elem
        self.count = bits // 8 // SIZES[elem]

    def each(self, lane: Callable[[Expr], Expr]) -> Address:
        """Return what `lane` gives for each index."""
        return self.lanes.each(self.elem, self.count, lane)

    def map(self, lane: Callable[..., Expr], *held: Arg) -> Address:
        """Return `lane` of the lanes of others; a number is the same for all."""
        return self.lanes.map(self.elem, self.count, lane, *held)

    def listed(self, values: Sequence[Expr]) -> Address:
        """Return given lanes."""
        return self.lanes.listed(self.elem, values)

    def spread(self, value: Expr) -> Address:
        """Return one number in all lanes."""
        return self.lanes.spread(value, self.elem, self.count)

    def copy(self, source: Address) -> Address:
        """Return the lanes that stand at an address."""
        out = self.lanes.new(self.elem, self.count)
        self.lanes.move(out, source.read_as(self.elem), self.count)
        return out


def item(value: Arg, index: Expr) -> Expr:
    """Return a lane of a vector, or the number that stands for all lanes."""
    return value.item(index) if isinstance(value, Address) else value


def read_all(args: Sequence[Arg], elem: str) -> list[Any]:
    """Return operands, vectors counted in an element."""
    return [a.read_as(elem) if isinstance(a, Address) else a for a in args]


def minus(value: Expr) -> Expr:
    """Return -value."""
    return Unary(op="-", operand=value)


def inverted(value: Expr) -> Expr:
    """Return ~value."""
    return Unary(op="~", operand=value)


def less(a: Expr, b: Expr | int, sign: str = "<") -> Expr:
    """Return a comparison."""
    return Binary(op=sign, left=a, right=num(b) if isinstance(b, int) else b)


def range_of(elem: str) -> tuple[int, int]:
    """Return the smallest and the largest number of an integer element."""
    bits = 8 * SIZES[elem]
    return (0, (1 << bits) - 1) if elem[0] == "u" else (-(1 << bits - 1), (1 << bits - 1) - 1)


def saturate(value: Expr, elem: str) -> Expr:
    """Return an integer held in the range of an element type."""
    low, top = range_of(elem)
    return call("max", call("min", value, num(top)), num(low))


def wide(value: Expr) -> Expr:
    """Return a lane as i64."""
    return cast("i64", value)


def integer_at(value: Arg) -> int:
    """Return an immediate of an instruction."""
    known = fold(value, {}) if isinstance(value, Expr) else value
    if not isinstance(known, Int):
        raise refuse("an immediate that is not constant")
    return known.value


KINDS = {"i32": "_i32"}
"""What the names of loads and stores of an element end with."""
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^"}
BINARY: dict[str, Callable[[Expr, Expr], Expr]] = {
    **{name: partial(op, sign) for name, sign in _SIGNS.items()},
    "max": partial(call, "max"),
    "min": partial(call, "min"),
    "andnot": lambda a, b: op("&", inverted(a), b),
}
"""Operations on two lanes whose result has the lanes' type."""
COMPARED = {"eq": "==", "gt": ">", "ge": ">=", "lt": "<", "le": "<=", "neq": "!="}
