"""Check the statements of one high-IR function: flow, assignments, loops, tiles, returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dovetail.ir.diagnostics import Span
from dovetail.ir.expr import Index
from dovetail.ir.high import nodes as high
from dovetail.ir.high import rules
from dovetail.ir.high.check_expr import ExprChecker
from dovetail.ir.high.ops import ELEMENTS, OPS, SCALARS, VECTORS
from dovetail.ir.high.print import print_high
from dovetail.ir.high.scopes import Body

TILE_ELEMENTS = ("f32", "i32")


@dataclass(slots=True)
class BodyChecker:
    """Walks a body in order. `fixed` are names that cannot be assigned, with what they are."""

    function: high.Function
    exprs: ExprChecker
    fixed: dict[str, str]
    loops: list[str] = field(default_factory=list)
    loop_names: set[str] = field(default_factory=set)
    returned: str = "void"

    def body(self, body: Body) -> bool:
        """Check statements in order; tell whether the end of the body can be reached."""
        reachable = True
        for stmt in body:
            if not reachable:
                self.fault("high-unreachable", "this is never executed", stmt.span)
                return False
            reachable = _CHECK[type(stmt)](self, stmt)
        return reachable

    def fault(self, code: str, message: str, span: Span, hint: str | None = None) -> None:
        """Record a fault."""
        self.exprs.faults.add(code, message, span, hint)

    # ---- assignments ----

    def _assign(self, stmt: high.Assign) -> bool:
        if isinstance(stmt.target, Index):
            self._assign_element(stmt, stmt.target)
        elif stmt.op == "=":
            self._assign_name(stmt, stmt.target.id)
        else:
            self._augment(stmt, self.exprs.value(stmt.target))
            self._check_target(stmt.target.id, stmt.span)
        return True

    def _assign_element(self, stmt: high.Assign, target: Index) -> None:
        type_ = self.exprs.type_of(target)
        if stmt.op != "=":
            self._augment(stmt, type_)
        elif type_ != rules.UNKNOWN:
            self.exprs.wanted(stmt.value, type_, "the value stored")

    def _assign_name(self, stmt: high.Assign, name: str) -> None:
        scope = self.exprs.scope
        value = self.exprs.value(stmt.value)
        if stmt.type is not None:
            self._declare(stmt, name, value)
        elif self._check_target(name, stmt.target.span):
            fresh = value if name in scope.constants else rules.settled(value)
            known = scope.types.setdefault(name, fresh)
            if known == rules.UNKNOWN or (name in scope.constants and known == "int"):
                scope.types[name] = fresh
            elif not rules.assignable(known, value):
                self.fault(
                    "high-type-change",
                    f"`{name}` is {known} and cannot become {value}",
                    stmt.value.span,
                    "use another name, or cast",
                )
        scope.assigned.add(name)

    def _declare(self, stmt: high.Assign, name: str, value: str) -> None:
        assert stmt.type is not None
        type_ = print_high(stmt.type)
        self.exprs.check_type(type_, stmt.type.span, (*SCALARS, *VECTORS))
        if not self._check_target(name, stmt.target.span):
            return
        if not rules.assignable(type_, value):
            message = f"a {value} cannot be stored in `{name}: {type_}`"
            self.fault("high-type-mismatch", message, stmt.value.span, f"use cast({type_}, ...)")
        self._settle(name, type_, stmt.span)

    def _check_target(self, name: str, span: Span) -> bool:
        """Tell whether `name` may be assigned."""
        what = "a loop variable" if name in self.loop_names else self.fixed.get(name)
        if what is None and (name in OPS or name in ELEMENTS):
            what = "a word of the language"
        if what:
            self.fault(
                "high-bad-assignment",
                f"`{name}` is {what}; it cannot be assigned",
                span,
                "rename it",
            )
        return what is None

    def _augment(self, stmt: high.Assign, target: str) -> None:
        value = self.exprs.value(stmt.value)
        try:
            result = rules.binary_type(stmt.op[:-1], target, value)
        except rules.TypeFault as fault:
            self.fault(fault.code, fault.message, stmt.span, fault.hint)
            return
        if not rules.assignable(target, result):
            message = f"`{stmt.op}` gives {result}, which does not fit {target}"
            self.fault("high-type-mismatch", message, stmt.span, f"use cast({target}, ...)")

    # ---- tiles and arrays ----

    def _regs(self, stmt: high.Regs) -> bool:
        for item in stmt.shape:
            self.exprs.constant(item, "the shape of a register tile")
        if stmt.elem not in TILE_ELEMENTS:
            message = f"register tiles hold f32 or i32, not {stmt.elem}"
            self.fault("high-unknown-type", message, stmt.span)
        self.exprs.scope.ranks[stmt.name] = len(stmt.shape)
        return self._define(stmt.name, f"tile[{stmt.elem}]", stmt.span)

    def _local(self, stmt: high.Local) -> bool:
        self.exprs.constant(stmt.size, "the size of a local array")
        self.exprs.check_type(f"ptr[{stmt.elem}]", stmt.span, ())
        return self._define(stmt.name, f"ptr[{stmt.elem}]", stmt.span)

    def _define(self, name: str, type_: str, span: Span) -> bool:
        if self._check_target(name, span):
            self._settle(name, type_, span)
        self.exprs.scope.assigned.add(name)
        return True

    def _settle(self, name: str, type_: str, span: Span) -> None:
        """Give a variable its type, which cannot change."""
        known = self.exprs.scope.types.setdefault(name, type_)
        if known != type_:
            message = f"`{name}` is {known} and cannot become {type_}"
            self.fault("high-type-change", message, span, "use another name")

    # ---- control flow ----

    def _branch(self, stmt: high.If) -> bool:
        scope = self.exprs.scope
        self._condition(stmt)
        before = set(scope.assigned)
        then_ends = self.body(stmt.then)
        after_then = scope.assigned
        scope.assigned = set(before)
        other_ends = self.body(stmt.other)
        if then_ends and other_ends:
            scope.assigned &= after_then
        elif then_ends:
            scope.assigned = after_then
        return then_ends or other_ends

    def _condition(self, stmt: high.If | high.While) -> None:
        try:
            rules.check_condition(self.exprs.value(stmt.cond))
        except rules.TypeFault as fault:
            self.fault(fault.code, fault.message, stmt.cond.span, fault.hint)

    def _repeat(self, stmt: high.While) -> bool:
        self._condition(stmt)
        self._inside("while", stmt.body)
        return True

    def _loop(self, stmt: high.For) -> bool:
        for bound, what in ((stmt.start, "start"), (stmt.stop, "stop"), (stmt.step, "step")):
            check = self.exprs.constant if stmt.kind == "unroll" else self.exprs.integer
            check(bound, f"the {what} of {stmt.kind}")
        scope = self.exprs.scope
        if stmt.kind == "vrange" and scope.in_vrange:
            self.fault("high-nested-vrange", "vrange loops cannot be nested", stmt.span)
        self._check_loop_name(stmt)
        known = scope.types.get(stmt.var)
        outer = scope.in_vrange, scope.constants, self.loop_names
        own, unrolled = {stmt.var}, stmt.kind == "unroll"
        self.loop_names = self.loop_names | own
        scope.types[stmt.var] = "int" if unrolled else "i64"
        scope.constants = scope.constants | own if unrolled else scope.constants - own
        scope.in_vrange = scope.in_vrange or stmt.kind == "vrange"
        self._inside(stmt.kind, stmt.body, stmt.var)
        scope.in_vrange, scope.constants, self.loop_names = outer
        if known is not None:
            scope.types[stmt.var] = known
        return True

    def _check_loop_name(self, stmt: high.For) -> None:
        taken = stmt.var in self.exprs.scope.assigned or stmt.var in self.loop_names
        if taken or stmt.var in self.fixed:
            self.fault(
                "high-loop-variable",
                f"`{stmt.var}` is in use; a loop needs a variable of its own",
                Span(stmt.span.line, stmt.span.column, stmt.span.line, stmt.span.column + 3),
                "rename the loop variable",
            )

    def _inside(self, kind: str, body: Body, *names: str) -> None:
        """Check a loop's body: what it assigns may not have happened once the loop is over."""
        scope = self.exprs.scope
        before = set(scope.assigned)
        scope.assigned |= set(names)
        self.loops.append(kind)
        self.body(body)
        self.loops.pop()
        scope.assigned = before

    def _leave(self, stmt: high.Break | high.Continue) -> bool:
        word = "break" if isinstance(stmt, high.Break) else "continue"
        if not self.loops or self.loops[-1] not in ("range", "while"):
            where = f"inside {self.loops[-1]}" if self.loops else "outside a loop"
            hint = "only range and while loops can be left"
            self.fault("high-break-position", f"`{word}` {where}", stmt.span, hint)
        return False

    def _give_back(self, stmt: high.Return) -> bool:
        kernel = self.function.kind == "kernel"
        if kernel and stmt.value is not None:
            hint = "store results through pointers"
            self.fault("high-kernel-return", "a kernel returns no value", stmt.span, hint)
        if not kernel and stmt is not self.function.body[-1]:
            self.fault(
                "high-return-position",
                "an @inline function returns only at its end",
                stmt.span,
                "assign the result on each way and return it in the last line",
            )
        if kernel and any(kind in ("vrange", "unroll") for kind in self.loops[-1:]):
            message = f"`return` inside {self.loops[-1]}"
            self.fault("high-return-position", message, stmt.span, "use a condition")
        if stmt.value is not None:
            self.returned = rules.settled(self.exprs.value(stmt.value))
            if self.function.returns is not None:
                self.exprs.wanted(stmt.value, print_high(self.function.returns), "the result")
        return False

    def _effect(self, stmt: high.ExprStmt) -> bool:
        type_ = self.exprs.type_of(stmt.expr)
        inline = getattr(stmt.expr, "name", "") in self.exprs.functions
        if type_ not in ("void", rules.UNKNOWN) and not inline:
            self.fault("high-unused-value", "this value is thrown away", stmt.span, "assign it")
        return True


_CHECK: dict[type[high.Stmt], Callable[[BodyChecker, Any], bool]] = {
    high.Assign: BodyChecker._assign,
    high.Regs: BodyChecker._regs,
    high.Local: BodyChecker._local,
    high.If: BodyChecker._branch,
    high.While: BodyChecker._repeat,
    high.For: BodyChecker._loop,
    high.Break: BodyChecker._leave,
    high.Continue: BodyChecker._leave,
    high.Return: BodyChecker._give_back,
    high.ExprStmt: BodyChecker._effect,
}
