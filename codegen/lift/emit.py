"""Short spellings of high-IR nodes, and the list of statements that a translation writes to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from dovetail.codegen.lift.types import Names
from dovetail.ir.expr import (
    Binary,
    Call,
    Cast,
    Expr,
    Index,
    Int,
    Name,
    NamedType,
    PointerType,
    Unary,
)
from dovetail.ir.expr import Ternary as Ternary_
from dovetail.ir.high import nodes as high

VL = Name(id="VL")
NOTHING = Int(value=0)


def num(value: int) -> Expr:
    """Return an integer."""
    return Int(value=value)


def op(sign: str, left: Expr, right: Expr | int) -> Expr:
    """Return `left sign right`, without what adds nothing."""
    right = num(right) if isinstance(right, int) else right
    if isinstance(right, Int) and (
        (right.value == 0 and sign in ("+", "-", "<<", ">>")) or (right.value == 1 and sign == "*")
    ):
        return left
    if sign == "+" and isinstance(left, Int) and left.value == 0:
        return right
    if isinstance(left, Int) and isinstance(right, Int) and sign in ("+", "-", "*"):
        a, b = left.value, right.value
        return num({"+": a + b, "-": a - b, "*": a * b}[sign])
    return Binary(op=sign, left=left, right=right)


def pick(cond: Expr, then: Expr, other: Expr) -> Expr:
    """Return `then if cond else other`."""
    return Ternary_(cond=cond, then=then, other=other)


def cast(type_: str, value: Expr) -> Expr:
    """Return `cast(type, value)`."""
    if isinstance(value, Cast) and value.type == NamedType(name=type_):
        return value
    return Cast(type=NamedType(name=type_), operand=value)


def call(name: str, *args: Expr) -> Expr:
    """Return a call of a builtin."""
    return Call(name=name, args=args)


@dataclass(frozen=True, slots=True)
class Address:
    """`base + at`: a pointer expression to elements of a type, and a number of elements."""

    base: Expr
    elem: str
    at: Expr = NOTHING

    def moved(self, count: Expr | int, sign: str = "+") -> Address:
        """Return the address some elements further."""
        if isinstance(self.at, Int) and self.at.value == 0 and sign == "-":
            return Address(op("-", self.base, count), self.elem)
        return Address(self.base, self.elem, op(sign, self.at, count))

    def pointer(self) -> Expr:
        """Return the address as one pointer expression."""
        return op("+", self.base, self.at)

    def read_as(self, elem: str) -> Address:
        """Return the same address, counted in another element type."""
        if elem == self.elem:
            return self
        type_ = PointerType(of=NamedType(name=elem))
        if isinstance(self.base, Cast) and self.at == num(0):
            return Address(Cast(type=type_, operand=self.base.operand), elem)
        return Address(Cast(type=type_, operand=self.pointer()), elem)

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

    def set(self, target: Expr, value: Expr, type_: str | None = None) -> None:
        """Write an assignment, or the store of a half."""
        if isinstance(target, Call):
            self.do(call("store", *target.args, value))
            return
        assert isinstance(target, Name | Index)
        kind = None if type_ is None else NamedType(name=type_.removeprefix("ptr[").rstrip("]"))
        whole = PointerType(of=kind) if kind and type_ != kind.name else kind
        self.out.append(high.Assign(target=target, value=value, type=whole))

    def do(self, expr: Expr) -> None:
        """Write a call evaluated for its effect."""
        self.out.append(high.ExprStmt(expr=expr))

    def array(self, name: str, size: int, elem: str) -> Address:
        """Return a new local array."""
        made = self.names.fresh(name, f"ptr[{elem}]")
        self.out.append(high.Local(name=made, size=num(size), elem=elem))
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
        """Write an `if`, turned round where only its second arm does anything."""
        if then:
            self.out.append(high.If(cond=cond, then=tuple(then), other=tuple(other)))
        elif other:
            self.out.append(high.If(cond=negated(cond), then=tuple(other)))


def negated(cond: Expr) -> Expr:
    """Return the condition that holds where `cond` does not; `==` and `!=` are turned round."""
    turned = {"==": "!=", "!=": "=="}
    if isinstance(cond, Binary) and cond.op in turned:
        return Binary(op=turned[cond.op], left=cond.left, right=cond.right)
    return Unary(op="!", operand=cond)
