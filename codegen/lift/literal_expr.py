"""Expressions of C, written out: a rule for each kind of node.

`self` is the `Literal` that translates the function.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from dovetail.codegen.lift.emit import Address, call, cast, negated, num, op, pick, zero_of
from dovetail.codegen.lift.lanes import Rule
from dovetail.codegen.lift.lanes_x86 import x86_rule
from dovetail.codegen.lift.layout import kind_of, pointee_element, vector_element
from dovetail.codegen.lift.literal_values import (
    ASIDE,
    FLOAT_LANES,
    MEMORY,
    NAMED,
    Value,
    holds,
    memory_element,
    narrowed,
)
from dovetail.codegen.lift.neon_ops import neon_rule
from dovetail.codegen.lift.types import (
    DOUBLE,
    FLOAT,
    INT,
    LONG,
    MATH,
    SIZES,
    VOID,
    refuse,
)
from dovetail.ir import expr as ex
from dovetail.ir.high import nodes as high
from dovetail.ir.low import nodes as low
from dovetail.ir.low.conversions import combine, promote
from dovetail.ir.low.types import constant, is_integer, scalar, unqualified, vector

Literal = Any

# ---- rules of expressions ----


def _name(self: Literal, expr: ex.Name) -> Any:
    found = self.find(expr.id)
    if found is not None:
        return self.load(found)
    if expr.id in self.layout.constants:
        return Value(INT, num(self.layout.constants[expr.id]))
    table = self.globals.get(expr.id)
    if table is not None and table.init is not None and scalar(table.type):
        return self.convert(self.expr(table.init), table.type)
    if expr.id in NAMED:
        return NAMED[expr.id]
    raise refuse(f"the name {expr.id}")


def _int(self: Literal, expr: ex.Int) -> Any:
    suffix = expr.text.lower().lstrip("0123456789abcdefx").strip()
    name = "long" if "l" in suffix or not -(1 << 31) <= expr.value < 1 << 31 else "int"
    if "u" in suffix or (expr.text.lower().startswith("0x") and 1 << 31 <= expr.value < 1 << 32):
        name = "unsigned long" if "l" in suffix or expr.value >> 32 else "unsigned"
    value = expr.value - (1 << 64) if expr.value >> 63 else expr.value
    return Value(ex.NamedType(name=name), num(value))


def _float(self: Literal, expr: ex.Float) -> Any:
    double = bool(expr.text) and expr.text[-1] not in "fF"
    return Value(DOUBLE if double else FLOAT, ex.Float(value=expr.value))


def _unary(self: Literal, expr: ex.Unary) -> Any:
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


def _binary(self: Literal, expr: ex.Binary) -> Any:
    if expr.op in ("&&", "||") or expr.op in ex.COMPARISONS:
        known = constant(expr, {})
        return Value(INT, num(known) if known is not None else cast("i32", self.condition(expr)))
    return _join(self, expr.op, self.expr(expr.left), self.expr(expr.right))


def _join(self: Literal, sign: str, left: Value, right: Value) -> Any:
    if vector(left.type) or vector(right.type):
        return _lanes_of(self, sign, left, right)
    if left.at is not None or right.at is not None:
        return _join_addresses(self, sign, left, right)
    type_ = combine(sign, left.type, right.type)
    if type_ is None:
        raise refuse(f"`{sign}` on these")
    kind = kind_of(type_)
    a, b = self.convert(left, type_).number, self.convert(right, type_).number
    if isinstance(a, ex.Int) and isinstance(b, ex.Int):
        known = constant(ex.Binary(op=sign, left=a, right=b), {})
        if known is not None and (kind == "u32" or holds(kind, known)):
            return Value(type_, num(known & 0xFFFFFFFF if kind == "u32" else known))
    if isinstance(a, ex.Int):  # a literal alone would take the type of what it meets
        a = cast(kind, a)
    return Value(type_, op("//" if sign == "/" and kind[0] != "f" else sign, a, b))


def _join_addresses(self: Literal, sign: str, left: Value, right: Value) -> Any:
    if left.at is not None and right.at is not None:
        if sign != "-":
            raise refuse(f"`{sign}` on addresses")
        a, b = left.at.read_as("u8"), right.at.read_as("u8")
        of = left.type.of if isinstance(left.type, ex.PointerType | ex.ArrayType) else None
        distance = op("-", a.pointer(), b.pointer())
        size = self.layout.size(of) if of is not None else 1
        return Value(LONG, op("//", distance, size) if size > 1 else distance)
    if sign not in "+-":  # how an address is aligned
        whole = [_as_number(side) if side.at is not None else side for side in (left, right)]
        return _join(self, sign, *whole)
    if left.at is None:
        left, right = right, left
    type_ = unqualified(left.type)
    of = type_.of if isinstance(type_, ex.PointerType) else VOID
    return Value(type_, at=self.moved(left.address, of, self.count(right), sign))


def _as_number(address: Value) -> Value:
    """An address as the integer that it is."""
    return Value(LONG, cast("i64", address.address.pointer()))


def _lanes_of(self: Literal, sign: str, left: Value, right: Value) -> Any:
    type_ = left.type if vector(left.type) else right.type
    shape = vector(type_)
    assert shape is not None
    lane = ex.NamedType(name=shape.lane or "long long")
    elem = pointee_element(lane)
    count = shape.size // SIZES[elem]
    sides: list[Address] = []
    for side in (left, right):
        if vector(side.type):
            sides.append(side.address.read_as(elem))
        else:
            made = self.convert(side, lane).number
            sides.append(self.lanes.spread(made, elem, count))
    made_at = self.lanes.operate(sign, elem, count, sides)
    return Value(type_, at=made_at.read_as(vector_element(shape.name)))


def _ternary(self: Literal, expr: ex.Ternary) -> Any:
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
        type_ = unqualified(then.type if then.at is not None else other.type)
    else:
        type_ = combine("+", then.type, other.type) or INT
    then, other = self.convert(then, type_), self.convert(other, type_)
    if then.at is not None:
        elem = then.at.elem
        a, b, kind = then.at.pointer(), other.address.pointer(), f"ptr[{elem}]"
    else:
        a, b, elem, kind = then.number, other.number, "", kind_of(type_)
        if isinstance(a, ex.Int) and isinstance(b, ex.Int):
            a = cast(kind, a)
    if first or second:
        chosen = ex.Name(id=self.names.fresh("chosen", kind))
        self.w.set(chosen, zero_of(kind), kind)
        first.append(high.Assign(target=chosen, value=a))
        second.append(high.Assign(target=chosen, value=b))
        self.w.branch(cond, first, second)
    made = chosen if first or second else pick(cond, a, b)
    return Value(type_, at=Address(made, elem)) if elem else Value(type_, made)


def _call(self: Literal, expr: ex.Call) -> Any:
    if expr.name in self.functions:
        return self.call_helper(self.functions[expr.name], expr.args)
    if expr.name in MEMORY:
        return _memory(self, expr)
    if expr.name in ASIDE:
        for arg in expr.args[:1]:
            self.w.do(call("prefetch", self.expr(arg).address.pointer()))
        return Value(VOID)
    if expr.name in MATH:
        return _math(self, expr)
    if expr.name in _TESTS:
        return _test_number(self, expr)
    rule = find_rule(expr.name)
    if rule is None:
        raise refuse(f"a call of {expr.name}")
    args = [self.expr(arg) for arg in expr.args]
    if FLOAT_LANES.search(expr.name):
        args = [self.convert(a, FLOAT) if a.at is None and is_integer(a.type) else a for a in args]
    given = [a.expr if a.expr is not None else a.address for a in args]
    try:
        type_, result = rule(self.lanes, given)
    except (AttributeError, IndexError, TypeError, ValueError):
        raise refuse(f"a call of {expr.name} with {len(args)} arguments") from None
    if isinstance(result, Address):
        return Value(type_, at=result.read_as(memory_element(type_)))
    if result is not None and is_integer(type_):
        result = cast(kind_of(type_), result)
    return Value(type_, result)


@cache
def find_rule(name: str) -> Rule | None:
    """Return what an intrinsic of any instruction set writes, None for a function that is none."""
    return x86_rule(name) or neon_rule(name)


def _memory(self: Literal, expr: ex.Call) -> Any:
    to, source = self.expr(expr.args[0]), self.expr(expr.args[1])
    size = self.expr(expr.args[2]).number
    size = size if isinstance(size, ex.Int) else cast("i64", size)
    a = to.address.read_as("u8")
    if expr.name == "memset":
        self.w.loop(size, lambda i: self.w.set(a.item(i), narrowed(source.number, "u8")))
        return to
    b = source.address.read_as("u8")
    ahead = ex.Binary(op="<", left=b.pointer(), right=a.pointer())

    def copy(i: ex.Expr) -> None:
        if expr.name == "memmove":  # from the end, where the first bytes go over what follows
            i = pick(ahead, op("-", op("-", size, 1), i), i)
        self.w.set(a.item(i), b.item(i))

    self.w.loop(size, copy)
    return to


def _math(self: Literal, expr: ex.Call) -> Any:
    name = expr.name
    type_ = INT if name == "abs" else FLOAT if name.endswith("f") else DOUBLE
    args = tuple(self.convert(self.expr(arg), type_).number for arg in expr.args)
    return Value(type_, call(MATH[name], *args))


_TESTS = ("isnan", "isinf", "lrintf", "lrint", "lroundf", "ldexpf", "__builtin_isnan")


def _test_number(self: Literal, expr: ex.Call) -> Any:
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


def _cast(self: Literal, expr: ex.Cast) -> Any:
    if expr.type == VOID:
        self.expr(expr.operand)
        return Value(expr.type)
    value = self.expr(expr.operand)
    shape = vector(expr.type)
    if shape is not None:
        return Value(expr.type, at=value.address.read_as(vector_element(shape.name)))
    return self.convert(value, expr.type)


def _assign(self: Literal, expr: low.Assign) -> Any:
    if expr.op == "=" and isinstance(expr.value, low.InitList):
        raise refuse("a list that is assigned")
    place = self.place(expr.target)
    value = self.expr(expr.value)
    if expr.op != "=":
        value = _join(self, expr.op[:-1], self.load(place), value)
    self.assign(place, value)
    return self.load(place)


def _step(self: Literal, expr: low.Step) -> Any:
    place = self.place(expr.target)
    old = self.load(place)
    kept = old
    if not expr.prefix and old.at is not None:
        held = self.w.temporary(old.at.pointer(), f"ptr[{old.at.elem}]")
        kept = Value(old.type, at=Address(held, old.at.elem))
    elif not expr.prefix:
        kept = Value(old.type, self.w.temporary(old.number, kind_of(old.type)))
    self.assign(place, _join(self, expr.op[0], old, Value(INT, num(1))))
    return self.load(place) if expr.prefix else kept


def _sizeof(self: Literal, expr: low.SizeOf) -> Any:
    type_ = expr.of
    if isinstance(type_, ex.Expr):
        with self.w.inside():
            type_ = self.expr(type_).type
    return Value(ex.NamedType(name="size_t"), num(self.layout.size(type_)))


def short_circuit(self: Literal, expr: ex.Binary) -> ex.Expr:
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


def compare(self: Literal, expr: ex.Binary) -> ex.Expr:
    """Return a comparison."""
    left, right = self.expr(expr.left), self.expr(expr.right)
    if left.at is not None or right.at is not None:
        ats = [None if side.expr == num(0) else side.address for side in (left, right)]
        mixed = len({at.elem for at in ats if at is not None}) > 1
        sides = [
            ex.Name(id="null") if at is None else (at.read_as("u8") if mixed else at).pointer()
            for at in ats
        ]
        return ex.Binary(op=expr.op, left=sides[0], right=sides[1])
    type_ = combine("+", left.type, right.type)
    assert type_ is not None
    a, b = self.convert(left, type_).number, self.convert(right, type_).number
    return ex.Binary(op=expr.op, left=a, right=b)


RULES: dict[type[ex.Expr], Callable[[Literal, Any], Value]] = {
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
    low.Comma: lambda self, expr: [self.expr(item) for item in expr.items][-1],
}
