"""C as it stands: every variable, address and vector of a function, written out in the high IR.

The last way to lift: nothing is proved and nothing made independent of the vector width. Vectors
become arrays of their lanes, which operations fill in loops; memory is bytes at offsets, so
structs, unions, casts of pointers and `void *` mean what they mean to a C compiler.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dovetail.codegen.lift.emit import Address, Writer, call, cast, negated, num, op, pick
from dovetail.codegen.lift.lanes import Lanes, find_rule
from dovetail.codegen.lift.layout import (
    Layout,
    element_of,
    pointee_element,
    value_of,
    vector_element,
)
from dovetail.codegen.lift.types import LIMITS, MATH, NAMES, Names, refuse
from dovetail.ir import expr as ex
from dovetail.ir.high import nodes as high
from dovetail.ir.low import nodes as low
from dovetail.ir.low.conversions import combine, promote
from dovetail.ir.low.types import VECTOR_GROUPS, VECTORS, constant, scalar, vector

INT = ex.NamedType(name="int")
LONG = ex.NamedType(name="long")
RESULT = "result"
"""The parameter through which a kernel gives back what the C function returned."""
MEMORY = ("memcpy", "memmove", "memset")
ASIDE = ("__builtin_prefetch", "_mm_prefetch", "__builtin_assume")
LARGEST_TABLE = 1 << 14
DEEPEST = 16
"""Calls of helpers inside each other."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a C type: `expr` of a number; `at` what a pointer, vector or struct stands at."""

    type: ex.Type
    expr: ex.Expr | None = None
    at: Address | None = None

    @property
    def number(self) -> ex.Expr:
        """The expression of a number."""
        if self.expr is None:
            raise refuse("an address or a vector where a number is wanted")
        return self.expr

    @property
    def address(self) -> Address:
        """Where the value of a pointer, vector or struct is."""
        if self.at is None:
            raise refuse("a number where an address or a vector is wanted")
        return self.at


@dataclass(frozen=True, slots=True)
class Variable:
    """A C variable: a number or pointer in `name`, or memory at `at`."""

    type: ex.Type
    name: str = ""
    at: Address | None = None


