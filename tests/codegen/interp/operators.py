"""Arithmetic on compiled values: C's conversions, integers that wrap, floats, addresses.

In: an operator and two `Code`s. Out: the `Code` of their combination.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dovetail.ir.diagnostics import Span
from dovetail.ir.expr import NamedType, PointerType, Type
from dovetail.ir.low.conversions import combine
from dovetail.ir.low.types import INTEGER_OPERATORS, scalar
from tests.codegen.interp.memory import MemoryFault, Pointer
from tests.codegen.interp.values import InterpretError, Layouts, convert, wrapper

Frame = list[Any]
Run = Callable[[Frame], Any]
INT = NamedType(name="int")
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
FLOAT_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}


@dataclass(frozen=True, slots=True)
class Code:
    """A compiled expression: its type without qualifiers, and what computes it."""

    type: Type
    run: Run


def guarded(run: Run, span: Span) -> Run:
    """Return `run` with faults of memory and arithmetic turned into errors at `span`."""

    def checked(frame: Frame) -> Any:
        try:
            return run(frame)
        except MemoryFault as fault:
            raise InterpretError(str(fault), span) from None
        except ZeroDivisionError:
            raise InterpretError("division by zero", span) from None

    return checked


def converted(made: Code, target: Type) -> Run:
    """Return the value of `made` converted to `target`."""
    change = convert(made.type, target)
    if change is None:
        return made.run
    run, apply = made.run, change
    return lambda f: apply(run(f))


def operate(layouts: Layouts, op: str, left: Code, right: Code, span: Span) -> Code:
    """Return `left op right` after C's conversions."""
    result = combine(op, left.type, right.type)
    if result is None:
        raise InterpretError(f"`{op}` cannot join these types", span)
    if isinstance(left.type, PointerType) or isinstance(right.type, PointerType):
        return _pointers(layouts, op, left, right, span)
    common = result
    if op in COMPARISONS:
        common = combine("+", left.type, right.type) or result
    if op in ("<<", ">>"):
        return Code(result, guarded(_shift(op, left, right, result), span))
    a, b = converted(left, common), converted(right, common)
    if op in COMPARISONS:
        compare = COMPARISONS[op]
        return Code(INT, lambda f: int(compare(a(f), b(f))))
    found = scalar(common)
    if found is None or found.floating:
        act = FLOAT_OPERATORS[op]
        return Code(result, lambda f: act(a(f), b(f)))
    wrap, join = wrapper(found.name), _ADDRESS_OPERATORS.get(op, INTEGER_OPERATORS[op])
    run: Run = lambda f: wrap(join(a(f), b(f)))  # noqa: E731 - a def would hide the symmetry
    return Code(result, guarded(run, span) if op in "/%" else run)


def _add(a: Any, b: Any) -> Any:
    """Add integers, either of which may hold an address."""
    if isinstance(a, Pointer):
        return a.advance(_signed(b))
    return b.advance(_signed(a)) if isinstance(b, Pointer) else a + b


def _subtract(a: Any, b: Any) -> Any:
    if isinstance(b, Pointer):
        return _distance(a, b)
    return a.advance(-_signed(b)) if isinstance(a, Pointer) else a - b


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _distance(a: Pointer, b: Pointer) -> int:
    if a.memory is not b.memory:
        raise MemoryFault("addresses of two different buffers are compared")
    return a.offset - b.offset


_ADDRESS_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {"+": _add, "-": _subtract}


def _shift(op: str, left: Code, right: Code, result: Type) -> Run:
    found = scalar(result)
    assert found is not None, "combine gives an integer type"
    a, b, bits, wrap = converted(left, result), right.run, 8 * found.size, wrapper(found.name)
    act = INTEGER_OPERATORS[op]

    def run(f: Frame) -> int:
        count = b(f)
        if not 0 <= count < bits:
            raise MemoryFault(f"a {bits}-bit integer is shifted by {count}")
        return int(wrap(act(a(f), count)))

    return run


def _pointers(layouts: Layouts, op: str, left: Code, right: Code, span: Span) -> Code:
    """Return arithmetic or a comparison with at least one pointer."""
    if op in COMPARISONS:
        return Code(INT, guarded(_compare_pointers(op, left, right), span))
    if isinstance(left.type, PointerType) and isinstance(right.type, PointerType):
        size = layouts.size(left.type.of)
        a, b = left.run, right.run
        run: Run = lambda f: _distance(a(f), b(f)) // size  # noqa: E731 - as above
        return Code(NamedType(name="ptrdiff_t"), guarded(run, span))
    pointer, number = (left, right) if isinstance(left.type, PointerType) else (right, left)
    assert isinstance(pointer.type, PointerType)
    step = layouts.size(pointer.type.of) * (-1 if op == "-" else 1)
    base, count = pointer.run, number.run
    return Code(pointer.type, lambda f: base(f).advance(step * _signed(count(f))))


def _compare_pointers(op: str, left: Code, right: Code) -> Run:
    either = left.type if isinstance(left.type, PointerType) else right.type
    a, b, compare = converted(left, either), converted(right, either), COMPARISONS[op]
    if op in ("==", "!="):
        return lambda f: int(compare(a(f), b(f)))
    return lambda f: int(compare(_distance(a(f), b(f)), 0))
