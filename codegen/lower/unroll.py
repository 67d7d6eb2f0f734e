"""Partial evaluation: `unroll` loops repeated, compile-time variables and `if`s resolved.

A body and the values of its tunables in; out a body whose tile indices and shapes are literals.
Each copy of an unrolled body gets variables of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dovetail.codegen.lower.fold import combine, fold, is_literal
from dovetail.codegen.lower.names import Names, rebuild
from dovetail.ir.errors import ScheduleError
from dovetail.ir.expr import Expr, Float, Int, Name, NamedType
from dovetail.ir.high import scopes
from dovetail.ir.high.nodes import Assign, For, If, Local, Regs, Stmt
from dovetail.ir.high.print import print_high

F32 = NamedType(name="f32")
MAX_STEPS = 4096
"""Most copies one `unroll` may make; more is a mistake in a bound."""


def unroll_body(body: scopes.Body, values: Mapping[str, Expr], names: Names) -> scopes.Body:
    """Return `body` with everything resolved that `values` of tunables and constants decide."""
    homes = scopes.find_homes(body)
    constants = scopes.find_constants(body, values, homes)
    return _Unroller(dict(values), constants, homes, names).body(body)


@dataclass(slots=True)
class _Unroller:
    env: dict[str, Expr]
    constants: set[str]
    homes: scopes.Homes
    names: Names

    def body(self, body: scopes.Body) -> scopes.Body:
        out: list[Stmt] = []
        for stmt in body:
            out += self.statement(stmt)
        return tuple(out)

    def statement(self, stmt: Stmt) -> scopes.Body:
        if isinstance(stmt, For):
            return self.unroll(stmt) if stmt.kind == "unroll" else self.loop(stmt)
        if isinstance(stmt, Assign) and scopes.defined_name(stmt) in self.constants:
            self.remember(stmt)
            return ()
        if isinstance(stmt, If):
            return self.branch(stmt)
        new = rebuild(stmt, self.env, self.body)
        if isinstance(new, Regs):
            sizes = [self.integer(item, stmt) for item in new.shape]
            new = replace(new, shape=tuple(Int(value=size) for size in sizes))
        if isinstance(new, Local):
            new = replace(new, size=Int(value=self.integer(new.size, stmt)))
        return (new,)

    def loop(self, stmt: For) -> scopes.Body:
        outer = self.env.pop(stmt.var, None)
        new: Any = rebuild(stmt, self.env, self.body)
        if outer is not None:
            self.env[stmt.var] = outer
        down = isinstance(new.step, Int) and new.step.value < 0
        known = isinstance(new.start, Int) and isinstance(new.stop, Int)
        empty = known and not range(new.start.value, new.stop.value, -1 if down else 1)
        return () if empty else (new,)

    def branch(self, stmt: If) -> scopes.Body:
        cond = fold(stmt.cond, self.env)
        if isinstance(cond, Int):
            return self.body(stmt.then if cond.value else stmt.other)
        then, other = self.body(stmt.then), self.body(stmt.other)
        if not then and not other:
            return ()
        return (If(cond=cond, then=then, other=other, span=stmt.span),)

    def remember(self, stmt: Assign) -> None:
        assert isinstance(stmt.target, Name)
        name, value = stmt.target.id, fold(stmt.value, self.env)
        if stmt.op != "=":
            value = combine(stmt.op[:-1], self.env[name], value)
        if stmt.type == F32 and isinstance(value, Int):
            value = Float(value=float(value.value))
        if not (is_literal(value) or value == Name(id="null")):
            raise ScheduleError(
                f"line {stmt.span.line}: `{print_high(value)}` has no compile-time value"
            )
        self.env[name] = value

    def unroll(self, stmt: For) -> scopes.Body:
        bounds = (fold(item, self.env) for item in (stmt.start, stmt.stop, stmt.step))
        start, stop, step = (self.integer(bound, stmt) for bound in bounds)
        if step == 0 or len(range(start, stop, step)) > MAX_STEPS:
            raise ScheduleError(
                f"line {stmt.span.line}: unroll({start}, {stop}, {step}) makes too many copies"
            )
        local = sorted(self.spliced(stmt.body) - self.constants)
        outer = {name: self.env[name] for name in (stmt.var, *local) if name in self.env}
        out: list[Stmt] = []
        for value in range(start, stop, step):
            self.env |= {name: Name(id=self.names.fresh(name)) for name in local}
            self.env[stmt.var] = Int(value=value)
            out += self.body(stmt.body)
        for name in (stmt.var, *local):
            self.env.pop(name, None)
        self.env |= outer
        return tuple(out)

    def spliced(self, body: scopes.Body) -> set[str]:
        """Return the variables that would meet in one block if copies of `body` stood in a row."""
        found = set(self.homes.of(body))
        for stmt in body:
            if isinstance(stmt, If):
                found = found.union(*(self.spliced(child) for child in scopes.child_bodies(stmt)))
        return found

    def integer(self, expr: Expr, stmt: Stmt) -> int:
        if isinstance(expr, Int):
            return expr.value
        raise ScheduleError(
            f"line {stmt.span.line}: `{print_high(expr)}` must be a compile-time integer"
        )
