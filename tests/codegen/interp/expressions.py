"""Expressions to closures: each node becomes a typed `Code` whose `run` takes the frame.

In: low-IR expressions and the variables in scope. Out: `Code`; faults carry the node's span.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dovetail.codegen.isa.intrinsics import SCALAR_TYPES
from dovetail.ir.diagnostics import Span
from dovetail.ir.expr import (
    ArrayType,
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
    Ternary,
    Type,
    Unary,
)
from dovetail.ir.low import nodes as low
from dovetail.ir.low.conversions import combine, promote
from dovetail.ir.low.types import CONSTANTS, scalar, unqualified
from tests.codegen.interp.library import CONSTANTS as STANDARD_VALUES
from tests.codegen.interp.memory import NULL, Pointer
from tests.codegen.interp.operators import (
    INT,
    Code,
    Frame,
    Run,
    converted,
    guarded,
    operate,
)
from tests.codegen.interp.values import (
    Convert,
    InterpretError,
    Layouts,
    loader,
    storer,
    wrapper,
)

SIZE = NamedType(name="size_t")
LITERAL_SUFFIX = re.compile(r"[uUlL]*$")


@dataclass(frozen=True, slots=True)
class Local:
    """A variable: its place in the frame, and whether the frame holds its address instead."""

    slot: int
    type: Type
    in_memory: bool


@dataclass(frozen=True, slots=True)
class Place:
    """Something that can be assigned to: a frame slot, or an address computed by `address`."""

    type: Type
    slot: int = -1
    address: Run | None = None


class Environment(Protocol):
    """What expressions are compiled in: variables, functions, struct layouts and constants."""

    layouts: Layouts

    def variable(self, name: str) -> Local | None:
        """Return a variable in scope."""

    def table(self, name: str) -> tuple[Type, Pointer] | None:
        """Return a static table of the unit."""

    def constant(self, name: str) -> int | None:
        """Return an integer constant of the target's headers."""

    def callee(self, name: str, span: Span) -> tuple[tuple[Type | None, ...], Type, Any]:
        """Return parameter types, result type and function of a name."""


class Expressions:
    """Compiles expressions in an environment."""

    def __init__(self, environment: Environment) -> None:
        self.env = environment

    def code(self, expr: Expr) -> Code:
        """Return the compiled expression; arrays become addresses of their first element."""
        rule = _RULES.get(type(expr))
        if rule is None:
            raise InterpretError(f"{type(expr).__name__} is not interpreted here", expr.span)
        made = rule(self, expr)
        return Code(unqualified(made.type), made.run)

    def convert(self, expr: Expr, target: Type) -> Run:
        """Return the expression converted to `target`, as by assignment."""
        made = self.code(expr)
        return converted(made, unqualified(target))

    def condition(self, expr: Expr) -> Run:
        """Return the truth of an expression."""
        made = self.code(expr)
        if isinstance(made.type, PointerType):
            return lambda f: made.run(f).memory is not None
        return lambda f: made.run(f) != 0

    # ---- places ----

    def place(self, expr: Expr) -> Place:
        """Return where an expression that may be assigned to lies."""
        if isinstance(expr, Name):
            return self._named(expr)
        if isinstance(expr, Index):
            (index,) = expr.indices
            return self._element(expr.base, self.code(index), expr.span)
        if isinstance(expr, Unary) and expr.op == "*":
            return self._element(expr.operand, Code(INT, lambda f: 0), expr.span)
        if isinstance(expr, low.Member):
            return self._member(expr)
        raise InterpretError("this cannot be assigned to or have its address taken", expr.span)

    def _named(self, expr: Name) -> Place:
        found = self.env.variable(expr.id)
        if found is not None:
            if not found.in_memory:
                return Place(found.type, slot=found.slot)
            return Place(found.type, address=operator.itemgetter(found.slot))
        table = self.env.table(expr.id)
        if table is None:
            raise InterpretError(f"`{expr.id}` is not known", expr.span)
        type_, pointer = table
        return Place(type_, address=lambda f: pointer)

    def _element(self, base: Expr, index: Code, span: Span) -> Place:
        made = self.code(base)
        if not isinstance(made.type, PointerType):
            raise InterpretError("only pointers and arrays have elements", span)
        element = made.type.of
        size, run, at = self.env.layouts.size(element), made.run, index.run

        def address(f: Frame) -> Pointer:
            p = run(f)
            return Pointer(p.memory, p.offset + size * at(f))

        return Place(element, address=address)

    def _member(self, expr: low.Member) -> Place:
        if expr.arrow:
            base = self._element(expr.base, Code(INT, lambda f: 0), expr.span)
        else:
            base = self.place(expr.base)
        layout, start = self.env.layouts.of(base.type), base.address
        if layout is None or start is None or expr.field not in layout.fields:
            raise InterpretError(f"there is no field `{expr.field}` here", expr.span)
        offset, type_ = layout.fields[expr.field]
        return Place(type_, address=lambda f: start(f).advance(offset))

    def load(self, place: Place, span: Span) -> Code:
        """Return the value at a place; an array is its address."""
        if place.address is None:
            return Code(place.type, operator.itemgetter(place.slot))
        address = place.address
        if isinstance(place.type, ArrayType):
            return Code(place.type, address)
        read = loader(place.type)
        return Code(place.type, guarded(lambda f: read(address(f)), span))

    def store(self, place: Place, value: Run, span: Span) -> Run:
        """Return the code that writes `value` to a place and yields it."""
        if place.address is None:
            slot = place.slot

            def keep(f: Frame) -> Any:
                f[slot] = result = value(f)
                return result

            return keep
        address, write = place.address, storer(place.type)

        def put(f: Frame) -> Any:
            result = value(f)
            write(address(f), result)
            return result

        return guarded(put, span)


