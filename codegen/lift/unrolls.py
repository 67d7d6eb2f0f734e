"""Joins neighbouring unrolled loops over one group of vectors, as a person would write them.

In: statements of the high IR. Out: the same with fewer loops.
"""

from __future__ import annotations

from dataclasses import replace

from dovetail.codegen.lift.statements import Body
from dovetail.ir.expr import Call
from dovetail.ir.high import nodes as high
from dovetail.ir.high.scopes import map_bodies


def merge_unrolls(body: Body) -> Body:
    """Join neighbouring unrolled loops over one group; none that loads may follow a store."""
    out: list[high.Stmt] = []
    for stmt in map(_inside, body):
        last = out[-1] if out else None
        if (
            isinstance(stmt, high.For)
            and isinstance(last, high.For)
            and stmt.kind == last.kind == "unroll"
            and stmt.stop == last.stop
            and not (_calls(last, "vstore") and _calls(stmt, "vload"))
        ):
            out[-1] = replace(last, body=(*last.body, *stmt.body))
        else:
            out.append(stmt)
    return tuple(out)


def _inside(stmt: high.Stmt) -> high.Stmt:
    unrolled = isinstance(stmt, high.For) and stmt.kind == "unroll"
    return stmt if unrolled else map_bodies(stmt, merge_unrolls)


def _calls(stmt: high.Stmt, name: str) -> bool:
    return any(isinstance(n, Call) and n.name == name for n in stmt.walk())
