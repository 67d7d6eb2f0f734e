"""Statements and functions to closures: a compiled function takes its arguments and runs.

In: low-IR functions. Out: `CompiledFunction`s; every local has a slot in the frame of its call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dovetail.ir.diagnostics import Span
from dovetail.ir.expr import ArrayType, Expr, Int, Name, Type, Unary
from dovetail.ir.low import nodes as low
from dovetail.ir.low.types import unqualified
from tests.codegen.interp.expressions import Environment, Expressions, Local
from tests.codegen.interp.memory import Memory, Pointer
from tests.codegen.interp.operators import Frame, Run
from tests.codegen.interp.values import InterpretError, Layouts, storer, undefined

BREAK, CONTINUE = object(), object()
"""What a statement yields when it leaves a loop or goes on with its next round."""


@dataclass(frozen=True, slots=True)
class Returned:
    """What a statement yields when the function returns."""

    value: Any


Execute = Callable[[Frame], Any]
"""A compiled statement: None to go on, BREAK, CONTINUE, or Returned."""


class CompiledFunction:
    """A function that is compiled when it is first called."""

    def __init__(self, function: low.Function, environment: Environment) -> None:
        self.function = function
        self._environment = environment
        self._compiled: tuple[Execute, list[Local]] | None = None
        self._body = Body(function, environment)

    def __call__(self, *args: Any) -> Any:
        """Run with arguments already converted to the parameters' types."""
        if self._compiled is None:
            self._compiled = self._body.compile()
        execute, params = self._compiled
        frame: Frame = [None] * self._body.slots
        for local, value in zip(params, args, strict=True):
            if local.in_memory:
                frame[local.slot] = reserve(self._environment.layouts, local.type, "a parameter")
                storer(local.type)(frame[local.slot], value)
            else:
                frame[local.slot] = value
        result = execute(frame)
        return result.value if isinstance(result, Returned) else None


def reserve(layouts: Layouts, type_: Type, name: str) -> Pointer:
    """Return new memory for a value of `type_`, all bits set: reads of it give NaN or -1."""
    return Pointer(Memory(name, np.full(layouts.size(type_), 0xFF, np.uint8)))


