"""Where the variables of a function body live, and which of them are compile-time values.

Variables have function scope in the text. `find_homes` gives each the innermost block that can hold
its declaration; `find_constants` the names that a sequential walk over `unroll` loops and constant
`if`s can replace by values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

from dovetail.ir.expr import Call, Expr, Float, Index, Int, Name
from dovetail.ir.high.nodes import Assign, For, If, Local, Regs, Stmt, Text, While
from dovetail.ir.high.ops import CONSTANTS, ELEMENTS, FOLDABLE
from dovetail.ir.node import Node

Body = tuple[Stmt, ...]


def child_bodies(stmt: Stmt) -> tuple[Body, ...]:
    """Return the statement lists inside `stmt`."""
    if isinstance(stmt, If):
        return (stmt.then, stmt.other)
    if isinstance(stmt, (For, While)):
        return (stmt.body,)
    return ()


def map_bodies(stmt: Stmt, change: Callable[[Body], Body]) -> Stmt:
    """Return `stmt` with every statement list inside it changed."""
    if isinstance(stmt, If):
        then, other = change(stmt.then), change(stmt.other)
        same = then is stmt.then and other is stmt.other
        return stmt if same else replace(stmt, then=then, other=other)
    if not isinstance(stmt, (For, While)):
        return stmt
    body = change(stmt.body)
    return stmt if body is stmt.body else replace(stmt, body=body)


def all_statements(body: Body) -> list[Stmt]:
    """Return every statement of a body in text order, outer ones first."""
    found: list[Stmt] = []
    for stmt in body:
        found.append(stmt)
        for child in child_bodies(stmt):
            found += all_statements(child)
    return found


def defined_name(stmt: Stmt) -> str | None:
    """Return the variable that `stmt` itself gives a value, if any (loop variables apart)."""
    if isinstance(stmt, Assign) and isinstance(stmt.target, Name):
        return stmt.target.id
    return stmt.name if isinstance(stmt, (Regs, Local)) else None


def defined_names(body: Body) -> set[str]:
    """Return every variable given a value in `body`, loop variables included."""
    return _assigned(body) | {stmt.var for stmt in all_statements(body) if isinstance(stmt, For)}


def _assigned(body: Body) -> set[str]:
    return {name for stmt in all_statements(body) if (name := defined_name(stmt))}


def expressions(stmt: Stmt) -> Iterator[Expr]:
    """Yield the expressions evaluated by `stmt` itself, without those of statements inside it."""
    for child in stmt.children():
        if isinstance(child, Expr):
            yield child


def read_names(stmt: Stmt) -> frozenset[str]:
    """Return the names read by `stmt` itself."""
    if stmt.reads is None:
        object.__setattr__(stmt, "reads", frozenset(_read_names(stmt)))
    assert stmt.reads is not None
    return stmt.reads


def _read_names(stmt: Stmt) -> set[str]:
    names: set[str] = set()
    waiting: list[Node] = [*expressions(stmt)]
    if isinstance(stmt, Assign) and stmt.op == "=" and isinstance(stmt.target, Name):
        waiting = [stmt.value]  # which may be the target itself: `a = a`
    while waiting:
        node = waiting.pop()
        if isinstance(node, Name):
            names.add(node.id)
        elif not isinstance(node, Int):
            waiting += node.children()
    return names


# ---- homes ----


@dataclass(slots=True)
class _Block:
    """A block's names: used by its own statements, used below, read before assigned."""

    direct: set[str] = field(default_factory=set)
    children: list[tuple[Body, _Block]] = field(default_factory=list)
    below: set[str] = field(default_factory=set)
    exposed: set[str] = field(default_factory=set)
    assigned: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Homes:
    """For each body (by identity) the variables to declare there."""

    by_body: dict[int, set[str]]

    def of(self, body: Body) -> set[str]:
        """Return the variables that live in `body`."""
        return self.by_body.get(id(body), set())


def find_homes(body: Body) -> Homes:
    """Give each assigned variable the innermost blocks that hold its uses and pass no value out."""
    homes: dict[int, set[str]] = defaultdict(set)
    _settle(body, _scan(body), _assigned(body), homes)
    return Homes(dict(homes))


