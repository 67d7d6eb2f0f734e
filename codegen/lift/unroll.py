"""Loops of a kernel taken several turns at a time, vector sums with sums of their own for each.

In: a high-IR function. Out: the same with loops of UNROLL turns, then of one. Sums over vectors are
joined in another order then; a loop that counts down computes what it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dovetail.codegen.lift.emit import VL, call, negated, num, op
from dovetail.codegen.lift.loops import read_names
from dovetail.codegen.lift.types import Names
from dovetail.ir.expr import Binary, Call, Expr, Index, Int, Name
from dovetail.ir.high import nodes as high
from dovetail.ir.high.scopes import all_statements, defined_names, map_bodies
from dovetail.ir.node import Node, rewrite_node

UNROLL = "UNROLL"
CHOICES = (1, 2, 4, 8)
TUNABLE = high.Tunable(name=UNROLL, choices=CHOICES, default=1)
LEAVE = (high.Break(),)
LEAST = {">": 1, "!=": 1, ">=": 0}
"""A comparison to what, above its bound, it holds from on."""
JOINS = {"vadd": "vadd", "vfma": "vadd", "vfnma": "vadd", "vmax": "vmax", "vmin": "vmin"}
"""What a sum over lanes is made by, to what joins two of them."""


def unroll_kernel(kernel: high.Function) -> high.Function:
    """Return a kernel with loops unrolled where that is known to be right, and the tunable."""
    body = _each_loop(kernel.body, names_of(kernel))
    if body == kernel.body or any(t.name == UNROLL for t in kernel.tunables):
        return kernel
    return replace(kernel, body=body, tunables=(*kernel.tunables, TUNABLE))


def unroll_unit(unit: high.Unit) -> high.Unit:
    """Return a unit with its kernels unrolled."""
    made = (unroll_kernel(f) if f.kind == "kernel" else f for f in unit.functions)
    return replace(unit, functions=tuple(made))


def names_of(kernel: high.Function) -> Names:
    """Return the names that a kernel has, to find others."""
    taken = {*(p.name for p in kernel.params), *defined_names(kernel.body), *read_names([kernel])}
    return Names(dict.fromkeys(taken, ""))


def _each_loop(body: tuple[high.Stmt, ...], names: Names) -> tuple[high.Stmt, ...]:
    out: list[high.Stmt] = []
    for stmt in body:
        made = _unroll(stmt, names) if isinstance(stmt, high.For) else ()
        made = _unroll_count(stmt, names) if isinstance(stmt, high.While) else made
        out += made or (map_bodies(stmt, lambda inner: _each_loop(inner, names)),)
    return tuple(out)


# ---- loops that count down ----


def _unroll_count(loop: high.While, names: Names) -> tuple[high.Stmt, ...]:
    """Return a loop over vectors that a variable counts down, after one of UNROLL turns at a time.

    Nothing where it is no such loop, or a turn may leave it.
    """
    body, goes_on, kept = loop.body, loop.cond, 0
    if isinstance(last := body[-1], high.If) and (loop.cond, last.then) == (num(1), LEAVE):
        body, goes_on, kept = body[:-1], negated(last.cond), 1  # turns, if it asks after the first
    inner = all_statements(body)
    jumps = any(isinstance(s, high.While | high.Break | high.Continue | high.Return) for s in inner)
    loops = any(isinstance(s, high.For) and s.kind != "unroll" for s in inner)
    vectors = any(isinstance(n, Call) and n.name == "vload" for s in body for n in s.walk())
    if jumps or loops or not vectors or not isinstance(goes_on, Binary):
        return ()
    counter, least = goes_on.left, LEAST.get(goes_on.op)
    steps = [s for s in inner if isinstance(s, high.Assign) and s.target == counter]
    match goes_on.right, steps:
        case Int(value=bound), [high.Assign(op="-=", value=Int(value=step)) as only]:
            odd = goes_on.op == "!=" and bound != 0
            if least is None or odd or step < 1 or only not in body or type(counter) is not Name:
                return ()
            beyond = bound + least - (0 if kept else step)
            ahead = op("*", Name(id=UNROLL), num(step))
            ahead = op("+" if beyond >= 0 else "-", ahead, abs(beyond))
            enough = Binary(op=">=", left=counter, right=ahead)
            return (high.While(cond=enough, body=(_each(names.fresh("turn", "i64"), body),)), loop)
    return ()


# ---- loops over vectors ----


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
