"""Counted loops and the facts about a loop body that decide whether it may be rewritten.

In: low statements. Out: a `Counted` loop, sets of names assigned, read and stored through.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dovetail.ir.expr import Binary, Call, Expr, Index, Int, Name, Unary
from dovetail.ir.low import nodes as low
from dovetail.ir.node import Node


@dataclass(frozen=True, slots=True)
class Counted:
    """`for (var = start; var < stop; var += step)`, `var` its own where `owned`."""

    var: str
    start: Expr
    stop: Expr
    step: Expr
    body: low.Block
    owned: bool


def counted(loop: low.For) -> Counted | None:
    """Return the loop in counted form, None where its count is not known on entry."""
    begun = beginning(loop)
    if begun is None or loop.cond is None or loop.step is None:
        return None
    var, start, owned = begun
    stepped = advance(loop.step)
    if stepped is None or stepped[0] != var:
        return None
    stop = _stop(loop.cond, var, stepped[1])
    if stop is None:
        return None
    changed = assigned_names([loop.body])
    if var in changed or not steady(stop, changed) or not steady(stepped[1], changed):
        return None
    return Counted(var, start, stop, stepped[1], loop.body, owned)


def beginning(loop: low.For) -> tuple[str, Expr, bool] | None:
    """Return the variable that a loop gives a value first, the value, and whether it is its own."""
    if len(loop.init) != 1:
        return None
    first = loop.init[0]
    if isinstance(first, low.Declare) and first.init is not None:
        return first.name, first.init, True
    if isinstance(first, low.ExprStmt) and isinstance(first.expr, low.Assign):
        target = first.expr.target
        if first.expr.op == "=" and isinstance(target, Name):
            return target.id, first.expr.value, False
    return None


def advance(step: Expr) -> tuple[str, Expr] | None:
    """Return the variable and the amount of `i++`, `i += k`, `i -= k` or `i = i + k`."""
    if isinstance(step, low.Step) and isinstance(step.target, Name):
        return step.target.id, Int(value=1 if step.op == "++" else -1)
    if not isinstance(step, low.Assign) or not isinstance(step.target, Name):
        return None
    name, value = step.target.id, step.value
    if step.op == "+=":
        return name, value
    if step.op == "-=":
        minus = Int(value=-value.value) if isinstance(value, Int) else Unary(op="-", operand=value)
        return name, minus
    if step.op == "=" and isinstance(value, Binary):
        return (name, value.right) if (value.op, value.left) == ("+", step.target) else None
    return None


def _stop(cond: Expr, var: str, step: Expr) -> Expr | None:
    if not isinstance(cond, Binary) or cond.left != Name(id=var):
        return None
    up = not (isinstance(step, Unary) or (isinstance(step, Int) and step.value < 0))
    one = Int(value=1)
    if cond.op == ("<" if up else ">") or (cond.op == "!=" and step in (one, Int(value=-1))):
        return cond.right
    if cond.op == ("<=" if up else ">="):
        return Binary(op="+" if up else "-", left=cond.right, right=one)
    return None


def assigned_names(nodes: Iterable[Node]) -> set[str]:
    """Return the variables that are assigned, stepped or declared anywhere in `nodes`."""
    found: set[str] = set()
    for root in nodes:
        for node in root.walk():
            if isinstance(node, low.Assign | low.Step) and isinstance(node.target, Name):
                found.add(node.target.id)
            elif isinstance(node, low.Declare):
                found.add(node.name)
    return found


def read_names(nodes: Iterable[Node]) -> set[str]:
    """Return every name that occurs in `nodes`."""
    return {n.id for root in nodes for n in root.walk() if isinstance(n, Name)}


def read_first(body: Iterable[Node]) -> set[str]:
    """Return the names that statements read before one of them gives them a value."""
    found: set[str] = set()
    given: set[str] = set()
    for stmt in body:
        name, reads = "", [stmt]
        if isinstance(stmt, low.Declare):
            name, reads = stmt.name, stmt.children()
        elif isinstance(stmt, low.ExprStmt) and isinstance(stmt.expr, low.Assign):
            target = stmt.expr.target
            if stmt.expr.op == "=" and isinstance(target, Name):
                name, reads = target.id, [stmt.expr.value]
        found |= read_names(reads) - given
        given.add(name)
    return found


def steady(expr: Expr, changed: set[str]) -> bool:
    """Whether `expr` keeps its value while the names `changed` and memory change."""
    return not any(
        isinstance(n, Index | Call | low.Member | low.Assign | low.Step)
        or (isinstance(n, Unary) and n.op == "*")
        or (isinstance(n, Name) and n.id in changed)
        for n in expr.walk()
    )
