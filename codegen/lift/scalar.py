"""Scalar C expressions to the high IR: conversions become casts, pointers keep element steps.

In: a low expression and the names in scope. Out: the high expression and its type (as text).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dovetail.codegen.lift.types import (
    LIMITS,
    MATH,
    NAMES,
    Names,
    element_type,
    float_offsets,
    refuse,
    value_type,
)
from dovetail.ir.expr import (
    Binary,
    Call,
    Cast,
    Expr,
    Float,
    Index,
    Int,
    Name,
    NamedType,
    PointerType,
    Ternary,
    Type,
    Unary,
)
from dovetail.ir.low import nodes as low
from dovetail.ir.low.types import constant, scalar

Typed = tuple[Expr, str]
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")


@dataclass(slots=True)
class Scalars:
    """Translates expressions. `constants` are integers known at compile time, tunables left out."""

    names: Names
    structs: dict[str, low.StructDef]
    tunables: set[str]
    inlines: dict[str, tuple[tuple[str, ...], str]]  # helper -> parameter types, result
    constants: dict[str, int] = field(default_factory=dict)
    struct_params: dict[str, str] = field(default_factory=dict)  # C name -> struct it points to
    notes: list[str] = field(default_factory=list)

    def expr(self, expr: Expr) -> Typed:
        """Return the high expression and its type; SpecError for what has no high form."""
        rule = _RULES.get(type(expr))
        if rule is None:
            raise refuse(f"{type(expr).__name__.lower()} inside an expression", "give it a line")
        return rule(self, expr)

    def value(self, expr: Expr, wanted: str) -> Expr:
        """Return the expression converted to type `wanted`."""
        made, type_ = self.expr(expr)
        return convert(made, type_, wanted)

    def integer(self, expr: Expr) -> Expr:
        """Return an integer expression; SpecError for anything else."""
        made, type_ = self.expr(expr)
        if type_ not in ("int", "i64", "i32", "u16", "u32", "bool"):
            raise refuse(f"a {type_} where an integer is wanted")
        return made

    def pointer(self, expr: Expr) -> Expr:
        """Return a pointer expression."""
        made, type_ = self.expr(expr)
        if not type_.startswith("ptr"):
            raise refuse(f"a {type_} where a pointer is wanted")
        return made

    def field(self, expr: low.Member) -> Typed:
        """Return `p->a.b` of a struct of floats as an element of the array it is."""
        path: list[str] = []
        node: Expr = expr
        while isinstance(node, low.Member):
            path.insert(0, node.field)
            if node.arrow:
                break
            node = node.base
        base = node.base if isinstance(node, low.Member) else None
        if not isinstance(base, Name) or base.id not in self.struct_params:
            raise refuse("fields of anything but a struct parameter")
        offsets = float_offsets(self.structs, self.struct_params[base.id])
        if tuple(path) not in offsets:
            raise refuse(f"the field {'.'.join(path)}")
        at = Int(value=offsets[tuple(path)])
        return Index(base=self.expr(base)[0], indices=(at,)), "f32"


def convert(made: Expr, type_: str, wanted: str) -> Expr:
    """Return a value of `type_` as `wanted`, with a cast where the high IR wants one."""
    if type_ == wanted or (type_ == "null" and wanted.startswith("ptr")):
        return made
    if type_ in ("int", "bool") and wanted == "i64":
        return made
    if type_ == "int" and wanted in ("f32", "f64") and isinstance(made, Int):
        return Float(value=float(made.value))
    if type_ == "float" and wanted in ("f32", "f64"):
        return made
    if type_ in ("i32", "u16", "u32") and wanted == "i64":
        return Cast(type=NamedType(name="i64"), operand=made) if type_ != "i32" else made
    if type_.startswith("ptr") or wanted.startswith("ptr"):
        raise refuse(f"a {type_} used as {wanted}")
    return Cast(type=NamedType(name=wanted), operand=made)


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


def _int(self: Scalars, expr: Int) -> Typed:
    return Int(value=expr.value), "int"


def _float(self: Scalars, expr: Float) -> Typed:
    double = bool(expr.text) and expr.text[-1] not in "fF"
    return Float(value=expr.value), "f64" if double else "f32"


def _name(self: Scalars, expr: Name) -> Typed:
    if expr.id in NAMES:
        return Name(id=NAMES[expr.id]), "null" if expr.id == "NULL" else "f32"
    if expr.id in LIMITS:
        return Float(value=LIMITS[expr.id]), "f32"
    if expr.id in self.tunables:
        return Name(id=expr.id), "i64"
    found = self.names.find(expr.id)
    if found is None:
        if expr.id in self.constants:
            return Int(value=self.constants[expr.id]), "int"
        raise refuse(f"the name {expr.id}")
    return Name(id=found), self.names.type_of(found)


def _unary(self: Scalars, expr: Unary) -> Typed:
    if expr.op == "*":
        return _element(self, expr.operand, Int(value=0))
    if expr.op == "&":
        if isinstance(expr.operand, Index):
            inner = expr.operand
            sum_ = Binary(op="+", left=inner.base, right=inner.indices[0])
            return self.expr(sum_)
        raise refuse("the address of a variable")
    made, type_ = self.expr(expr.operand)
    if expr.op == "!":
        if isinstance(made, Unary) and made.op == "!":
            return made.operand, "bool"
        return Unary(op="!", operand=made), "bool"
    if isinstance(made, Int) and expr.op == "-":
        return Int(value=-made.value), "int"
    if isinstance(made, Float) and expr.op == "-":
        return Float(value=-made.value), type_
    return Unary(op=expr.op, operand=made), type_


def _binary(self: Scalars, expr: Binary) -> Typed:
    if expr.op in ("&&", "||"):
        left, right = self.expr(expr.left)[0], self.expr(expr.right)[0]
        return Binary(op=expr.op, left=left, right=right), "bool"
    left, left_type = self.expr(expr.left)
    right, right_type = self.expr(expr.right)
    if (
        left_type.startswith("ptr")
        or right_type.startswith("ptr")
        or "null"
        in (
            left_type,
            right_type,
        )
    ):
        return _pointers(expr.op, (left, left_type), (right, right_type))
    type_ = common(left_type, right_type)
    if type_ in ("f32", "f64"):
        left, right = convert(left, left_type, type_), convert(right, right_type, type_)
        made: Expr = Binary(op=expr.op, left=left, right=right)
        return made, "bool" if expr.op in COMPARISONS else type_
    known = constant(Binary(op=expr.op, left=left, right=right), {})
    if known is not None:
        return Int(value=known), "int"
    op = "//" if expr.op == "/" else expr.op
    made = Binary(op=op, left=left, right=right)
    return made, "bool" if expr.op in COMPARISONS else type_


def _pointers(op: str, left: Typed, right: Typed) -> Typed:
    made = Binary(op=op, left=left[0], right=right[0])
    if op in COMPARISONS:
        return made, "bool"
    if left[1].startswith("ptr") and right[1].startswith("ptr"):
        return made, "i64"
    if left[1].startswith("ptr"):
        return made, left[1]
    return Binary(op=op, left=right[0], right=left[0]), right[1]


def _ternary(self: Scalars, expr: Ternary) -> Typed:
    cond = self.expr(expr.cond)[0]
    then, then_type = self.expr(expr.then)
    other, other_type = self.expr(expr.other)
    if then_type.startswith("ptr") or other_type.startswith("ptr"):
        type_ = then_type if then_type.startswith("ptr") else other_type
    else:
        type_ = common(then_type, other_type)
        if type_ in ("f32", "f64"):
            then, other = convert(then, then_type, type_), convert(other, other_type, type_)
    return Ternary(cond=cond, then=then, other=other), type_


def _call(self: Scalars, expr: Call) -> Typed:
    if expr.name in self.inlines:
        params, result = self.inlines[expr.name]
        args = tuple(self.value(a, t) for a, t in zip(expr.args, params, strict=True))
        return Call(name=expr.name, args=args), result
    builtin = MATH.get(expr.name)
    if builtin is None:
        raise refuse(f"a call of {expr.name}")
    type_ = "i64" if expr.name == "abs" else "f32" if expr.name.endswith("f") else "f64"
    if expr.name == "erf":
        raise refuse("a call of erf")
    return Call(name=builtin, args=tuple(self.value(a, type_) for a in expr.args)), type_


def _element(self: Scalars, base: Expr, at: Expr) -> Typed:
    made, type_ = self.expr(base)
    if not type_.startswith("ptr"):
        raise refuse(f"indexing a {type_}")
    if isinstance(made, Binary) and made.op == "+":
        at, made = _sum(made.right, at), made.left
    return Index(base=made, indices=(at,)), type_[4:-1]


def _sum(left: Expr, right: Expr) -> Expr:
    return left if right == Int(value=0) else Binary(op="+", left=left, right=right)


def _index(self: Scalars, expr: Index) -> Typed:
    return _element(self, expr.base, self.integer(expr.indices[0]))


def _cast(self: Scalars, expr: Cast) -> Typed:
    if isinstance(expr.type, PointerType):
        return _cast_pointer(self, expr.type, expr.operand)
    target = value_type(expr.type)
    made, type_ = self.expr(expr.operand)
    narrow = scalar(expr.type)
    if narrow is not None and not narrow.floating and narrow.size < 4:
        raise refuse(f"casts to {narrow.name}")
    return convert(made, type_, target), target


def _cast_pointer(self: Scalars, type_: PointerType, operand: Expr) -> Typed:
    """`(T*) p`, and `(T*) ((uintptr_t) p + bytes)`: steps in bytes become steps in elements."""
    if isinstance(type_.of, NamedType) and type_.of.name in ("void", "char"):
        return self.expr(operand)
    wanted = f"ptr[{element_type(type_.of)}]"
    if isinstance(operand, Binary) and operand.op in ("+", "-"):
        inner = operand.left
        if isinstance(inner, Cast) and _is_address(inner.type):
            base, base_type = self.expr(inner.operand)
            size = scalar(type_.of)
            assert size is not None
            step = in_elements(self.integer(operand.right), size.size)
            note = "byte offsets between rows are whole elements"
            if note not in self.notes:
                self.notes.append(note)
            return Binary(op=operand.op, left=base, right=step), _same(base_type, wanted)
    made, found = self.expr(operand)
    return made, _same(found, wanted)


def _same(found: str, wanted: str) -> str:
    if found not in (wanted, "null"):
        raise refuse(f"a {found} read as {wanted}")
    return wanted


def _is_address(type_: Type) -> bool:
    integer = isinstance(type_, NamedType) and type_.name in ("uintptr_t", "intptr_t", "size_t")
    of = type_.of if isinstance(type_, PointerType) else None
    return integer or (isinstance(of, NamedType) and of.name in ("char", "uint8_t", "int8_t"))


def in_elements(count: Expr, size: int) -> Expr:
    """Return a number of bytes as a number of elements of `size` bytes."""
    if isinstance(count, Int):
        return Int(value=count.value // size)
    if isinstance(count, Binary) and count.op == "*":
        for factor, rest in ((count.left, count.right), (count.right, count.left)):
            if isinstance(factor, Int) and factor.value % size == 0:
                left = factor.value // size
                return rest if left == 1 else Binary(op="*", left=rest, right=Int(value=left))
    return Binary(op="//", left=count, right=Int(value=size))


def _sizeof(self: Scalars, expr: low.SizeOf) -> Typed:
    value = constant(expr, {})
    if value is None:
        raise refuse("sizeof of this")
    return Int(value=value), "int"


def _member(self: Scalars, expr: low.Member) -> Typed:
    return self.field(expr)


_RULES: dict[type[Expr], Callable[[Scalars, Any], Typed]] = {
    Int: _int,
    Float: _float,
    Name: _name,
    Unary: _unary,
    Binary: _binary,
    Ternary: _ternary,
    Call: _call,
    Index: _index,
    Cast: _cast,
    low.SizeOf: _sizeof,
    low.Member: _member,
}
