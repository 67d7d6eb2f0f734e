"""Constant folding: an expression and values of its names in, the simplest equal one out.

Integers follow C (`//` and `%` truncate); floating values fold in double precision. An environment
maps names to what stands for them: a literal, a `Text`, or another name.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from dovetail.ir import expr as ex
from dovetail.ir.high.nodes import Text
from dovetail.ir.high.ops import ELEMENTS, REAL_FUNCTIONS
from dovetail.ir.low.types import INTEGER_OPERATORS, SIGN_OPERATORS

Env = Mapping[str, ex.Expr]
Literal = ex.Int | ex.Float | Text
NULL = ex.Name(id="null")

_INT_OPS: dict[str, Callable[[Any, Any], int]] = {
    "//" if op == "/" else op: act for op, act in INTEGER_OPERATORS.items()
}
_REAL_OPS: dict[str, Callable[[Any, Any], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
_REAL_CALLS: dict[str, Callable[[float], float]] = {
    name: getattr(math, name) for name in REAL_FUNCTIONS if hasattr(math, name)
}
_ANY_CALLS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "abs": abs}


def fold(expr: ex.Expr, env: Env) -> ex.Expr:
    """Return `expr` with names replaced from `env` and compile-time parts computed."""
    return _FOLD[type(expr)](expr, env)


def fold_type(type_: ex.Type, env: Env) -> ex.Type:
    """Return `type_` with dtype names replaced from `env`."""
    if isinstance(type_, ex.PointerType):
        of = fold_type(type_.of, env)
        return type_ if of is type_.of else ex.PointerType(of=of, span=type_.span)
    assert isinstance(type_, ex.NamedType)
    name = fold_dtype(type_.name, env)
    return type_ if name == type_.name else ex.NamedType(name=name, span=type_.span)


def fold_dtype(name: str, env: Env) -> str:
    """Return the dtype that `name` stands for."""
    value = env.get(name)
    if isinstance(value, Text):
        return value.value
    return value.id if isinstance(value, ex.Name) else name


def literal(value: float) -> ex.Int | ex.Float:
    """Return the literal of a Python number."""
    return ex.Float(value=value) if isinstance(value, float) else ex.Int(value=int(value))


def is_literal(expr: ex.Expr) -> bool:
    """Tell whether `expr` is a number or compile-time string."""
    return isinstance(expr, (ex.Int, ex.Float, Text))


def _name(expr: ex.Name, env: Env) -> ex.Expr:
    found = env.get(expr.id)
    if found is not None:
        return found
    if expr.id == "inf":
        return ex.Float(value=math.inf)
    return Text(value=expr.id) if expr.id in ELEMENTS else expr


def _unary(expr: ex.Unary, env: Env) -> ex.Expr:
    operand = fold(expr.operand, env)
    if isinstance(operand, ex.Int):
        return literal(SIGN_OPERATORS[expr.op](operand.value))
    if isinstance(operand, ex.Float) and expr.op in ("-", "+"):
        return literal(-operand.value if expr.op == "-" else operand.value)
    return (
        expr if operand is expr.operand else ex.Unary(op=expr.op, operand=operand, span=expr.span)
    )


def _binary(expr: ex.Binary, env: Env) -> ex.Expr:
    left, right = fold(expr.left, env), fold(expr.right, env)
    return combine(expr.op, left, right, expr)


def combine(op: str, left: ex.Expr, right: ex.Expr, was: ex.Binary | None = None) -> ex.Expr:
    """Return `left op right` computed or simplified; `was` is given back if it is just that."""
    if isinstance(left, (ex.Int, ex.Float)) and isinstance(right, (ex.Int, ex.Float)):
        value = _compute(op, left.value, right.value)
        if value is not None:
            return literal(value)
    if op in ("==", "!=") and (left, right) == (NULL, NULL):
        return ex.Int(value=int(op == "=="))
    if op in ("==", "!=") and isinstance(left, Text) and isinstance(right, Text):
        return ex.Int(value=int((left.value == right.value) == (op == "==")))
    short = _identity(op, left, right)
    if short is not None:
        return short
    if was is not None and left is was.left and right is was.right:
        return was
    return ex.Binary(op=op, left=left, right=right)


def _compute(op: str, left: float, right: float) -> float | None:
    """Return the value of `left op right`, None where it has none (division by zero, overflow)."""
    both_int = isinstance(left, int) and isinstance(right, int)
    try:
        if op in ex.COMPARISONS or (both_int and op in _INT_OPS):
            return _INT_OPS[op](left, right)
        return float(_REAL_OPS[op](left, right)) if op in _REAL_OPS else None
    except (ArithmeticError, ValueError):
        return None


def _identity(op: str, left: ex.Expr, right: ex.Expr) -> ex.Expr | None:
    """Return the simpler form of an operation with one neutral or absorbing integer, else None."""
    a = left.value if isinstance(left, ex.Int) else None
    b = right.value if isinstance(right, ex.Int) else None
    if (op in ("+", "-") and b == 0) or (op in ("*", "//") and b == 1):
        return left
    if (op == "+" and a == 0) or (op == "*" and a == 1):
        return right
    if op == "*" and 0 in (a, b):
        return ex.Int(value=0)
    if op in ("&&", "||") and a is not None:
        return right if bool(a) == (op == "&&") else ex.Int(value=int(op == "||"))
    if op in ("+", "-") and b is not None:
        return _merge_offsets(op, left, b)
    return None


def _merge_offsets(op: str, left: ex.Expr, amount: int) -> ex.Expr | None:
    """Return `x + (c + amount)` for `(x + c) + amount`, a negative sum as a difference."""
    total = amount if op == "+" else -amount
    rest, found = left, False
    if isinstance(left, ex.Binary) and left.op in ("+", "-") and isinstance(left.right, ex.Int):
        total += left.right.value if left.op == "+" else -left.right.value
        rest, found = left.left, True
    if not found and amount > 0:
        return None
    if total == 0:
        return rest
    sign = "+" if total > 0 else "-"
    return ex.Binary(op=sign, left=rest, right=ex.Int(value=abs(total)))


def _ternary(expr: ex.Ternary, env: Env) -> ex.Expr:
    cond = fold(expr.cond, env)
    if isinstance(cond, ex.Int):
        return fold(expr.then if cond.value else expr.other, env)
    then, other = fold(expr.then, env), fold(expr.other, env)
    if cond is expr.cond and then is expr.then and other is expr.other:
        return expr
    return ex.Ternary(cond=cond, then=then, other=other, span=expr.span)


def _call(expr: ex.Call, env: Env) -> ex.Expr:
    args = _fold_all(expr.args, env)
    numbers = [arg.value for arg in args if isinstance(arg, (ex.Int, ex.Float))]
    if len(numbers) == len(args) and numbers:
        value = _compute_call(expr.name, numbers)
        if value is not None:
            return literal(value)
    return expr if args is expr.args else ex.Call(name=expr.name, args=args, span=expr.span)


def _compute_call(name: str, numbers: list[float]) -> float | None:
    try:
        if name in _REAL_CALLS:
            return float(_REAL_CALLS[name](float(numbers[0])))
        return _ANY_CALLS[name](*numbers) if name in _ANY_CALLS else None
    except (ArithmeticError, ValueError, TypeError):
        return None


def _fold_all(items: tuple[ex.Expr, ...], env: Env) -> tuple[ex.Expr, ...]:
    folded = tuple([_FOLD[type(item)](item, env) for item in items])
    return items if all(map(operator.is_, folded, items)) else folded


def _index(expr: ex.Index, env: Env) -> ex.Expr:
    base, indices = fold(expr.base, env), _fold_all(expr.indices, env)
    if base is expr.base and indices is expr.indices:
        return expr
    return ex.Index(base=base, indices=indices, span=expr.span)


def _cast(expr: ex.Cast, env: Env) -> ex.Expr:
    type_, operand = fold_type(expr.type, env), fold(expr.operand, env)
    if isinstance(operand, (ex.Int, ex.Float)) and isinstance(type_, ex.NamedType):
        if type_.name == "f32":
            return ex.Float(value=float(operand.value))
        if type_.name == "i64" and math.isfinite(operand.value):
            return ex.Int(value=int(operand.value))
    if type_ is expr.type and operand is expr.operand:
        return expr
    return ex.Cast(type=type_, operand=operand, span=expr.span)


_FOLD: dict[type[ex.Expr], Callable[[Any, Env], ex.Expr]] = {
    ex.Int: lambda expr, env: expr,
    ex.Float: lambda expr, env: expr,
    Text: lambda expr, env: expr,
    ex.Name: _name,
    ex.Unary: _unary,
    ex.Binary: _binary,
    ex.Ternary: _ternary,
    ex.Call: _call,
    ex.Index: _index,
    ex.Cast: _cast,
}
