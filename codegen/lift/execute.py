"""Runs straight-line low IR on symbolic vectors and concrete counters.

In: statements and an environment. Out: the changed environment and the stores made. Conditions
must be concrete; whatever cannot be followed raises Unliftable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dovetail.codegen.isa.intrinsics import SCALAR_TYPES, Intrinsic
from dovetail.codegen.lift.scalar import address_of
from dovetail.codegen.lift.symbolic import Lane, SymbolicPointer, Table, apply, as_lane
from dovetail.codegen.lift.types import VECTOR_CALLS, VECTOR_OPS, Unliftable
from dovetail.ir import expr as ex
from dovetail.ir.low import nodes as low
from dovetail.ir.low.print import print_low
from dovetail.ir.low.types import INTEGER_OPERATORS, SIGN_OPERATORS, constant, scalar

ILL_TYPED = (TypeError, ValueError, AttributeError, IndexError, OverflowError)
"""What is raised for C that is ill-typed, or that leaves a table."""
MOST_TURNS = 64


@dataclass(slots=True)
class Executor:
    """`outer` gives float scalars from outside, as lanes; `types` the C types of variables."""

    intrinsics: Mapping[str, Intrinsic]
    env: dict[str, Any]
    types: dict[str, ex.Type]
    outer: Callable[[ex.Expr], Lane]
    functions: Mapping[str, low.Function] = field(default_factory=dict)
    address: Callable[[ex.Expr], Any] = lambda expr: None  # addresses that are known otherwise

    def inline(self, function: low.Function, args: list[Any]) -> Any:
        """Return what a helper of the text gives: straight-line code with one return at its end."""
        *body, last = function.body.body
        if not isinstance(last, low.Return) or last.value is None:
            raise Unliftable(f"`{function.name}` does not end with its value")
        env = {p.name: a for p, a in zip(function.params, args, strict=True)}
        types = {p.name: p.type for p in function.params}
        inner = Executor(self.intrinsics, env, types, self.outer, self.functions)
        inner.run(body)
        return inner.expr(last.value)

    def run(self, body: Sequence[low.Stmt]) -> None:
        """Execute statements in order."""
        for stmt in body:
            self.statement(stmt)

    def statement(self, stmt: low.Stmt) -> None:
        """Execute one statement."""
        if isinstance(stmt, low.Declare):
            self.declare(stmt)
        elif isinstance(stmt, low.ExprStmt):
            self.expr(stmt.expr)
        elif isinstance(stmt, low.Block):
            self.run(stmt.body)
        elif isinstance(stmt, low.If):
            chosen = stmt.then if self.integer(stmt.cond) else stmt.other
            self.run(chosen.body if chosen else ())
        elif isinstance(stmt, low.For):
            self.loop(stmt)
        elif not isinstance(stmt, low.Pragma):
            raise Unliftable(f"it holds a {type(stmt).__name__.lower()} statement")

    def loop(self, stmt: low.For) -> None:
        """Execute a loop over a few known values."""
        self.run(stmt.init)
        for _ in range(MOST_TURNS):
            if stmt.cond is None or not self.integer(stmt.cond):
                return
            self.run(stmt.body.body)
            if stmt.step is not None:
                self.expr(stmt.step)
        raise Unliftable("a long loop")

    def declare(self, stmt: low.Declare) -> None:
        """Execute a declaration."""
        self.types[stmt.name] = stmt.type
        if isinstance(stmt.type, ex.ArrayType):
            local = SymbolicPointer(stmt.name, 0, {})
            self.env[stmt.name] = local if stmt.init is None else table(stmt)
        elif stmt.init is not None:
            self.env[stmt.name] = self.converted(self.expr(stmt.init), stmt.type)

    def converted(self, value: Any, type_: ex.Type) -> Any:
        """Return a value as C stores it in a variable of this type."""
        found = scalar(type_)
        if found is None:
            return value
        if found.floating:
            if found.name != "float":
                raise Unliftable("it holds a double")
            return as_lane(value)
        if not isinstance(value, int | np.integer):
            raise Unliftable("a counter is not known")
        return int(value) & ((1 << 8 * found.size) - 1) if not found.signed else int(value)

    def integer(self, expr: ex.Expr) -> int:
        """Return the value of an integer expression that must be known."""
        value = self.expr(expr)
        if not isinstance(value, int | np.integer):
            raise Unliftable("a condition is not known")
        return int(value)

    def expr(self, expr: ex.Expr) -> Any:
        """Return the value of an expression."""
        rule = _RULES.get(type(expr))
        if rule is None:
            raise Unliftable(f"it holds a {type(expr).__name__.lower()} expression")
        found = self.address(expr)
        if found is not None:
            return found
        try:
            return rule(self, expr)
        except ILL_TYPED as error:
            raise Unliftable(f"`{print_low(expr)}` does not fit its operands") from error

    def step_size(self, pointer: ex.Expr) -> int:
        """Return the bytes that one step of a pointer expression covers."""
        type_ = self.pointer_type(pointer)
        found = scalar(type_.of) if isinstance(type_, ex.PointerType | ex.ArrayType) else None
        if found is None:
            raise Unliftable("a pointer to vectors is stepped")
        return found.size

    def pointer_type(self, expr: ex.Expr) -> ex.Type | None:
        """Return the C type of a pointer expression, None where it is not plain."""
        if isinstance(expr, ex.Name):
            return self.types.get(expr.id)
        if isinstance(expr, ex.Cast):
            return expr.type
        if isinstance(expr, ex.Binary):
            return self.pointer_type(expr.left) or self.pointer_type(expr.right)
        if isinstance(expr, ex.Unary) and expr.op == "&" and isinstance(expr.operand, ex.Index):
            return self.pointer_type(expr.operand.base)
        return None


def table(stmt: low.Declare) -> Table:
    """Return a pointer to the bytes of a constant table, or to undefined local memory."""
    assert isinstance(stmt.type, ex.ArrayType)
    of = stmt.type.of
    if not isinstance(stmt.init, low.InitList) or not isinstance(of, ex.NamedType):
        raise Unliftable(f"the array `{stmt.name}` is no table")
    values = [constant(item, {}) for item in stmt.init.items]
    if None in values or of.name not in SCALAR_TYPES:
        raise Unliftable(f"the table `{stmt.name}` is not constant")
    size = constant(stmt.type.size, {}) if stmt.type.size else len(values)
    if size is None or size < len(values):
        raise Unliftable(f"the table `{stmt.name}` has more values than places")
    filled = np.zeros(size, SCALAR_TYPES[of.name])
    filled[: len(values)] = values
    return Table(filled.view(np.uint8))


# ---- expressions ----


def _is_pointer(value: Any) -> bool:
    return isinstance(value, Table | SymbolicPointer)


def _name(self: Executor, expr: ex.Name) -> Any:
    if expr.id in self.env:
        return self.env[expr.id]
    return self.outer(expr)


def _binary(self: Executor, expr: ex.Binary) -> Any:
    left, right = self.expr(expr.left), self.expr(expr.right)
    if _is_pointer(left) or _is_pointer(right):
        return _step_pointer(self, expr, left, right)
    if isinstance(left, int | np.integer) and isinstance(right, int | np.integer):
        if expr.op in "/%" and right == 0:
            raise Unliftable("a division by zero")
        return INTEGER_OPERATORS[expr.op](int(left), int(right))
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray) or expr.op not in VECTOR_OPS:
        raise Unliftable(f"`{expr.op}` on vectors or unknown numbers")
    return Lane(VECTOR_OPS[expr.op], (as_lane(left), as_lane(right)))


def _step_pointer(self: Executor, expr: ex.Binary, left: Any, right: Any) -> Any:
    pointer, count, source = left, right, expr.left
    if not _is_pointer(left):
        pointer, count, source = right, left, expr.right
    if not isinstance(count, int | np.integer) or expr.op not in "+-":
        raise Unliftable("a pointer is stepped by an unknown amount")
    in_bytes = isinstance(source, ex.Cast) and isinstance(source.type, ex.NamedType)
    size = 1 if in_bytes else self.step_size(source)
    return pointer.advance(int(count) * size if expr.op == "+" else -int(count) * size)


def _unary(self: Executor, expr: ex.Unary) -> Any:
    if expr.op == "*":
        return _at(self.expr(expr.operand))
    if expr.op == "&":
        if not isinstance(expr.operand, ex.Index):
            raise Unliftable("it takes an address")
        return self.expr(address_of(expr.operand))
    value = self.expr(expr.operand)
    if isinstance(value, int | np.integer):
        return SIGN_OPERATORS[expr.op](int(value))
    if isinstance(value, Lane) and expr.op == "-":
        known = value.op == "const"
        return Lane("const", (-value.args[0],)) if known else Lane("vneg", (value,))
    raise Unliftable(f"`{expr.op}` on this")


def _at(pointer: Any) -> Any:
    if not isinstance(pointer, SymbolicPointer):
        raise Unliftable("it reads a table")
    return pointer.load(np.float32, 1)[0]


def _cast(self: Executor, expr: ex.Cast) -> Any:
    value = self.expr(expr.operand)
    if _is_pointer(value) or isinstance(expr.type, ex.PointerType):
        return value
    return self.converted(value, expr.type)


def _call(self: Executor, expr: ex.Call) -> Any:
    args = [self.expr(a) for a in expr.args]
    if expr.name in VECTOR_CALLS:
        return Lane(VECTOR_CALLS[expr.name], tuple(map(as_lane, args)))
    if expr.name in self.functions:
        return self.inline(self.functions[expr.name], args)
    row = self.intrinsics.get(expr.name)
    if row is None:
        raise Unliftable(f"`{expr.name}` is no known intrinsic")
    return apply(row, args)


def _assign(self: Executor, expr: low.Assign) -> Any:
    target, source = expr.target, expr.value
    if expr.op != "=":
        source = ex.Binary(op=expr.op[:-1], left=target, right=source)
    value = self.expr(source)
    if isinstance(target, ex.Name):
        if target.id not in self.types:
            raise Unliftable(f"it assigns `{target.id}`")
        self.env[target.id] = self.converted(value, self.types[target.id])
        return self.env[target.id]
    place = None
    if isinstance(target, ex.Index):
        place = self.expr(address_of(target))
    elif isinstance(target, ex.Unary) and target.op == "*":
        place = self.expr(target.operand)
    if not isinstance(place, SymbolicPointer):
        raise Unliftable("it assigns to this")
    place.stores[place.array, place.offset] = as_lane(value)
    return value


def _step(self: Executor, expr: low.Step) -> Any:
    old = self.expr(expr.target)
    new = _assign(self, low.Assign(op=f"{expr.op[0]}=", target=expr.target, value=ex.Int(value=1)))
    return new if expr.prefix else old


def _sizeof(self: Executor, expr: low.SizeOf) -> Any:
    value = constant(expr, {})
    if value is None:
        raise Unliftable("it holds sizeof")
    return value


_RULES: dict[type[ex.Expr], Callable[[Executor, Any], Any]] = {
    ex.Int: lambda self, expr: expr.value,
    ex.Float: lambda self, expr: as_lane(expr.value),
    ex.Name: _name,
    ex.Binary: _binary,
    ex.Unary: _unary,
    ex.Index: lambda self, expr: _at(self.expr(address_of(expr))),
    ex.Cast: _cast,
    ex.Call: _call,
    low.Member: lambda self, expr: self.outer(expr),
    low.Assign: _assign,
    low.Step: _step,
    low.SizeOf: _sizeof,
    low.Comma: lambda self, expr: [self.expr(item) for item in expr.items][-1],
}
