"""Expand register tiles: `acc[1, 0]` becomes the scalar variable `acc_1_0`.

Compilers keep arrays of vectors in memory; named vectors live in registers.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from dovetail.codegen.lower.names import Names
from dovetail.ir.errors import ScheduleError
from dovetail.ir.expr import Call, Expr, Index, Int, Name
from dovetail.ir.high.nodes import Assign, Regs, Stmt
from dovetail.ir.high.print import print_high
from dovetail.ir.high.scopes import Body
from dovetail.ir.node import Node

ZERO: dict[str, Expr] = {
    "f32": Call(name="vzero", args=()),
    "i32": Call(name="vbroadcast_i32", args=(Int(value=0),)),
}


def expand_tiles(body: Body, names: Names) -> Body:
    """Return `body` without tiles; raises ScheduleError for an index outside its tile."""
    tiles: dict[str, dict[tuple[int, ...], Name]] = {}
    out: list[Stmt] = []
    for stmt in body:
        out += _statement(stmt, tiles, names)
    return tuple(out)


def _statement(stmt: Stmt, tiles: dict[str, Any], names: Names) -> tuple[Stmt, ...]:
    if isinstance(stmt, Regs):
        return _declare(stmt, tiles, names)
    new = stmt.map_children(lambda child: _child(child, tiles, names))
    return (new,)


def _child(node: Node, tiles: dict[str, Any], names: Names) -> Node | tuple[Node, ...]:
    if isinstance(node, Stmt):
        return _statement(node, tiles, names)
    if isinstance(node, Index) and isinstance(node.base, Name) and node.base.id in tiles:
        return _element(node, tiles[node.base.id])
    return node.map_children(lambda child: _child(child, tiles, names))


def _declare(stmt: Regs, tiles: dict[str, Any], names: Names) -> tuple[Stmt, ...]:
    counts = [item.value for item in stmt.shape if isinstance(item, Int)]
    places = list(product(*(range(count) for count in counts)))
    cells = {at: Name(id=names.fresh("_".join([stmt.name, *map(str, at)]))) for at in places}
    tiles[stmt.name] = cells
    zero = ZERO[stmt.elem]
    return tuple(Assign(target=cell, value=zero, span=stmt.span) for cell in cells.values())


def _element(node: Index, cells: dict[tuple[int, ...], Name]) -> Name:
    at = tuple(item.value for item in node.indices if isinstance(item, Int))
    if len(at) == len(node.indices) and at in cells:
        return cells[at]
    raise ScheduleError(f"line {node.span.line}: `{print_high(node)}` lies outside its tile")
