"""Which pointers a kernel writes through: the others become pointers to const."""

from __future__ import annotations

from dovetail.ir.expr import Call, Cast, Expr, Index, Name, Ternary
from dovetail.ir.high.nodes import Assign, ExprStmt, Stmt
from dovetail.ir.high.scopes import Body, all_statements

STORES = (
    "vstore",
    "vstore_i32",
    "vstore_i8",
    "store",
    "vreduce_add4",
    "vreduce_add16",
    "tile_dots",
)


def written_pointers(body: Body) -> set[str]:
    """Return the variables through which, or through pointers made from them, memory is written."""
    sources: dict[str, set[str]] = {}
    written: set[str] = set()
    for stmt in all_statements(body):
        written |= _stored(stmt)
        if isinstance(stmt, Assign) and isinstance(stmt.target, Name):
            sources.setdefault(stmt.target.id, set()).update(_roots(stmt.value))
    waiting = list(written)
    while waiting:
        for root in sources.get(waiting.pop(), set()) - written:
            written.add(root)
            waiting.append(root)
    return written


def _stored(stmt: Stmt) -> set[str]:
    if isinstance(stmt, Assign) and isinstance(stmt.target, Index):
        return _roots(stmt.target.base)
    if isinstance(stmt, ExprStmt) and isinstance(stmt.expr, Call) and stmt.expr.name in STORES:
        return _roots(stmt.expr.args[0])
    return set()


def _roots(expr: Expr) -> set[str]:
    """Return the names that may be the base of an address; indices of loads are no part of it."""
    if isinstance(expr, Name):
        return {expr.id}
    if isinstance(expr, Call | Index):
        return set()
    if isinstance(expr, Ternary):
        return _roots(expr.then) | _roots(expr.other)
    if isinstance(expr, Cast):
        return _roots(expr.operand)
    parts = (child for child in expr.children() if isinstance(child, Expr))
    return set().union(*(_roots(part) for part in parts))
