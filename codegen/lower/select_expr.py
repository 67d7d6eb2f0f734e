"""Select instructions for expressions: a high-IR expression in, a low-IR one and its type out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from dovetail.codegen.isa.target import Target
from dovetail.codegen.lower.names import Names
from dovetail.ir import expr as ex
from dovetail.ir.errors import ScheduleError
from dovetail.ir.expr import (
    Binary,
    Expr,
    Float,
    Index,
    Int,
    Name,
    NamedType,
    PointerType,
    Type,
    Unary,
)
from dovetail.ir.high import rules
from dovetail.ir.high.nodes import Text
from dovetail.ir.high.ops import OPS, STORAGE, Op
from dovetail.ir.high.print import print_high
from dovetail.ir.low import nodes as low
from dovetail.ir.low.parse import parse_low_expr
from dovetail.ir.node import Node

Typed = tuple[Expr, str]
C_OPS = {"//": "/"}
MATH = {"f32": "{}f", "f64": "{}"}


@dataclass(slots=True)
class ExprSelector:
    """`types` gives the variables; statements that an expression needs first go to `before`."""

    target: Target
    names: Names
    types: dict[str, str]
    written: set[str]
    before: list[low.Stmt] = field(default_factory=list)
    guarded: int = 0  # inside arms that may not be evaluated: nothing may move to `before`

    def expr(self, expr: Expr) -> Typed:
        """Return `expr` in C and its type; ScheduleError where a binding makes the types clash."""
        try:
            return _SELECT[type(expr)](self, expr)
        except rules.TypeFault as fault:
            where = f"line {expr.span.line}: " if expr.span.line else ""
            raise ScheduleError(f"{where}`{print_high(expr)}`: {fault.message}") from None

    def value(self, expr: Expr, wanted: str) -> Expr:
        """Return `expr` in C where a value of type `wanted` is expected."""
        made, type_ = self.expr(expr)
        return fit(made, type_, wanted)

    # ---- types ----

    def c_type(self, type_: str, *, const: bool = False, written: bool = True) -> Type:
        """Return the C type; a pointer that is not `written` points to const."""
        if rules.is_pointer(type_):
            inner = rules.element(type_)
            return PointerType(of=self.c_type(inner, const=not written))
        if type_ == "bool":
            return NamedType(name="int32_t", const=const)
        return NamedType(name=self.target.types[type_], const=const)

    # ---- nodes ----

    def _name(self, expr: Name) -> Typed:
        if expr.id == "null":
            return Int(value=0), "null"
        if expr.id not in self.types:
            raise ScheduleError(f"`{expr.id}` is not known, or has no value under this binding")
        return Name(id=expr.id), self.types[expr.id]

    def _unary(self, expr: Unary) -> Typed:
        operand, type_ = self.expr(expr.operand)
        return Unary(op=expr.op, operand=operand), rules.unary_type(expr.op, type_)

    def _binary(self, expr: ex.Binary) -> Typed:
        left, left_type = self.expr(expr.left)
        self.guarded += expr.op in ("&&", "||")
        right, right_type = self.expr(expr.right)
        self.guarded -= expr.op in ("&&", "||")
        type_ = rules.binary_type(expr.op, left_type, right_type)
        left, right = _alike(left, left_type, right, right_type)
        return ex.Binary(op=C_OPS.get(expr.op, expr.op), left=left, right=right), type_

    def _ternary(self, expr: ex.Ternary) -> Typed:
        cond, cond_type = self.expr(expr.cond)
        self.guarded += 1
        then, then_type = self.expr(expr.then)
        other, other_type = self.expr(expr.other)
        self.guarded -= 1
        type_ = rules.ternary_type(cond_type, then_type, other_type)
        then, other = fit(then, then_type, type_), fit(other, other_type, type_)
        return ex.Ternary(cond=cond, then=then, other=other), type_

    def _index(self, expr: ex.Index) -> Typed:
        base, base_type = self.expr(expr.base)
        at, at_type = self.expr(expr.indices[0])
        return ex.Index(base=base, indices=(at,)), rules.index_type(base_type, at_type)

    def _cast(self, expr: ex.Cast) -> Typed:
        operand, source = self.expr(expr.operand)
        type_ = print_high(expr.type)
        roots = {node.id for node in expr.operand.walk() if isinstance(node, Name)}
        c_type = self.c_type(type_, written=source == "i64" or bool(roots & self.written))
        return ex.Cast(type=c_type, operand=operand), type_

    # ---- builtins ----

    def _call(self, expr: ex.Call) -> Typed:
        op = OPS.get(expr.name)
        if op is None:
            raise ScheduleError(f"`{expr.name}` is neither a builtin nor an @inline function")
        counted = op.name == "vtail" and len(expr.args) == 3
        made = [self.expr(arg) for arg in expr.args]
        types = [type_ for _, type_ in made]
        result = rules.call_type(op, types[:2] if counted else types)
        kinds = (*op.params, "int") if counted else op.params
        args = tuple(
            fit(arg, type_, _wanted(kind, result, types))
            for (arg, type_), kind in zip(made, kinds, strict=False)
        )
        if op.name in ("load", "store"):
            return self._memory(op, expr, args, rules.element(types[0])), result
        if op.result != "void" and not op.name.startswith("v"):
            return self._scalar(op, args, rules.settled(result)), result
        return self._instance(self._template(op, args, types), args, expr), result

    def _template(self, op: Op, args: tuple[Expr, ...], types: list[str]) -> Template:
        """Return the target's operation for the element type, partial if lanes are counted."""
        partial = bool(op.family) and len(args) == len(op.params)
        if partial and args[-1] == Int(value=self.target.lanes):
            partial = False
        suffix = "_n" if partial else ""
        if op.params[:1] == ("ptr.real",):
            return find_template(self.target, f"{op.family}{suffix}.{rules.element(types[0])}")
        return find_template(self.target, op.name + suffix)

    def _instance(self, template: Template, args: tuple[Expr, ...], expr: ex.Call) -> Expr:
        """Fill a template; an argument it uses twice is computed once, before the statement."""
        kept = list(args)
        for i, uses in enumerate(template.uses):
            if uses > 1 and not self.guarded and not isinstance(args[i], (Name, Int, Float)):
                kept[i] = self._once(args[i], expr.args[i])
        return template.fill(tuple(kept))

    def _once(self, made: Expr, was: Expr) -> Name:
        """Keep `made` in a constant declared before the statement."""
        type_ = rules.settled(self.expr(was)[1])
        name = self.names.fresh("t")
        self.before.append(low.Declare(type=self.c_type(type_, const=True), name=name, init=made))
        return Name(id=name)

    def _memory(self, op: Op, expr: ex.Call, args: tuple[Expr, ...], elem: str) -> Expr:
        """Scalar `load` and `store`: plain elements by index, storage types through the target."""
        if elem in STORAGE:
            return find_template(self.target, f"{op.name}.{elem}").fill(args)
        at = args[0]
        place = ex.Index(base=at, indices=(Int(value=0),))
        if isinstance(at, ex.Binary) and at.op == "+":
            place = ex.Index(base=at.left, indices=(at.right,))
        return place if op.name == "load" else self.put(place, elem, "=", args[1])

    def put(self, place: ex.Index, elem: str, op: str, value: Expr) -> Expr:
        """Return `place op value` for an element in memory, where all lanes may run scalar code."""
        template = find_template(self.target, f"store.{elem}")
        if isinstance(template.expr, low.Assign):
            return low.Assign(op=op, target=place, value=value)
        if op != "=":
            value = ex.Binary(op=op[:-1], left=place, right=value)
        (at,) = place.indices
        address = place.base if at == Int(value=0) else ex.Binary(op="+", left=place.base, right=at)
        return template.fill((address, value))

    def _scalar(self, op: Op, args: tuple[Expr, ...], type_: str) -> Expr:
        """Scalar math: the C library's function, or a `dt_*` helper for min, max and abs."""
        if op.name == "abs" and type_ in ("u32", "u64"):
            return args[0]
        if op.name == "abs" and not rules.is_int(type_):
            return ex.Call(name=MATH[type_].format("fabs"), args=args)
        if op.name in ("min", "max", "abs"):
            wide = "i32" if type_ in rules.NARROW else type_
            return ex.Call(name=f"dt_{op.name}_{wide}", args=args)
        return ex.Call(name=MATH[type_].format(op.name), args=args)


