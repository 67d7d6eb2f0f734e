"""Facts about C types: canonical spellings, ranks, sizes, vector shapes; and constant expressions.

Types are the nodes of `dovetail.ir.expr`; sizes are in bytes on an LP64 machine.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dovetail.ir.expr import (
    ArrayType,
    Binary,
    Cast,
    Expr,
    Int,
    Name,
    NamedType,
    PointerType,
    Ternary,
    Type,
    Unary,
)
from dovetail.ir.low.nodes import SizeOf


@dataclass(frozen=True, slots=True)
class Scalar:
    """An arithmetic type. `rank` orders the usual arithmetic conversions; integers are below 10."""

    name: str
    size: int
    rank: int
    signed: bool = True

    @property
    def floating(self) -> bool:
        """Whether this is a floating type."""
        return self.rank >= 10


SCALARS: dict[str, Scalar] = {
    s.name: s
    for s in (
        Scalar("_Bool", 1, 0, False),
        Scalar("char", 1, 1),
        Scalar("signed char", 1, 1),
        Scalar("unsigned char", 1, 1, False),
        Scalar("short", 2, 2),
        Scalar("unsigned short", 2, 2, False),
        Scalar("int", 4, 3),
        Scalar("unsigned", 4, 3, False),
        Scalar("long", 8, 4),
        Scalar("unsigned long", 8, 4, False),
        Scalar("long long", 8, 5),
        Scalar("unsigned long long", 8, 5, False),
        Scalar("int8_t", 1, 1),
        Scalar("uint8_t", 1, 1, False),
        Scalar("int16_t", 2, 2),
        Scalar("uint16_t", 2, 2, False),
        Scalar("int32_t", 4, 3),
        Scalar("uint32_t", 4, 3, False),
        Scalar("int64_t", 8, 4),
        Scalar("uint64_t", 8, 4, False),
        Scalar("ssize_t", 8, 4),
        Scalar("ptrdiff_t", 8, 4),
        Scalar("intptr_t", 8, 4),
        Scalar("size_t", 8, 4, False),
        Scalar("uintptr_t", 8, 4, False),
        Scalar("__mmask8", 1, 1, False),
        Scalar("__mmask16", 2, 2, False),
        Scalar("__mmask32", 4, 3, False),
        Scalar("__mmask64", 8, 4, False),
        Scalar("_Float16", 2, 10),
        Scalar("float16_t", 2, 10),
        Scalar("__bf16", 2, 10),
        Scalar("bfloat16_t", 2, 10),
        Scalar("float", 4, 11),
        Scalar("float32_t", 4, 11),
        Scalar("double", 8, 12),
        Scalar("float64_t", 8, 12),
        Scalar("long double", 16, 13),
    )
}
"""Arithmetic types by canonical name."""


def _combinations() -> dict[str, str]:
    spellings = {
        "_Bool": "_Bool, bool",
        "char": "char",
        "signed char": "char signed",
        "unsigned char": "char unsigned",
        "short": "short, int short, short signed, int short signed",
        "unsigned short": "short unsigned, int short unsigned",
        "int": "int, signed, int signed",
        "unsigned": "unsigned, int unsigned",
        "long": "long, int long, long signed, int long signed",
        "unsigned long": "long unsigned, int long unsigned",
        "long long": "long long, int long long, long long signed, int long long signed",
        "unsigned long long": "long long unsigned, int long long unsigned",
        "long double": "double long",
    }
    return {words: name for name, row in spellings.items() for words in row.split(", ")}


ARITHMETIC = _combinations()
"""Sorted type words, such as `int long unsigned`, to the canonical name."""


@dataclass(frozen=True, slots=True)
class Vector:
    """A SIMD register type: `lanes` of a scalar type, or bits whose lanes the intrinsic decides.

    A warp of a GPU counts as one register of 32 lanes.
    """

    name: str
    size: int
    lane: str | None = None

    @property
    def lanes(self) -> int:
        """Lane count; 0 where the lane type is open."""
        return self.size // SCALARS[self.lane].size if self.lane else 0


def _vectors() -> dict[str, Vector]:
    x86 = {"": "float", "d": "double", "i": None, "bh": None}
    found = [
        Vector(f"__m{bits}{suffix}", bits // 8, lane)
        for bits in (128, 256, 512)
        for suffix, lane in x86.items()
    ]
    found.append(Vector("__m64", 8))
    found += [Vector("dt_f32x32", 128, "float"), Vector("dt_i32x32", 128, "int32_t")]
    lanes = {
        "float": (16, 32, 64),
        "bfloat": (16,),
        "int": (8, 16, 32, 64),
        "uint": (8, 16, 32, 64),
    }
    for kind, widths in lanes.items():
        found += [
            Vector(f"{kind}{width}x{bits // width}_t", bits // 8, f"{kind}{width}_t")
            for width in widths
            for bits in (64, 128)
        ]
    return {v.name: v for v in found}


VECTORS = _vectors()
"""SIMD register types by name."""

VECTOR_GROUPS = {
    f"{lane}x{lanes}x{count}_t": (f"{lane}x{lanes}_t", count)
    for lane, lanes in (("float32", 2), ("float32", 4))
    for count in (2, 4)
}
"""NEON groups such as `float32x4x2_t`: a struct with one field `val`, an array of vectors."""


def scalar(type_: Type | None) -> Scalar | None:
    """Return the arithmetic type, or None for anything else."""
    return SCALARS.get(type_.name) if isinstance(type_, NamedType) else None


def vector(type_: Type | None) -> Vector | None:
    """Return the vector type, or None for anything else."""
    return VECTORS.get(type_.name) if isinstance(type_, NamedType) else None


def is_integer(type_: Type | None) -> bool:
    """Whether `type_` is an integer type."""
    found = scalar(type_)
    return found is not None and not found.floating


def unqualified(type_: Type) -> Type:
    """Return `type_` without `const` and `restrict` of its own, arrays as pointers."""
    if isinstance(type_, ArrayType):
        return PointerType(of=type_.of)
    if isinstance(type_, PointerType):
        return PointerType(of=type_.of)
    return NamedType(name=type_.name) if isinstance(type_, NamedType) else type_


def size_of(type_: Type, constants: Mapping[str, int]) -> int | None:
    """Return the size of a type in bytes; None where it is not known here (structs, `x[]`)."""
    if isinstance(type_, PointerType):
        return 8
    if isinstance(type_, ArrayType):
        count = constant(type_.size, constants) if type_.size else None
        each = size_of(type_.of, constants)
        return None if count is None or each is None else count * each
    found = scalar(type_) or vector(type_)
    return found.size if found else None


def _divide(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


INTEGER_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divide,
    "%": lambda a, b: a - b * _divide(a, b),
    "<<": operator.lshift,
    ">>": operator.rshift,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "<": lambda a, b: int(a < b),
    "<=": lambda a, b: int(a <= b),
    ">": lambda a, b: int(a > b),
    ">=": lambda a, b: int(a >= b),
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
    "&&": lambda a, b: int(bool(a and b)),
    "||": lambda a, b: int(bool(a or b)),
}
_UNARY: dict[str, Callable[[int], int]] = {
    "-": operator.neg,
    "+": operator.pos,
    "~": operator.invert,
    "!": lambda v: int(not v),
}


def constant(expr: Expr, constants: Mapping[str, int]) -> int | None:
    """Return the value of an integer constant expression (C's rules, no overflow), else None."""
    if isinstance(expr, Int):
        return expr.value
    if isinstance(expr, Name):
        return constants.get(expr.id)
    if isinstance(expr, Cast):
        return constant(expr.operand, constants) if is_integer(expr.type) else None
    if isinstance(expr, SizeOf):
        return size_of(expr.of, constants) if isinstance(expr.of, Type) else None
    if isinstance(expr, Unary) and expr.op in _UNARY:
        value = constant(expr.operand, constants)
        return None if value is None else _UNARY[expr.op](value)
    if isinstance(expr, Ternary):
        cond = constant(expr.cond, constants)
        return None if cond is None else constant(expr.then if cond else expr.other, constants)
    if isinstance(expr, Binary):
        left, right = constant(expr.left, constants), constant(expr.right, constants)
        if left is None or right is None or (expr.op in "/%" and right == 0):
            return None
        if expr.op in ("<<", ">>") and not 0 <= right < 64:
            return None
        return INTEGER_OPERATORS[expr.op](left, right)
    return None


@dataclass(frozen=True, slots=True)
class Signature:
    """What a call needs: parameter types (None = any) and the result (None = any)."""

    params: tuple[Type | None, ...]
    returns: Type | None


_DOUBLE = NamedType(name="double")
_FLOAT = NamedType(name="float")
_INT = NamedType(name="int")
_VOID_POINTER = PointerType(of=NamedType(name="void"))


def _math() -> dict[str, Signature]:
    counts = {
        1: "exp exp2 expm1 log log2 log10 log1p sqrt cbrt fabs floor ceil round rint trunc "
        "nearbyint sin cos tan asin acos atan sinh cosh tanh erf erfc",
        2: "pow fmod fmin fmax atan2 hypot copysign fdim",
        3: "fma",
    }
    rows: dict[str, Signature] = {}
    for count, names in counts.items():
        for name in names.split():
            rows[name] = Signature((_DOUBLE,) * count, _DOUBLE)
            rows[f"{name}f"] = Signature((_FLOAT,) * count, _FLOAT)
    return rows


LIBRARY: dict[str, Signature] = {
    **_math(),
    "ldexpf": Signature((_FLOAT, _INT), _FLOAT),
    "abs": Signature((_INT,), _INT),
    "isnan": Signature((None,), _INT),
    "isinf": Signature((None,), _INT),
    "memcpy": Signature((_VOID_POINTER, _VOID_POINTER, NamedType(name="size_t")), _VOID_POINTER),
    "memset": Signature((_VOID_POINTER, _INT, NamedType(name="size_t")), _VOID_POINTER),
}
"""Functions of <math.h> and <string.h> that kernels call."""

CONSTANTS: dict[str, Type] = {
    "NULL": _VOID_POINTER,
    **dict.fromkeys("INFINITY NAN HUGE_VALF FLT_MAX FLT_MIN FLT_EPSILON".split(), _FLOAT),
    **dict.fromkeys("DBL_MAX DBL_MIN DBL_EPSILON M_PI M_LN2 M_LOG2E".split(), _DOUBLE),
    **dict.fromkeys("INT32_MAX INT32_MIN INT64_MAX INT64_MIN INT_MAX INT_MIN".split(), _INT),
    **dict.fromkeys("SIZE_MAX UINT32_MAX UINT64_MAX".split(), NamedType(name="size_t")),
}
"""Names the standard headers define."""
