"""Values and places of C while it is written out, and small facts about its types and texts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.codegen.lift.emit import Address, cast
from dovetail.codegen.lift.lanes import SIZES, WORKS_IN
from dovetail.codegen.lift.layout import pointee_element, vector_element
from dovetail.codegen.lift.types import refuse
from dovetail.ir import expr as ex
from dovetail.ir.high import nodes as high
from dovetail.ir.low import nodes as low
from dovetail.ir.low.types import VECTOR_GROUPS, VECTORS, scalar

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


FLOAT = ex.NamedType(name="float")
FLOAT_LANES = re.compile(r"_set[r1]?_p[sd]$|_set1_ps$|_n_f32$|_set_ss$")
"""Intrinsics that make floats of the numbers they are given."""


def is_integer(value: Value) -> bool:
    """Whether a value is an integer."""
    found = scalar(value.type)
    return value.expr is not None and found is not None and not found.floating


HELPER: Any = "helper"
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
COMPARISONS |= {f"INT{bits}_MAX": (1 << bits - 1) - 1 for bits in (8, 16, 32)}
COMPARISONS |= {f"INT{bits}_MIN": -(1 << bits - 1) for bits in (8, 16, 32)}
COMPARISONS |= {f"UINT{bits}_MAX": (1 << bits) - 1 for bits in (8, 16)}
"""Numbers that headers name."""
DOUBLES = {"M_PI": math.pi, "M_SQRT1_2": math.sqrt(0.5), "M_SQRT2": math.sqrt(2), "M_E": math.e}
DOUBLES |= {"M_LN2": math.log(2), "M_LOG2E": 1 / math.log(2), "M_2_SQRTPI": 2 / math.sqrt(math.pi)}
BYTES = SIZES | {"bf16": 2}
NARROW = tuple(WORKS_IN)
RANGE = {
    "i8": (-128, 127),
    "u8": (0, 255),
    "i16": (-(1 << 15), (1 << 15) - 1),
    "u16": (0, (1 << 16) - 1),
    "i32": (-(1 << 31), (1 << 31) - 1),
    "u32": (0, (1 << 31) - 1),
    "i64": (-(1 << 63), (1 << 63) - 1),
    "u64": (0, (1 << 63) - 1),
}


def holds(elem: str, value: int) -> bool:
    """Whether an element type holds a number."""
    low_, high_ = RANGE[elem]
    return low_ <= value <= high_


def narrowed(value: ex.Expr, elem: str) -> ex.Expr:
    """Return a value as it is stored in an element."""
    return cast(elem, value) if elem in NARROW and not isinstance(value, ex.Int) else value


def memory_element(type_: ex.Type) -> str:
    """Return the element in which memory of a C type is counted."""
    while isinstance(type_, ex.ArrayType):
        type_ = type_.of
    if isinstance(type_, ex.NamedType):
        name = VECTOR_GROUPS.get(type_.name, (type_.name,))[0]
        if name in VECTORS:
            return vector_element(name)
    return pointee_element(type_)


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


def names_in(expr: ex.Expr, scopes: Sequence[Mapping[str, Variable]]) -> bool:
    """Whether an expression has names of variables."""
    names = {n.id for n in expr.walk() if isinstance(n, ex.Name)}
    return any(name in scope for name in names for scope in scopes)


def reachable(body: Sequence[high.Stmt]) -> list[high.Stmt]:
    """Return a body up to the first statement after which nothing runs."""
    out: list[high.Stmt] = []
    for stmt in body:
        out.append(stmt)
        if isinstance(stmt, high.Break | high.Continue | high.Return):
            break
    return out
