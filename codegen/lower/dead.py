"""Drop assignments without effect, as unrolled tiles and unused arguments leave them.

Goes in: a bound body without tiles; comes out: the body without variables that nothing reads,
without values that are overwritten before they are read, and without empty loops and branches.
"""

from __future__ import annotations

from dovetail.ir.high.nodes import Assign, For, If, Local, Stmt
from dovetail.ir.high.scopes import Body, child_bodies, defined_name, map_bodies, read_names


def drop_dead(body: Body) -> Body:
    """Return `body` without statements that change nothing; all expressions are pure."""
    body, _ = _drop_overwritten(body)
    while True:
        live: set[str] = set()
        _add_live(body, live)
        smaller = _sweep(body, live)
        if smaller == body:
            return body
        body = smaller


def _add_live(body: Body, live: set[str]) -> None:
    for stmt in body:
        name = defined_name(stmt) if isinstance(stmt, Assign) else None
        live |= read_names(stmt) - {name}
        for child in child_bodies(stmt):
            _add_live(child, live)


def _sweep(body: Body, live: set[str]) -> Body:
    kept = (_shrink(stmt, live) for stmt in body)
    return tuple(stmt for stmt in kept if stmt is not None)


def _shrink(stmt: Stmt, live: set[str]) -> Stmt | None:
    """Return what is left of `stmt`, None if nothing is."""
    if isinstance(stmt, (Assign, Local)):
        name = defined_name(stmt)
        return stmt if name is None or name in live else None
    swept = map_bodies(stmt, lambda body: _sweep(body, live))
    return None if isinstance(stmt, (If, For)) and not any(child_bodies(swept)) else swept


def _drop_overwritten(body: Body) -> tuple[Body, set[str]]:
    """Drop values that the same block replaces unread; also return all names in `body`."""
    out: list[Stmt | None] = []
    pending: dict[str, int] = {}
    seen: set[str] = set()
    for stmt in body:
        new, inside = _inside(stmt)
        used = read_names(stmt) | inside
        for read in used & pending.keys():
            del pending[read]
        name = defined_name(stmt)
        if isinstance(stmt, Assign) and stmt.op == "=" and name is not None:
            if name in pending:
                out[pending[name]] = None
            pending[name] = len(out)
        seen |= used | ({name} if name else set())
        out.append(new)
    return tuple(stmt for stmt in out if stmt is not None), seen


def _inside(stmt: Stmt) -> tuple[Stmt, set[str]]:
    """Return `stmt` with its bodies cleaned, and the names they mention."""
    names: set[str] = set()

    def clean(body: Body) -> Body:
        cleaned, mentioned = _drop_overwritten(body)
        names.update(mentioned)
        return cleaned

    return map_bodies(stmt, clean), names