@dataclass(slots=True)
class Literal:
    """Translates one function with the helpers that it calls."""

    functions: Mapping[str, low.Function]
    layout: Layout
    globals: Mapping[str, low.Declare]
    names: Names = field(default_factory=Names)
    scopes: list[dict[str, Variable]] = field(default_factory=lambda: [{}])
    addressed: set[str] = field(default_factory=set)
    active: list[str] = field(default_factory=list)
    steps: list[Any] = field(default_factory=list)  # of the loops around
    results: list[Variable | None] = field(default_factory=list)  # of the helpers around
    tables: dict[str, Variable] = field(default_factory=dict)
    prologue: list[high.Stmt] = field(default_factory=list)  # fills the tables
    w: Writer = field(init=False)
    lanes: Lanes = field(init=False)

    def __post_init__(self) -> None:
        self.w = Writer(self.names)
        self.lanes = Lanes(self.w)

    def kernel(self, function: low.Function) -> high.Function:
        """Return the function as a @kernel; what it returns goes to `result[0]`."""
        params = []
        self.enter(function)
        for param in function.params:
            made, type_ = self.parameter(param)
            params.append(high.Param(name=made, type=type_))
        back = function.returns
        if back != ex.NamedType(name="void"):
            elem = _memory_element(back)
            if isinstance(back, ex.PointerType):
                raise refuse("a kernel that returns a pointer")
            made = self.names.declare(RESULT, f"ptr[{elem}]")
            pointer = ex.PointerType(of=ex.NamedType(name=elem))
            params.append(high.Param(name=made, type=pointer))
            self.results.append(Variable(back, at=Address(ex.Name(id=made), elem)))
        else:
            self.results.append(None)
        body = list(function.body.body)
        self.block(body)
        out = self.w.out
        if out and out[-1] == high.Return():
            out.pop()
        made_body = tuple(_reachable(out))
        return high.Function(
            kind="kernel",
            name=function.name,
            params=tuple(params),
            returns=None,
            tunables=(),
            body=(*self.prologue, *made_body),
        )

    def enter(self, function: low.Function) -> None:
        """Note the variables of a function whose address is taken."""
        if function.name in self.active or len(self.active) > DEEPEST:
            raise refuse(f"the recursion of {function.name}")
        self.active.append(function.name)
        for node in function.walk():
            if isinstance(node, ex.Unary) and node.op == "&" and isinstance(node.operand, ex.Name):
                self.addressed.add(node.operand.id)

    def parameter(self, param: low.Param) -> tuple[str, ex.Type]:
        """Declare a parameter; return its name and type in the high IR."""
        type_ = param.type
        if isinstance(type_, ex.ArrayType):
            type_ = ex.PointerType(of=type_.of)
        if isinstance(type_, ex.PointerType):
            if isinstance(type_.of, ex.PointerType):
                raise refuse("pointers to pointers")
            elem = pointee_element(type_.of)
            made = self.names.declare(param.name, f"ptr[{elem}]")
            self.scopes[-1][param.name] = Variable(type_, made)
            return made, ex.PointerType(of=ex.NamedType(name=elem))
        found = scalar(type_)
        if found is None:  # by value: a pointer to it
            elem = _memory_element(type_)
            made = self.names.declare(param.name, f"ptr[{elem}]")
            given = Value(type_, at=Address(ex.Name(id=made), elem))
            self.declare_as(param.name, type_, given)
            return made, ex.PointerType(of=ex.NamedType(name=elem))
        kind = value_of(element_of(found))
        kind = "i64" if kind in ("i32", "u32") else kind  # kernels take integers of 64 bits
        made = self.names.declare(param.name, kind)
        source = Value(LONG if kind == "i64" else type_, ex.Name(id=made))
        if kind == value_of(element_of(found)) and param.name not in self.addressed:
            self.scopes[-1][param.name] = Variable(type_, made)
        else:
            self.declare_as(param.name, type_, source)
        return made, ex.NamedType(name=kind)

    # ---- statements ----

    def block(self, body: Sequence[low.Stmt]) -> None:
        """Translate the statements of a block."""
        self.scopes.append({})
        for i, stmt in enumerate(body):
            if isinstance(stmt, low.If) and len(self.results) > 1 and _returns(stmt):
                self.leave_early(stmt, body[i + 1 :])
                break
            self.statement(stmt)
            if isinstance(stmt, low.Return):
                break
        self.scopes.pop()

    def leave_early(self, stmt: low.If, rest: Sequence[low.Stmt]) -> None:
        """Translate `if (c) return x; rest` of a helper: the rest becomes the other arm."""
        if self.steps and self.steps[-1] != _HELPER:
            raise refuse("a helper that returns inside a loop")
        then, other = list(stmt.then.body), list(stmt.other.body) if stmt.other else []
        if not _ends(then):
            then += rest
        if not _ends(other):
            other += rest
        self.statement(
            low.If(
                cond=stmt.cond, then=low.Block(body=tuple(then)), other=low.Block(body=tuple(other))
            )
        )

    def statement(self, stmt: low.Stmt) -> None:
        """Translate one statement."""
        _STATEMENTS[type(stmt)](self, stmt)

    def declare(self, stmt: low.Declare) -> None:
        """Translate a declaration."""
        type_ = stmt.type
        if isinstance(type_, ex.ArrayType) and type_.size is None and stmt.init is not None:
            count = len(stmt.init.items) if isinstance(stmt.init, low.InitList) else 0
            type_ = replace(type_, size=ex.Int(value=count))
        if isinstance(stmt.init, low.InitList) or stmt.init is None:
            variable = self.declare_as(stmt.name, type_, None)
            if stmt.init is not None:
                assert isinstance(stmt.init, low.InitList)
                if variable.at is None:
                    self.assign(variable, self.expr(stmt.init.items[0]))
                else:
                    self.fill(variable.at, type_, stmt.init)
            return
        known = constant(stmt.init, self.layout.constants)
        if stmt.static and known is None:
            raise refuse(f"the static variable {stmt.name}")
        if known is not None and getattr(type_, "const", False) and scalar(type_):
            self.layout.constants[stmt.name] = known  # type: ignore[index]
        self.declare_as(stmt.name, type_, self.expr(stmt.init))

    def declare_as(self, name: str, type_: ex.Type, value: Value | None) -> Variable:
        """Declare a variable of a C type with a value, or 0 where C leaves it open."""
        found = scalar(type_)
        made: Variable
        if found is not None and name not in self.addressed:
            kind = value_of(element_of(found))
            made = Variable(type_, self.names.declare(name, kind))
            start = self.convert(value, type_).number if value else _zero(kind)
            self.w.set(ex.Name(id=made.name), start, kind)
        elif isinstance(type_, ex.PointerType) and name not in self.addressed:
            elem = pointee_element(type_.of)
            made = Variable(type_, self.names.declare(name, f"ptr[{elem}]"))
            if value is not None:
                self.w.set(ex.Name(id=made.name), self.convert(value, type_).address.pointer())
            else:
                kind_ = ex.PointerType(of=ex.NamedType(name=elem))
                self.w.out.append(
                    high.Assign(target=ex.Name(id=made.name), value=ex.Name(id="null"), type=kind_)
                )
        else:
            made = self.declare_memory(name, type_)
            if value is not None:
                assert made.at is not None
                self.store(made.at, type_, value)
        self.scopes[-1][name] = made
        return made

    def declare_memory(self, name: str, type_: ex.Type) -> Variable:
        """Declare a variable that is memory: an array, struct, vector, what has an address."""
        inner = type_
        while isinstance(inner, ex.ArrayType):
            inner = inner.of
        if isinstance(inner, ex.PointerType):
            raise refuse("arrays of pointers")
        found, shape = scalar(inner), vector(inner)
        if found is not None:
            elem = element_of(found)
        elif shape is not None:
            elem = vector_element(shape.name)
        elif isinstance(inner, ex.NamedType) and inner.name in VECTOR_GROUPS:
            elem = vector_element(VECTOR_GROUPS[inner.name][0])
        else:
            elem = "u8"
        size = self.layout.size(type_)
        return Variable(type_, at=self.w.array(name, size // _BYTES[elem], elem))

    def fill(self, at: Address, type_: ex.Type, init: ex.Expr) -> None:
        """Store an initialiser; what it does not name is 0."""
        if not isinstance(init, low.InitList):
            self.store(at, type_, self.expr(init))
            return
        if isinstance(type_, ex.ArrayType):
            each = self.layout.size(type_.of)
            count = self.layout.size(type_) // each
            if len(init.items) < count:
                bytes_ = at.read_as("u8")
                self.w.loop(each * count, lambda i: self.w.set(bytes_.item(i), num(0)))
            for i, item in enumerate(init.items):
                self.fill(self.field(at, i * each, type_.of), type_.of, item)
            return
        if scalar(type_) or isinstance(type_, ex.PointerType):
            self.fill(at, type_, init.items[0])
            return
        fields = self.layout.fields(type_)
        bytes_ = at.read_as("u8")
        self.w.loop(self.layout.size(type_), lambda i: self.w.set(bytes_.item(i), num(0)))
        for (offset, declared), item in zip(fields.values(), init.items, strict=False):
            kind = declared
            if isinstance(kind, ex.ArrayType) and kind.size is None:
                kind = replace(kind, size=ex.Int(value=len(getattr(item, "items", ()))))
            self.fill(self.field(at, offset, kind), kind, item)

    def field(self, at: Address, offset: int, type_: ex.Type) -> Address:
        """Return the address of a part of memory, counted in the part's own elements."""
        elem = _memory_element(type_)
        size = _BYTES[elem]
        if elem == at.elem and offset % size == 0:
            return at.moved(offset // size)
        return at.read_as("u8").moved(offset).read_as(elem)

    def evaluate(self, stmt: low.ExprStmt) -> None:
        """Translate an expression statement."""
        self.expr(stmt.expr)

    def branch(self, stmt: low.If) -> None:
        """Translate `if`."""
        known = constant(stmt.cond, self.layout.constants)
        if known is not None and not _names_in(stmt.cond, self.scopes):
            chosen = stmt.then if known else stmt.other
            if chosen is not None:
                self.block(chosen.body)
            return
        cond = self.condition(stmt.cond)
        with self.w.inside() as then:
            self.block(stmt.then.body)
        with self.w.inside() as other:
            if stmt.other is not None:
                self.block(stmt.other.body)
        self.w.branch(cond, then, other)

    def for_loop(self, stmt: low.For) -> None:
        """Translate `for` as `while`, with its step before each `continue`."""
        self.scopes.append({})
        for item in stmt.init:
            self.statement(item)
        self.repeat(stmt.cond, stmt.body, stmt.step, last=None)
        self.scopes.pop()

    def while_loop(self, stmt: low.While) -> None:
        """Translate `while` and `do`."""
        if not stmt.do:
            self.repeat(stmt.cond, stmt.body, None, last=None)
        elif constant(stmt.cond, {}) == 0 and not _leaves(stmt.body):
            self.block(stmt.body.body)
        else:
            if any(isinstance(n, low.Continue) for n in stmt.body.walk()):
                raise refuse("continue inside do")
            self.repeat(None, stmt.body, None, last=stmt.cond)

    def repeat(
        self, cond: ex.Expr | None, body: low.Block, step: ex.Expr | None, last: ex.Expr | None
    ) -> None:
        """Write a loop whose condition is met before, or (`last`) after each turn."""
        self.steps.append(step)
        with self.w.inside() as inner:
            test = self.condition(cond) if cond is not None else num(1)
            prepared = len(inner)
            if prepared:
                inner.append(high.If(cond=negated(test), then=(high.Break(),)))
                test = num(1)
            self.block(body.body)
            if step is not None and not (inner and isinstance(inner[-1], high.Break | high.Return)):
                self.expr(step)
            if last is not None:
                done = negated(self.condition(last))
                inner.append(high.If(cond=done, then=(high.Break(),)))
        self.steps.pop()
        self.w.out.append(high.While(cond=test, body=tuple(_reachable(inner))))

    def go_on(self, stmt: low.Continue) -> None:
        """Translate `continue`."""
        step = self.steps[-1]
        if step is not None:
            self.expr(step)
        self.w.out.append(high.Continue())

    def give_back(self, stmt: low.Return) -> None:
        """Translate `return`."""
        result = self.results[-1]
        if stmt.value is not None:
            value = self.expr(stmt.value)
            if result is not None:
                self.assign(result, value)
        if len(self.results) == 1:
            self.w.out.append(high.Return())
        elif self.steps and self.steps[-1] != _HELPER:
            raise refuse("a helper that returns inside a loop")

    # ---- places ----

    def find(self, name: str) -> Variable | None:
        """Return the variable that a name means here."""
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return self.tables.get(name) or self.table(name)

    def table(self, name: str) -> Variable | None:
        """Return a constant table of the file; it is filled where the kernel begins."""
        stmt = self.globals.get(name)
        if stmt is None or stmt.init is None:
            return None
        if not isinstance(stmt.type, ex.ArrayType) or not isinstance(stmt.init, low.InitList):
            return None
        type_ = stmt.type
        if type_.size is None:
            type_ = replace(type_, size=ex.Int(value=len(stmt.init.items)))
        if self.layout.size(type_) > LARGEST_TABLE:
            raise refuse(f"the table {name}, which is larger than {LARGEST_TABLE} bytes")
        scopes, self.scopes = self.scopes, [self.scopes[0]]
        with self.w.inside() as filled:
            made = self.declare_memory(name, type_)
            assert made.at is not None
            self.fill(made.at, type_, stmt.init)
        self.prologue += filled
        self.scopes = scopes
        self.tables[name] = made
        return made

    def place(self, expr: ex.Expr) -> Variable:
        """Return the place that an expression names."""
        if isinstance(expr, ex.Name):
            found = self.find(expr.id)
            if found is None:
                raise refuse(f"the name {expr.id}")
            return found
        if isinstance(expr, ex.Unary) and expr.op == "*":
            return self.pointee(self.expr(expr.operand), num(0))
        if isinstance(expr, ex.Index):
            base, index = self.expr(expr.base), self.expr(expr.indices[0])
            if vector(base.type) and not isinstance(base.type, ex.PointerType):
                return self.lane(base, index)
            if isinstance(index.type, ex.PointerType):
                base, index = index, base
            return self.pointee(base, index.number)
        if isinstance(expr, low.Member):
            base = self.expr(expr.base)
            of = base.type.of if isinstance(base.type, ex.PointerType) else base.type
            fields = self.layout.fields(of)
            if expr.field not in fields:
                raise refuse(f"the field {expr.field}")
            offset, type_ = fields[expr.field]
            return Variable(type_, at=self.field(base.address, offset, type_))
        if isinstance(expr, ex.Cast):
            return self.place(expr.operand)
        raise refuse("an assignment to this")

    def lane(self, base: Value, index: Value) -> Variable:
        """Return the place of a lane of a vector."""
        shape = vector(base.type)
        assert shape is not None
        lane = ex.NamedType(name=shape.lane or "long long")
        return Variable(lane, at=base.address.read_as(pointee_element(lane)).moved(index.number))

    def pointee(self, base: Value, index: ex.Expr) -> Variable:
        """Return what a pointer, moved by whole elements, points at."""
        if not isinstance(base.type, ex.PointerType | ex.ArrayType):
            raise refuse("indexing a number")
        of = base.type.of
        return Variable(of, at=self.moved(base.address, of, index))

    def moved(self, at: Address, of: ex.Type, count: ex.Expr, sign: str = "+") -> Address:
        """Return an address some elements of a C type further."""
        size, elem = self.layout.size(of), _memory_element(of)
        if at.elem != elem:
            return at.read_as("u8").moved(op("*", _wide(count), size), sign).read_as(elem)
        return at.moved(op("*", _wide(count), size // _BYTES[elem]), sign)

    def load(self, place: Variable) -> Value:
        """Return the value at a place."""
        type_ = place.type
        if place.at is None:
            name = ex.Name(id=place.name)
            if isinstance(type_, ex.PointerType):
                return Value(type_, at=Address(name, pointee_element(type_.of)))
            return Value(type_, name)
        if isinstance(type_, ex.ArrayType) or vector(type_) or not scalar(type_):
            if isinstance(type_, ex.PointerType):
                raise refuse("pointers that are kept in memory")
            return Value(type_, at=place.at)
        item = place.at.item()
        if place.at.elem in ("f16", "bf16"):
            return Value(type_, call("load", place.at.pointer()))
        return Value(type_, item)

    def assign(self, place: Variable, value: Value) -> None:
        """Write a value to a place."""
        if place.at is not None:
            self.store(place.at, place.type, value)
        elif isinstance(place.type, ex.PointerType):
            moved = self.convert(value, place.type).address.pointer()
            self.w.set(ex.Name(id=place.name), moved)
        else:
            self.w.set(ex.Name(id=place.name), self.convert(value, place.type).number)

    def store(self, at: Address, type_: ex.Type, value: Value) -> None:
        """Write a value to memory."""
        found = scalar(type_)
        if found is not None:
            made = self.convert(value, type_).number
            at = at.read_as(element_of(found))
            if at.elem in ("f16", "bf16"):
                self.w.do(call("store", at.pointer(), made))
            else:
                self.w.set(at.item(), _narrowed(made, at.elem))
            return
        if isinstance(type_, ex.PointerType):
            raise refuse("pointers that are kept in memory")
        self.copy(at, value.address, self.layout.size(type_))

    def copy(self, to: Address, source: Address, size: int) -> None:
        """Write a copy of some bytes, in the largest elements that both have."""
        if to.base == source.base and to.at == source.at and to.elem == source.elem:
            return
        elem = to.elem if to.elem == source.elem else "u8"
        a, b = to.read_as(elem), source.read_as(elem)
        self.lanes.move(a, b, size // _BYTES[elem])

    # ---- expressions ----

    def expr(self, expr: ex.Expr) -> Value:
        """Return the value of an expression; what it does besides is written."""
        rule = _RULES.get(type(expr))
        if rule is None:
            raise refuse(f"{type(expr).__name__.lower()} inside an expression")
        made: Value = rule(self, expr)
        return made

    def condition(self, expr: ex.Expr) -> ex.Expr:
        """Return whether an expression is not 0."""
        if isinstance(expr, ex.Unary) and expr.op == "!":
            inner = self.condition(expr.operand)
            return (
                inner.operand if isinstance(inner, ex.Unary) and inner.op == "!" else negated(inner)
            )
        if isinstance(expr, ex.Binary) and expr.op in ("&&", "||"):
            return self.short_circuit(expr)
        if isinstance(expr, ex.Binary) and expr.op in ex.COMPARISONS:
            return self.compare(expr)
        value = self.expr(expr)
        if value.at is not None:
            return ex.Binary(op="!=", left=value.at.pointer(), right=ex.Name(id="null"))
        found = scalar(value.type)
        zero: ex.Expr = ex.Float(value=0.0) if found and found.floating else num(0)
        return ex.Binary(op="!=", left=value.number, right=zero)

    def short_circuit(self, expr: ex.Binary) -> ex.Expr:
        """Return `a && b` or `a || b`; what b does happens only where C evaluates it."""
        left = self.condition(expr.left)
        with self.w.inside() as inner:
            right = self.condition(expr.right)
        if not inner:
            return ex.Binary(op=expr.op, left=left, right=right)
        test = self.w.temporary(cast("i32", left), "i32", "test")
        assert isinstance(test, ex.Name)
        inner.append(high.Assign(target=test, value=cast("i32", right)))
        holds = ex.Binary(op="!=", left=test, right=num(0))
        self.w.branch(holds if expr.op == "&&" else negated(holds), inner, ())
        return holds

    def compare(self, expr: ex.Binary) -> ex.Expr:
        """Return a comparison."""
        left, right = self.expr(expr.left), self.expr(expr.right)
        if left.at is not None or right.at is not None:
            sides = []
            for side in (left, right):
                is_null = side.expr == num(0)
                at = None if is_null else side.address
                sides.append(at.pointer() if at else ex.Name(id="null"))
            elems = {s.at.elem for s in (left, right) if s.at is not None}
            if len(elems) > 1:
                sides = [s.address.read_as("u8").pointer() for s in (left, right)]
            return ex.Binary(op=expr.op, left=sides[0], right=sides[1])
        type_ = combine("+", left.type, right.type)
        assert type_ is not None
        a, b = self.convert(left, type_).number, self.convert(right, type_).number
        return ex.Binary(op=expr.op, left=a, right=b)

    def convert(self, value: Value, type_: ex.Type) -> Value:
        """Return a value as another C type."""
        if isinstance(type_, ex.PointerType):
            if value.expr == num(0):
                elem = pointee_element(type_.of)
                pointer = ex.PointerType(of=ex.NamedType(name=elem))
                null = ex.Cast(type=pointer, operand=ex.Name(id="null"))
                return Value(type_, at=Address(null, elem))
            return Value(type_, at=value.address.read_as(pointee_element(type_.of)))
        wanted = scalar(type_)
        if wanted is None:
            return Value(type_, value.expr, value.at)
        if value.at is not None:
            if wanted.size == 8 and isinstance(value.type, ex.PointerType | ex.ArrayType):
                return Value(type_, at=value.at.read_as("u8"))  # an address as an integer
            if scalar(value.type):
                return Value(type_, at=value.at)
            raise refuse(f"a vector or an address as {wanted.name}")
        made, source = value.number, scalar(value.type)
        if source is None:
            raise refuse("an address as a number")
        elem, had = element_of(wanted), element_of(source)
        kind = value_of(elem)
        if isinstance(made, ex.Int) and wanted.floating:
            return Value(type_, ex.Float(value=float(made.value)))
        if (
            isinstance(made, ex.Float)
            and wanted.floating
            and not (kind == "f32" and value_of(had) == "f64")
        ):
            return Value(type_, made if kind == value_of(had) else cast(kind, made))
        if isinstance(made, ex.Int) and not source.floating and _holds(elem, made.value):
            return Value(type_, made)
        if wanted.name == "_Bool":
            zero: ex.Expr = ex.Float(value=0.0) if source.floating else num(0)
            return Value(type_, cast("i32", ex.Binary(op="!=", left=made, right=zero)))
        if elem in _NARROW and not (had == elem and not isinstance(made, ex.Int)):
            return Value(type_, cast("i32", cast(elem, made)))
        if kind != value_of(had) or isinstance(made, ex.Int):
            if had == "u32" and kind == "i64":
                return Value(type_, cast("i64", cast("u32", made)))
            return Value(type_, cast(kind, made))
        return Value(type_, made)

    def call_helper(self, function: low.Function, args: Sequence[ex.Expr]) -> Value:
        """Write the body of a helper in place of its call; return its value."""
        if len(args) != len(function.params):
            raise refuse(f"a call of {function.name} with {len(args)} arguments")
        values = [self.expr(arg) for arg in args]
        outer_scopes, outer_addressed = self.scopes, set(self.addressed)
        self.scopes = [{}]
        self.enter(function)
        for param, value in zip(function.params, values, strict=True):
            type_ = param.type
            if isinstance(type_, ex.ArrayType):
                type_ = ex.PointerType(of=type_.of)
            self.declare_as(param.name, type_, value)
        void = function.returns == ex.NamedType(name="void")
        result = None if void else self.declare_as(RESULT + "_of", function.returns, None)
        self.results.append(result)
        self.steps.append(_HELPER)
        self.block(function.body.body)
        self.steps.pop()
        self.results.pop()
        self.active.pop()
        self.scopes, self.addressed = outer_scopes, outer_addressed
        return self.load(result) if result is not None else Value(ex.NamedType(name="void"))


FLOAT = ex.NamedType(name="float")
FLOAT_LANES = re.compile(r"_set[r1]?_p[sd]$|_set1_ps$|_n_f32$|_set_ss$")
"""Intrinsics that make floats of the numbers they are given."""


def _is_integer(value: Value) -> bool:
    found = scalar(value.type)
    return value.expr is not None and found is not None and not found.floating


_HELPER: Any = "helper"
COMPARISONS = {"EQ_OQ": 0, "LT_OS": 1, "LE_OS": 2, "NEQ_UQ": 4, "GE_OS": 13, "GT_OS": 14}
COMPARISONS |= {"LT_OQ": 17, "LE_OQ": 18, "GE_OQ": 29, "GT_OQ": 30, "NEQ_OQ": 12, "EQ_OS": 16}
COMPARISONS = {f"_CMP_{name}": value for name, value in COMPARISONS.items()}
COMPARISONS |= {
    "_MM_FROUND_TO_NEAREST_INT": 0,
    "_MM_FROUND_TO_NEG_INF": 1,
    "_MM_HINT_T0": 3,
    "_MM_ROUND_NEAREST": 0,
}
COMPARISONS |= {"_MM_FROUND_TO_POS_INF": 2, "_MM_FROUND_TO_ZERO": 3, "_MM_FROUND_NO_EXC": 8}
"""Numbers that the headers of x86 name."""
DOUBLES = {"M_PI": math.pi, "M_SQRT1_2": math.sqrt(0.5), "M_SQRT2": math.sqrt(2), "M_E": math.e}
DOUBLES |= {"M_LN2": math.log(2), "M_LOG2E": 1 / math.log(2), "M_2_SQRTPI": 2 / math.sqrt(math.pi)}
_BYTES = {"i8": 1, "u8": 1, "i16": 2, "u16": 2, "f16": 2, "bf16": 2, "i32": 4, "u32": 4, "f32": 4}
_BYTES |= {"i64": 8, "f64": 8}
_NARROW = ("i8", "u8", "i16", "u16")
_RANGE = {
    "i8": (-128, 127),
    "u8": (0, 255),
    "i16": (-(1 << 15), (1 << 15) - 1),
    "u16": (0, (1 << 16) - 1),
    "i32": (-(1 << 31), (1 << 31) - 1),
    "u32": (0, (1 << 31) - 1),
    "i64": (-(1 << 63), (1 << 63) - 1),
}


def _holds(elem: str, value: int) -> bool:
    low_, high_ = _RANGE[elem]
    return low_ <= value <= high_


def _zero(kind: str) -> ex.Expr:
    return ex.Float(value=0.0) if kind in ("f32", "f64") else num(0)


def _narrowed(value: ex.Expr, elem: str) -> ex.Expr:
    return cast(elem, value) if elem in _NARROW and not isinstance(value, ex.Int) else value


def _wide(count: ex.Expr) -> ex.Expr:
    return count


def _memory_element(type_: ex.Type) -> str:
    while isinstance(type_, ex.ArrayType):
        type_ = type_.of
    if isinstance(type_, ex.NamedType) and type_.name in VECTORS:
        return vector_element(type_.name)
    return pointee_element(type_)


def _returns(stmt: low.Stmt) -> bool:
    return any(isinstance(n, low.Return) for n in stmt.walk())


def _ends(body: Sequence[low.Stmt]) -> bool:
    return bool(body) and (
        isinstance(body[-1], low.Return)
        or (isinstance(body[-1], low.Block) and _ends(body[-1].body))
    )


def _leaves(body: low.Block) -> bool:
    return any(isinstance(n, low.Break | low.Continue) for n in body.walk())


def _names_in(expr: ex.Expr, scopes: Sequence[Mapping[str, Variable]]) -> bool:
    names = {n.id for n in expr.walk() if isinstance(n, ex.Name)}
    return any(name in scope for name in names for scope in scopes)


def _reachable(body: Sequence[high.Stmt]) -> list[high.Stmt]:
    """Return a body up to the first statement after which nothing runs."""
    out: list[high.Stmt] = []
    for stmt in body:
        out.append(stmt)
        if isinstance(stmt, high.Break | high.Continue | high.Return):
            break
    return out


# ---- rules of expressions ----


def _name(self: Literal, expr: ex.Name) -> Value:
    found = self.find(expr.id)
    if found is not None:
        return self.load(found)
    if expr.id in self.layout.constants:
        return Value(INT, num(self.layout.constants[expr.id]))
    if expr.id in LIMITS:
        return Value(ex.NamedType(name="float"), ex.Float(value=LIMITS[expr.id]))
    if expr.id == "NULL":
        return Value(INT, num(0))
    table = self.globals.get(expr.id)
    if table is not None and table.init is not None and scalar(table.type):
        return self.convert(self.expr(table.init), table.type)
    if expr.id in COMPARISONS:
        return Value(INT, num(COMPARISONS[expr.id]))
    if expr.id in DOUBLES:
        return Value(ex.NamedType(name="double"), ex.Float(value=DOUBLES[expr.id]))
    if expr.id in NAMES:
        return Value(ex.NamedType(name="float"), ex.Name(id=NAMES[expr.id]))
    raise refuse(f"the name {expr.id}")


def _int(self: Literal, expr: ex.Int) -> Value:
    suffix = expr.text.lower().lstrip("0123456789abcdefx").strip()
    name = "long" if "l" in suffix or not -(1 << 31) <= expr.value < 1 << 31 else "int"
    if "u" in suffix or (expr.text.lower().startswith("0x") and 1 << 31 <= expr.value < 1 << 32):
        name = "unsigned long" if "l" in suffix or expr.value >> 32 else "unsigned"
    value = expr.value - (1 << 64) if expr.value >> 63 else expr.value
    return Value(ex.NamedType(name=name), num(value))


def _float(self: Literal, expr: ex.Float) -> Value:
    double = bool(expr.text) and expr.text[-1] not in "fF"
    return Value(ex.NamedType(name="double" if double else "float"), ex.Float(value=expr.value))


def _unary(self: Literal, expr: ex.Unary) -> Value:
    if expr.op == "*":
        return self.load(self.place(expr))
    if expr.op == "&":
        place = self.place(expr.operand)
        if place.at is None:
            raise refuse("the address of a variable")
        return Value(ex.PointerType(of=place.type), at=place.at)
    if expr.op == "!":
        return Value(INT, cast("i32", negated(self.condition(expr.operand))))
    value = self.expr(expr.operand)
    if vector(value.type) and expr.op == "-":
        return _lanes_of(self, "-", Value(INT, num(0)), value)
    type_ = promote(value.type)
    made = self.convert(value, type_).number
    if isinstance(made, ex.Int):
        known = {"-": -made.value, "+": made.value, "~": ~made.value}[expr.op]
        return Value(type_, num(known))
    if isinstance(made, ex.Float) and expr.op == "-":
        return Value(type_, ex.Float(value=-made.value))
    return Value(type_, made if expr.op == "+" else ex.Unary(op=expr.op, operand=made))


def _binary(self: Literal, expr: ex.Binary) -> Value:
    if expr.op in ("&&", "||") or expr.op in ex.COMPARISONS:
        known = constant(expr, {})
        return Value(INT, num(known) if known is not None else cast("i32", self.condition(expr)))
    return _join(self, expr.op, self.expr(expr.left), self.expr(expr.right))


def _join(self: Literal, sign: str, left: Value, right: Value) -> Value:
    if vector(left.type) or vector(right.type):
        return _lanes_of(self, sign, left, right)
    if left.at is not None or right.at is not None:
        return _join_addresses(self, sign, left, right)
    type_ = combine(sign, left.type, right.type)
    if type_ is None:
        raise refuse(f"`{sign}` on these")
    found = scalar(type_)
    assert found is not None
    a = self.convert(left, type_).number
    b = self.convert(right, type_).number
    if isinstance(a, ex.Int) and isinstance(b, ex.Int):
        known = constant(ex.Binary(op=sign, left=a, right=b), {})
        if known is not None and (element_of(found) == "u32" or _holds(element_of(found), known)):
            return Value(type_, num(known & 0xFFFFFFFF if element_of(found) == "u32" else known))
    if isinstance(a, ex.Int):  # a literal alone would take the type of what it meets
        a = cast(element_of(found), a)
    if sign == ">>" and found.size == 8 and not found.signed:
        mask = op("<<", op("<<", cast("i64", num(-1)), op("-", num(63), b)), num(1))
        return Value(type_, op("&", op(">>", a, b), ex.Unary(op="~", operand=mask)))
    high_sign = "//" if sign == "/" and not found.floating else sign
    return Value(type_, op(high_sign, a, b))


def _join_addresses(self: Literal, sign: str, left: Value, right: Value) -> Value:
    if left.at is not None and right.at is not None:
        if sign != "-":
            raise refuse(f"`{sign}` on addresses")
        a, b = left.at.read_as("u8"), right.at.read_as("u8")
        of = left.type.of if isinstance(left.type, ex.PointerType | ex.ArrayType) else None
        distance = op("-", a.pointer(), b.pointer())
        size = self.layout.size(of) if of is not None else 1
        return Value(LONG, op("//", distance, size) if size > 1 else distance)
    if left.at is None:
        left, right = right, left
    if sign not in "+-":
        raise refuse(f"`{sign}` on an address")
    of = left.type.of if isinstance(left.type, ex.PointerType | ex.ArrayType) else None
    type_ = ex.PointerType(of=of) if of is not None else left.type
    moved = self.moved(left.address, of or ex.NamedType(name="void"), right.number, sign)
    return Value(type_, at=moved)


def _lanes_of(self: Literal, sign: str, left: Value, right: Value) -> Value:
    type_ = left.type if vector(left.type) else right.type
    shape = vector(type_)
    assert shape is not None
    lane = shape.lane or "long long"
    elem = pointee_element(ex.NamedType(name=lane))
    count = shape.size // _BYTES[elem]
    sides: list[Address] = []
    for side in (left, right):
        if vector(side.type):
            sides.append(side.address.read_as(elem))
        else:
            made = self.convert(side, ex.NamedType(name=lane)).number
            sides.append(self.lanes.spread(made, elem, count))
    made_at = self.lanes.operate(sign, elem, count, sides)
    return Value(type_, at=made_at.read_as(vector_element(shape.name)))


def _ternary(self: Literal, expr: ex.Ternary) -> Value:
    known = constant(expr.cond, {})
    if known is not None:
        return self.expr(expr.then if known else expr.other)
    cond = self.condition(expr.cond)
    with self.w.inside() as first:
        then = self.expr(expr.then)
    with self.w.inside() as second:
        other = self.expr(expr.other)
    if vector(then.type) or vector(other.type):
        raise refuse("a choice of vectors")
    if then.at is not None or other.at is not None:
        type_ = then.type if then.at is not None else other.type
        if isinstance(type_, ex.ArrayType):
            type_ = ex.PointerType(of=type_.of)
    else:
        type_ = combine("+", then.type, other.type) or INT
    then, other = self.convert(then, type_), self.convert(other, type_)
    if then.at is not None:
        elem = then.at.elem
        a, b, kind = then.at.pointer(), other.address.pointer(), f"ptr[{elem}]"
    else:
        a, b = then.number, other.number
        found = scalar(type_)
        assert found is not None
        elem, kind = "", value_of(element_of(found))
        if isinstance(a, ex.Int) and isinstance(b, ex.Int):
            a = cast(kind, a)
    if first or second:
        if elem:
            raise refuse("a choice of addresses that does something")
        made = ex.Name(id=self.names.fresh("chosen", kind))
        self.w.set(made, _zero(kind), kind)
        first.append(high.Assign(target=made, value=a))
        second.append(high.Assign(target=made, value=b))
        self.w.branch(cond, first, second)
        return Value(type_, made)
    return (
        Value(type_, at=Address(pick(cond, a, b), elem)) if elem else Value(type_, pick(cond, a, b))
    )


def _call(self: Literal, expr: ex.Call) -> Value:
    if expr.name in self.functions:
        return self.call_helper(self.functions[expr.name], expr.args)
    if expr.name in MEMORY:
        return _memory(self, expr)
    if expr.name in ASIDE:
        for arg in expr.args[:1]:
            self.w.do(call("prefetch", self.expr(arg).address.pointer()))
        return Value(ex.NamedType(name="void"))
    if expr.name in MATH:
        return _math(self, expr)
    if expr.name in _TESTS:
        return _test_number(self, expr)
    rule = find_rule(expr.name)
    if rule is None:
        raise refuse(f"a call of {expr.name}")
    args = [self.expr(arg) for arg in expr.args]
    if FLOAT_LANES.search(expr.name):
        args = [self.convert(a, FLOAT) if _is_integer(a) else a for a in args]
    given = [a.expr if a.expr is not None else a.address for a in args]
    type_, result = rule(self.lanes, given)
    if isinstance(result, Address):
        return Value(type_, at=result.read_as(_memory_element(type_)))
    found = scalar(type_)
    if found is not None and not found.floating and result is not None:
        kind = value_of(element_of(found))
        result = cast(kind, result)
    return Value(type_, result)


def _memory(self: Literal, expr: ex.Call) -> Value:
    to, source = self.expr(expr.args[0]), self.expr(expr.args[1])
    size = self.expr(expr.args[2]).number
    a = to.address.read_as("u8")
    if expr.name == "memset":
        self.w.loop(cast_i64(size), lambda i: self.w.set(a.item(i), _narrowed(source.number, "u8")))
    else:
        b = source.address.read_as("u8")
        self.w.loop(cast_i64(size), lambda i: self.w.set(a.item(i), b.item(i)))
    return to


def cast_i64(size: ex.Expr) -> ex.Expr:
    """Return a count as an i64."""
    return size if isinstance(size, ex.Int) else cast("i64", size)


def _math(self: Literal, expr: ex.Call) -> Value:
    name = expr.name
    type_ = ex.NamedType(
        name="int" if name == "abs" else "float" if name.endswith("f") else "double"
    )
    args = tuple(self.convert(self.expr(arg), type_).number for arg in expr.args)
    return Value(type_, call(MATH[name], *args))


_TESTS = ("isnan", "isinf", "lrintf", "lrint", "lroundf", "ldexpf", "__builtin_isnan")


def _test_number(self: Literal, expr: ex.Call) -> Value:
    value = self.expr(expr.args[0])
    made = value.number
    if expr.name.endswith("isnan"):
        return Value(INT, cast("i32", ex.Binary(op="!=", left=made, right=made)))
    if expr.name == "isinf":
        size = call("abs", made)
        return Value(INT, cast("i32", ex.Binary(op="==", left=size, right=ex.Name(id="inf"))))
    if expr.name == "ldexpf":
        power = self.expr(expr.args[1]).number
        return Value(value.type, op("*", made, call("exp2", cast("f32", power))))
    nearest = "rint" if "rint" in expr.name else "round"
    return Value(LONG, cast("i64", call(nearest, made)))


def _cast(self: Literal, expr: ex.Cast) -> Value:
    if expr.type == ex.NamedType(name="void"):
        self.expr(expr.operand)
        return Value(expr.type)
    value = self.expr(expr.operand)
    shape = vector(expr.type)
    if shape is not None:
        return Value(expr.type, at=value.address.read_as(vector_element(shape.name)))
    return self.convert(value, expr.type)


def _assign(self: Literal, expr: low.Assign) -> Value:
    if expr.op == "=" and isinstance(expr.value, low.InitList):
        raise refuse("a list that is assigned")
    place = self.place(expr.target)
    value = self.expr(expr.value)
    if expr.op != "=":
        value = _join(self, expr.op[:-1], self.load(place), value)
    self.assign(place, value)
    return self.load(place)


def _step(self: Literal, expr: low.Step) -> Value:
    place = self.place(expr.target)
    old = self.load(place)
    if not expr.prefix:
        if old.at is not None:
            kept = self.w.temporary(old.at.pointer(), f"ptr[{old.at.elem}]")
            kept_value = Value(old.type, at=Address(kept, old.at.elem))
        else:
            found = scalar(old.type)
            assert found is not None
            kept = self.w.temporary(old.number, value_of(element_of(found)))
            kept_value = Value(old.type, kept)
    self.assign(place, _join(self, expr.op[0], old, Value(INT, num(1))))
    return self.load(place) if expr.prefix else kept_value


def _sizeof(self: Literal, expr: low.SizeOf) -> Value:
    type_ = expr.of
    if isinstance(type_, ex.Expr):
        with self.w.inside():
            type_ = self.expr(type_).type
    return Value(ex.NamedType(name="size_t"), num(self.layout.size(type_)))


def _comma(self: Literal, expr: low.Comma) -> Value:
    return [self.expr(item) for item in expr.items][-1]


_RULES: dict[type[ex.Expr], Callable[[Literal, Any], Value]] = {
    ex.Int: _int,
    ex.Float: _float,
    ex.Name: _name,
    ex.Unary: _unary,
    ex.Binary: _binary,
    ex.Ternary: _ternary,
    ex.Call: _call,
    ex.Index: lambda self, expr: self.load(self.place(expr)),
    ex.Cast: _cast,
    low.Member: lambda self, expr: self.load(self.place(expr)),
    low.Assign: _assign,
    low.Step: _step,
    low.SizeOf: _sizeof,
    low.Comma: _comma,
}
_STATEMENTS: dict[type[Any], Callable[[Literal, Any], None]] = {
    low.Declare: Literal.declare,
    low.ExprStmt: Literal.evaluate,
    low.Block: lambda self, stmt: self.block(stmt.body),
    low.If: Literal.branch,
    low.For: Literal.for_loop,
    low.While: Literal.while_loop,
    low.Return: Literal.give_back,
    low.Break: lambda self, stmt: self.w.out.append(high.Break()),
    low.Continue: Literal.go_on,
    low.Pragma: lambda self, stmt: None,
    low.StructDef: lambda self, stmt: None,
}
