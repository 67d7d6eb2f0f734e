"""C statements to high-IR statements; loops are offered to the vectorisers before anything else.

In: the body of a low function. Out: a high body, with notes on what stayed scalar and why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dovetail.codegen.lift.emit import call, choose, negated, num, type_of, zero_of
from dovetail.codegen.lift.loops import advance, counted, read_first, read_names
from dovetail.codegen.lift.reductions import match_chain
from dovetail.codegen.lift.scalar import Scalars, common, convert
from dovetail.codegen.lift.strips import Strips
from dovetail.codegen.lift.types import Unliftable, element_type, refuse, value_type
from dovetail.codegen.lift.vectorise import vectorise
from dovetail.ir import expr as ex
from dovetail.ir.high import nodes as high
from dovetail.ir.high.rules import is_pointer
from dovetail.ir.low import nodes as low
from dovetail.ir.low.types import constant
from dovetail.ir.node import rewrite_node

Body = tuple[high.Stmt, ...]


@dataclass(slots=True)
class Statements:
    """Translates statement lists of one function."""

    scalars: Scalars
    strips: Strips
    function: low.Function
    later: set[str] = field(default_factory=set)  # names that are read after the block at hand

    def function_body(self, body: Sequence[low.Stmt]) -> Body:
        """Translate a function body."""
        return self.body(body)

    def block(self, body: Sequence[low.Stmt]) -> Body:
        """Translate the statements of a C block, in a scope of its own."""
        own = {s.name for s in body if isinstance(s, low.Declare)}
        outer, self.later = self.later, self.later - own
        with self.scalars.names.scope():
            out = self.body(body)
        self.later = outer
        return out

    def body(self, body: Sequence[low.Stmt]) -> Body:
        """Translate statements in the scope at hand."""
        out: list[high.Stmt] = []
        outer, i = self.later, 0
        while i < len(body):
            used, made = self.chain(body[i:])
            if not used:
                again = _read_again(body[i])
                self.later = outer | again | read_names(body[i + 1 :])
                made = self.statement(body[i])
                self.later = outer
            out += made
            i += used or 1
        return tuple(out)

    def chain(self, body: Sequence[low.Stmt]) -> tuple[int, Body]:
        """Return how many statements vector loops at the start take, and what they become."""
        return match_chain(self.strips, body, self.later)

    def statement(self, stmt: low.Stmt) -> Body:
        """Translate one statement."""
        return _STATEMENTS[type(stmt)](self, stmt)

    # ---- declarations and expressions ----

    def declare(self, stmt: low.Declare) -> Body:
        """Translate a declaration; vector constants are kept aside."""
        if self.strips.define(stmt):
            return ()
        if isinstance(stmt.type, ex.ArrayType):
            return self.array(stmt)
        type_ = value_type(stmt.type)
        if type_ == "vec":
            raise Unliftable(f"the vector `{stmt.name}` has no VL-symbolic form")
        value = None if stmt.init is None else self.scalars.value(stmt.init, type_)
        name = self.scalars.names.declare(stmt.name, type_)
        if value is None:
            if is_pointer(type_) or stmt.name not in self.read_outside(stmt.name):
                return ()
            value = zero_of(type_)  # C leaves it undefined until it is assigned
        kind = None if is_pointer(type_) else type_of(type_)
        return (high.Assign(target=ex.Name(id=name), value=value, type=kind),)

    def array(self, stmt: low.Declare) -> Body:
        """Translate a local array."""
        assert isinstance(stmt.type, ex.ArrayType)
        if stmt.init is not None or stmt.type.size is None:
            raise refuse(f"the table `{stmt.name}`", "only masks in vector loops may use tables")
        elem = element_type(stmt.type.of)
        size = self.scalars.integer(stmt.type.size)
        name = self.scalars.names.declare(stmt.name, f"ptr[{elem}]")
        return (high.Local(name=name, size=size, elem=elem),)

    def effect(self, expr: ex.Expr) -> Body:
        """Translate an expression evaluated for what it does."""
        if isinstance(expr, low.Comma):
            return tuple(s for item in expr.items for s in self.effect(item))
        if isinstance(expr, low.Step):
            return self.effect(low.Assign(op=f"{expr.op[0]}=", target=expr.target, value=num(1)))
        if isinstance(expr, low.Assign):
            return self.assign(expr)
        if isinstance(expr, ex.Cast):
            return self.effect(expr.operand)
        if isinstance(expr, ex.Call) and expr.name in ("__builtin_prefetch", "_mm_prefetch"):
            return (high.ExprStmt(expr=call("prefetch", self.scalars.pointer(expr.args[0]))),)
        if isinstance(expr, ex.Call):
            made, type_ = self.scalars.expr(expr)
            return (high.ExprStmt(expr=made),) if type_ == "void" else ()
        if isinstance(expr, ex.Name | ex.Int):
            return ()
        raise refuse("an expression whose value is not used")

    def assign(self, expr: low.Assign) -> Body:
        """Translate an assignment, with the `p++` inside it as statements."""
        expr, before, after = split_steps(expr)
        first = tuple(s for step in before for s in self.effect(step))
        last = tuple(s for step in after for s in self.effect(step))
        return (*first, self.plain_assign(expr), *last)

    def plain_assign(self, expr: low.Assign) -> high.Stmt:
        """Translate an assignment without side effects inside."""
        target, type_ = self.scalars.expr(expr.target)
        if not isinstance(target, ex.Name | ex.Index):
            raise refuse("an assignment to this")
        if expr.op == "=":
            return high.Assign(target=target, value=self.scalars.value(expr.value, type_))
        value, value_type_ = self.scalars.expr(expr.value)
        joined = type_ if is_pointer(type_) else common(type_, value_type_)
        if joined in (type_, "int") or (type_ == "i32" and joined == "i64"):
            op = "//=" if expr.op == "/=" and type_ not in ("f32", "f64") else expr.op
            if joined not in ("int", "i64") and not is_pointer(type_):
                value = convert(value, value_type_, type_)
            return high.Assign(target=target, value=value, op=op)
        whole = ex.Binary(op=expr.op[:-1], left=expr.target, right=expr.value)
        return high.Assign(target=target, value=self.scalars.value(whole, type_))

    # ---- control ----

    def branch(self, stmt: low.If) -> Body:
        """Translate `if`; one arm of a constant condition."""
        known = constant(stmt.cond, {})
        if known is not None:
            chosen = stmt.then if known else stmt.other
            return self.block(chosen.body) if chosen else ()
        cond = self.scalars.expr(stmt.cond)[0]
        then = self.block(stmt.then.body)
        other = self.block(stmt.other.body) if stmt.other else ()
        return choose(cond, then, other)

    def loop(self, stmt: low.For) -> Body:
        """Translate `for`: as vectors, as a counted loop, or as `while`."""
        found = counted(stmt)
        if found is None or (not found.owned and found.var in self.read_outside(found.var)):
            return self.general_loop(stmt)
        # C's scope of the loop variable is the loop; the high IR's is the function
        with self.scalars.names.scope():
            bounds = self.scalars.integer(found.start), self.scalars.integer(found.stop)
            step = self.scalars.integer(found.step)
            outer = None if found.owned else self.scalars.names.find(found.var)
            var = outer or self.scalars.names.declare(found.var, "i64", loop=True)
            loops = (n for n in stmt.body.walk() if isinstance(n, low.For | low.While))
            if found.step == num(1) and not any(loops):
                try:
                    return vectorise(found, self.scalars, var, bounds)
                except Unliftable as reason:
                    line = f" at line {stmt.span.line}" if stmt.span.line else ""
                    self.scalars.note(f"the loop over `{found.var}`{line} stays scalar: {reason}")
            (start, stop), body = bounds, self.block(found.body.body)
            return (high.For(kind="range", var=var, start=start, stop=stop, step=step, body=body),)

    def read_outside(self, begun: str) -> set[str]:
        """Return names that occur in the function outside loops that set `begun` first."""
        outside: set[str] = set()
        waiting: list[Any] = [self.function.body]
        while waiting:
            node = waiting.pop()
            if isinstance(node, low.For) and _loop_variable(node) == begun:
                continue
            outside |= {node.id} if isinstance(node, ex.Name) else set()
            waiting += node.children()
        return outside

    def general_loop(self, stmt: low.For) -> Body:
        """Translate a `for` whose count is not known on entry."""
        with self.scalars.names.scope():
            init = tuple(s for part in stmt.init for s in self.statement(part))
            cond = self.scalars.expr(stmt.cond)[0] if stmt.cond is not None else num(1)
            body = list(stmt.body.body)
            if stmt.step is not None:
                step = low.ExprStmt(expr=stmt.step)
                body = [*(_before_continue(s, step) for s in body), step]
            return (*init, high.While(cond=cond, body=self.block(body)))

    def while_loop(self, stmt: low.While) -> Body:
        """Translate `while` and `do`."""
        if not stmt.do:
            cond = self.scalars.expr(stmt.cond)[0]
            return (high.While(cond=cond, body=self.block(stmt.body.body)),)
        if any(isinstance(n, low.Continue) for n in stmt.body.walk()):
            raise refuse("continue inside do")
        body = self.block(stmt.body.body)
        done = negated(self.scalars.expr(stmt.cond)[0])
        leave = high.If(cond=done, then=(high.Break(),))
        return (high.While(cond=num(1), body=(*body, leave)),)

    def give_back(self, stmt: low.Return) -> Body:
        """Translate `return`."""
        if stmt.value is None:
            return (high.Return(),)
        wanted = value_type(self.function.returns)
        return (high.Return(value=self.scalars.value(stmt.value, wanted)),)


def _read_again(stmt: low.Stmt) -> set[str]:
    """Return the names that the next turn of a loop reads before it gives them a value."""
    if not isinstance(stmt, low.For | low.While):
        return set()
    step = stmt.step if isinstance(stmt, low.For) else None
    asked = [node for node in (stmt.cond, step) if node is not None]
    return read_names(asked) | read_first(stmt.body.body)


def _loop_variable(stmt: low.For) -> str | None:
    moved = advance(stmt.step) if stmt.step is not None else None
    begun = counted(stmt)
    return begun.var if begun else (moved[0] if moved and stmt.init else None)


def _before_continue(stmt: low.Stmt, step: low.Stmt) -> low.Stmt:
    """Put the step of a `for` in front of each `continue` that belongs to it."""
    if isinstance(stmt, low.For | low.While):
        return stmt
    if isinstance(stmt, low.Continue):
        return low.Block(body=(step, stmt))
    changed: low.Stmt = stmt.map_children(
        lambda n: _before_continue(n, step) if isinstance(n, low.Stmt) else n
    )
    return changed


def split_steps(expr: low.Assign) -> tuple[low.Assign, list[ex.Expr], list[ex.Expr]]:
    """Take `p++` and `++p` out of an assignment: steps to do before it, and after it."""
    before: list[ex.Expr] = []
    after: list[ex.Expr] = []

    def take(step: low.Step) -> ex.Expr:
        (before if step.prefix else after).append(step)
        return step.target

    names = [s.target for s in expr.walk() if isinstance(s, low.Step)]
    if not names:
        return expr, [], []
    for target in names:
        uses = sum(1 for n in expr.walk() if n == target)
        if not isinstance(target, ex.Name) or uses != 1:
            raise refuse("a variable stepped and used in one expression", "use two lines")
    changed = rewrite_node(expr, [(low.Step, take)])
    assert isinstance(changed, low.Assign)
    return changed, before, after


_STATEMENTS: dict[type[Any], Callable[[Statements, Any], Body]] = {
    low.Declare: lambda self, stmt: self.declare(stmt),
    low.ExprStmt: lambda self, stmt: self.effect(stmt.expr),
    low.Block: lambda self, stmt: self.block(stmt.body),
    low.If: lambda self, stmt: self.branch(stmt),
    low.For: lambda self, stmt: self.loop(stmt),
    low.While: lambda self, stmt: self.while_loop(stmt),
    low.Return: lambda self, stmt: self.give_back(stmt),
    low.Break: lambda self, stmt: (high.Break(),),
    low.Continue: lambda self, stmt: (high.Continue(),),
    low.Pragma: lambda self, stmt: (),
    low.StructDef: lambda self, stmt: (),
}
"""Statement to translation, by method so that `Pinned` may take its own."""
