"""Expand calls of @inline functions: a kernel that calls them in, one body without such calls out.

Locals of an expanded body get fresh names. Compile-time, tile, pointer and vector arguments that
are plain names stand in for their parameters; others are computed once into a typed local.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

from dovetail.codegen.lower.fold import fold_type
from dovetail.codegen.lower.names import Names, rebuild_body
from dovetail.ir import expr as ex
from dovetail.ir.errors import ScheduleError
from dovetail.ir.high import nodes as high
from dovetail.ir.high.scopes import Body, all_statements, defined_names

I64 = ex.NamedType(name="i64")
BY_NAME = ("const", "dtype", "tile")
"""Parameter types whose argument replaces the parameter as it stands."""


@dataclass(slots=True)
class _Expander:
    functions: dict[str, high.Function]
    names: Names
    types: dict[str, ex.Type]  # of parameters, typed copies and plain integers
    active: list[str]

    def body(self, body: Body) -> Body:
        out: list[high.Stmt] = []
        for stmt in body:
            out += self.statement(stmt)
        return tuple(out)

    def statement(self, stmt: high.Stmt) -> list[high.Stmt]:
        before: list[high.Stmt] = []
        if isinstance(stmt, high.ExprStmt) and isinstance(stmt.expr, ex.Call):
            if stmt.expr.name in self.functions:
                self.call(stmt.expr, before)
                return before
        if isinstance(stmt, high.If):
            cond = self.expr(stmt.cond, before)
            then, other = self.body(stmt.then), self.body(stmt.other)
            return [*before, high.If(cond=cond, then=then, other=other, span=stmt.span)]
        if isinstance(stmt, high.While):
            return [self.loop(stmt)]
        new: Any = stmt.map_children(
            lambda child: self.expr(child, before) if isinstance(child, ex.Expr) else child
        )
        if isinstance(new, high.For):
            self.types[new.var] = I64
            new = replace(new, body=self.body(new.body))
        if isinstance(new, high.Assign) and isinstance(new.target, ex.Name):
            self.learn(new.target.id, new)
        return [*before, new]

    def learn(self, name: str, stmt: high.Assign) -> None:
        """Note the type of a variable where it is plain: annotated, or an integer made of such."""
        if stmt.type is not None:
            self.types[name] = stmt.type
        elif name not in self.types and self.is_i64(stmt.value):
            self.types[name] = I64

    def is_i64(self, expr: ex.Expr) -> bool:
        if isinstance(expr, ex.Name):
            return expr.id == "VL" or self.types.get(expr.id) == I64
        if isinstance(expr, ex.Int):
            return True
        if isinstance(expr, ex.Binary):
            arithmetic = expr.op in ("+", "-", "*", "//", "%")
            return arithmetic and self.is_i64(expr.left) and self.is_i64(expr.right)
        if isinstance(expr, ex.Call):
            return expr.name in ("min", "max") and all(self.is_i64(arg) for arg in expr.args)
        if isinstance(expr, ex.Ternary):
            return self.is_i64(expr.then) and self.is_i64(expr.other)
        return isinstance(expr, ex.Cast) and expr.type == I64

    def loop(self, stmt: high.While) -> high.Stmt:
        """A condition that needs statements moves to the top of an endless loop's body."""
        before: list[high.Stmt] = []
        cond, body = self.expr(stmt.cond, before), self.body(stmt.body)
        if not before:
            return high.While(cond=cond, body=body, span=stmt.span)
        leave = high.If(cond=ex.Unary(op="!", operand=cond), then=(high.Break(),))
        return high.While(cond=ex.Int(value=1), body=(*before, leave, *body), span=stmt.span)

    def expr(self, expr: ex.Expr, before: list[high.Stmt]) -> Any:
        """Return `expr` without inline calls; what they compute first is appended to `before`."""
        if isinstance(expr, (ex.Name, ex.Int)):
            return expr
        if isinstance(expr, ex.Binary):
            if expr.op in ("&&", "||"):
                return self.short_circuit(expr, before)
            left, right = self.in_order((expr.left, expr.right), before)
            if left is expr.left and right is expr.right:
                return expr
            return ex.Binary(op=expr.op, left=left, right=right, span=expr.span)
        if isinstance(expr, ex.Ternary):
            return self.ternary(expr, before)
        if isinstance(expr, ex.Call):
            args = self.in_order(expr.args, before)
            if any(map(operator.is_not, args, expr.args)):
                expr = ex.Call(name=expr.name, args=args, span=expr.span)
            return self.call(expr, before) if expr.name in self.functions else expr
        return expr.map_children(
            lambda child: self.expr(child, before) if isinstance(child, ex.Expr) else child
        )

    def in_order(self, items: tuple[ex.Expr, ...], before: list[high.Stmt]) -> tuple[ex.Expr, ...]:
        """Expand operands in order; one that reads memory is kept before a later one writes."""
        done: list[ex.Expr] = []
        for item in items:
            start = len(before)
            new = self.expr(item, before)
            if done and any(_writes(stmt) for stmt in before[start:]):
                for i, earlier in enumerate(done):
                    if _reads_memory(earlier):
                        kept = ex.Name(id=self.names.fresh("kept"))
                        before.insert(start, high.Assign(target=kept, value=earlier))
                        done[i] = kept
                        start += 1
            done.append(new)
        return tuple(done)

    def short_circuit(self, expr: ex.Binary, before: list[high.Stmt]) -> ex.Expr:
        """What the right side computes first runs only where the left side lets it."""
        inside: list[high.Stmt] = []
        left, right = self.expr(expr.left, before), self.expr(expr.right, inside)
        if not inside:
            return replace(expr, left=left, right=right)
        test = ex.Name(id=self.names.fresh("test"))
        goes_on = test if expr.op == "&&" else ex.Unary(op="!", operand=test)
        inside.append(high.Assign(target=test, value=right))
        before += [high.Assign(target=test, value=left), high.If(cond=goes_on, then=tuple(inside))]
        return test

    def ternary(self, expr: ex.Ternary, before: list[high.Stmt]) -> ex.Expr:
        """What an arm computes first runs only where that arm is chosen."""
        cond = self.expr(expr.cond, before)
        sides: tuple[list[high.Stmt], list[high.Stmt]] = ([], [])
        then, other = self.expr(expr.then, sides[0]), self.expr(expr.other, sides[1])
        if not any(sides):
            return replace(expr, cond=cond, then=then, other=other)
        chosen = ex.Name(id=self.names.fresh("chosen"))
        arms = [
            (*side, high.Assign(target=chosen, value=value))
            for side, value in zip(sides, (then, other), strict=True)
        ]
        # the arm written first gives the variable its type
        if isinstance(then, (ex.Int, ex.Float)):
            cond, arms = ex.Unary(op="!", operand=cond), arms[::-1]
        before.append(high.If(cond=cond, then=arms[0], other=arms[1]))
        return chosen

    def call(self, call: ex.Call, before: list[high.Stmt]) -> ex.Expr | None:
        """Append the expanded body of `call` to `before` and return its result."""
        function = self.functions[call.name]
        if call.name in self.active:
            raise ScheduleError(
                f"`{call.name}` calls itself; @inline functions cannot be recursive"
            )
        env, copies = self.bind(function, call)
        before += copies
        self.active.append(call.name)
        body = self.body(rebuild_body(function.body, env))
        self.active.pop()
        if body and isinstance(body[-1], high.Return):
            before += body[:-1]
            return body[-1].value
        before += body
        return None

    def bind(
        self, function: high.Function, call: ex.Call
    ) -> tuple[dict[str, ex.Expr], list[high.Stmt]]:
        """Return what parameters and locals are called here, and the copies of arguments."""
        inner = defined_names(function.body)
        pairs = list(zip(function.params, call.args, strict=True))
        locals_ = sorted(inner - {param.name for param in function.params})
        env: dict[str, ex.Expr] = {name: ex.Name(id=self.names.fresh(name)) for name in locals_}
        env |= {param.name: arg for param, arg in pairs if _by_name(param.type)}
        copies: list[high.Stmt] = []
        for param, arg in (pair for pair in pairs if not _by_name(pair[0].type)):
            type_ = fold_type(param.type, env)
            if param.name not in inner and self.stands(type_, arg):
                env[param.name] = _as_type(type_, arg)
                continue
            local = ex.Name(id=self.names.fresh(param.name))
            self.types[local.id] = type_
            env[param.name] = local
            copies.append(high.Assign(target=local, value=arg, type=type_, span=call.span))
        return env, copies

    def stands(self, type_: ex.Type, arg: ex.Expr) -> bool:
        """Tell whether `arg` can stand for a parameter of `type_` wherever it is used."""
        if isinstance(arg, (ex.Int, ex.Float, high.Text)):
            return True
        if not isinstance(arg, ex.Name):
            return False
        passive = isinstance(type_, ex.PointerType) or str(getattr(type_, "name", "")).startswith(
            "vec"
        )
        return passive or arg.id in ("null", "inf", "VL") or self.types.get(arg.id) == type_