# ---- one rule per node ----


def _int(_: Expressions, expr: Int) -> Code:
    value = expr.value
    return Code(NamedType(name=literal_type(expr)), lambda f: value)


def literal_type(expr: Int) -> str:
    """Return the C type of an integer literal."""
    found = LITERAL_SUFFIX.search(expr.text.lower())
    suffix = found.group() if found else ""
    based = expr.text.startswith("0")  # hexadecimal and octal literals may be unsigned
    if "l" not in suffix and expr.value < 2**31:
        return "unsigned" if "u" in suffix else "int"
    if "l" not in suffix and expr.value < 2**32 and (based or "u" in suffix):
        return "unsigned"
    return "unsigned long" if "u" in suffix or expr.value >= 2**63 else "long"


def _float(_: Expressions, expr: Float) -> Code:
    name = "double" if expr.text and expr.text[-1] not in "fF" else "float"
    value = np.dtype(SCALAR_TYPES[name]).type(expr.value)
    return Code(NamedType(name=name), lambda f: value)


def _name(self: Expressions, expr: Name) -> Code:
    if self.env.variable(expr.id) is not None or self.env.table(expr.id) is not None:
        return self.load(self.place(expr), expr.span)
    if expr.id == "NULL":
        return Code(CONSTANTS["NULL"], lambda f: NULL)
    number = self.env.constant(expr.id)
    if number is not None:
        return Code(INT, lambda f: number)
    if expr.id in STANDARD_VALUES:
        value = STANDARD_VALUES[expr.id]
        return Code(CONSTANTS[expr.id], lambda f: value)
    raise InterpretError(f"`{expr.id}` is not known", expr.span)


def _unary(self: Expressions, expr: Unary) -> Code:
    if expr.op == "*":
        return self.load(self.place(expr), expr.span)
    if expr.op == "&":
        place = self.place(expr.operand)
        assert place.address is not None, "a variable with an address lies in memory"
        return Code(PointerType(of=place.type), guarded(place.address, expr.span))
    if expr.op == "!":
        truth = self.condition(expr.operand)
        return Code(INT, lambda f: int(not truth(f)))
    made = self.code(expr.operand)
    type_ = promote(made.type)
    run = converted(made, type_)
    if expr.op == "+":
        return Code(type_, run)
    act = operator.neg if expr.op == "-" else operator.invert
    found = scalar(type_)
    if found is None or found.floating:
        return Code(type_, lambda f: act(run(f)))
    wrap = wrapper(found.name)
    return Code(type_, lambda f: wrap(act(run(f))))


