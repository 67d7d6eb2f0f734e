"""Check high-IR expressions: names, types, tiles and what must be known at compile time.

An expression in, its type as text out; faults go to a `Reporter` and the type becomes `?`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from dovetail.ir.diagnostics import Span, did_you_mean
from dovetail.ir.expr import Binary, Call, Cast, Expr, Float, Index, Int, Name, Ternary, Unary
from dovetail.ir.high import rules
from dovetail.ir.high.nodes import Function, Text
from dovetail.ir.high.ops import CONSTANTS, ELEMENTS, OPS, SCALARS, STORAGE, VECTORS
from dovetail.ir.high.parse_expr import Reporter
from dovetail.ir.high.print import print_high
from dovetail.ir.high.scopes import is_constant


@dataclass(slots=True)
class Scope:
    """What is known at a point of a function. `ranks`: indices of tiles, None for parameters."""

    types: dict[str, str]
    constants: set[str]
    assigned: set[str]
    ranks: dict[str, int | None] = field(default_factory=dict)
    in_vrange: bool = False


@dataclass(slots=True)
class ExprChecker:
    """`functions` are the @inline functions in sight; `result_of` gives their result types."""

    faults: Reporter
    functions: Mapping[str, Function]
    result_of: Callable[[str], str]
    vector_loops: Set[str]  # whom to call is to run a vrange loop
    scope: Scope

    def value(self, expr: Expr) -> str:
        """Return the type of `expr`, which must have a value to store or compute with."""
        type_ = self.type_of(expr)
        if type_ == "void":
            self.fault("high-no-value", "this call has no value", expr)
            return rules.UNKNOWN
        if type_.startswith("tile["):
            hint = "index it with compile-time values: tile[i, j]"
            self.fault("high-tile-use", "a register tile has no value as a whole", expr, hint)
            return rules.UNKNOWN
        return type_

    def wanted(self, expr: Expr, type_: str, what: str) -> None:
        """Check that `expr` may be stored where a `type_` is wanted."""
        found = self.value(expr)
        if not rules.assignable(type_, found):
            hint = f"convert it with cast({type_}, ...)" if type_ in SCALARS else None
            message = f"{what} must be {type_}, not {found}"
            self.fault("high-type-mismatch", message, expr, hint)

    def integer(self, expr: Expr, what: str) -> None:
        """Check that `expr` is an integer."""
        type_ = self.value(expr)
        if type_ != rules.UNKNOWN and not rules.is_int(type_):
            self.fault("high-type-mismatch", f"{what} must be an integer, not {type_}", expr)

    def constant(self, expr: Expr, what: str) -> None:
        """Check that `expr` is an integer known at compile time."""
        self.integer(expr, what)
        self.known(expr, what)

    def known(self, expr: Expr, what: str) -> None:
        """Check that `expr` is known at compile time."""
        if not is_constant(expr, self.scope.constants):
            hint = "compile-time: literals, tunables, VL, const parameters, unroll variables"
            message = f"{what} must be known at compile time"
            self.fault("high-not-constant", message, expr, hint)

    def fault(self, code: str, message: str, at: Expr, hint: str | None = None) -> None:
        """Record a fault at an expression."""
        self.faults.add(code, message, at.span, hint)

    def type_of(self, expr: Expr) -> str:
        """Return the type of `expr`; `void` and tiles included."""
        try:
            return _TYPE_OF[type(expr)](self, expr)
        except rules.TypeFault as fault:
            self.fault(fault.code, fault.message, expr, fault.hint)
            return rules.UNKNOWN

    # ---- nodes ----

    def _name(self, expr: Name) -> str:
        if expr.id in CONSTANTS:
            return CONSTANTS[expr.id]
        if expr.id in self.scope.types:
            if expr.id not in self.scope.assigned:
                self.fault(
                    "high-maybe-unassigned",
                    f"`{expr.id}` may have no value here",
                    expr,
                    "assign it on every way that leads here, for example before the loop",
                )
            return self.scope.types[expr.id]
        if expr.id in ELEMENTS:
            return "text"
        hint = did_you_mean(expr.id, (*self.scope.types, *CONSTANTS))
        self.fault("high-unknown-name", f"`{expr.id}` is not known here", expr, hint)
        return rules.UNKNOWN

    def _index(self, expr: Index) -> str:
        base = self.type_of(expr.base)
        if base.startswith("tile["):
            return self._tile_cell(expr, rules.element(base))
        types = [self.value(item) for item in expr.indices]
        if len(expr.indices) != 1 and base != rules.UNKNOWN:
            self.fault("high-tile-rank", f"`{print_high(expr.base)}` takes one index", expr)
            return rules.UNKNOWN
        return rules.index_type(base, types[0])

    def _tile_cell(self, expr: Index, elem: str) -> str:
        for item in expr.indices:
            self.constant(item, "the index of a register tile")
        rank = self.scope.ranks.get(expr.base.id) if isinstance(expr.base, Name) else None
        if rank is not None and rank != len(expr.indices):
            message = f"this tile has {rank} dimensions, not {len(expr.indices)}"
            self.fault("high-tile-rank", message, expr)
        return f"vec[{elem}]"

    def _cast(self, expr: Cast) -> str:
        target, source = print_high(expr.type), self.value(expr.operand)
        self.check_type(target, expr.type.span, (*SCALARS,))
        numbers = target in SCALARS and source in (*SCALARS, "int", "float", "bool")
        pointers = all(rules.is_pointer(t) or t in ("i64", "null") for t in (target, source))
        if not (numbers or pointers or source == rules.UNKNOWN):
            raise rules.TypeFault("high-type-mismatch", f"{source} cannot become {target}")
        return target

    def check_type(self, type_: str, span: Span, allowed: tuple[str, ...]) -> None:
        """Check that a written type exists and may stand here; pointers always may."""
        pointer = rules.is_pointer(type_)
        elem = rules.element(type_) if pointer else type_
        if elem in (ELEMENTS if pointer else allowed):
            return
        if pointer and self.scope.types.get(elem) == "text":
            return
        if elem in STORAGE:
            hint = "they exist in memory only; compute in f32"
            self.faults.add("high-storage-access", f"no value has type {type_}", span, hint)
            return
        hint = f"known: {', '.join((*SCALARS, *VECTORS))}, ptr[T]"
        self.faults.add("high-unknown-type", f"`{elem}` is no type that can stand here", span, hint)

    # ---- calls ----

    def _call(self, expr: Call) -> str:
        if expr.name in self.functions:
            return self._inline_call(expr, self.functions[expr.name])
        op = OPS.get(expr.name)
        if op is None:
            near = did_you_mean(expr.name, (*OPS, *self.functions))
            hint = near or "import the module that defines it"
            self.fault("high-unknown-function", f"there is no function `{expr.name}`", expr, hint)
            return rules.UNKNOWN
        if expr.name == "vtail" and not self.scope.in_vrange:
            hint = "without a vrange all lanes are used"
            self.fault("high-vtail-outside", "vtail stands only inside a vrange loop", expr, hint)
        types = [self.value(arg) for arg in expr.args]
        for arg, kind in zip(expr.args, op.params, strict=False):
            if kind == "const":
                self.known(arg, f"the argument of `{op.name}`")
        return rules.call_type(op, types)

    def _inline_call(self, expr: Call, function: Function) -> str:
        if len(expr.args) != len(function.params):
            message = f"`{expr.name}` takes {len(function.params)} arguments, not {len(expr.args)}"
            self.fault("high-arity", message, expr)
        if self.scope.in_vrange and expr.name in self.vector_loops:
            message = f"`{expr.name}` has a vrange loop and cannot be called inside one"
            self.fault("high-nested-vrange", message, expr)
        for param, arg in zip(function.params, expr.args, strict=False):
            self._argument(param.name, print_high(param.type), arg)
        return self.result_of(expr.name)

    def _argument(self, name: str, type_: str, arg: Expr) -> None:
        what = f"argument `{name}`"
        if type_ == "const":
            self.constant(arg, what)
        elif type_ == "dtype":
            if self.value(arg) not in ("text", rules.UNKNOWN):
                self.fault("high-type-mismatch", f"{what} must be a dtype", arg, "such as bf16")
        elif type_ == "tile":
            if not self.type_of(arg).startswith("tile["):
                self.fault("high-tile-use", f"{what} must be a register tile", arg)
        else:
            self.wanted(arg, type_, what)


_TYPE_OF: dict[type[Expr], Callable[[ExprChecker, Any], str]] = {
    Int: lambda checker, expr: "int",
    Float: lambda checker, expr: "float",
    Text: lambda checker, expr: "text",
    Name: ExprChecker._name,
    Unary: lambda checker, expr: rules.unary_type(expr.op, checker.value(expr.operand)),
    Binary: lambda checker, expr: rules.binary_type(
        expr.op, checker.value(expr.left), checker.value(expr.right)
    ),
    Ternary: lambda checker, expr: rules.ternary_type(
        *map(checker.value, (expr.cond, expr.then, expr.other))
    ),
    Index: ExprChecker._index,
    Cast: ExprChecker._cast,
    Call: ExprChecker._call,
}
