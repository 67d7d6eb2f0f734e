"""C's conversions: which types may be assigned to which, and what operators make of two.

In: types. Out: a type, or None where C refuses.
"""

from __future__ import annotations

from dovetail.ir.expr import COMPARISONS, Expr, Int, NamedType, PointerType, Type
from dovetail.ir.low.types import scalar, unqualified, vector

INT = NamedType(name="int")
VOID = NamedType(name="void")
INTEGER_ONLY = ("%", "<<", ">>", "&", "^", "|")


def assignable(target: Type, value: Type, expr: Expr) -> bool:
    """Whether C converts `value` to `target` without a cast (and without a warning)."""
    if scalar(target) and scalar(value):
        return True
    if isinstance(target, PointerType):
        if isinstance(value, PointerType):
            return _void(target) or _void(value) or _same_memory(target.of, value.of)
        return isinstance(expr, Int) and expr.value == 0
    return target == value


def _void(type_: PointerType) -> bool:
    return unqualified(type_.of) == VOID


def _same_memory(left: Type, right: Type) -> bool:
    """Whether pointers to the two may be mixed: `int` and `int32_t` are one type, const or not."""
    a, b = scalar(left), scalar(right)
    if a and b:
        return (a.size, a.floating, a.signed) == (b.size, b.floating, b.signed)
    if isinstance(left, NamedType):
        return unqualified(left) == unqualified(right)
    return left == right


def promote(type_: Type) -> Type:
    """Return the type after C's integer promotion."""
    found = scalar(type_)
    return INT if found is not None and found.rank < 3 else type_


def combine(op: str, left: Type, right: Type) -> Type | None:
    """Return the type of `left op right`, None where C refuses it."""
    a, b = scalar(left), scalar(right)
    if a and b:
        if op in INTEGER_ONLY and (a.floating or b.floating):
            return None
        if op in ("<<", ">>"):
            return promote(left)
        wide = left if (a.rank, not a.signed) >= (b.rank, not b.signed) else right
        return INT if op in COMPARISONS else promote(wide)
    if isinstance(left, PointerType) and isinstance(right, PointerType):
        if op in COMPARISONS:
            return INT
        return NamedType(name="ptrdiff_t") if op == "-" else None
    if isinstance(left, PointerType) and b and op in (*COMPARISONS, "+", "-"):
        return None if b.floating else INT if op in COMPARISONS else left
    if isinstance(right, PointerType) and a and op == "+":
        return None if a.floating else right
    if vector(left) and (left == right or b) and op not in COMPARISONS:
        return left
    return right if vector(right) and a and op not in COMPARISONS else None
