"""A counted scalar loop to a `vrange`: elementwise stores and float sums, maxima and minima.

Refused (with the reason) where an iteration may need what an earlier one wrote, or where an
operation has no vector form. Arrays under different names are taken to be the same or disjoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dovetail.codegen.lift.emit import call, num, op
from dovetail.codegen.lift.loops import Counted, assigned_names, read_names, steady
from dovetail.codegen.lift.patterns import (
    extreme_of,
    join_address,
    join_term,
    terms_of,
    vector_loop,
)
from dovetail.codegen.lift.scalar import Scalars, address_of, convert
from dovetail.codegen.lift.types import (
    VECTOR_CALLS,
    VECTOR_OPS,
    Unliftable,
    reason_of,
    value_type,
)
from dovetail.codegen.lift.writer import Broadcasts
from dovetail.ir import expr as ex
from dovetail.ir.errors import SpecError
from dovetail.ir.high import nodes as high
from dovetail.ir.high.rules import is_pointer
from dovetail.ir.low import nodes as low
from dovetail.ir.low.print import print_low
from dovetail.ir.low.types import scalar

ALIAS_NOTE = "arrays of different names are taken to be the same or not to overlap: {}"


@dataclass(frozen=True, slots=True)
class Value:
    """A vector, or a scalar no iteration changes. `zero_tail`: its lanes past the end are 0."""

    expr: ex.Expr
    vector: bool
    zero_tail: bool = False


@dataclass(slots=True)
class Reduction:
    """An accumulator: its C name, the operation, and the vector that holds partial results."""

    kind: str
    acc: ex.Name


def vectorise(
    loop: Counted, scalars: Scalars, var: str, bounds: tuple[ex.Expr, ex.Expr]
) -> tuple[high.Stmt, ...]:
    """Return the loop as `vrange` with what goes before and after; Unliftable says why not.

    var: the high name of its variable. bounds: where it starts and stops.
    """
    try:
        return _Vectoriser(loop, scalars, var).run(*bounds)
    except SpecError as error:
        raise Unliftable(reason_of(error)) from None


@dataclass(slots=True)
class _Vectoriser:
    loop: Counted
    scalars: Scalars
    var: str
    changed: set[str] = field(default_factory=set)
    before: list[high.Stmt] = field(default_factory=list)
    after: list[high.Stmt] = field(default_factory=list)
    locals: dict[str, Value] = field(default_factory=dict)
    hoisted: Broadcasts = field(init=False)
    stored: dict[str, tuple[ex.Expr, ex.Expr]] = field(default_factory=dict)  # offset, value
    loaded: dict[str, set[ex.Expr]] = field(default_factory=dict)
    reductions: dict[str, Reduction] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hoisted = Broadcasts(self.scalars.names, self.before)

    def run(self, start: ex.Expr, stop: ex.Expr) -> tuple[high.Stmt, ...]:
        """Translate the body, then put the loop together."""
        self.changed = assigned_names([self.loop.body]) | {self.loop.var}
        body = [s for stmt in self.loop.body.body for s in self.statement(stmt)]
        if not body:
            raise Unliftable("it has nothing to do in vectors")
        self.check_dependences()
        return (*self.before, vector_loop(self.var, start, stop, tuple(body)), *self.after)

    # ---- statements ----

    def statement(self, stmt: low.Stmt) -> list[high.Stmt]:
        if isinstance(stmt, low.Pragma):
            return []
        if isinstance(stmt, low.Block):
            return [s for inner in stmt.body for s in self.statement(inner)]
        if isinstance(stmt, low.Declare):
            return self.declare(stmt)
        if isinstance(stmt, low.If):
            return self.guarded(stmt)
        if isinstance(stmt, low.ExprStmt) and isinstance(stmt.expr, low.Assign):
            return self.assign(stmt.expr)
        raise Unliftable(f"it holds a {type(stmt).__name__.lower()} statement")

    def declare(self, stmt: low.Declare) -> list[high.Stmt]:
        if stmt.init is None or value_type(stmt.type) != "f32":
            raise Unliftable(f"`{stmt.name}` is no float computed at once")
        return self.set_local(stmt.name, stmt.init)

    def set_local(self, name: str, value: ex.Expr) -> list[high.Stmt]:
        made = self.value(value)
        if not made.vector:
            self.locals[name] = made
            return []
        target = ex.Name(id=self.scalars.names.fresh(name, "vec"))
        self.locals[name] = Value(target, True)
        return [high.Assign(target=target, value=made.expr)]

    def assign(self, expr: low.Assign) -> list[high.Stmt]:
        target, value = expr.target, expr.value
        if isinstance(target, ex.Name) and (
            target.id not in self.locals or target.id in self.reductions
        ):
            return self.reduce(target.id, expr)
        if expr.op != "=":
            value = ex.Binary(op=expr.op[:-1], left=target, right=value)
        if isinstance(target, ex.Name):
            return self.set_local(target.id, value)
        base, offset = self.place(target)
        if offset is None:
            raise Unliftable(f"every iteration writes `{print_low(target)}`")
        made = self.vector(self.value(value))
        earlier = self.stored.get(base)
        if earlier is not None and earlier[0] != offset:
            raise Unliftable(f"it writes `{base}` at two places")
        first: list[high.Stmt] = []
        held = made
        if not isinstance(made, ex.Name):
            held = ex.Name(id=self.scalars.names.fresh("v", "vec"))
            first = [high.Assign(target=held, value=made)]
        self.stored[base] = (offset, held)
        return [*first, high.ExprStmt(expr=call("vstore", join_address(base, offset), held))]

    # ---- reductions ----

    def guarded(self, stmt: low.If) -> list[high.Stmt]:
        """`if (x > m) m = x;` is a maximum; other conditions have no vector form."""
        body = stmt.then.body
        inner = body[0] if len(body) == 1 else None
        if stmt.other is None and isinstance(inner, low.ExprStmt):
            made = inner.expr
            if isinstance(made, low.Assign) and made.op == "=" and isinstance(made.target, ex.Name):
                kind = extreme_of(stmt.cond, made.value, made.target)
                if kind is not None:
                    return self.fold(made.target.id, kind, made.value)
        raise Unliftable("it holds a condition")

    def reduce(self, name: str, expr: low.Assign) -> list[high.Stmt]:
        target, value = expr.target, expr.value
        if expr.op == "+=":
            return self.fold(name, "add", value)
        if expr.op == "-=":
            return self.fold(name, "add", ex.Unary(op="-", operand=value))
        if expr.op == "=" and isinstance(value, ex.Binary) and value.op == "+":
            for this, other in ((value.left, value.right), (value.right, value.left)):
                if this == target:
                    return self.fold(name, "add", other)
        if expr.op == "=" and isinstance(value, ex.Call) and value.name in ("fmaxf", "fminf"):
            for this, other in (value.args, value.args[::-1]):
                if this == target:
                    return self.fold(name, value.name[1:4], other)
        if expr.op == "=" and isinstance(value, ex.Ternary):
            kind = extreme_of(value.cond, value.then, value.other)
            if kind is not None and target in (value.then, value.other):
                return self.fold(name, kind, value.other if value.then == target else value.then)
        raise Unliftable(f"`{name}` is carried from one iteration to the next")

    def fold(self, name: str, kind: str, value: ex.Expr) -> list[high.Stmt]:
        found = self.scalars.names.find(name)
        if found is None or self.scalars.names.used[found] != "f32":
            raise Unliftable(f"`{name}` is no float declared before the loop")
        made = self.value(value)
        if name not in self.reductions:
            acc = ex.Name(id=self.scalars.names.fresh(f"{found}_v", "vec"))
            self.reductions[name] = Reduction(kind, acc)
            self.begin(self.reductions[name], ex.Name(id=found))
        known = self.reductions[name]
        if known.kind != kind:
            raise Unliftable(f"`{name}` is reduced in two ways")
        joined = join_term(kind, known.acc, self.vector(made), made.vector and made.zero_tail)
        return [high.Assign(target=known.acc, value=joined)]

    def begin(self, reduction: Reduction, result: ex.Name) -> None:
        total = reduction.kind == "add"
        start = call("vzero") if total else call("vbroadcast", result)
        self.before.append(high.Assign(target=reduction.acc, value=start))
        made = call(f"vreduce_{reduction.kind}", reduction.acc)
        self.after.append(high.Assign(target=result, value=made, op="+=" if total else "="))

    # ---- expressions ----

    def value(self, expr: ex.Expr) -> Value:
        """Return an expression of the body as a vector, or as a scalar that stays the same."""
        if self.invariant(expr):
            same, type_ = self.scalars.expr(expr)
            if type_ == "f64":
                raise Unliftable("it computes in double precision")
            return Value(convert(same, type_, "f32"), False)
        if isinstance(expr, ex.Name):
            return self.name(expr)
        if isinstance(expr, ex.Index) or (isinstance(expr, ex.Unary) and expr.op == "*"):
            return self.load(expr)
        if isinstance(expr, ex.Binary) and expr.op in VECTOR_OPS:
            left, right = self.value(expr.left), self.value(expr.right)
            zero = left.zero_tail and right.zero_tail and expr.op != "/"
            return self.applied(VECTOR_OPS[expr.op], left, right, zero=zero)
        if isinstance(expr, ex.Unary) and expr.op in "-+":
            inner = self.value(expr.operand)
            if expr.op == "+":
                return inner
            return self.applied("vneg", inner, zero=inner.zero_tail)
        if isinstance(expr, ex.Call) and expr.name in VECTOR_CALLS:
            return self.applied(VECTOR_CALLS[expr.name], *map(self.value, expr.args))
        if isinstance(expr, ex.Ternary):
            return self.select(expr)
        if isinstance(expr, ex.Cast):
            found = scalar(expr.type)
            if found is not None and found.name == "float":
                return self.value(expr.operand)
        raise Unliftable(f"`{print_low(expr)}` has no vector form")

    def name(self, expr: ex.Name) -> Value:
        if expr.id == self.loop.var:
            raise Unliftable(f"it computes with the index `{expr.id}`")
        if expr.id in self.reductions:
            raise Unliftable(f"`{expr.id}` is read while it is being reduced")
        if expr.id not in self.locals:
            raise Unliftable(f"`{expr.id}` is carried from one iteration to the next")
        return self.locals[expr.id]

    def select(self, expr: ex.Ternary) -> Value:
        cond = expr.cond
        if not isinstance(cond, ex.Binary) or cond.op not in ("<", ">"):
            raise Unliftable(f"the condition `{print_low(cond)}` has no vector form")
        compared = (cond.left, cond.right) if cond.op == ">" else (cond.right, cond.left)
        return self.applied("vselect_gt", *map(self.value, (*compared, expr.then, expr.other)))

    def applied(self, name: str, *values: Value, zero: bool = False) -> Value:
        """Return a builtin of vectors; zero: its lanes past the end are 0."""
        return Value(call(name, *map(self.vector, values)), True, zero)

    def invariant(self, expr: ex.Expr) -> bool:
        """Whether no iteration changes the value; memory is steady where the loop never writes."""
        reads = [n for n in expr.walk() if isinstance(n, ex.Index | low.Member)]
        if not reads:
            return steady(expr, self.changed)
        if read_names([expr]) & self.changed or any(isinstance(n, ex.Call) for n in expr.walk()):
            return False
        writes = any(
            isinstance(n, low.Assign) and not isinstance(n.target, ex.Name)
            for n in self.loop.body.walk()
        )
        return not writes or all(isinstance(n, low.Member) for n in reads)

    def vector(self, value: Value) -> ex.Expr:
        return value.expr if value.vector else self.spread(value.expr)

    def spread(self, expr: ex.Expr) -> ex.Expr:
        """Return a vector of one scalar, made before the loop unless it reads memory."""
        if any(isinstance(n, ex.Index) for n in expr.walk()):
            return call("vbroadcast", expr)
        return self.hoisted.vector(expr)

    def load(self, expr: ex.Expr) -> Value:
        base, offset = self.place(expr)
        if offset is None:
            raise Unliftable(f"`{print_low(expr)}` may be written while it is read")
        written = self.stored.get(base)
        if written is not None and written[0] == offset:
            return Value(written[1], True)
        self.loaded.setdefault(base, set()).add(offset)
        return Value(call("vload", join_address(base, offset)), True, True)

    # ---- addresses ----

    def place(self, expr: ex.Expr) -> tuple[str, ex.Expr | None]:
        """Return the array and its offset (the loop variable with a step of 1, and what stays)."""
        if isinstance(expr, ex.Index):
            total = address_of(expr)
        elif isinstance(expr, ex.Unary) and expr.op == "*":
            total = expr.operand
        else:
            raise Unliftable(f"`{print_low(expr)}` is no array element")
        terms = terms_of(total)
        bases = [t for t, sign in terms if sign > 0 and self.array_of(t) is not None]
        moving = [(t, s) for t, s in terms if self.loop.var in read_names([t])]
        if len(bases) != 1:
            raise Unliftable(f"`{print_low(expr)}` has no array that can be told")
        base = self.array_of(bases[0])
        assert base is not None
        rest = [(t, s) for t, s in terms if t is not bases[0] and (t, s) not in moving]
        if any(not steady(t, self.changed) for t, _ in rest):
            raise Unliftable(f"the place of `{print_low(expr)}` changes in other ways")
        if not moving:
            return base, None
        if moving != [(ex.Name(id=self.loop.var), 1)]:
            raise Unliftable(f"`{print_low(expr)}` does not step by one element")
        index: ex.Expr = num(0)
        for term, sign in rest:
            index = op("+" if sign > 0 else "-", index, self.scalars.integer(term))
        return base, op("+", index, ex.Name(id=self.var))

    def array_of(self, term: ex.Expr) -> str | None:
        if not isinstance(term, ex.Name) or term.id in self.changed:
            return None
        found = self.scalars.names.find(term.id)
        if found is None:
            return None
        type_ = self.scalars.names.used[found]
        if is_pointer(type_) and type_ != "ptr[f32]":
            raise Unliftable(f"`{term.id}` does not hold floats")
        return found if is_pointer(type_) else None

    def check_dependences(self) -> None:
        """An array that is written may be read at the place just written only."""
        for base, (offset, _) in self.stored.items():
            others = self.loaded.get(base, set()) - {offset}
            if others:
                raise Unliftable(f"`{base}` is written and read at different places")
        arrays = sorted(set(self.stored) | set(self.loaded))
        if self.stored and len(arrays) > 1:
            self.scalars.note(ALIAS_NOTE.format(", ".join(arrays)))
