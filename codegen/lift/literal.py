"""C as it stands: every variable, address and vector of a function, written out in the high IR.

The last way to lift: nothing is proved and nothing made independent of the vector width. Vectors
become arrays of their lanes, which operations fill in loops; memory is bytes at offsets, so
structs, unions, casts of pointers and `void *` mean what they mean to a C compiler.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from dovetail.codegen.lift.emit import Address, Writer, cast, negated, num, op, type_of, zero_of
from dovetail.codegen.lift.lanes import Lanes
from dovetail.codegen.lift.layout import Layout, pointee_element, value_of
from dovetail.codegen.lift.literal_expr import RULES, compare, short_circuit
from dovetail.codegen.lift.literal_values import (
    DEEPEST,
    HELPER,
    LARGEST_TABLE,
    RESULT,
    Value,
    Variable,
    ends,
    holds,
    leaves,
    memory_element,
    narrowed,
    reachable,
    returns,
    value_in,
    variable_kind,
)
from dovetail.codegen.lift.types import LONG, SIZES, VOID, WORKS_IN, Names, element_of, refuse
from dovetail.ir import expr as ex
from dovetail.ir.high import nodes as high
from dovetail.ir.low import nodes as low
from dovetail.ir.low.types import constant, scalar, sized, unqualified, vector


def write_out(
    function: low.Function,
    functions: Mapping[str, low.Function],
    layout: Layout,
    tables: Mapping[str, low.Declare],
) -> high.Function:
    """Return a function as a @kernel; what it returns goes to `result[0]`.

    functions: of the text, which it may call. tables: what stands outside of them.
    """
    return _Literal(functions, layout, tables).kernel(function)


@dataclass(slots=True)
class _Literal:
    functions: Mapping[str, low.Function]
    layout: Layout
    globals: Mapping[str, low.Declare]
    names: Names = field(default_factory=Names)
    scopes: ChainMap[str, Variable] = field(default_factory=ChainMap)
    addressed: set[str] = field(default_factory=set)
    active: list[str] = field(default_factory=list)
    steps: list[Any] = field(default_factory=list)  # of the loops around
    results: list[Variable | None] = field(default_factory=list)  # of the helpers around
    tables: dict[str, Variable] = field(default_factory=dict)
    prologue: list[high.Stmt] = field(default_factory=list)  # fills the tables
    w: Writer = field(init=False)
    lanes: Lanes = field(init=False)
    outside: Layout = field(init=False)  # what is known outside of functions

    def __post_init__(self) -> None:
        self.outside = self.layout
        self.w = Writer(self.names)
        self.lanes = Lanes(self.w)

    def kernel(self, function: low.Function) -> high.Function:
        self.enter(function)
        params = [self.parameter(param) for param in function.params]
        back, result = function.returns, None
        if isinstance(back, ex.PointerType):
            raise refuse("a kernel that returns a pointer")
        if back != VOID:
            elem = memory_element(back)
            made = self.names.declare(RESULT, f"ptr[{elem}]")
            params.append(high.Param(name=made, type=type_of(f"ptr[{elem}]")))
            result = Variable(back, at=Address(ex.Name(id=made), elem))
        self.results.append(result)
        self.block(function.body.body)
        out = self.w.out
        if out and out[-1] == high.Return():
            out.pop()
        return high.Function(
            kind="kernel",
            name=function.name,
            params=tuple(params),
            returns=None,
            tunables=(),
            body=(*self.prologue, *reachable(out)),
        )

    def enter(self, function: low.Function) -> None:
        """Note the variables of a function whose address is taken."""
        if function.name in self.active or len(self.active) > DEEPEST:
            raise refuse(f"the recursion of {function.name}")
        self.active.append(function.name)
        for node in function.walk():
            if isinstance(node, ex.Unary) and node.op == "&" and isinstance(node.operand, ex.Name):
                self.addressed.add(node.operand.id)

    def parameter(self, param: low.Param) -> high.Param:
        """Declare a parameter; return it as the high IR has it."""
        type_, name = unqualified(param.type), param.name
        if scalar(type_) or isinstance(type_, ex.PointerType):
            kind = variable_kind(type_)
            given = "i64" if kind in ("i32", "u32", "u64") else kind  # kernels take integers so
        else:  # by value: a pointer to it
            kind, given = "", f"ptr[{memory_element(type_)}]"
        made = ex.Name(id=self.names.declare(name, given))
        if given == kind and name not in self.addressed:
            self.bind(name, Variable(type_, made.id))
        else:
            held = Value(LONG, made) if given == "i64" else value_in(type_, made)
            self.declare_as(name, type_, held)
        return high.Param(name=made.id, type=type_of(given))

    # ---- statements ----

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Open a scope: what is declared in it, and what is known of it, ends with it."""
        outer = self.scopes, self.layout
        self.scopes = self.scopes.new_child()
        yield
        self.scopes, self.layout = outer

    def block(self, body: Sequence[low.Stmt]) -> None:
        with self.scope():
            for i, stmt in enumerate(body):
                if isinstance(stmt, low.If) and len(self.results) > 1 and returns(stmt):
                    self.leave_early(stmt, body[i + 1 :])
                    break
                self.statement(stmt)
                if isinstance(stmt, low.Return):
                    break

    def leave_early(self, stmt: low.If, rest: Sequence[low.Stmt]) -> None:
        """Translate `if (c) return x; rest` of a helper: the rest becomes the other arm."""
        if self.steps and self.steps[-1] != HELPER:
            raise refuse("a helper that returns inside a loop")
        then, other = list(stmt.then.body), list(stmt.other.body) if stmt.other else []
        if not ends(then):
            then += rest
        if not ends(other):
            other += rest
        arms = low.Block(body=tuple(then)), low.Block(body=tuple(other))
        self.statement(replace(stmt, then=arms[0], other=arms[1]))

    def statement(self, stmt: low.Stmt) -> None:
        _STATEMENTS[type(stmt)](self, stmt)

    def declare(self, stmt: low.Declare) -> None:
        type_, init = stmt.type, stmt.init
        if isinstance(init, low.InitList) and (scalar(type_) or isinstance(type_, ex.PointerType)):
            init = init.items[0] if init.items else ex.Int(value=0)
        if isinstance(init, low.InitList):
            type_ = sized(type_, init)
            at = self.declare_as(stmt.name, type_, None).at
            assert at is not None
            self.fill(at, type_, init)
            return
        if init is None:
            self.declare_as(stmt.name, type_, None)
            return
        known = constant(init, self.layout.constants)
        if stmt.static and known is None:
            raise refuse(f"the static variable {stmt.name}")
        self.declare_as(stmt.name, type_, self.expr(init))
        if known is not None and getattr(type_, "const", False) and scalar(type_):
            constants = {**self.layout.constants, stmt.name: known}
            self.layout = replace(self.layout, constants=constants)

    def declare_as(self, name: str, type_: ex.Type, value: Value | None) -> Variable:
        """Declare a variable of a C type with a value, or 0 where C leaves it open."""
        number = scalar(type_) is not None
        if name in self.addressed or not (number or isinstance(type_, ex.PointerType)):
            made = self.declare_memory(name, type_)
            if value is not None:
                assert made.at is not None
                self.store(made.at, type_, value)
        else:
            kind = variable_kind(type_)
            made = Variable(type_, self.names.declare(name, kind))
            start = zero_of(kind) if value is None else self.held(value, type_)
            self.w.set(ex.Name(id=made.name), start, kind if number or value is None else None)
        self.bind(name, made)
        return made

    def bind(self, name: str, variable: Variable) -> None:
        """Let a name mean a variable: what a constant of that name was is hidden."""
        self.scopes[name] = variable
        if name in self.layout.constants:
            constants = {n: v for n, v in self.layout.constants.items() if n != name}
            self.layout = replace(self.layout, constants=constants)

    def declare_memory(self, name: str, type_: ex.Type) -> Variable:
        """Declare a variable that is memory: an array, struct, vector, what has an address."""
        elem = memory_element(type_)
        size = self.layout.size(type_)
        return Variable(type_, at=self.w.array(name, size // SIZES[elem], elem))

    def fill(self, at: Address, type_: ex.Type, init: ex.Expr) -> None:
        """Store an initialiser; what it does not name is 0."""
        if not isinstance(init, low.InitList):
            self.store(at, type_, self.expr(init))
            return
        if scalar(type_) or isinstance(type_, ex.PointerType):
            self.fill(at, type_, init.items[0] if init.items else ex.Int(value=0))
            return
        size, shape = self.layout.size(type_), vector(type_)
        if shape is not None and shape.lane:
            type_ = ex.ArrayType(of=ex.NamedType(name=shape.lane), size=ex.Int(value=shape.lanes))
        if isinstance(type_, ex.ArrayType):
            each = self.layout.size(type_.of)
            parts = [(start, type_.of) for start in range(0, size, each)]
        else:
            parts = list(self.layout.fields(type_).values())
        if len(init.items) < len(parts) or not isinstance(type_, ex.ArrayType):
            self.lanes.clear(at.read_as("u8"), size)
        for (offset, declared), item in zip(parts, init.items, strict=False):
            kind = sized(declared, item)
            self.fill(self.field(at, offset, kind), kind, item)

    def field(self, at: Address, offset: int, type_: ex.Type) -> Address:
        """Return the address of a part of memory, counted in the part's own elements."""
        elem = memory_element(type_)
        size = SIZES[elem]
        if elem == at.elem and offset % size == 0:
            return at.moved(offset // size)
        return at.read_as("u8").moved(offset).read_as(elem)

    def branch(self, stmt: low.If) -> None:
        known = constant(stmt.cond, self.layout.constants)
        if known is not None:
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
        with self.scope():
            for item in stmt.init:
                self.statement(item)
            self.repeat(stmt.cond, stmt.body, stmt.step, last=None)

    def while_loop(self, stmt: low.While) -> None:
        if not stmt.do:
            self.repeat(stmt.cond, stmt.body, None, last=None)
        elif constant(stmt.cond, {}) == 0 and not leaves(stmt.body):
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
        self.w.out.append(high.While(cond=test, body=tuple(reachable(inner))))

    def go_on(self, stmt: low.Continue) -> None:
        step = self.steps[-1]
        if step is not None:
            self.expr(step)
        self.w.out.append(high.Continue())

    def give_back(self, stmt: low.Return) -> None:
        result = self.results[-1]
        if stmt.value is not None:
            value = self.expr(stmt.value)
            if result is not None:
                self.assign(result, value)
        if len(self.results) == 1:
            self.w.out.append(high.Return())
        elif self.steps and self.steps[-1] != HELPER:
            raise refuse("a helper that returns inside a loop")

    # ---- places ----

    def find(self, name: str) -> Variable | None:
        return self.scopes.get(name) or self.tables.get(name) or self.table(name)

    def table(self, name: str) -> Variable | None:
        """Return a constant table of the file; it is filled where the kernel begins."""
        stmt = self.globals.get(name)
        if stmt is None or stmt.init is None:
            return None
        if not isinstance(stmt.type, ex.ArrayType) or not isinstance(stmt.init, low.InitList):
            return None
        type_ = sized(stmt.type, stmt.init)
        if self.layout.size(type_) > LARGEST_TABLE:
            raise refuse(f"the table {name}, which is larger than {LARGEST_TABLE} bytes")
        with self.apart(), self.w.inside() as filled:
            made = self.tables[name] = self.declare_memory(name, type_)
            assert made.at is not None
            self.fill(made.at, type_, stmt.init)
        self.prologue += filled
        return made

    def place(self, expr: ex.Expr) -> Variable:
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
                return self.lane(base, self.count(index))
            if isinstance(index.type, ex.PointerType):
                base, index = index, base
            return self.pointee(base, self.count(index))
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

    def lane(self, base: Value, index: ex.Expr) -> Variable:
        shape = vector(base.type)
        assert shape is not None
        lane = ex.NamedType(name=shape.lane or "long long")
        return Variable(lane, at=base.address.read_as(pointee_element(lane)).moved(index))

    def pointee(self, base: Value, index: ex.Expr) -> Variable:
        """Return what a pointer, moved by whole elements, points at."""
        if not isinstance(base.type, ex.PointerType | ex.ArrayType):
            raise refuse("indexing a number")
        of = base.type.of
        return Variable(of, at=self.moved(base.address, of, index))

    def moved(self, at: Address, of: ex.Type, count: ex.Expr, sign: str = "+") -> Address:
        """Return an address some elements of a C type further."""
        size, elem = self.layout.size(of), memory_element(of)
        if at.elem != elem:
            return at.read_as("u8").moved(op("*", count, size), sign).read_as(elem)
        return at.moved(op("*", count, size // SIZES[elem]), sign)

    def count(self, value: Value) -> ex.Expr:
        """Return a number by which an address is moved: as in C, an unsigned one wraps."""
        found = scalar(value.type)
        wraps = found is not None and found.size == 8 and not found.signed
        return (self.convert(value, LONG) if wraps else value).number

    def load(self, place: Variable) -> Value:
        type_ = place.type
        if place.at is None:
            return value_in(type_, ex.Name(id=place.name))
        if scalar(type_):
            return Value(type_, place.at.item())
        if isinstance(type_, ex.PointerType):
            return Value(type_, at=self.kept(place.at.item(), pointee_element(type_.of)))
        return Value(type_, at=place.at)

    def kept(self, item: ex.Expr, elem: str) -> Address:
        """Return the address that an i64 in memory is; the memory may change before it is used."""
        kind = f"ptr[{elem}]"
        made = ex.Cast(type=type_of(kind), operand=cast("i64", item))
        return Address(self.w.temporary(made, kind), elem)

    def assign(self, place: Variable, value: Value) -> None:
        if place.at is not None:
            self.store(place.at, place.type, value)
        else:
            self.w.set(ex.Name(id=place.name), self.held(value, place.type))

    def held(self, value: Value, type_: ex.Type) -> ex.Expr:
        """Return what a variable of a C type holds where it has a value."""
        made = self.convert(value, type_)
        return made.address.pointer() if isinstance(type_, ex.PointerType) else made.number

    def store(self, at: Address, type_: ex.Type, value: Value) -> None:
        if found := scalar(type_):
            at = at.read_as(element_of(found))
            self.w.set(at.item(), narrowed(self.held(value, type_), at.elem))
        elif isinstance(type_, ex.PointerType):
            self.w.set(at.read_as("i64").item(), cast("i64", self.held(value, type_)))
        else:
            self.copy(at, value.address, self.layout.size(type_))

    def copy(self, to: Address, source: Address, size: int) -> None:
        """Write a copy of some bytes, in the largest elements that both have."""
        if to == source:
            return
        elem = to.elem if to.elem == source.elem else "u8"
        a, b = to.read_as(elem), source.read_as(elem)
        self.lanes.move(a, b, size // SIZES[elem])

    # ---- expressions ----

    def expr(self, expr: ex.Expr) -> Value:
        """Return the value of an expression; what it does besides is written."""
        rule = RULES.get(type(expr))
        if rule is None:
            raise refuse(f"{type(expr).__name__.lower()} inside an expression")
        made: Value = rule(self, expr)
        return made

    def condition(self, expr: ex.Expr) -> ex.Expr:
        """Return whether an expression is not 0."""
        if isinstance(expr, ex.Unary) and expr.op == "!":
            return negated(self.condition(expr.operand))
        if isinstance(expr, ex.Binary) and expr.op in ("&&", "||"):
            return short_circuit(self, expr)
        if isinstance(expr, ex.Binary) and expr.op in ex.COMPARISONS:
            return compare(self, expr)
        value = self.expr(expr)
        if value.at is not None:
            return ex.Binary(op="!=", left=value.at.pointer(), right=ex.Name(id="null"))
        found = scalar(value.type)
        zero = zero_of("f32" if found and found.floating else "i32")
        return ex.Binary(op="!=", left=value.number, right=zero)

    def convert(self, value: Value, type_: ex.Type) -> Value:
        if isinstance(type_, ex.PointerType):
            if value.expr == num(0):
                elem = pointee_element(type_.of)
                null = ex.Cast(type=type_of(f"ptr[{elem}]"), operand=ex.Name(id="null"))
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
        if isinstance(made, ex.Int) and not source.floating and holds(elem, made.value):
            return Value(type_, made)
        if wanted.name == "_Bool":
            zero = zero_of("f32" if source.floating else "i32")
            return Value(type_, cast("i32", ex.Binary(op="!=", left=made, right=zero)))
        if elem in WORKS_IN and not (had == elem and not isinstance(made, ex.Int)):
            return Value(type_, cast("i32", cast(elem, made)))
        if kind != value_of(had) or isinstance(made, ex.Int):
            if had == "u32" and kind in ("i64", "u64"):
                return Value(type_, cast(kind, cast("u32", made)))
            return Value(type_, cast(kind, made))
        return Value(type_, made)

    def call_helper(self, function: low.Function, args: Sequence[ex.Expr]) -> Value:
        """Write the body of a helper in place of its call; return its value."""
        if len(args) != len(function.params):
            raise refuse(f"a call of {function.name} with {len(args)} arguments")
        values = [self.expr(arg) for arg in args]
        with self.apart():
            self.enter(function)
            for param, value in zip(function.params, values, strict=True):
                self.declare_as(param.name, unqualified(param.type), value)
            void = function.returns == VOID
            result = None if void else self.declare_as(RESULT + "_of", function.returns, None)
            self.results.append(result)
            self.steps.append(HELPER)
            self.block(function.body.body)
            self.steps.pop()
            self.results.pop()
            self.active.pop()
        return self.load(result) if result is not None else Value(VOID)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Leave the function for a helper, or what stands outside of all: it knows other names."""
        outer = self.scopes, self.layout, set(self.addressed)
        self.scopes, self.layout = ChainMap(), self.outside
        yield
        self.scopes, self.layout, self.addressed = outer


_STATEMENTS: dict[type[Any], Callable[[_Literal, Any], object]] = {
    low.Declare: _Literal.declare,
    low.ExprStmt: lambda self, stmt: self.expr(stmt.expr),
    low.Block: lambda self, stmt: self.block(stmt.body),
    low.If: _Literal.branch,
    low.For: _Literal.for_loop,
    low.While: _Literal.while_loop,
    low.Return: _Literal.give_back,
    low.Break: lambda self, stmt: self.w.out.append(high.Break()),
    low.Continue: _Literal.go_on,
    low.Pragma: lambda self, stmt: None,
    low.StructDef: lambda self, stmt: None,
}