def _writes(stmt: high.Stmt) -> bool:
    """Tell whether `stmt` changes memory or a register tile."""
    return any(
        isinstance(inner, high.ExprStmt)
        or (isinstance(inner, high.Assign) and isinstance(inner.target, ex.Index))
        for inner in all_statements((stmt,))
    )


def _reads_memory(expr: ex.Expr) -> bool:
    return any(isinstance(node, (ex.Index, ex.Call)) for node in expr.walk())


def _by_name(type_: ex.Type) -> bool:
    return isinstance(type_, ex.NamedType) and type_.name in BY_NAME


def _as_type(type_: ex.Type, arg: ex.Expr) -> ex.Expr:
    wants_real = isinstance(type_, ex.NamedType) and type_.name in ("f32", "f64")
    return ex.Float(value=float(arg.value)) if wants_real and isinstance(arg, ex.Int) else arg


def expand_calls(unit: high.Unit, kernel: high.Function, names: Names) -> high.Function:
    """Return `kernel` with every call of an @inline function of `unit` expanded in place."""
    functions = {f.name: f for f in unit.functions if f.kind == "inline"}
    types = {p.name: p.type for p in kernel.params}
    expander = _Expander(functions, names, types, [])
    return replace(kernel, body=expander.body(kernel.body))
