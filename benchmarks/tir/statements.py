"""Statements of the high IR in TensorIR: a flat, bound function in, a PrimFunc out.

Every variable is a buffer of one value, which LLVM turns into a register; addresses are int64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tvm import tirx as tir
from tvm.ir import PrimType

from dovetail.ir import expr as ex
from dovetail.ir.errors import ScheduleError
from dovetail.ir.expr import Binary, Call, Index, Int
from dovetail.ir.high import nodes as high
from dovetail.ir.high.print import print_high
from dovetail.ir.high.rules import element, is_pointer, settled
from dovetail.ir.high.scopes import Body, defined_names
from tir.expressions import Expressions
from tir.values import SIZES, STORED, Tir, dtype_of, each, fit, number

STACK_BYTES = 1024
"""The largest array that TVM keeps on the stack."""


def make_prim_func(function: high.Function, lanes: int, name: str) -> Tir:
    """Return the PrimFunc of a function without tunables, tiles, inline calls and `vrange`.

    Its parameters are the kernel's, in order, pointers as int64 addresses.
    """
    params, types = [], {}
    for param in function.params:
        types[param.name] = print_high(param.type)
        params.append(tir.Var(param.name, PrimType(dtype_of(types[param.name], lanes))))
    given: dict[str, Tir] = {p.name: v for p, v in zip(function.params, params, strict=True)}
    builder = _Statements(Expressions(lanes, given, types))
    changed = defined_names(function.body) & set(given)
    start = [builder.keep(name, given[name]) for name in sorted(changed)]
    body = builder.body(function.body)
    whole = each([*builder.declared, *start, *body])
    return tir.PrimFunc(params, whole).with_attr("global_symbol", name)


@dataclass(slots=True)
class _Statements:
    exprs: Expressions
    declared: list[Tir] = field(default_factory=list)
    slots: dict[tuple[str, str], Tir] = field(default_factory=dict)

    def keep(self, name: str, value: Tir) -> Tir:
        """Return the statement that makes a parameter that is changed a variable."""
        return tir.BufferStore(self.slot(name, self.exprs.types[name]), value, [0])

    def slot(self, name: str, type_: str) -> Tir:
        """Return the buffer of a variable, which may have a type of its own in each block."""
        if (name, type_) not in self.slots:
            dtype = dtype_of(type_, self.exprs.lanes)
            buffer = tir.decl_buffer((1,), dtype, name)
            self.slots[name, type_] = buffer
            self.declared.append(tir.AllocBuffer(buffer))
        self.exprs.types[name] = type_
        self.exprs.variables[name] = self.slots[name, type_]
        return self.slots[name, type_]

    def body(self, body: Body) -> list[Tir]:
        outer, self.exprs.before = self.exprs.before, []
        out: list[Tir] = []
        for stmt in body:
            made = _STATEMENTS[type(stmt)](self, stmt)
            out += self.exprs.before
            self.exprs.before.clear()
            out += made
        self.exprs.before = outer
        return out

    def assign(self, stmt: high.Assign) -> list[Tir]:
        value = stmt.value
        if stmt.op != "=":
            value = Binary(op=stmt.op[:-1], left=stmt.target, right=value)
        if isinstance(stmt.target, Index):
            base, at = self.exprs.expr(stmt.target.base), stmt.target.indices[0]
            where = self.exprs.expr(Binary(op="+", left=stmt.target.base, right=at)).expr
            elem = element(base.type)
            return [self.exprs.store(where, elem, self.exprs.value(value, elem), elem, None)]
        made = self.exprs.expr(value)
        type_ = print_high(stmt.type) if stmt.type else settled(made.type)
        known = self.exprs.types.get(stmt.target.id)
        if stmt.type is None and known is not None and _holds(known, type_):
            type_ = known
        kept = fit(made, type_)
        if type_ == "bool":
            kept = tir.Cast("int32", kept)
        return [tir.BufferStore(self.slot(stmt.target.id, type_), kept, [0])]

    def local(self, stmt: high.Local) -> list[Tir]:
        assert isinstance(stmt.size, Int)
        if stmt.size.value * SIZES[stmt.elem] > STACK_BYTES:
            raise ScheduleError(
                f"`{stmt.name}` takes {stmt.size.value * SIZES[stmt.elem]} bytes; the TIR backend "
                f"keeps at most {STACK_BYTES} of a local array: use the C backend"
            )
        buffer = tir.decl_buffer((stmt.size.value,), STORED[stmt.elem], stmt.name)
        self.declared.append(tir.AllocBuffer(buffer))
        address = tir.reinterpret("int64", tir.address_of(tir.BufferLoad(buffer, [0])))
        return [tir.BufferStore(self.slot(stmt.name, f"ptr[{stmt.elem}]"), address, [0])]

    def branch(self, stmt: high.If) -> list[Tir]:
        cond = self.exprs.value(stmt.cond, "bool")
        then = each(self.body(stmt.then))
        other = each(self.body(stmt.other)) if stmt.other else None
        return [tir.IfThenElse(cond, then, other)]

    def loop(self, stmt: high.For) -> list[Tir]:
        """A counted loop from 0, so that its variable may step by more than one, or down."""
        bounds = (self.exprs.value(item, "i64") for item in (stmt.start, stmt.stop, stmt.step))
        start, stop, step = (self.exprs.once(bound, "int64") for bound in bounds)
        down = isinstance(stmt.step, ex.Unary) or getattr(stmt.step, "value", 1) < 0
        distance = start - stop if down else stop - start
        size = -step if down else step
        count = tir.truncdiv(distance + size - number(1, "int64"), size)
        outer = self.exprs.variables.get(stmt.var), self.exprs.types.get(stmt.var)
        turn = tir.Var(f"{stmt.var}_turn", PrimType("int64"))
        variable = tir.Var(stmt.var, PrimType("int64"))
        self.exprs.variables[stmt.var], self.exprs.types[stmt.var] = variable, "i64"
        body = [tir.Bind(variable, start + turn * step), *self.body(stmt.body)]
        if outer[0] is not None and outer[1] is not None:
            self.exprs.variables[stmt.var], self.exprs.types[stmt.var] = outer[0], outer[1]
        zero = number(0, "int64")
        extent = tir.Max(count, zero)
        return [tir.For(turn, zero, extent, tir.ForKind.SERIAL, each(body))]

    def repeat(self, stmt: high.While) -> list[Tir]:
        """The condition is part of the body: what it needs first is computed each time."""
        leave = high.If(cond=ex.Unary(op="!", operand=stmt.cond), then=(high.Break(),))
        body = self.body((leave, *stmt.body))
        return [tir.While(tir.const(True, "bool"), each(body))]

    def effect(self, stmt: high.ExprStmt) -> list[Tir]:
        assert isinstance(stmt.expr, Call)
        return [self.exprs.effect(stmt.expr)]


def _holds(known: str, type_: str) -> bool:
    """Tell whether a variable of type `known` takes a `type_`: a literal, null, an integer."""
    if is_pointer(known):
        return type_ in ("null", known)
    return (
        known == type_ or (known in SIZES and type_ in SIZES) or (known, type_) == ("i32", "bool")
    )


_STATEMENTS: dict[type[high.Stmt], Callable[[_Statements, Any], list[Tir]]] = {
    high.Assign: _Statements.assign,
    high.Local: _Statements.local,
    high.If: _Statements.branch,
    high.For: _Statements.loop,
    high.While: _Statements.repeat,
    high.ExprStmt: _Statements.effect,
    high.Return: lambda self, stmt: [tir.Return(number(0, "int32"))],
    high.Break: lambda self, stmt: [tir.Evaluate(tir.break_loop())],
    high.Continue: lambda self, stmt: [tir.Evaluate(tir.continue_loop())],
}
