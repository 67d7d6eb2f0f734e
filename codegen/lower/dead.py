"""Drop assignments to variables that nothing reads, as unrolled tiles and unused arguments leave them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from dovetail.ir.high.nodes import Assign, For, If, Local, Stmt
from dovetail.ir.high.scopes import Body, all_statements, child_bodies, defined_name, read_names


def drop_dead(body: Body) -> Body:
    """Return `body` without variables and loops that have no effect; expressions are pure."""
    while True:
        live = _live_names(body)
        smaller = _sweep(body, live)
        if smaller == body:
            return body
        body = smaller


def _live_names(body: Body) -> set[str]:
    live: Counter[str] = Counter()
    for stmt in all_statements(body):
        reads = read_names(stmt)
        name = defined_name(stmt)
        live.update(reads - {name} if name and isinstance(stmt, Assign) else reads)
    return set(live)


def _sweep(body: Body, live: set[str]) -> Body:
    out: list[Stmt] = []
    for stmt in body:
        name = defined_name(stmt)
        if name is not None and name not in live and isinstance(stmt, Assign | Local):
            continue
        if isinstance(stmt, If):
            stmt = replace(stmt, then=_sweep(stmt.then, live), other=_sweep(stmt.other, live))
            if not stmt.then and not stmt.other:
                continue
        elif isinstance(stmt, For):
            stmt = replace(stmt, body=_sweep(stmt.body, live))
            if not stmt.body:
                continue
        elif child_bodies(stmt):
            stmt = replace(stmt, body=_sweep(stmt.body, live))  # type: ignore[call-arg]
        out.append(stmt)
    return tuple(out)
