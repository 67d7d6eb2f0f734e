"""Scalar C expressions to the high IR: conversions become casts, pointers keep element steps.

In: a low expression and the names in scope. Out: the high expression and its type (as text).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dovetail.codegen.lift.emit import cast, negated, num, op
from dovetail.codegen.lift.layout import Layout
from dovetail.codegen.lift.types import LIMITS, MATH, NAMES, Names, element_type, refuse, value_type
from dovetail.ir import expr as ex
from dovetail.ir.high.rules import is_pointer
from dovetail.ir.low import nodes as low
from dovetail.ir.low.types import constant, scalar

Typed = tuple[ex.Expr, str]


@dataclass(slots=True)
class Scalars:
    """Translates expressions."""

    names: Names
    layout: Layout
    tunables: set[str]
    inlines: dict[str, tuple[str, tuple[str, ...], str]]  # helper -> name, parameter types, result
    structs: dict[str, ex.NamedType] = field(default_factory=dict)  # parameter -> what it points to
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Record something the reader of the result should know, once."""
        if text not in self.notes:
            self.notes.append(text)

    def expr(self, expr: ex.Expr) -> Typed:
        """Return the high expression and its type; SpecError for what has no high form."""
        rule = _RULES.get(type(expr))
        if rule is None:
            raise refuse(f"{type(expr).__name__.lower()} inside an expression", "give it a line")
        return rule(self, expr)

    def value(self, expr: ex.Expr, wanted: str) -> ex.Expr:
        """Return the expression converted to type `wanted`."""
        made, type_ = self.expr(expr)
        return convert(made, type_, wanted)

    def integer(self, expr: ex.Expr) -> ex.Expr:
        """Return an integer expression; SpecError for anything else."""
        made, type_ = self.expr(expr)
        if type_ not in ("int", "i64", "i32", "u16", "u32", "bool"):
            raise refuse(f"a {type_} where an integer is wanted")
        return made

    def pointer(self, expr: ex.Expr) -> ex.Expr:
        """Return a pointer expression."""
        made, type_ = self.expr(expr)
        if not is_pointer(type_):
            raise refuse(f"a {type_} where a pointer is wanted")
        return made


def convert(made: ex.Expr, type_: str, wanted: str) -> ex.Expr:
    """Return a value of `type_` as `wanted`, with a cast where the high IR wants one."""
    if type_ == wanted or (type_ == "null" and is_pointer(wanted)):
        return made
    if type_ in ("int", "bool", "i32") and wanted == "i64":
        return made
    if type_ == "int" and wanted in ("f32", "f64") and isinstance(made, ex.Int):
        return ex.Float(value=float(made.value))
    if type_ == "float" and wanted in ("f32", "f64"):
        return made
    if is_pointer(type_) or is_pointer(wanted):
        raise refuse(f"a {type_} used as {wanted}")
    return cast(wanted, made)


def common(left: str, right: str) -> str:
    """Return the type in which C computes on two scalars."""
    both = {left, right}
    for type_ in ("f64", "f32"):
        if type_ in both:
            return type_
    if "float" in both:
        return "f64"  # a literal without f is a double
    return "int" if both <= {"int", "bool"} else "i64"


# ---- rules ----


def _float(self: Scalars, expr: ex.Float) -> Typed:
    double = bool(expr.text) and expr.text[-1] not in "fF"
    return ex.Float(value=expr.value), "f64" if double else "f32"


def _name(self: Scalars, expr: ex.Name) -> Typed:
    if expr.id in NAMES:
        return ex.Name(id=NAMES[expr.id]), "null" if expr.id == "NULL" else "f32"
    if expr.id in LIMITS:
        return ex.Float(value=LIMITS[expr.id]), "f32"
    if expr.id in self.tunables:
        return ex.Name(id=expr.id), "i64"
    found = self.names.find(expr.id)
    if found is None:
        if expr.id in self.layout.constants:
            return num(self.layout.constants[expr.id]), "int"
        raise refuse(f"the name {expr.id}")
    return ex.Name(id=found), self.names.used[found]