class Body:
    """Compiles one function: variables by block, statements in order."""

    def __init__(self, function: low.Function, outer: Environment) -> None:
        self.layouts = outer.layouts
        self._outer = outer
        self._function = function
        self._scopes: list[dict[str, Local]] = [{}]
        self.slots = 0
        self._addressed = addressed_names(function)
        self._expressions = Expressions(self)

    def compile(self) -> tuple[Execute, list[Local]]:
        """Return the body and the parameters."""
        params = [self._declare(p.name, unqualified(p.type)) for p in self._function.params]
        execute = self.block(self._function.body)
        return execute, params

    # ---- the environment ----

    def variable(self, name: str) -> Local | None:
        """Return the innermost variable of that name."""
        return next((scope[name] for scope in reversed(self._scopes) if name in scope), None)

    def table(self, name: str) -> tuple[Type, Pointer] | None:
        """Return a static table of the unit."""
        return self._outer.table(name)

    def constant(self, name: str) -> int | None:
        """Return an integer constant of the target's headers."""
        return self._outer.constant(name)

    def callee(self, name: str, span: Span) -> tuple[tuple[Type | None, ...], Type, Any]:
        """Return parameter types, result type and function of a name."""
        return self._outer.callee(name, span)

    def _declare(self, name: str, type_: Type) -> Local:
        in_memory = isinstance(type_, ArrayType) or self.layouts.of(type_) is not None
        local = Local(self.slots, type_, in_memory or name in self._addressed)
        self.slots += 1
        self._scopes[-1][name] = local
        return local

    # ---- statements ----

    def statement(self, node: low.Stmt) -> Execute:
        """Return a compiled statement."""
        rule = _RULES.get(type(node))
        if rule is None:
            raise InterpretError(f"{type(node).__name__} is not interpreted here", node.span)
        return rule(self, node)

    def block(self, node: low.Block) -> Execute:
        """Return the statements of a block, in a scope of their own."""
        self._scopes.append({})
        steps = [self.statement(s) for s in node.body if not isinstance(s, low.Pragma)]
        self._scopes.pop()
        return sequence(steps)

    def later(self, node: low.Block) -> Execute:
        """Return a block that is compiled when it is first run, as most of a kernel's never are."""
        scopes, made = [dict(scope) for scope in self._scopes], None

        def execute(frame: Frame) -> Any:
            nonlocal made
            if made is None:
                outer, self._scopes = self._scopes, scopes
                made = self.block(node)
                self._scopes = outer
            frame.extend([None] * (self.slots - len(frame)))
            return made(frame)

        return execute

    def declare(self, node: low.Declare) -> Execute:
        """Return a declaration: memory or a slot, then its initialiser."""
        type_ = node.type
        initial = node.init
        if isinstance(initial, low.InitList):
            type_ = sized(type_, initial)
        local = self._declare(node.name, type_)
        if not local.in_memory:
            return self._declare_slot(local, initial)
        slot, layouts, name = local.slot, self.layouts, node.name
        fill = self.initialise(local, initial) if initial is not None else None

        def execute(frame: Frame) -> None:
            frame[slot] = reserve(layouts, type_, name)
            if fill is not None:
                fill(frame)

        return execute

    def _declare_slot(self, local: Local, initial: Expr | None) -> Execute:
        slot, type_ = local.slot, unqualified(local.type)
        nothing = undefined(type_)
        run: Run = (
            self._expressions.convert(initial, type_)
            if initial is not None
            else lambda frame: nothing
        )

        def execute(frame: Frame) -> None:
            frame[slot] = run(frame)

        return execute

    def initialise(self, local: Local, initial: Expr) -> Run:
        """Return the code that writes an initialiser to a variable in memory."""
        writes = list(self._writes(local.type, initial, 0))
        slot, size = local.slot, self.layouts.size(local.type)
        zero = isinstance(initial, low.InitList)

        def fill(frame: Frame) -> None:
            start = frame[slot]
            if zero:
                start.store(np.zeros(size, np.uint8))
            for offset, put, run in writes:
                put(start.advance(offset), run(frame))

        return fill

    def _writes(
        self, type_: Type, initial: Expr, offset: int
    ) -> Iterable[tuple[int, Callable[[Pointer, Any], None], Run]]:
        """Yield the offset, store and value of every scalar an initialiser gives."""
        if not isinstance(initial, low.InitList):
            run = self._expressions.convert(initial, unqualified(type_))
            yield offset, storer(unqualified(type_)), run
            return
        for position, item in enumerate(initial.items):
            at, kind = self._part(type_, position, initial.span)
            yield from self._writes(kind, item, offset + at)

    def _part(self, type_: Type, position: int, span: Span) -> tuple[int, Type]:
        """Return the offset and type of one element or field."""
        if isinstance(type_, ArrayType):
            return position * self.layouts.size(type_.of), type_.of
        layout = self.layouts.of(type_)
        if layout is None or position >= len(layout.fields):
            raise InterpretError("there are more initialisers than places", span)
        return list(layout.fields.values())[position]

    def evaluate(self, node: low.ExprStmt) -> Execute:
        """Return an expression run for its effect."""
        run = self._expressions.code(node.expr).run

        def execute(frame: Frame) -> None:
            run(frame)

        return execute

    def branch(self, node: low.If) -> Execute:
        """Return an `if`."""
        truth, then = self._expressions.condition(node.cond), self.later(node.then)
        if node.other is None:
            return lambda frame: then(frame) if truth(frame) else None
        other = self.later(node.other)
        return lambda frame: then(frame) if truth(frame) else other(frame)

    def loop(self, node: low.For) -> Execute:
        """Return a `for`, its variables in a scope around the body."""
        self._scopes.append({})
        start = sequence([self.statement(s) for s in node.init])
        step = self._expressions.code(node.step).run if node.step is not None else None
        rounds = self._rounds(node.cond, node.body, step, check_first=True)
        self._scopes.pop()

        def execute(frame: Frame) -> Any:
            start(frame)
            return rounds(frame)

        return execute

    def repeat(self, node: low.While) -> Execute:
        """Return a `while` or `do`."""
        return self._rounds(node.cond, node.body, None, check_first=not node.do)

    def _rounds(
        self, cond: Expr | None, block: low.Block, step: Run | None, *, check_first: bool
    ) -> Execute:
        truth: Run = self._expressions.condition(cond) if cond is not None else lambda frame: True
        body = self.block(block)

        def execute(frame: Frame) -> Any:
            if check_first and not truth(frame):
                return None
            while True:
                result = body(frame)
                if result is BREAK:
                    return None
                if isinstance(result, Returned):
                    return result
                if step is not None:
                    step(frame)
                if not truth(frame):
                    return None

        return execute

    def leave(self, node: low.Return) -> Execute:
        """Return a `return`."""
        if node.value is None:
            return lambda frame: Returned(None)
        run = self._expressions.convert(node.value, unqualified(self._function.returns))
        return lambda frame: Returned(run(frame))


def sequence(steps: Sequence[Execute]) -> Execute:
    """Return statements run one after the other, until one leaves."""
    if len(steps) == 1:
        return steps[0]

    def execute(frame: Frame) -> Any:
        for step in steps:
            result = step(frame)
            if result is not None:
                return result
        return None

    return execute


def sized(type_: Type, initial: low.InitList) -> Type:
    """Return `x[]` with the length of its initialiser; other types as they are."""
    if not isinstance(type_, ArrayType) or type_.size is not None:
        return type_
    return replace(type_, size=Int(value=len(initial.items)))


def addressed_names(function: low.Function) -> set[str]:
    """Return the names whose address is taken with `&`."""
    return {
        node.operand.id
        for node in function.walk()
        if isinstance(node, Unary) and node.op == "&" and isinstance(node.operand, Name)
    }


_RULES: dict[type[low.Stmt], Callable[..., Execute]] = {
    low.Declare: Body.declare,
    low.ExprStmt: Body.evaluate,
    low.Block: Body.block,
    low.If: Body.branch,
    low.For: Body.loop,
    low.While: Body.repeat,
    low.Return: Body.leave,
    low.Break: lambda body, node: lambda frame: BREAK,
    low.Continue: lambda body, node: lambda frame: CONTINUE,
}
