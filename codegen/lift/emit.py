"""Short spellings of high-IR nodes, and the list of statements that a translation writes to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from dovetail.codegen.lift.types import Names
from dovetail.ir import expr as ex
from dovetail.ir.expr import (
    Binary,
    Call,
    Cast,
    Expr,
    Float,
    Index,
    Int,
    Name,
    NamedType,
    PointerType,
)
from dovetail.ir.high import nodes as high

VL = Name(id="VL")
NOTHING = Int(value=0)
WIDE = ("f32", "i32")
"""Elements of which vectors are loaded and stored."""


def num(value: int) -> Expr:
    """Return an integer."""
    return Int(value=value)


def op(sign: str, left: Expr, right: Expr | int) -> Expr:
    """Return `left sign right`, without what adds nothing."""
    right = num(right) if isinstance(right, int) else right
    if (right == NOTHING and sign in ("+", "-", "<<", ">>")) or (right == num(1) and sign == "*"):
        return left
    if left == NOTHING and sign == "+":
        return right
    if isinstance(left, Int) and isinstance(right, Int) and sign in ("+", "-", "*"):
        a, b = left.value, right.value
        return num({"+": a + b, "-": a - b, "*": a * b}[sign])
    return Binary(op=sign, left=left, right=right)


def pick(cond: Expr, then: Expr, other: Expr) -> Expr:
    """Return `then if cond else other`."""
    return ex.Ternary(cond=cond, then=then, other=other)


def cast(type_: str, value: Expr) -> Expr:
    """Return `cast(type, value)`."""
    if isinstance(value, Cast) and value.type == NamedType(name=type_):
        return value
    return Cast(type=NamedType(name=type_), operand=value)


def call(name: str, *args: Expr) -> Expr:
    """Return a call of a builtin."""
    return Call(name=name, args=args)


def zero_of(elem: str) -> Expr:
    """Return 0 as a lane, or a pointer, has it."""
    if elem.startswith("ptr"):
        return Name(id="null")
    return Float(value=0.0) if elem in ("f32", "f64") else num(0)


def type_of(text: str) -> ex.Type:
    """Return a type of the high IR: `f32`, `ptr[f32]`."""
    if text.startswith("ptr["):
        return PointerType(of=NamedType(name=text[4:-1]))
    return NamedType(name=text)


@dataclass(frozen=True, slots=True)
class Address:
    """`base + at`: a pointer expression to elements of a type, and a number of elements."""

    base: Expr
    elem: str
    at: Expr = NOTHING

    def moved(self, count: Expr | int, sign: str = "+") -> Address:
        """Return the address some elements further."""
        if self.at == NOTHING and sign == "-":
            return Address(op("-", self.base, count), self.elem)
        return Address(self.base, self.elem, op(sign, self.at, count))

    def pointer(self) -> Expr:
        """Return the address as one pointer expression."""
        return op("+", self.base, self.at)

    def read_as(self, elem: str) -> Address:
        """Return the same address, counted in another element type."""
        if elem == self.elem:
            return self
        source = self.pointer()
        if isinstance(source, Cast):
            source = source.operand
        return Address(Cast(type=type_of(f"ptr[{elem}]"), operand=source), elem)

    def item(self, index: Expr | int = 0) -> Expr:
        """Return the element at an index; halves are loaded, as f32."""
        if self.elem in ("f16", "bf16"):
            return call("load", self.moved(index).pointer())
        return Index(base=self.base, indices=(op("+", self.at, index),))


@dataclass(slots=True)
class Writer:
    """Statements in order; `inside` collects those of a body."""

    names: Names
    out: list[high.Stmt] = field(default_factory=list)
    sizes: dict[Expr, int] = field(default_factory=dict)  # of arrays, which hold a vector at least

    def set(self, target: Expr, value: Expr, type_: str | None = None) -> None:
        """Write an assignment, or the store of a half."""
        if isinstance(target, Call):
            self.do(call("store", *target.args, value))
            return
        assert isinstance(target, Name | Index)
        kind = None if type_ is None else type_of(type_)
        self.out.append(high.Assign(target=target, value=value, type=kind))

    def do(self, expr: Expr) -> None:
        """Write a call evaluated for its effect."""
        self.out.append(high.ExprStmt(expr=expr))

    def array(self, name: str, size: int, elem: str) -> Address:
        """Return a new local array."""
        made = self.names.fresh(name, f"ptr[{elem}]")
        wide = call("max", num(size), VL) if elem in WIDE else num(size)
        self.out.append(high.Local(name=made, size=wide, elem=elem))
        self.sizes[Name(id=made)] = size if elem in WIDE else 0
        return Address(Name(id=made), elem)

    def temporary(self, value: Expr, type_: str, name: str = "t") -> Expr:
        """Return a new variable that holds a value."""
        made = Name(id=self.names.fresh(name, type_))
        value = cast(type_, value) if type_ in ("i32", "u32", "i64", "u64") else value
        self.set(made, value, None if type_.startswith("ptr") else type_)
        return made

    @contextmanager
    def inside(self) -> Iterator[list[high.Stmt]]:
        """Collect the statements of a body in the list given."""
        outer, self.out = self.out, []
        try:
            yield self.out
        finally:
            self.out = outer

    def loop(self, count: Expr | int, body: Callable[[Expr], None], kind: str = "range") -> None:
        """Write a loop from 0 to `count`."""
        stop = num(count) if isinstance(count, int) else count
        if stop == num(1):
            body(num(0))
            return
        var = self.names.fresh("l" if kind == "range" else "u", "i64")
        with self.inside() as inner:
            body(Name(id=var))
        self.out.append(
            high.For(kind=kind, var=var, start=num(0), stop=stop, step=num(1), body=tuple(inner))
        )

    def branch(self, cond: Expr, then: Sequence[high.Stmt], other: Sequence[high.Stmt]) -> None:
        """Write an `if`."""
        self.out += choose(cond, tuple(then), tuple(other))


def choose(
    cond: Expr, then: tuple[high.Stmt, ...], other: tuple[high.Stmt, ...]
) -> tuple[high.Stmt, ...]:
    """Return an `if`, turned round where only its second arm does anything."""
    if then:
        return (high.If(cond=cond, then=then, other=other),)
    return (high.If(cond=negated(cond), then=other),) if other else ()


def negated(cond: Expr) -> Expr:
    """Return the condition that holds where `cond` does not; `==` and `!=` are turned round."""
    turned = {"==": "!=", "!=": "=="}
    if isinstance(cond, Binary) and cond.op in turned:
        return Binary(op=turned[cond.op], left=cond.left, right=cond.right)
    if isinstance(cond, ex.Unary) and cond.op == "!":
        return cond.operand
    return ex.Unary(op="!", operand=cond)