def _unary(self: Scalars, expr: ex.Unary) -> Typed:
    if expr.op == "*":
        return _element(self, expr.operand, num(0))
    if expr.op == "&":
        if not isinstance(expr.operand, ex.Index):
            raise refuse("the address of a variable")
        return self.expr(address_of(expr.operand))
    made, type_ = self.expr(expr.operand)
    if expr.op == "!":
        return negated(made), "bool"
    if isinstance(made, ex.Int) and expr.op == "-":
        return ex.Int(value=-made.value), "int"
    if isinstance(made, ex.Float) and expr.op == "-":
        return ex.Float(value=-made.value), type_
    return ex.Unary(op=expr.op, operand=made), type_


def _binary(self: Scalars, expr: ex.Binary) -> Typed:
    if expr.op in ("&&", "||"):
        left, right = self.expr(expr.left)[0], self.expr(expr.right)[0]
        return ex.Binary(op=expr.op, left=left, right=right), "bool"
    left, left_type = self.expr(expr.left)
    right, right_type = self.expr(expr.right)
    if "null" in (left_type, right_type) or is_pointer(left_type) or is_pointer(right_type):
        return _pointers(expr.op, (left, left_type), (right, right_type))
    type_ = common(left_type, right_type)
    if type_ in ("f32", "f64"):
        left, right = convert(left, left_type, type_), convert(right, right_type, type_)
        made: ex.Expr = ex.Binary(op=expr.op, left=left, right=right)
        return made, "bool" if expr.op in ex.COMPARISONS else type_
    known = constant(ex.Binary(op=expr.op, left=left, right=right), {})
    if known is not None:
        return ex.Int(value=known), "int"
    op = "//" if expr.op == "/" else expr.op
    made = ex.Binary(op=op, left=left, right=right)
    return made, "bool" if expr.op in ex.COMPARISONS else type_


def _pointers(op: str, left: Typed, right: Typed) -> Typed:
    made = ex.Binary(op=op, left=left[0], right=right[0])
    if op in ex.COMPARISONS:
        return made, "bool"
    if is_pointer(left[1]):
        return made, "i64" if is_pointer(right[1]) else left[1]
    return ex.Binary(op=op, left=right[0], right=left[0]), right[1]


def _ternary(self: Scalars, expr: ex.Ternary) -> Typed:
    cond = self.expr(expr.cond)[0]
    then, then_type = self.expr(expr.then)
    other, other_type = self.expr(expr.other)
    if is_pointer(then_type) or is_pointer(other_type):
        type_ = then_type if is_pointer(then_type) else other_type
    else:
        type_ = common(then_type, other_type)
        if type_ in ("f32", "f64"):
            then, other = convert(then, then_type, type_), convert(other, other_type, type_)
    return ex.Ternary(cond=cond, then=then, other=other), type_


def _call(self: Scalars, expr: ex.Call) -> Typed:
    if expr.name in self.inlines:
        name, params, result = self.inlines[expr.name]
        args = tuple(self.value(a, t) for a, t in zip(expr.args, params, strict=True))
        return ex.Call(name=name, args=args), result
    builtin = MATH.get(expr.name)
    if builtin is None:
        raise refuse(f"a call of {expr.name}")
    type_ = "i64" if expr.name == "abs" else "f32" if expr.name.endswith("f") else "f64"
    return ex.Call(name=builtin, args=tuple(self.value(a, type_) for a in expr.args)), type_


def _element(self: Scalars, base: ex.Expr, at: ex.Expr) -> Typed:
    made, type_ = self.expr(base)
    if not is_pointer(type_):
        raise refuse(f"indexing a {type_}")
    if isinstance(made, ex.Binary) and made.op == "+":
        at, made = op("+", made.right, at), made.left
    return ex.Index(base=made, indices=(at,)), type_[4:-1]


def address_of(place: ex.Index) -> ex.Expr:
    """Return the address of an element."""
    return ex.Binary(op="+", left=place.base, right=place.indices[0])


