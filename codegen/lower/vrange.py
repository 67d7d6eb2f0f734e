"""Split `vrange` loops: a main loop over whole vectors, and a tail for the lanes that are left.

In the tail every load and store without a count gets one, and `vtail(v, fill)` its count; in the
main loop `vtail` is its vector. With one lane per vector there is no tail.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace

from dovetail.codegen.lower.fold import combine
from dovetail.codegen.lower.names import Names, rebuild_body
from dovetail.ir.errors import ScheduleError
from dovetail.ir.expr import Binary, Call, Expr, Int, Name
from dovetail.ir.high import scopes
from dovetail.ir.high.nodes import Assign, For, If, Stmt
from dovetail.ir.high.ops import OPS
from dovetail.ir.node import rewrite_node


def split_vranges(body: scopes.Body, lanes: int, names: Names) -> scopes.Body:
    """Return `body` with every `vrange` written as `range` loops and tails."""
    return _Splitter(lanes, names, scopes.find_homes(body)).body(body)


@dataclass(slots=True)
class _Splitter:
    lanes: int
    names: Names
    homes: scopes.Homes

    def body(self, body: scopes.Body) -> scopes.Body:
        out: list[Stmt] = []
        for stmt in body:
            if isinstance(stmt, For) and stmt.kind == "vrange":
                out += self.split(stmt)
            else:
                out.append(scopes.map_bodies(stmt, self.body))
        return tuple(out)

    def split(self, loop: For) -> list[Stmt]:
        if any(isinstance(s, For) and s.kind == "vrange" for s in scopes.all_statements(loop.body)):
            raise ScheduleError(f"line {loop.span.line}: vrange loops cannot be nested")
        main = replace(loop, kind="range", step=Int(value=self.lanes), body=_whole(loop.body))
        if self.lanes == 1:
            return [main]
        before: list[Stmt] = []
        assigned = scopes.defined_names(loop.body)
        start = self.once(loop.start, f"{loop.var}_start", before, assigned)
        stop = self.once(loop.stop, f"{loop.var}_stop", before, assigned)
        end = self.last_whole(start, stop)
        if isinstance(end, Int) and isinstance(stop, Int):
            tail = [] if end.value >= stop.value else self.tail(loop, end, stop)
            body = [] if end == start else [replace(main, start=start, stop=end)]
            return [*before, *body, *tail]
        end = self.once(end, f"{loop.var}_end", before)
        rest = If(cond=Binary(op="<", left=end, right=stop), then=tuple(self.tail(loop, end, stop)))
        return [*before, replace(main, start=start, stop=end), rest]

    def last_whole(self, start: Expr, stop: Expr) -> Expr:
        """Return where the main loop ends; with an empty range that is `start` or before."""
        lanes = Int(value=self.lanes)
        count = combine("*", combine("//", combine("-", stop, start), lanes), lanes)
        return combine("+", start, count)

    def once(
        self, expr: Expr, base: str, before: list[Stmt], assigned: Container[str] = ()
    ) -> Expr:
        """Return a literal or a name that keeps the value of `expr`, computed in `before`."""
        if isinstance(expr, Int) or (isinstance(expr, Name) and expr.id not in assigned):
            return expr
        name = Name(id=self.names.fresh(base))
        before.append(Assign(target=name, value=expr))
        return name

    def tail(self, loop: For, at: Expr, stop: Expr) -> list[Stmt]:
        """Return the statements of the last, partial step at index `at`."""
        before: list[Stmt] = []
        count = self.once(combine("-", stop, at), f"{loop.var}_left", before)
        local = sorted(self.homes.of(loop.body))
        env: dict[str, Expr] = {name: Name(id=self.names.fresh(name)) for name in local}
        body = rebuild_body(loop.body, {**env, loop.var: at})
        return [*before, *(_partial(stmt, count) for stmt in body)]


def _whole(body: scopes.Body) -> scopes.Body:
    return tuple(_replace_calls(stmt, _without_tail) for stmt in body)


def _without_tail(call: Call) -> Expr:
    return call.args[0] if call.name == "vtail" else call


def _partial(stmt: Stmt, count: Expr) -> Stmt:
    def change(call: Call) -> Expr:
        op = OPS.get(call.name)
        if op is None or not (op.name == "vtail" or op.family):
            return call
        counted = op.name == "vtail" or len(call.args) < len(op.params)
        return replace(call, args=(*call.args, count)) if counted else call

    return _replace_calls(stmt, change)


def _replace_calls(stmt: Stmt, change: Callable[[Call], Expr]) -> Stmt:
    rewritten = rewrite_node(stmt, [(Call, change)])
    assert isinstance(rewritten, Stmt)
    return rewritten
