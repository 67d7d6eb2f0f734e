"""Values and places of C while it is written out, and small facts about its types and texts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.codegen.isa.avx2_intrinsics import CONSTANTS
from dovetail.codegen.lift.emit import Address, cast, num, op
from dovetail.codegen.lift.lanes import range_of
from dovetail.codegen.lift.layout import kind_of, pointee_element, vector_element
from dovetail.codegen.lift.types import DOUBLE, FLOAT, INT, LIMITS, NAMES, SIZES, WORKS_IN, refuse
from dovetail.ir import expr as ex
from dovetail.ir.high import nodes as high
from dovetail.ir.low import nodes as low
from dovetail.ir.low.types import VECTOR_GROUPS, VECTORS, scalar

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


FLOAT_LANES = re.compile(r"_set[r1]?_p[sd]$|_set1_ps$|_n_f32$|_set_ss$")
"""Intrinsics that make floats of the numbers they are given."""


HELPER: Any = "helper"
_INTEGERS = {
    **CONSTANTS,
    "_MM_ROUND_NEAREST": 0,
    "true": 1,
    "false": 0,
    **{"CHAR_BIT": 8, "INT_MAX": (1 << 31) - 1, "INT_MIN": -(1 << 31)},
    **{f"INT{bits}_MAX": (1 << bits - 1) - 1 for bits in (8, 16, 32)},
    **{f"INT{bits}_MIN": -(1 << bits - 1) for bits in (8, 16, 32)},
    **{f"UINT{bits}_MAX": (1 << bits) - 1 for bits in (8, 16)},
}
_DOUBLES = {"M_PI": math.pi, "M_SQRT1_2": math.sqrt(0.5), "M_SQRT2": math.sqrt(2), "M_E": math.e}
_DOUBLES |= {"M_LN2": math.log(2), "M_LOG2E": 1 / math.log(2), "M_2_SQRTPI": 2 / math.sqrt(math.pi)}
NAMED = {
    **{name: Value(INT, num(number)) for name, number in _INTEGERS.items()},
    **{name: Value(FLOAT, ex.Float(value=number)) for name, number in LIMITS.items()},
    **{name: Value(DOUBLE, ex.Float(value=number)) for name, number in _DOUBLES.items()},
    **{name: Value(FLOAT, ex.Name(id=NAMES[name])) for name in ("INFINITY", "HUGE_VALF")},
    "NAN": Value(FLOAT, op("-", ex.Name(id="inf"), ex.Name(id="inf"))),
    "NULL": Value(INT, num(0)),
}
"""What headers name."""


def holds(elem: str, value: int) -> bool:
    """Whether an element type holds a number; of 32 bits and more, as if they were signed."""
    low, top = range_of(elem)
    return low <= value <= (top if SIZES[elem] < 4 else range_of(f"i{8 * SIZES[elem]}")[1])


def narrowed(value: ex.Expr, elem: str) -> ex.Expr:
    """Return a value as it is stored in an element."""
    return cast(elem, value) if elem in WORKS_IN and not isinstance(value, ex.Int) else value


def memory_element(type_: ex.Type) -> str:
    """Return the element in which memory of a C type is counted."""
    while isinstance(type_, ex.ArrayType):
        type_ = type_.of
    if isinstance(type_, ex.NamedType):
        name = VECTOR_GROUPS.get(type_.name, (type_.name,))[0]
        if name in VECTORS:
            return vector_element(name)
    return pointee_element(type_)


def variable_kind(type_: ex.Type) -> str:
    """Return the type of a variable that holds a number or a pointer of a C type."""
    if isinstance(type_, ex.PointerType):
        return f"ptr[{pointee_element(type_.of)}]"
    return kind_of(type_)


def value_in(type_: ex.Type, made: ex.Expr) -> Value:
    """Return the value of a C type that an expression is, or points at."""
    if scalar(type_):
        return Value(type_, made)
    elem = pointee_element(type_.of) if isinstance(type_, ex.PointerType) else memory_element(type_)
    return Value(type_, at=Address(made, elem))


def returns(stmt: low.Stmt) -> bool:
    """Whether a statement may return."""
    return any(isinstance(n, low.Return) for n in stmt.walk())


def ends(body: Sequence[low.Stmt]) -> bool:
    """Whether a body ends with a return."""
    return bool(body) and (
        isinstance(body[-1], low.Return)
        or (isinstance(body[-1], low.Block) and ends(body[-1].body))
    )


def leaves(body: low.Block) -> bool:
    """Whether a body leaves its loop, or goes on with it."""
    return any(isinstance(n, low.Break | low.Continue) for n in body.walk())


def reachable(body: Sequence[high.Stmt]) -> list[high.Stmt]:
    """Return a body up to the first statement after which nothing runs."""
    out: list[high.Stmt] = []
    for stmt in body:
        out.append(stmt)
        if isinstance(stmt, high.Break | high.Continue | high.Return):
            break
    return out
