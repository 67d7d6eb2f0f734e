"""Facts about C types: canonical spellings, ranks, sizes, vector shapes; and constant expressions.

Types are the nodes of `dovetail.ir.expr`; sizes are in bytes on an LP64 machine.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from dovetail.ir import expr as ex
from dovetail.ir.low.nodes import InitList, SizeOf


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


_SCALARS: dict[tuple[int, int, bool], str] = {
    (1, 0, False): "_Bool",
    (1, 1, True): "char, signed char, int8_t",
    (1, 1, False): "unsigned char, uint8_t, __mmask8",
    (2, 2, True): "short, int16_t",
    (2, 2, False): "unsigned short, uint16_t, __mmask16",
    (4, 3, True): "int, int32_t",
    (4, 3, False): "unsigned, uint32_t, __mmask32",
    (8, 4, True): "long, int64_t, ssize_t, ptrdiff_t, intptr_t",
    (8, 4, False): "unsigned long, uint64_t, size_t, uintptr_t, __mmask64",
    (8, 5, True): "long long",
    (8, 5, False): "unsigned long long",
    (2, 10, True): "_Float16, float16_t, __fp16, __bf16, bfloat16_t",
    (4, 11, True): "float, float32_t",
    (8, 12, True): "double, float64_t",
    (16, 13, True): "long double",
}
"""Size, rank and sign to the types that have them."""
SCALARS: dict[str, Scalar] = {
    name: Scalar(name, *facts) for facts, names in _SCALARS.items() for name in names.split(", ")
}
"""Arithmetic types by canonical name."""


_SPELLINGS = {
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
ARITHMETIC = {words: name for name, row in _SPELLINGS.items() for words in row.split(", ")}
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


def _vectors() -> Iterator[Vector]:
    for bits in (128, 256, 512):
        for suffix, lane in (("", "float"), ("d", "double"), ("i", None), ("bh", None)):
            yield Vector(f"__m{bits}{suffix}", bits // 8, lane)
    yield Vector("__m64", 8)
    yield Vector("dt_f32x32", 128, "float")
    yield Vector("dt_i32x32", 128, "int32_t")
    integers = (8, 16, 32, 64)
    neon = {"float": (16, 32, 64), "bfloat": (16,), "int": integers, "uint": integers}
    for kind, widths in neon.items():
        for width in widths:
            for bits in (64, 128):
                yield Vector(f"{kind}{width}x{bits // width}_t", bits // 8, f"{kind}{width}_t")


VECTORS = {v.name: v for v in _vectors()}
"""SIMD register types by name."""

VECTOR_GROUPS = {
    f"{name.removesuffix('_t')}x{count}_t": (name, count)
    for name in VECTORS
    if name.endswith("_t") and not name.startswith(("float64", "bfloat"))
    for count in (2, 3, 4)
}
"""NEON groups such as `float32x4x2_t`: a struct with one field `val`, an array of vectors."""


def scalar(type_: ex.Type | None) -> Scalar | None:
    """Return the arithmetic type, or None for anything else."""
    return SCALARS.get(type_.name) if isinstance(type_, ex.NamedType) else None


def vector(type_: ex.Type | None) -> Vector | None:
    """Return the vector type, or None for anything else."""
    return VECTORS.get(type_.name) if isinstance(type_, ex.NamedType) else None


def is_integer(type_: ex.Type | None) -> bool:
    """Whether `type_` is an integer type."""
    found = scalar(type_)
    return found is not None and not found.floating


def unqualified(type_: ex.Type) -> ex.Type:
    """Return `type_` without `const` and `restrict` of its own, arrays as pointers."""
    if isinstance(type_, ex.ArrayType | ex.PointerType):
        return ex.PointerType(of=type_.of)
    return ex.NamedType(name=type_.name) if isinstance(type_, ex.NamedType) else type_


def sized(type_: ex.Type, init: ex.Expr | None) -> ex.Type:
    """Return `type_`; an array without a size, `x[]`, with that of its initialiser."""
    if not isinstance(type_, ex.ArrayType) or type_.size is not None:
        return type_
    count = len(init.items) if isinstance(init, InitList) else 0
    return ex.ArrayType(of=type_.of, size=ex.Int(value=count))


def size_of(type_: ex.Type, constants: Mapping[str, int]) -> int | None:
    """Return the size of a type in bytes; None where it is not known here (structs, `x[]`)."""
    if isinstance(type_, ex.PointerType):
        return 8
    if isinstance(type_, ex.ArrayType):
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
SIGN_OPERATORS: dict[str, Callable[[int], int]] = {
    "-": operator.neg,
    "+": operator.pos,
    "~": operator.invert,
    "!": lambda v: int(not v),
}


def constant(expr: ex.Expr, constants: Mapping[str, int]) -> int | None:
    """Return the value of an integer constant expression (C's rules), else None.

    Nor is what needs more than 64 bits one: squares of squares would have digits without end.
    """
    if isinstance(expr, ex.Int):
        return expr.value
    if isinstance(expr, ex.Name):
        return constants.get(expr.id)
    if isinstance(expr, ex.Cast):
        return constant(expr.operand, constants) if is_integer(expr.type) else None
    if isinstance(expr, SizeOf):
        return size_of(expr.of, constants) if isinstance(expr.of, ex.Type) else None
    if isinstance(expr, ex.Unary) and expr.op in SIGN_OPERATORS:
        value = constant(expr.operand, constants)
        return None if value is None else SIGN_OPERATORS[expr.op](value)
    if isinstance(expr, ex.Ternary):
        cond = constant(expr.cond, constants)
        return None if cond is None else constant(expr.then if cond else expr.other, constants)
    if isinstance(expr, ex.Binary):
        left, right = constant(expr.left, constants), constant(expr.right, constants)
        if left is None or right is None or (expr.op in "/%" and right == 0):
            return None
        if expr.op in ("<<", ">>") and not 0 <= right < 64:
            return None
        value = INTEGER_OPERATORS[expr.op](left, right)
        return value if -(1 << 63) <= value < 1 << 64 else None
    return None


@dataclass(frozen=True, slots=True)
class Signature:
    """What a call needs: parameter types (None = any) and the result (None = any)."""

    params: tuple[ex.Type | None, ...]
    returns: ex.Type | None


_DOUBLE = ex.NamedType(name="double")
_FLOAT = ex.NamedType(name="float")
_INT = ex.NamedType(name="int")
_VOID_POINTER = ex.PointerType(of=ex.NamedType(name="void"))


_MATH = {
    1: "exp exp2 expm1 log log2 log10 log1p sqrt cbrt fabs floor ceil round rint trunc "
    "nearbyint roundeven sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc",
    2: "pow fmod fmin fmax atan2 hypot copysign fdim",
    3: "fma",
}
LIBRARY: dict[str, Signature] = {
    **{
        f"{name}{suffix}": Signature((type_,) * count, type_)
        for count, names in _MATH.items()
        for name in names.split()
        for suffix, type_ in (("", _DOUBLE), ("f", _FLOAT))
    },
    "ldexpf": Signature((_FLOAT, _INT), _FLOAT),
    "abs": Signature((_INT,), _INT),
    "isnan": Signature((None,), _INT),
    "isinf": Signature((None,), _INT),
    "memcpy": Signature((_VOID_POINTER, _VOID_POINTER, ex.NamedType(name="size_t")), _VOID_POINTER),
    "memset": Signature((_VOID_POINTER, _INT, ex.NamedType(name="size_t")), _VOID_POINTER),
}
"""Functions of <math.h> and <string.h> that kernels call."""

CONSTANTS: dict[str, ex.Type] = {
    "NULL": _VOID_POINTER,
    **dict.fromkeys("INFINITY NAN HUGE_VALF FLT_MAX FLT_MIN FLT_EPSILON".split(), _FLOAT),
    **dict.fromkeys("DBL_MAX DBL_MIN DBL_EPSILON M_PI M_LN2 M_LOG2E".split(), _DOUBLE),
    **dict.fromkeys("INT32_MAX INT32_MIN INT64_MAX INT64_MIN INT_MAX INT_MIN".split(), _INT),
    **dict.fromkeys("SIZE_MAX UINT32_MAX UINT64_MAX".split(), ex.NamedType(name="size_t")),
}
"""Names the standard headers define."""
