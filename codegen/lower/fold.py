"""Constant folding: an expression and values of its names in, the simplest equal one out.

Integers follow C (`//` and `%` truncate); floating values fold in double precision. An environment
maps names to what stands for them: a literal, a `Text`, or another name.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

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
    Ternary,
    Type,
    Unary,
)
from dovetail.ir.high.nodes import Text
from dovetail.ir.high.ops import ELEMENTS

Env = Mapping[str, Expr]
Literal = Int | Float | Text
NULL = Name(id="null")


def c_div(left: int, right: int) -> int:
    """Return `left / right` as C does, towards zero."""
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def c_mod(left: int, right: int) -> int:
    """Return `left % right` as C does, with the sign of `left`."""
    return left - c_div(left, right) * right


_INT_OPS: dict[str, Callable[[Any, Any], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": c_div,
    "%": c_mod,
    "<<": operator.lshift,
    ">>": operator.rshift,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "&&": lambda a, b: int(bool(a) and bool(b)),
    "||": lambda a, b: int(bool(a) or bool(b)),
}
_REAL_OPS: dict[str, Callable[[Any, Any], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_REAL_CALLS: dict[str, Callable[[float], float]] = {
    "exp": math.exp,
    "log": math.log,
    "sqrt": math.sqrt,
    "cos": math.cos,
    "sin": math.sin,
    "tanh": math.tanh,
    "floor": math.floor,
}
_ANY_CALLS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "abs": abs}


def fold(expr: Expr, env: Env) -> Expr:
    """Return `expr` with names replaced from `env` and compile-time parts computed."""
    return _FOLD[type(expr)](expr, env)


def fold_type(type_: Type, env: Env) -> Type:
    """Return `type_` with dtype names replaced from `env`."""
    if isinstance(type_, PointerType):
        of = fold_type(type_.of, env)
        return type_ if of is type_.of else PointerType(of=of, span=type_.span)
    assert isinstance(type_, NamedType)
    name = fold_dtype(type_.name, env)
    return type_ if name == type_.name else NamedType(name=name, span=type_.span)


def fold_dtype(name: str, env: Env) -> str:
    """Return the dtype that `name` stands for."""
    value = env.get(name)
    if isinstance(value, Text):
        return value.value
    return value.id if isinstance(value, Name) else name


def literal(value: float) -> Int | Float:
    """Return the literal of a Python number."""
    return Float(value=value) if isinstance(value, float) else Int(value=int(value))


def is_literal(expr: Expr) -> bool:
    """Tell whether `expr` is a number or compile-time string."""
    return isinstance(expr, Int | Float | Text)


def _name(expr: Name, env: Env) -> Expr:
    found = env.get(expr.id)
    if found is not None:
        return found
    if expr.id == "inf":
        return Float(value=math.inf)
    return Text(value=expr.id) if expr.id in ELEMENTS else expr


def _unary(expr: Unary, env: Env) -> Expr:
    operand = fold(expr.operand, env)
    if isinstance(operand, Int):
        value = operand.value
        return literal({"-": -value, "+": value, "~": ~value, "!": int(not value)}[expr.op])
    if isinstance(operand, Float) and expr.op in ("-", "+"):
        return literal(-operand.value if expr.op == "-" else operand.value)
    return expr if operand is expr.operand else Unary(op=expr.op, operand=operand, span=expr.span)


def _binary(expr: Binary, env: Env) -> Expr:
    left, right = fold(expr.left, env), fold(expr.right, env)
    return combine(expr.op, left, right, expr)


def combine(op: str, left: Expr, right: Expr, was: Binary | None = None) -> Expr:
    """Return `left op right` computed or simplified; `was` is given back if it is just that."""
    if isinstance(left, Int | Float) and isinstance(right, Int | Float):
        value = _compute(op, left.value, right.value)
        if value is not None:
            return literal(value)
    if op in ("==", "!=") and (left, right) == (NULL, NULL):
        return Int(value=int(op == "=="))
    if op in ("==", "!=") and isinstance(left, Text) and isinstance(right, Text):
        return Int(value=int((left.value == right.value) == (op == "==")))
    short = _identity(op, left, right)
    if short is not None:
        return short
    if was is not None and left is was.left and right is was.right:
        return was
    return Binary(op=op, left=left, right=right)


def _compute(op: str, left: float, right: float) -> float | None:
    """Return the value of `left op right`, None where it has none (division by zero, overflow)."""
    both_int = isinstance(left, int) and isinstance(right, int)
    try:
        if op in _COMPARE:
            return int(_COMPARE[op](left, right))
        if both_int and op in _INT_OPS:
            return _INT_OPS[op](left, right)
        return float(_REAL_OPS[op](left, right)) if op in _REAL_OPS else None
    except (ArithmeticError, ValueError):
        return None


def _identity(op: str, left: Expr, right: Expr) -> Expr | None:
    """Return the simpler form of an operation with one neutral or absorbing integer, else None."""
    a = left.value if isinstance(left, Int) else None
    b = right.value if isinstance(right, Int) else None
    if (op in ("+", "-") and b == 0) or (op in ("*", "//") and b == 1):
        return left
    if (op == "+" and a == 0) or (op == "*" and a == 1):
        return right
    if op == "*" and 0 in (a, b):
        return Int(value=0)
    if op in ("&&", "||") and a is not None:
        return right if bool(a) == (op == "&&") else Int(value=int(op == "||"))
    if op in ("+", "-") and b is not None:
        return _merge_offsets(op, left, b)
    return None


def _merge_offsets(op: str, left: Expr, amount: int) -> Expr | None:
    """Return `x + (c + amount)` for `(x + c) + amount`, a negative sum as a difference."""
    total = amount if op == "+" else -amount
    rest, found = left, False
    if isinstance(left, Binary) and left.op in ("+", "-") and isinstance(left.right, Int):
        total += left.right.value if left.op == "+" else -left.right.value
        rest, found = left.left, True
    if not found and amount > 0:
        return None
    if total == 0:
        return rest
    sign = "+" if total > 0 else "-"
    return Binary(op=sign, left=rest, right=Int(value=abs(total)))


def _ternary(expr: Ternary, env: Env) -> Expr:
    cond = fold(expr.cond, env)
    if isinstance(cond, Int):
        return fold(expr.then if cond.value else expr.other, env)
    then, other = fold(expr.then, env), fold(expr.other, env)
    if cond is expr.cond and then is expr.then and other is expr.other:
        return expr
    return Ternary(cond=cond, then=then, other=other, span=expr.span)


def _call(expr: Call, env: Env) -> Expr:
    args = _fold_all(expr.args, env)
    numbers = [arg.value for arg in args if isinstance(arg, Int | Float)]
    if len(numbers) == len(args) and numbers:
        value = _compute_call(expr.name, numbers)
        if value is not None:
            return literal(value)
    return expr if args is expr.args else Call(name=expr.name, args=args, span=expr.span)


def _compute_call(name: str, numbers: list[float]) -> float | None:
    try:
        if name in _REAL_CALLS:
            return float(_REAL_CALLS[name](float(numbers[0])))
        return _ANY_CALLS[name](*numbers) if name in _ANY_CALLS else None
    except (ArithmeticError, ValueError, TypeError):
        return None


def _fold_all(items: tuple[Expr, ...], env: Env) -> tuple[Expr, ...]:
    folded = tuple(fold(item, env) for item in items)
    same = all(new is old for new, old in zip(folded, items, strict=True))
    return items if same else folded


def _index(expr: Index, env: Env) -> Expr:
    base, indices = fold(expr.base, env), _fold_all(expr.indices, env)
    if base is expr.base and indices is expr.indices:
        return expr
    return Index(base=base, indices=indices, span=expr.span)


def _cast(expr: Cast, env: Env) -> Expr:
    type_, operand = fold_type(expr.type, env), fold(expr.operand, env)
    if isinstance(operand, Int | Float) and isinstance(type_, NamedType):
        if type_.name == "f32":
            return Float(value=float(operand.value))
        if type_.name == "i64" and math.isfinite(operand.value):
            return Int(value=int(operand.value))
    if type_ is expr.type and operand is expr.operand:
        return expr
    return Cast(type=type_, operand=operand, span=expr.span)


_FOLD: dict[type[Expr], Callable[[Any, Env], Expr]] = {
    Int: lambda expr, env: expr,
    Float: lambda expr, env: expr,
    Text: lambda expr, env: expr,
    Name: _name,
    Unary: _unary,
    Binary: _binary,
    Ternary: _ternary,
    Call: _call,
    Index: _index,
    Cast: _cast,
}
