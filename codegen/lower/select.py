"""Select instructions for statements: a flat, bound high-IR body in, a low-IR function out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dovetail.codegen.isa.target import Target
from dovetail.codegen.lower.names import Names
from dovetail.codegen.lower.select_expr import ExprSelector, fit
from dovetail.ir import expr as ex
from dovetail.ir.expr import ArrayType, Call, Cast, Expr, Index, Int, Name, NamedType, Ternary
from dovetail.ir.high import nodes as high
from dovetail.ir.high.nodes import Assign, ExprStmt, Stmt
from dovetail.ir.high.print import print_high
from dovetail.ir.high.rules import is_pointer, settled
from dovetail.ir.high.scopes import Body, all_statements, defined_name, defined_names, find_homes
from dovetail.ir.low import nodes as low
from dovetail.ir.node import Node


def select(function: high.Function, target: Target, names: Names, name: str) -> low.Function:
    """Return the C function `name` of a body without tunables, tiles, inline calls and `vrange`."""
    types = {p.name: print_high(p.type) for p in function.params}
    written = written_pointers(function.body)
    exprs = ExprSelector(target, names, types, written)
    homes = find_homes(function.body)
    counts = Counter(defined_name(stmt) for stmt in all_statements(function.body))
    shares = Counter(item for block in homes.by_body.values() for item in block)
    selector = _Selector(exprs, homes.by_body, set(types), counts, shares)
    params = tuple(
        low.Param(type=exprs.c_type(types[p.name], written=p.name in written), name=p.name)
        for p in function.params
    )
    body = low.Block(body=selector.body(function.body))
    return low.Function(name=name, returns=NamedType(name="void"), params=params, body=body)


@dataclass(slots=True)
class _Selector:
    exprs: ExprSelector
    homes: dict[int, set[str]]
    declared: set[str]
    counts: Counter[str | None]  # assignments of each variable in the function
    shares: Counter[str]  # blocks that declare a variable of the name
    once: set[str] = field(default_factory=set)  # assigned only where they are declared

    def body(self, body: Body) -> tuple[low.Stmt, ...]:
        here = self.homes.get(id(body), set()) - self.declared
        out: list[low.Stmt] = []
        waiting = set(here)
        self.once = (self.once - here) | self._assigned_once(body, here)
        for stmt in body:
            waiting -= self.declare_ahead(stmt, waiting, out)
            made = self.statement(stmt, waiting)
            waiting.discard(defined_name(stmt) or "")
            out += self.exprs.before
            self.exprs.before.clear()
            out += made
        return tuple(out)

    def _assigned_once(self, body: Body, here: set[str]) -> set[str]:
        """Return the variables of this block that are assigned only where they are declared."""
        once = {name for name in here if self.counts[name] == 1}
        shared = {name for name in here - once if self.shares[name] > 1}  # one name, several homes
        if shared:
            counts = Counter(defined_name(stmt) for stmt in all_statements(body))
            once |= {name for name in shared if counts[name] == 1}
        return once

    def block(self, body: Body) -> low.Block:
        outer, self.exprs.before = self.exprs.before, []
        block = low.Block(body=self.body(body))
        self.exprs.before = outer
        return block

    def declare_ahead(self, stmt: high.Stmt, waiting: set[str], out: list[low.Stmt]) -> set[str]:
        """Declare variables of this block whose first assignment lies deeper, inside `stmt`."""
        if not (waiting and isinstance(stmt, (high.If, high.For, high.While))):
            return set()
        inner = sorted(waiting & defined_names((stmt,)))
        for name in inner:
            type_ = self.first_type(stmt, name)
            self.exprs.types[name] = type_
            out.append(low.Declare(type=self.variable_type(name, type_, const=False), name=name))
        return set(inner)

    def first_type(self, stmt: high.Stmt, name: str) -> str:
        """Return the type that `name` gets first in `stmt`, learning others on the way."""
        for inner in all_statements((stmt,)):
            if isinstance(inner, high.For):
                if inner.var == name:
                    return "i64"
                self.exprs.types.setdefault(inner.var, "i64")
            made = defined_name(inner)
            if made is None:
                continue
            type_ = self.assigned_type(inner)
            if made == name:
                return type_
            self.exprs.types.setdefault(made, type_)
        raise AssertionError(f"{name} is never assigned")

    def assigned_type(self, stmt: high.Stmt) -> str:
        if isinstance(stmt, high.Local):
            return f"ptr[{stmt.elem}]"
        assert isinstance(stmt, high.Assign)
        if stmt.type is not None:
            return print_high(stmt.type)
        before = len(self.exprs.before)
        type_ = settled(self.exprs.expr(stmt.value)[1])
        del self.exprs.before[before:]
        return type_

    def variable_type(self, name: str, type_: str, *, const: bool) -> ex.Type:
        if is_pointer(type_):
            return self.exprs.c_type(type_, written=name in self.exprs.written)
        return self.exprs.c_type(type_, const=const)

    # ---- statements ----

    def statement(self, stmt: high.Stmt, waiting: set[str]) -> list[low.Stmt]:
        if isinstance(stmt, high.Assign):
            return [self.assign(stmt, waiting)]
        if isinstance(stmt, high.Local):
            return [self.local(stmt)]
        return _STATEMENTS[type(stmt)](self, stmt)

    def assign(self, stmt: high.Assign, waiting: set[str]) -> low.Stmt:
        target = stmt.target
        if isinstance(target, Name) and target.id in waiting:
            return self.declare(target.id, stmt)
        place, type_ = self.exprs.expr(target)
        value = self.exprs.value(stmt.value, type_)
        op = "/=" if stmt.op == "//=" else stmt.op
        if isinstance(place, ex.Index):
            return low.ExprStmt(expr=self.exprs.put(place, type_, op, value))
        return low.ExprStmt(expr=low.Assign(op=op, target=place, value=value))

    def declare(self, name: str, stmt: high.Assign) -> low.Stmt:
        made, value_type = self.exprs.expr(stmt.value)
        type_ = print_high(stmt.type) if stmt.type else settled(value_type)
        self.exprs.types[name] = type_
        c_type = self.variable_type(name, type_, const=name in self.once)
        return low.Declare(type=c_type, name=name, init=fit(made, value_type, type_))

    def local(self, stmt: high.Local) -> low.Stmt:
        self.exprs.types[stmt.name] = f"ptr[{stmt.elem}]"
        array = ArrayType(of=self.exprs.c_type(stmt.elem), size=stmt.size)
        return low.Declare(type=array, name=stmt.name)

    def loop(self, stmt: high.For) -> list[low.Stmt]:
        var = Name(id=stmt.var)
        outer = self.exprs.types.get(stmt.var)
        start = self.exprs.value(stmt.start, "i64")
        stop = self.exprs.value(stmt.stop, "i64")
        out: list[low.Stmt] = []
        if not _steady(stmt.stop, defined_names(stmt.body)):
            stop = self.hold(stop, f"{stmt.var}_stop")
        step = self.exprs.value(stmt.step, "i64")
        down = isinstance(step, ex.Unary)
        self.exprs.types[stmt.var] = "i64"
        init = low.Declare(type=NamedType(name="int64_t"), name=stmt.var, init=start)
        body = self.block(stmt.body)
        cond = ex.Binary(op=">" if down else "<", left=var, right=stop)
        out.append(low.For(init=(init,), cond=cond, step=_advance(var, step), body=body))
        if outer is not None:
            self.exprs.types[stmt.var] = outer
        return out

    def hold(self, made: Expr, base: str) -> Name:
        name = self.exprs.names.fresh(base)
        type_ = NamedType(name="int64_t", const=True)
        self.exprs.before.append(low.Declare(type=type_, name=name, init=made))
        return Name(id=name)

    def branch(self, stmt: high.If) -> list[low.Stmt]:
        cond, _ = self.exprs.expr(stmt.cond)
        then = self.block(stmt.then)
        other = self.block(stmt.other) if stmt.other else None
        return [low.If(cond=cond, then=then, other=other)]

    def repeat(self, stmt: high.While) -> list[low.Stmt]:
        self.exprs.guarded += 1
        cond, _ = self.exprs.expr(stmt.cond)
        self.exprs.guarded -= 1
        return [low.While(cond=cond, body=self.block(stmt.body))]

    def effect(self, stmt: high.ExprStmt) -> list[low.Stmt]:
        return [low.ExprStmt(expr=self.exprs.expr(stmt.expr)[0])]


def _advance(var: Name, step: Expr) -> Expr:
    if step == Int(value=1):
        return low.Step(op="++", target=var, prefix=True)
    if isinstance(step, ex.Unary):
        return low.Assign(op="-=", target=var, value=step.operand)
    return low.Assign(op="+=", target=var, value=step)


def _steady(stop: Expr, assigned: set[str]) -> bool:
    """Tell whether a loop's bound stays: no loads, calls or names assigned in the body."""
    return not any(
        isinstance(node, (ex.Index, ex.Call)) or (isinstance(node, Name) and node.id in assigned)
        for node in stop.walk()
    )


_STATEMENTS: dict[type[Node], Callable[[_Selector, Any], list[low.Stmt]]] = {
    high.For: _Selector.loop,
    high.If: _Selector.branch,
    high.While: _Selector.repeat,
    high.ExprStmt: _Selector.effect,
    high.Return: lambda selector, stmt: [low.Return()],
    high.Break: lambda selector, stmt: [low.Break()],
    high.Continue: lambda selector, stmt: [low.Continue()],
}


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
    if isinstance(expr, (Call, Index)):
        return set()
    if isinstance(expr, Ternary):
        return _roots(expr.then) | _roots(expr.other)
    if isinstance(expr, Cast):
        return _roots(expr.operand)
    parts = (child for child in expr.children() if isinstance(child, Expr))
    return set().union(*(_roots(part) for part in parts))