def _binary(self: Expressions, expr: Binary) -> Code:
    if expr.op in ("&&", "||"):
        first, second = self.condition(expr.left), self.condition(expr.right)
        if expr.op == "&&":
            return Code(INT, lambda f: int(first(f) and second(f)))
        return Code(INT, lambda f: int(first(f) or second(f)))
    return operate(
        self.env.layouts, expr.op, self.code(expr.left), self.code(expr.right), expr.span
    )


def _ternary(self: Expressions, expr: Ternary) -> Code:
    truth, then, other = self.condition(expr.cond), self.code(expr.then), self.code(expr.other)
    type_ = then.type if isinstance(then.type, PointerType) else other.type
    if scalar(then.type) and scalar(other.type):
        type_ = combine("+", then.type, other.type) or type_
    a, b = converted(then, type_), converted(other, type_)
    return Code(type_, lambda f: a(f) if truth(f) else b(f))


def _call(self: Expressions, expr: Call) -> Code:
    params, returns, function = self.env.callee(expr.name, expr.span)
    if len(params) != len(expr.args):
        message = f"`{expr.name}` takes {len(params)} arguments, here are {len(expr.args)}"
        raise InterpretError(message, expr.span)
    runs = [
        self.code(arg).run if wanted is None else self.convert(arg, wanted)
        for arg, wanted in zip(expr.args, params, strict=True)
    ]
    return Code(returns, guarded(_applied(function, runs, _result(returns)), expr.span))


def _result(returns: Type) -> Convert | None:
    """Return what turns the result of a meaning into a value of its type."""
    found = scalar(returns)
    if found is None:
        return None
    return np.dtype(SCALAR_TYPES[found.name]).type if found.floating else int


def _applied(function: Callable[..., Any], runs: list[Run], result: Convert | None) -> Run:
    if result is None:
        return lambda f: function(*[run(f) for run in runs])
    finish = result
    return lambda f: finish(function(*[run(f) for run in runs]))


def _index(self: Expressions, expr: Index) -> Code:
    return self.load(self.place(expr), expr.span)


def _cast(self: Expressions, expr: Cast) -> Code:
    made = self.code(expr.operand)
    target = unqualified(expr.type)
    return Code(target, guarded(converted(made, target), expr.span))


def _assign(self: Expressions, expr: low.Assign) -> Code:
    place = self.place(expr.target)
    if expr.op == "=":
        return Code(place.type, self.store(place, self.convert(expr.value, place.type), expr.span))
    before = self.load(place, expr.span)
    plain = Code(unqualified(before.type), before.run)
    joined = operate(self.env.layouts, expr.op[:-1], plain, self.code(expr.value), expr.span)
    value = converted(joined, unqualified(place.type))
    return Code(place.type, self.store(place, value, expr.span))


def _step(self: Expressions, expr: low.Step) -> Code:
    place = self.place(expr.target)
    before = self.load(place, expr.span)
    plain = Code(unqualified(before.type), before.run)
    one = Code(INT, lambda f: 1)
    joined = operate(self.env.layouts, expr.op[0], plain, one, expr.span)
    write = self.store(place, converted(joined, unqualified(place.type)), expr.span)
    if expr.prefix:
        return Code(place.type, write)
    read = before.run

    def after(f: Frame) -> Any:
        old = read(f)
        write(f)
        return old

    return Code(place.type, after)


def _comma(self: Expressions, expr: low.Comma) -> Code:
    items = [self.code(item) for item in expr.items]
    runs = [item.run for item in items]
    return Code(items[-1].type, lambda f: [run(f) for run in runs][-1])


def _sizeof(self: Expressions, expr: low.SizeOf) -> Code:
    if isinstance(expr.of, Type):
        type_ = expr.of
    elif isinstance(expr.of, Name):
        type_ = self.place(expr.of).type
    else:
        type_ = self.code(expr.of).type
    size = self.env.layouts.size(type_)
    return Code(SIZE, lambda f: size)


_RULES: dict[type[Expr], Callable[..., Code]] = {
    Int: _int,
    Float: _float,
    Name: _name,
    Unary: _unary,
    Binary: _binary,
    Ternary: _ternary,
    Call: _call,
    Index: _index,
    Cast: _cast,
    low.Member: lambda self, expr: self.load(self.place(expr), expr.span),
    low.Assign: _assign,
    low.Step: _step,
    low.Comma: _comma,
    low.SizeOf: _sizeof,
}
