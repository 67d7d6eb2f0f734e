"""Patterns of scalar expressions: terms of a sum, an address on its base, a maximum in an `if`."""

from __future__ import annotations

from dovetail.ir.expr import Binary, Expr, Name


def join_address(base: str, offset: Expr) -> Expr:
    """Return `base` with the terms of `offset` added one by one, from the left."""
    if isinstance(offset, Binary) and offset.op == "+":
        return Binary(op="+", left=join_address(base, offset.left), right=offset.right)
    return Binary(op="+", left=Name(id=base), right=offset)


def terms_of(expr: Expr, sign: int = 1) -> list[tuple[Expr, int]]:
    """Return the terms of a sum, each with its sign, 1 or -1."""
    if isinstance(expr, Binary) and expr.op in ("+", "-"):
        right = sign if expr.op == "+" else -sign
        return [*terms_of(expr.left, sign), *terms_of(expr.right, right)]
    return [(expr, sign)]


def names_in(expr: Expr) -> set[str]:
    """Return the names that an expression reads."""
    return {n.id for n in expr.walk() if isinstance(n, Name)}


def extreme_of(cond: Expr, value: Expr, target: Expr) -> str | None:
    """Return `max` if `cond` asks whether `value` is above `target`, `min` if below."""
    if not isinstance(cond, Binary) or cond.op not in ("<", ">", "<=", ">="):
        return None
    if (cond.left, cond.right) == (value, target):
        return "max" if cond.op[0] == ">" else "min"
    if (cond.left, cond.right) == (target, value):
        return "min" if cond.op[0] == ">" else "max"
    return None
