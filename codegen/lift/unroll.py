"""Vector loops of a kernel taken several vectors at a time, with sums of their own for each.

In: the body of a high-IR function. Out: the same with loops over UNROLL vectors, then one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dovetail.codegen.lift.emit import VL, call, num, op
from dovetail.codegen.lift.loops import read_names
from dovetail.codegen.lift.types import Names
from dovetail.ir.expr import Binary, Call, Expr, Index, Name
from dovetail.ir.high import nodes as high
from dovetail.ir.high.scopes import defined_names, map_bodies
from dovetail.ir.node import Node
from dovetail.ir.rewrite import rewrite_node

UNROLL = "UNROLL"
CHOICES = (1, 2, 4, 8)
TUNABLE = high.Tunable(name=UNROLL, choices=CHOICES, default=1)
JOINS = {"vadd": "vadd", "vfma": "vadd", "vfnma": "vadd", "vmax": "vmax", "vmin": "vmin"}
"""What a sum over lanes is made by, to what joins two of them."""


def unroll_vectors(kernel: high.Function) -> tuple[high.Stmt, ...]:
    """Return a kernel's body with vector loops unrolled where that is known to be right."""
    taken = {*(p.name for p in kernel.params), *defined_names(kernel.body), *read_names([kernel])}
    return _each_loop(kernel.body, Names(dict.fromkeys(taken, "")))


def _each_loop(body: tuple[high.Stmt, ...], names: Names) -> tuple[high.Stmt, ...]:
    out: list[high.Stmt] = []
    for stmt in body:
        made = _unroll(stmt, names) if isinstance(stmt, high.For) else ()
        out += made or (map_bodies(stmt, lambda inner: _each_loop(inner, names)),)
    return tuple(out)


def _unroll(loop: high.For, names: Names) -> tuple[high.Stmt, ...]:
    """Return the unrolled loop, nothing where its body is more than a line of assignments."""
    plain = all(isinstance(s, high.Assign | high.ExprStmt) for s in loop.body)
    sums = _sums(loop.body) if loop.kind == "vrange" and plain else None
    if sums is None:
        return ()
    u, full, var = (names.fresh(name, "i64") for name in ("u", "full", loop.var))
    tiles = {name: names.fresh(f"{name}_u", "tile") for name in sums}
    step = op("*", Name(id=UNROLL), VL)
    whole = op("*", Binary(op="//", left=op("-", loop.stop, loop.start), right=step), step)
    out: list[high.Stmt] = []
    for name, tile in tiles.items():
        start = call("vzero") if sums[name] == "vadd" else Name(id=name)
        out.append(high.Regs(name=tile, shape=(Name(id=UNROLL),), elem="f32"))
        out.append(_each(u, (high.Assign(target=_cell(tile, u), value=start),)))
    moved = op("+", Name(id=var), op("*", Name(id=u), VL))
    renamed: dict[str, Expr] = {loop.var: moved, **{n: _cell(t, u) for n, t in tiles.items()}}
    body = tuple(_renamed(stmt, renamed) for stmt in loop.body)
    out.append(high.Assign(target=Name(id=full), value=op("+", loop.start, whole)))
    main = (_each(u, body),)
    stop = Name(id=full)
    out.append(high.For(kind="range", var=var, start=loop.start, stop=stop, step=step, body=main))
    for name, tile in tiles.items():
        joined = call(sums[name], Name(id=name), _cell(tile, u))
        out.append(_each(u, (high.Assign(target=Name(id=name), value=joined),)))
    return (*out, replace(loop, start=Name(id=full)))


def _sums(body: Sequence[high.Stmt]) -> dict[str, str] | None:
    """Return the variables that go on from turn to turn, by what joins them; None if unknown."""
    assigned = [s.target.id for s in body if isinstance(s, high.Assign) and type(s.target) is Name]
    carried: dict[str, None] = {}  # in order, for the text to be the same each time
    known: set[str] = set()
    for stmt in body:
        carried |= dict.fromkeys(n for n in _read(stmt) if n in assigned and n not in known)
        if isinstance(stmt, high.Assign) and isinstance(stmt.target, Name):
            known.add(stmt.target.id)
    found: dict[str, str] = {}
    for name in carried:
        made = [s for s in body if isinstance(s, high.Assign) and s.target == Name(id=name)]
        reads = sum(list(_read(stmt)).count(name) for stmt in body)
        value = made[0].value
        if len(made) > 1 or reads > 1 or made[0].op != "=" or not isinstance(value, Call):
            return None
        ends = value.args[-1:] if value.name in ("vfma", "vfnma") else value.args
        if value.name not in JOINS or Name(id=name) not in ends:
            return None
        found[name] = JOINS[value.name]
    return found


def _read(stmt: high.Stmt) -> list[str]:
    """Return the names that a statement reads, each time that it does."""
    roots: list[Node] = [stmt.expr] if isinstance(stmt, high.ExprStmt) else []
    if isinstance(stmt, high.Assign):
        roots = [stmt.value, *(() if isinstance(stmt.target, Name) else (stmt.target,))]
        roots += [stmt.target] if stmt.op != "=" else []
    return [n.id for root in roots for n in root.walk() if isinstance(n, Name)]


def _renamed(stmt: high.Stmt, names: dict[str, Expr]) -> high.Stmt:
    """Return a statement with names replaced, and whole vectors in the place of their tails."""
    made = rewrite_node(
        stmt,
        [
            (Name, lambda node: names.get(node.id)),
            (Call, lambda node: node.args[0] if node.name == "vtail" else None),
        ],
    )
    assert isinstance(made, high.Stmt)
    return made


def _each(var: str, body: tuple[high.Stmt, ...]) -> high.For:
    return high.For(
        kind="unroll", var=var, start=num(0), stop=Name(id=UNROLL), step=num(1), body=body
    )


def _cell(tile: str, u: str) -> Index:
    return Index(base=Name(id=tile), indices=(Name(id=u),))