def _wanted(kind: str, result: str, types: list[str]) -> str:
    if kind in ("number", "real"):
        return rules.settled(result)
    if kind == "elem":
        elem = rules.element(types[0])
        return "f32" if elem in STORAGE else elem
    return "i64" if kind in ("int", "const") or kind.startswith("ptr.") else kind


def fit(made: Expr, type_: str, wanted: str) -> Expr:
    """Return a value spelled for the type it meets: literals get that type's suffix."""
    if type_ not in ("int", "float") or rules.is_pointer(wanted):
        return made
    if isinstance(made, ex.Ternary):
        then, other = fit(made.then, type_, wanted), fit(made.other, type_, wanted)
        return replace(made, then=then, other=other)
    number = _literal_value(made)
    if number is None:
        return made
    if wanted == "f64":
        return _signed(float(number), lambda v: Float(value=v, text=repr(v)))
    if wanted in ("f32", "float"):
        return _signed(float(number), lambda v: Float(value=v))
    if wanted == "u32" and number >= 0:
        return Int(value=int(number), text=f"{int(number)}u")
    return made


def _alike(left: Expr, left_type: str, right: Expr, right_type: str) -> tuple[Expr, Expr]:
    return fit(left, left_type, right_type), fit(right, right_type, left_type)


def _literal_value(made: Expr) -> float | None:
    if isinstance(made, Unary) and made.op == "-":
        inner = _literal_value(made.operand)
        return None if inner is None else -inner
    if isinstance(made, Name) and made.id == "INFINITY":
        return math.inf
    return made.value if isinstance(made, (Int, Float)) else None