def _field(self: Scalars, expr: low.Member) -> Typed:
    """Return `p->a.b` of a struct of floats as an element of the array it is."""
    path = [expr.field]
    while not expr.arrow and isinstance(expr.base, low.Member):
        expr = expr.base
        path.insert(0, expr.field)
    base = expr.base
    if not isinstance(base, ex.Name) or base.id not in self.structs:
        raise refuse("fields of anything but a struct parameter")
    offsets = self.layout.floats(self.structs[base.id])
    if tuple(path) not in offsets:
        raise refuse(f"the field {'.'.join(path)}")
    return ex.Index(base=self.expr(base)[0], indices=(num(offsets[tuple(path)]),)), "f32"


def _cast(self: Scalars, expr: ex.Cast) -> Typed:
    if isinstance(expr.type, ex.PointerType):
        return _cast_pointer(self, expr.type, expr.operand)
    target = value_type(expr.type)
    made, type_ = self.expr(expr.operand)
    narrow = scalar(expr.type)
    if narrow is not None and not narrow.floating and narrow.size < 4:
        raise refuse(f"casts to {narrow.name}")
    return convert(made, type_, target), target


def _cast_pointer(self: Scalars, type_: ex.PointerType, operand: ex.Expr) -> Typed:
    """`(T*) p`, and `(T*) ((uintptr_t) p + bytes)`: steps in bytes become steps in elements."""
    if isinstance(type_.of, ex.NamedType) and type_.of.name in ("void", "char"):
        return self.expr(operand)
    wanted = f"ptr[{element_type(type_.of)}]"
    if isinstance(operand, ex.Binary) and operand.op in ("+", "-"):
        inner = operand.left
        if isinstance(inner, ex.Cast) and _is_address(inner.type):
            base, base_type = self.expr(inner.operand)
            size = scalar(type_.of)
            assert size is not None
            step = in_elements(self.integer(operand.right), size.size)
            self.note("byte offsets between rows are whole elements")
            return ex.Binary(op=operand.op, left=base, right=step), _same(base_type, wanted)
    made, found = self.expr(operand)
    return made, _same(found, wanted)


def _same(found: str, wanted: str) -> str:
    if found not in (wanted, "null"):
        raise refuse(f"a {found} read as {wanted}")
    return wanted


def _is_address(type_: ex.Type) -> bool:
    integer = isinstance(type_, ex.NamedType) and type_.name in ("uintptr_t", "intptr_t", "size_t")
    of = type_.of if isinstance(type_, ex.PointerType) else None
    return integer or (isinstance(of, ex.NamedType) and of.name in ("char", "uint8_t", "int8_t"))


def in_elements(count: ex.Expr, size: int) -> ex.Expr:
    """Return a number of bytes as a number of elements of `size` bytes."""
    if isinstance(count, ex.Int):
        return num(count.value // size)
    if isinstance(count, ex.Binary) and count.op == "*":
        for factor, rest in ((count.left, count.right), (count.right, count.left)):
            if isinstance(factor, ex.Int) and factor.value % size == 0:
                return op("*", rest, factor.value // size)
    return ex.Binary(op="//", left=count, right=num(size))


def _sizeof(self: Scalars, expr: low.SizeOf) -> Typed:
    value = constant(expr, {})
    if value is None:
        raise refuse("sizeof of this")
    return ex.Int(value=value), "int"


_RULES: dict[type[ex.Expr], Callable[[Scalars, Any], Typed]] = {
    ex.Int: lambda self, expr: (ex.Int(value=expr.value), "int"),
    ex.Float: _float,
    ex.Name: _name,
    ex.Unary: _unary,
    ex.Binary: _binary,
    ex.Ternary: _ternary,
    ex.Call: _call,
    ex.Index: lambda self, expr: _element(self, expr.base, self.integer(expr.indices[0])),
    ex.Cast: _cast,
    low.SizeOf: _sizeof,
    low.Member: _field,
}
