"""Patterns of expressions: terms of a sum, an address on its base, a maximum; vector loops."""

from __future__ import annotations

from dovetail.codegen.lift.emit import call, num
from dovetail.ir.expr import Binary, Call, Expr, Float, Name
from dovetail.ir.high import nodes as high

IDENTITY = {"add": 0.0, "max": float("-inf"), "min": float("inf")}


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


def extreme_of(cond: Expr, value: Expr, target: Expr) -> str | None:
    """Return `max` if `cond` asks whether `value` is above `target`, `min` if below."""
    if not isinstance(cond, Binary) or cond.op not in ("<", ">", "<=", ">="):
        return None
    if (cond.left, cond.right) == (value, target):
        return "max" if cond.op[0] == ">" else "min"
    if (cond.left, cond.right) == (target, value):
        return "min" if cond.op[0] == ">" else "max"
    return None


def vector_loop(var: str, start: Expr, stop: Expr, body: tuple[high.Stmt, ...]) -> high.For:
    """Return a `vrange` over single elements."""
    return high.For(kind="vrange", var=var, start=start, stop=stop, step=num(1), body=body)


def join_term(kind: str, acc: Name, term: Expr, zero_tail: bool) -> Expr:
    """Return `acc` with a vector joined; `zero_tail`: its lanes past the end are 0."""
    if kind == "add" and zero_tail:
        if isinstance(term, Call) and term.name == "vmul":
            return call("vfma", *term.args, acc)
        return call("vadd", acc, term)
    kept = call("vtail", term, Float(value=IDENTITY[kind]))
    return call("vadd", acc, kept) if kind == "add" else call(f"v{kind}", kept, acc)
