"""Joins neighbouring unrolled loops over one group of vectors, as a person would write them.

In: statements of the high IR. Out: the same with fewer loops.
"""

from __future__ import annotations

from dovetail.codegen.lift.statements import Body
from dovetail.ir.expr import Call
from dovetail.ir.high import nodes as high


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
            out[-1] = _joined(last, stmt)
        else:
            out.append(stmt)
    return tuple(out)


def _joined(first: high.For, second: high.For) -> high.For:
    return high.For(
        kind=first.kind,
        var=first.var,
        start=first.start,
        stop=first.stop,
        step=first.step,
        body=(*first.body, *second.body),
    )


def _inside(stmt: high.Stmt) -> high.Stmt:
    if isinstance(stmt, high.If):
        then, other = merge_unrolls(stmt.then), merge_unrolls(stmt.other)
        return high.If(cond=stmt.cond, then=then, other=other)
    if isinstance(stmt, high.While):
        return high.While(cond=stmt.cond, body=merge_unrolls(stmt.body))
    if isinstance(stmt, high.For) and stmt.kind != "unroll":
        made = merge_unrolls(stmt.body)
        return high.For(
            kind=stmt.kind,
            var=stmt.var,
            start=stmt.start,
            stop=stmt.stop,
            step=stmt.step,
            body=made,
        )
    return stmt


def _calls(stmt: high.Stmt, name: str) -> bool:
    return any(isinstance(n, Call) and n.name == name for n in stmt.walk())
