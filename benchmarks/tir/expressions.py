"""Expressions of the high IR in TensorIR: a flat, bound expression in, a typed TVM expression out.

What an expression needs first (addresses, values used more than once) is bound before the
statement, through `before`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tvm import tirx as tir
from tvm.ir import PrimType

from dovetail.ir import expr as ex
from dovetail.ir.errors import ScheduleError
from dovetail.ir.expr import Expr
from dovetail.ir.high.ops import OPS
from dovetail.ir.high.print import print_high
from dovetail.ir.high.rules import (
    TypeFault,
    binary_type,
    call_type,
    element,
    index_type,
    is_int,
    is_pointer,
    settled,
    ternary_type,
    unary_type,
    unify,
)
from tir.operations import (
    OPERATIONS,
    REDUCTIONS,
    greater,
    in_use,
    intrinsic,
    lesser,
    narrowed,
    widened,
)
from tir.values import (
    SCALARS,
    SIZES,
    STORED,
    Tir,
    Typed,
    address_pointer,
    fit,
    number,
    ramp,
    spread,
    view,
    wide,
)

ARITHMETIC: dict[str, Callable[[Tir, Tir], Tir]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": tir.Div,
    "//": tir.truncdiv,
    "%": tir.truncmod,
    "<<": tir.shift_left,
    ">>": tir.shift_right,
    "&": tir.bitwise_and,
    "|": tir.bitwise_or,
    "^": tir.bitwise_xor,
}
COMPARISONS: dict[str, Callable[[Tir, Tir], Tir]] = {
    "==": tir.EQ,
    "!=": tir.NE,
    "<": tir.LT,
    "<=": tir.LE,
    ">": tir.GT,
    ">=": tir.GE,
}
MATH = ("exp", "log", "sqrt", "cos", "sin", "tanh", "floor")
"""Scalar functions that LLVM knows by these names."""
READ, DATA = 0, 1
LOCALITY = {"prefetch": 3, "prefetch_l2": 2}
"""Arguments of llvm.prefetch."""


@dataclass(slots=True)
class Expressions:
    """`variables` gives a variable's buffer of one value, `types` its type."""

    lanes: int
    variables: dict[str, Tir]
    types: dict[str, str]
    before: list[Tir] = field(default_factory=list)
    guarded: int = 0  # inside arms that may not be evaluated: nothing is computed before

    def expr(self, expr: Expr) -> Typed:
        """Return `expr` typed; ScheduleError where a binding makes the types clash."""
        try:
            return _EXPRESSIONS[type(expr)](self, expr)
        except TypeFault as fault:
            raise ScheduleError(f"`{print_high(expr)}`: {fault.message}") from None

    def value(self, expr: Expr, wanted: str) -> Tir:
        """Return `expr` as a value of type `wanted`."""
        return fit(self.expr(expr), wanted)

    # ---- nodes ----

    def _name(self, expr: ex.Name) -> Typed:
        if expr.id == "null":
            return Typed(0, "null")
        if expr.id not in self.types:
            raise ScheduleError(f"`{expr.id}` has no value under this binding")
        value, type_ = self.variables[expr.id], self.types[expr.id]
        if not tir.is_buffer_var(value):
            return Typed(value, type_)
        loaded = tir.BufferLoad(value, [0])
        return Typed(tir.NE(loaded, number(0, "int32")) if type_ == "bool" else loaded, type_)

    def _unary(self, expr: ex.Unary) -> Typed:
        operand = self.expr(expr.operand)
        type_ = unary_type(expr.op, operand.type)
        if expr.op == "!":
            return Typed(tir.Not(fit(operand, "bool")), type_)
        if isinstance(operand.expr, int | float):
            return Typed(-operand.expr if expr.op == "-" else operand.expr, type_)
        value = fit(operand, settled(type_))
        made = {"-": operator.neg, "+": operator.pos, "~": tir.bitwise_not}[expr.op](value)
        return Typed(made, type_)

    def _binary(self, expr: ex.Binary) -> Typed:
        left = self.expr(expr.left)
        self.guarded += expr.op in ("&&", "||")
        right = self.expr(expr.right)
        self.guarded -= expr.op in ("&&", "||")
        type_ = binary_type(expr.op, left.type, right.type)
        if expr.op in ("&&", "||"):
            join = tir.And if expr.op == "&&" else tir.Or
            return Typed(join(fit(left, "bool"), fit(right, "bool")), type_)
        if expr.op in COMPARISONS:
            return Typed(self._compare(expr.op, left, right), type_)
        if is_pointer(left.type) or is_pointer(right.type):
            return Typed(_move(expr.op, left, right), type_)
        common = settled(type_)
        made = ARITHMETIC[expr.op](fit(left, common), fit(right, common))
        return Typed(made, common)

    def _compare(self, op: str, left: Typed, right: Typed) -> Tir:
        common = settled(unify(left.type, right.type) or "i64")  # addresses
        common = "i32" if common == "bool" else common
        sides = (
            tir.Cast("int32", side.expr)
            if side.type == "bool" and common == "i32"
            else fit(side, common)
            for side in (left, right)
        )
        return COMPARISONS[op](*sides)

    def _ternary(self, expr: ex.Ternary) -> Typed:
        cond = self.expr(expr.cond)
        self.guarded += 1
        then, other = self.expr(expr.then), self.expr(expr.other)
        self.guarded -= 1
        type_ = settled(ternary_type(cond.type, then.type, other.type))
        arms = (fit(then, type_), fit(other, type_))
        return Typed(tir.if_then_else(fit(cond, "bool"), *arms), type_)

    def _index(self, expr: ex.Index) -> Typed:
        base, at = self.expr(expr.base), self.expr(expr.indices[0])
        type_ = index_type(base.type, at.type)
        return Typed(self.load(_move("+", base, at), type_, type_), type_)

    def _cast(self, expr: ex.Cast) -> Typed:
        operand, type_ = self.expr(expr.operand), print_high(expr.type)
        if is_pointer(type_):
            return Typed(fit(operand, type_), type_)
        value = fit(operand, settled(operand.type))
        return Typed(tir.Cast(SCALARS[type_], value), type_)

    # ---- memory ----

    def place(self, address: Tir, elem: str) -> tuple[Tir, Tir]:
        """Return a pointer to `address`, and a buffer that begins there."""
        pointer, value = address_pointer(address, elem)
        buffer = view(pointer, elem)
        self.before += [tir.Bind(pointer, value), tir.DeclBuffer(buffer, data=pointer)]
        return pointer, buffer

    def load(self, address: Tir, elem: str, type_: str, count: Tir | None = None) -> Tir:
        """Return the `type_` that lies at `address`; of `count` lanes, the rest 0."""
        lanes = self.lanes if type_.startswith("vec[") else 1
        pointer, buffer = self.place(address, elem)
        if count is None:
            stored = tir.BufferLoad(buffer, [ramp(number(0, "int64"), lanes)])
        elif lanes == 1:
            first, none = tir.BufferLoad(buffer, [0]), number(0, STORED[elem])
            stored = tir.if_then_else(number(0, "int64") < count, first, none)
        else:
            none = spread(number(0, STORED[elem]), lanes)
            dtype = wide(STORED[elem], lanes)
            stored = intrinsic("llvm.masked.load", dtype, pointer, in_use(lanes, count), none)
        return widened(elem, stored, lanes)

    def store(self, address: Tir, elem: str, value: Tir, type_: str, count: Tir | None) -> Tir:
        """Return the statement that writes `value` to `address`, or its first `count` lanes."""
        lanes = self.lanes if type_.startswith("vec[") else 1
        pointer, buffer = self.place(address, elem)
        stored = narrowed(elem, value, lanes)
        if count is not None and lanes > 1:
            mask = in_use(lanes, count)
            call = tir.call_llvm_intrin("void", "llvm.masked.store", stored, pointer, mask)
            return tir.Evaluate(call)
        whole = tir.BufferStore(buffer, stored, [ramp(number(0, "int64"), lanes)])
        return whole if count is None else tir.IfThenElse(number(0, "int64") < count, whole, None)

    def once(self, value: Tir, dtype: str) -> Tir:
        """Return a variable that holds `value`, unless it may not be computed ahead."""
        if self.guarded or isinstance(value, tir.IntImm):
            return value
        name = tir.Var("t", PrimType(dtype))
        self.before.append(tir.Bind(name, value))
        return name

    # ---- builtins ----

    def _call(self, expr: ex.Call) -> Typed:
        op = OPS.get(expr.name)
        if op is None:
            raise ScheduleError(f"`{expr.name}` is neither a builtin nor an @inline function")
        args = [self.expr(arg) for arg in expr.args]
        if expr.name in _MEMORY:
            return _MEMORY[expr.name](self, args)
        counted = op.name == "vtail" and len(args) == 3
        result = call_type(op, [arg.type for arg in args][: 2 if counted else None])
        kinds = (*op.params, "int") if counted else op.params
        made = [fit(arg, _wanted(kind, result)) for arg, kind in zip(args, kinds, strict=True)]
        if op.name in OPERATIONS:
            if op.name in REDUCTIONS:
                made = [self.once(made[0], wide("float32", self.lanes))]
            return Typed(OPERATIONS[op.name](self.lanes, *made), result)
        return Typed(_scalar(op.name, made, settled(result)), settled(result))

    def _store_sum(self, at: Tir, vector: Typed) -> Tir:
        """Return the statement that stores the sum over the lanes of `vector` at an address."""
        once = self.once(vector.expr, wide("float32", self.lanes))
        total = OPERATIONS["vreduce_add"](self.lanes, once)
        return self.store(at, "f32", total, "f32", None)

    def _store_sums(self, args: list[Typed], stride: Tir, vectors: list[Typed]) -> Tir:
        """Return the statement that stores sums, four at each `stride` values from args[0]."""
        size = SIZES["f32"]
        places = [
            args[0].expr + stride * number(i // 4 * size, "int64") + number(i % 4 * size, "int64")
            for i in range(len(vectors))
        ]
        return tir.SeqStmt([self._store_sum(*pair) for pair in zip(places, vectors, strict=True)])

    def effect(self, call: ex.Call) -> Tir:
        """Return the statement of a call made for its effect: a store or a prefetch."""
        args = [self.expr(arg) for arg in call.args]
        if call.name == "vreduce_add4":
            return self._store_sums(args, number(0, "int64"), args[1:])
        if call.name == "vreduce_add16":
            return self._store_sums(args, fit(args[1], "i64"), args[2:])
        if call.name == "keep_order":
            return tir.Evaluate(number(0, "int32"))
        if call.name in LOCALITY:
            pointer, value = address_pointer(args[0].expr, element(args[0].type))
            self.before.append(tir.Bind(pointer, value))
            flags = (number(flag, "int32") for flag in (READ, LOCALITY[call.name], DATA))
            return tir.Evaluate(tir.call_llvm_intrin("void", "llvm.prefetch", pointer, *flags))
        elem = element(args[0].type)
        if call.name == "vstore_i8":
            low = tir.Cast(wide("int8", self.lanes), args[1].expr)
            return self.store(args[0].expr, "i8", low, "vec[i8]", None)
        whole = {"vstore": "vec[f32]", "vstore_i32": "vec[i32]"}.get(call.name)
        type_ = whole or ("f32" if elem in ("bf16", "f16") else elem)
        count = fit(args[2], "i64") if len(args) > 2 else None
        return self.store(args[0].expr, elem, fit(args[1], type_), type_, count)


def _loader(type_: str) -> Callable[[Expressions, list[Typed]], Typed]:
    def load(self: Expressions, args: list[Typed]) -> Typed:
        elem = element(args[0].type)
        wanted = type_ or ("f32" if elem in ("bf16", "f16") else elem)
        count = fit(args[1], "i64") if len(args) > 1 else None
        return Typed(self.load(args[0].expr, elem, wanted, count), wanted)

    return load


def _byte_loader(self: Expressions, args: list[Typed]) -> Typed:
    stored = self.load(args[0].expr, element(args[0].type), "vec[i32]")
    return Typed(tir.Cast(wide("int32", self.lanes), stored), "vec[i32]")


_MEMORY: dict[str, Callable[[Expressions, list[Typed]], Typed]] = {
    "load": _loader(""),
    "vload": _loader("vec[f32]"),
    "vload_i32": _loader("vec[i32]"),
    "vload_u8": _byte_loader,
    "vload_i8": _byte_loader,
    **{
        f"vload_{group}s": lambda self, args: Typed(
            self.load(args[0].expr, "i32", "vec[i32]"), "vec[i32]"
        )
        for group in ("pair", "quad")
    },
    **{
        f"vbroadcast_{group}": lambda self, args: Typed(
            spread(self.load(args[0].expr, "i32", "i32"), self.lanes), "vec[i32]"
        )
        for group in ("pair", "quad")
    },
}


def _wanted(kind: str, result: str) -> str:
    if kind in ("number", "real"):
        return settled(result)
    return "i64" if kind in ("int", "const") else kind


def _scalar(name: str, args: list[Tir], type_: str) -> Tir:
    """Return scalar mathematics; min and max of floating values choose as the C helpers do."""
    if name in MATH or (name == "abs" and not is_int(type_)):
        return intrinsic(f"llvm.{'fabs' if name == 'abs' else name}", SCALARS[type_], args[0])
    if name == "abs":
        return tir.Select(args[0] < number(0, SCALARS[type_]), -args[0], args[0])
    if name not in ("min", "max"):
        raise ScheduleError(f"the TIR backend has no `{name}`: use the C backend")
    choose = {"min": tir.Min, "max": tir.Max} if is_int(type_) else {"min": lesser, "max": greater}
    return choose[name](*args)


def _move(op: str, left: Typed, right: Typed) -> Tir:
    """Return a pointer moved by elements, or the distance of two pointers in elements."""
    pointer, other = (left, right) if is_pointer(left.type) else (right, left)
    size = number(SIZES[element(pointer.type)], "int64")
    if is_pointer(left.type) and is_pointer(right.type):
        return tir.truncdiv(left.expr - right.expr, size)
    by = fit(other, "i64") * size
    return pointer.expr - by if op == "-" else pointer.expr + by


def _literal(expressions: Expressions, expr: Any) -> Typed:
    return Typed(expr.value, "int" if isinstance(expr, ex.Int) else "float")


_EXPRESSIONS: dict[type[Expr], Callable[[Expressions, Any], Typed]] = {
    ex.Int: _literal,
    ex.Float: _literal,
    ex.Name: Expressions._name,
    ex.Unary: Expressions._unary,
    ex.Binary: Expressions._binary,
    ex.Ternary: Expressions._ternary,
    ex.Index: Expressions._index,
    ex.Cast: Expressions._cast,
    ex.Call: Expressions._call,
}