def _scan(body: Body) -> _Block:
    block = _Block()
    for stmt in body:
        reads, name = read_names(stmt), defined_name(stmt)
        block.exposed |= reads - block.assigned
        block.direct |= reads
        inner = [(child, _scan(child)) for child in child_bodies(stmt)]
        for _, scanned in inner:
            block.exposed |= scanned.exposed - block.assigned
        block.children += inner
        if isinstance(stmt, If):
            block.assigned |= inner[0][1].assigned & inner[1][1].assigned
        if name:
            block.direct.add(name)
            block.assigned.add(name)
    block.below = block.direct.union(*(child.below for _, child in block.children))
    return block


def _settle(body: Body, block: _Block, names: set[str], homes: dict[int, set[str]]) -> None:
    here = names & block.direct
    rest = names - here
    here |= rest.intersection(chain.from_iterable(child.exposed for _, child in block.children))
    homes[id(body)] |= here
    for child_body, child in block.children:
        inside = (rest - here) & child.below
        if inside:
            _settle(child_body, child, inside, homes)


# ---- compile-time values ----


def is_constant(expr: Expr, constants: Container[str], more: Container[str] = frozenset()) -> bool:
    """Tell whether `expr` has a compile-time value when `constants`, and `more`, have one."""
    if isinstance(expr, (Int, Float, Text)):
        return True
    if isinstance(expr, Name):
        name = expr.id
        return name in constants or name in more or name in CONSTANTS or name in ELEMENTS
    if isinstance(expr, Index) or (isinstance(expr, Call) and expr.name not in FOLDABLE):
        return False
    parts = [child for child in expr.children() if isinstance(child, Expr)]
    return all(is_constant(part, constants, more) for part in parts)


def find_constants(body: Body, known: Iterable[str], homes: Homes) -> set[str]:
    """Return `known` and the variables that are compile-time wherever they are assigned.

    Straight-line means: from the variable's home only `unroll` loops and `if`s on constants lie
    around.
    """
    loops = {stmt.var for stmt in all_statements(body) if isinstance(stmt, For)}
    found = (_assigned(body) | set(known)) - loops - _changed_first(body)
    while _drop_others(body, found, homes):
        pass
    return found


def _changed_first(body: Body) -> set[str]:
    """Return the names (parameters, then) whose first assignment changes the value they have."""
    first: dict[str, Stmt] = {}
    for stmt in all_statements(body):
        name = defined_name(stmt)
        if name is not None:
            first.setdefault(name, stmt)
    return {
        name
        for name, stmt in first.items()
        if isinstance(stmt, Assign) and (stmt.op != "=" or name in read_names(stmt))
    }


CONSTANT_TYPES = ("i64", "f32")
"""Annotations that do not keep a variable from being a compile-time value."""


def _drop_others(
    body: Body,
    constants: set[str],
    homes: Homes,
    straight: frozenset[str] = frozenset(),
    unrolled: frozenset[str] = frozenset(),
) -> bool:
    """Take out of `constants` what is assigned something else in `body`; tell if anything was.

    unrolled: variables of loops around it, which are compile-time values, too.
    """
    straight, dropped = straight | homes.of(body), False
    for stmt in body:
        name = defined_name(stmt)
        if name in constants and not (
            name in straight and _assigns_constant(stmt, constants, unrolled)
        ):
            constants.discard(name)
            dropped = True
        if not (bodies := child_bodies(stmt)):
            continue
        runs_straight, inside = False, unrolled
        if isinstance(stmt, If):
            runs_straight = is_constant(stmt.cond, constants, unrolled)
        elif isinstance(stmt, For):
            runs_straight = stmt.kind == "unroll"
            inside = unrolled | {stmt.var} if runs_straight else unrolled - {stmt.var}
        for child in bodies:
            around = straight if runs_straight else frozenset[str]()
            dropped |= _drop_others(child, constants, homes, around, inside)
    return dropped


def _assigns_constant(stmt: Stmt, constants: set[str], unrolled: frozenset[str]) -> bool:
    if not isinstance(stmt, Assign) or not is_constant(stmt.value, constants, unrolled):
        return False
    return stmt.type is None or getattr(stmt.type, "name", "") in CONSTANT_TYPES