def _signed(value: float, spell: Callable[[float], Expr]) -> Expr:
    size = abs(value)
    made = Name(id="INFINITY") if math.isinf(size) else spell(size)
    return Unary(op="-", operand=made) if math.copysign(1.0, value) < 0 else made


def _int(selector: ExprSelector, expr: Int) -> Typed:
    made = Int(value=abs(expr.value))
    return (Unary(op="-", operand=made) if expr.value < 0 else made), "int"


def _text(selector: ExprSelector, expr: Text) -> Typed:
    raise ScheduleError(f'"{expr.value}" stands where a number is computed')


_SELECT: dict[type[Expr], Callable[[ExprSelector, Any], Typed]] = {
    Int: _int,
    Float: lambda selector, expr: (_signed(expr.value, lambda v: Float(value=v)), "float"),
    Text: _text,
    Name: ExprSelector._name,
    Unary: ExprSelector._unary,
    ex.Binary: ExprSelector._binary,
    ex.Ternary: ExprSelector._ternary,
    ex.Index: ExprSelector._index,
    ex.Cast: ExprSelector._cast,
    ex.Call: ExprSelector._call,
}


PLACEHOLDER = re.compile(r"\{(\d+)\}")
PREFIX = "dt_argument_"


@dataclass(frozen=True, slots=True)
class Template:
    """One operation: its expression over placeholder names, and how often each is used."""

    expr: Expr
    uses: tuple[int, ...]

    def fill(self, args: tuple[Expr, ...]) -> Expr:
        """Return the expression with `args` in place of the placeholders."""
        values = {f"{PREFIX}{i}": arg for i, arg in enumerate(args)}

        def visit(node: Node) -> Node:
            if isinstance(node, Name):
                return values.get(node.id, node)
            return node.map_children(visit)

        result = visit(self.expr)
        assert isinstance(result, Expr)
        return _plain_index(result)


def _plain_index(expr: Expr) -> Expr:
    """Write `(p + i)[0]`, as tables of scalar targets make it, as `p[i]`."""
    if isinstance(expr, low.Assign):
        return replace(expr, target=_plain_index(expr.target))
    if isinstance(expr, Index) and expr.indices == (Int(value=0),):
        base = expr.base
        if isinstance(base, Binary) and base.op == "+":
            return Index(base=base.left, indices=(base.right,))
    return expr


def find_template(target: Target, key: str) -> Template:
    """Return the operation `key` of `target`; ScheduleError if its table has none."""
    text = target.ops.get(key)
    if text is None:
        raise ScheduleError(f"target {target.name} has no operation `{key}`; bind another dtype")
    return _parse(text)


@cache
def _parse(text: str) -> Template:
    places = [int(number) for number in PLACEHOLDER.findall(text)]
    expr = parse_low_expr(PLACEHOLDER.sub(rf"{PREFIX}\1", text))
    count = max(places, default=-1) + 1
    return Template(expr, tuple(places.count(i) for i in range(count)))
