"""Vectors as arrays of lanes: what operations on them write, for any target.

In: addresses of vectors. Out: addresses of new ones. Lanes of f32 are computed in groups of VL, all
others in loops that compilers vectorise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.codegen.lift.emit import VL, Address, Writer, call, cast, num, op
from dovetail.codegen.lift.types import refuse
from dovetail.ir.expr import Binary, Call, Expr, Float, Int, Name, Type, Unary

SIZES = {"i8": 1, "u8": 1, "i16": 2, "u16": 2, "f16": 2, "i32": 4, "u32": 4, "f32": 4}
SIZES |= {"i64": 8, "u64": 8, "f64": 8}
WORKS_IN = {"i8": "i32", "u8": "i32", "i16": "i32", "u16": "i32"}
Arg = Expr | Address
Made = tuple[Type, Expr | Address | None]
Rule = Callable[["Lanes", list[Any]], Made]
JOINED = {"+": "vadd", "-": "vsub", "*": "vmul", "/": "vdiv"}


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

    def listed(self, elem: str, values: Sequence[Expr]) -> Address:
        """Return a vector of given lanes."""
        out = self.new(elem, len(values))
        for i, value in enumerate(values):
            self.put(out, num(i), value)
        return out

    def put(self, out: Address, index: Expr, value: Expr) -> None:
        """Write a lane."""
        elem = out.elem
        if elem in ("i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64"):
            value = value if isinstance(value, Int) and value.value >= 0 else cast(elem, value)
        self.w.set(out.item(index), value)

    def floats(self, count: int, make: Callable[[Callable[[Address], Expr]], Expr]) -> Address:
        """Return a vector of f32 made in groups of VL lanes; `make` gets a way to load others."""
        out = self.new("f32", count)
        used = call("min", VL, num(count))

        def group(u: Expr) -> None:
            step = op("*", u, VL)
            made = make(lambda at: call("vload", at.read_as("f32").moved(step).pointer(), used))
            self.w.do(call("vstore", out.moved(step).pointer(), made, used))

        groups = call("max", num(1), op("//", num(count), VL))
        self.loop_groups(groups, group)
        return out

    def loop_groups(self, groups: Expr, body: Callable[[Expr], None]) -> None:
        """Write a loop over the vectors of a group, all unrolled."""
        self.w.loop(groups, body, "unroll")

    def calls(self, name: str, count: int, *args: Address) -> Address:
        """Return a builtin of f32 vectors applied to vectors."""
        return self.floats(count, lambda load: call(name, *(load(a) for a in args)))

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
            used = call("min", VL, num(count))

            def group(u: Expr) -> None:
                step = op("*", u, VL)
                made = call("vload", source.moved(step).pointer(), used)
                self.w.do(call("vstore", to.moved(step).pointer(), made, used))

            self.loop_groups(call("max", num(1), op("//", num(count), VL)), group)
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

    def joined(self, low: Address, top: Address, count: int) -> Address:
        """Return a vector of two halves of `count` lanes."""
        out = self.new(low.elem, 2 * count)
        self.move(out, low, count)
        self.move(out.moved(count), top, count)
        return out

    def dots(
        self, count: int, acc: Address, a: Address, b: Address, fixed: int | None = None
    ) -> Address:
        """Return acc + dot products of the neighbours of its lanes' size; fixed: those of b."""
        each = SIZES[acc.elem] // SIZES[a.elem]

        def lane(i: Expr) -> Expr:
            made: Expr = acc.item(i)
            for k in range(each):
                j = op("+", op("*", i, each), k)
                other = j if fixed is None else num(each * fixed + k)
                made = op("+", made, op("*", a.item(j), b.item(other)))
            return made

        return self.each(acc.elem, count, lane)

    def spread(self, value: Expr, elem: str, count: int) -> Address:
        """Return a vector with one number in all lanes."""
        if elem == "f32":
            return self.floats(count, lambda load: call("vbroadcast", value))
        held = value
        if not isinstance(value, Int | Float | Name):
            held = self.w.temporary(value, WORKS_IN.get(elem, elem))
        return self.each(elem, count, lambda i: held)

    def operate(self, sign: str, elem: str, count: int, sides: Sequence[Address]) -> Address:
        """Return vectors joined by an operator of C."""
        if elem == "f32" and sign in JOINED:
            return self.calls(JOINED[sign], count, *sides)
        if sign in (">", "<", "==", ">=", "<=", "!="):
            raise refuse(f"`{sign}` on vectors")
        sign = "//" if sign == "/" and elem != "f64" else sign
        a, b = sides
        return self.each(elem, count, lambda i: op(sign, a.item(i), b.item(i)))

    def total(self, elem: str, count: int, at: Address, join: Callable[[Expr, Expr], Expr]) -> Expr:
        """Return all lanes joined into one number."""
        kind = WORKS_IN.get(elem, elem)
        total = self.w.temporary(_plain(at.item(0), elem), kind, "total")

        def one(i: Expr) -> None:
            self.w.set(total, _plain(join(total, at.item(op("+", i, 1))), kind))

        if count > 1:
            self.w.loop(count - 1, one)
        return total


def _plain(value: Expr, elem: str) -> Expr:
    return cast("i32", value) if elem in WORKS_IN else value


def zero_of(elem: str) -> Expr:
    """Return 0 as a lane, or a pointer, has it."""
    if elem.startswith("ptr"):
        return Name(id="null")
    return Float(value=0.0) if elem in ("f32", "f64") else num(0)


def minus(value: Expr) -> Expr:
    """Return -value."""
    return Unary(op="-", operand=value)


def less(a: Expr, b: Expr | int, sign: str = "<") -> Expr:
    """Return a comparison."""
    return Binary(op=sign, left=a, right=num(b) if isinstance(b, int) else b)


def saturate(value: Expr, elem: str) -> Expr:
    """Return an integer held in the range of an element type."""
    bits = 8 * SIZES[elem]
    low, top = (0, (1 << bits) - 1) if elem[0] == "u" else (-(1 << bits - 1), (1 << bits - 1) - 1)
    return call("max", call("min", value, num(top)), num(low))


def wide(value: Expr) -> Expr:
    """Return a lane as i64."""
    return cast("i64", value)


def integer_at(value: Arg) -> int:
    """Return an immediate of an instruction."""
    if isinstance(value, Unary) and isinstance(value.operand, Int):
        return {"-": -1, "+": 1}.get(value.op, 1) * value.operand.value
    if isinstance(value, Call | Name | Address) or not isinstance(value, Int):
        from dovetail.codegen.lower.fold import fold  # noqa: PLC0415

        made = fold(value, {}) if isinstance(value, Expr) else value
        if isinstance(made, Int):
            return made.value
        raise refuse("an immediate that is not constant")
    return value.value


BINARY: dict[str, Callable[[Expr, Expr], Expr]] = {
    "add": lambda a, b: op("+", a, b),
    "sub": lambda a, b: op("-", a, b),
    "mul": lambda a, b: op("*", a, b),
    "div": lambda a, b: op("/", a, b),
    "max": lambda a, b: call("max", a, b),
    "min": lambda a, b: call("min", a, b),
    "and": lambda a, b: op("&", a, b),
    "or": lambda a, b: op("|", a, b),
    "xor": lambda a, b: op("^", a, b),
    "andnot": lambda a, b: op("&", Unary(op="~", operand=a), b),
}
"""Operations on two lanes whose result has the lanes' type."""
COMPARED = {"eq": "==", "gt": ">", "ge": ">=", "lt": "<", "le": "<=", "neq": "!="}
