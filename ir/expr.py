"""Types and expressions shared by low and high IR, and the one operator-precedence table."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.ir.node import Node

# ---- types: names spelled as in the text (`float`, `__m256`, `int64_t`; `f32`, `vec[f32]`) ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Type(Node):
    """A type as written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedType(Type):
    """`float`, `__m256`, `size_t`, `f32`, `vec[f32]`, `sched`, `struct NAME` ..."""

    name: str
    const: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PointerType(Type):
    """`of*` (low) or `ptr[of]` (high). `const` and `restrict` qualify the pointer itself."""

    of: Type
    const: bool = False
    restrict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayType(Type):
    """`of[size]`; `size` is None in array parameters written `float x[]`."""

    of: Type
    size: Expr | None = None


# ---- expressions ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Expr(Node):
    """An expression."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Int(Expr):
    """An integer literal. `text` keeps the spelling (`0xff`, `4u`) where it matters."""

    value: int
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Float(Expr):
    """A floating literal. `text` keeps the spelling (`1e-5f`) where it matters, else is empty."""

    value: float
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Name(Expr):
    """A variable, parameter, constant or macro-free identifier."""

    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unary(Expr):
    """Prefix operator in C spelling: `-` `+` `!` `~`; low IR also `*` (load) and `&` (address)."""

    op: str
    operand: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Binary(Expr):
    """Infix operator in C spelling (`&&`, `==`, `<<` ...); high IR's `//` is `/` on integers."""

    op: str
    left: Expr
    right: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Ternary(Expr):
    """`cond ? then : other` (low), `then if cond else other` (high)."""

    cond: Expr
    then: Expr
    other: Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Expr):
    """A call of a named function, intrinsic or builtin."""

    name: str
    args: tuple[Expr, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Index(Expr):
    """`base[i]`; the high IR's register tiles take several indices: `acc[i, j]`."""

    base: Expr
    indices: tuple[Expr, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast(Expr):
    """`(type) operand` (low), `cast(type, operand)` (high)."""

    type: Type
    operand: Expr


PRECEDENCE: dict[str, int] = {
    **dict.fromkeys(("*", "/", "%"), 11),
    **dict.fromkeys(("+", "-"), 10),
    **dict.fromkeys(("<<", ">>"), 9),
    **dict.fromkeys(("<", "<=", ">", ">="), 8),
    **dict.fromkeys(("==", "!="), 7),
    "&": 6,
    "^": 5,
    "|": 4,
    "&&": 3,
    "||": 2,
}
"""C's binary operators, tighter = larger, all left-associative. Postfix 14, prefix, cast 13."""
PREFIX, POSTFIX, TERNARY, ASSIGN = 13, 14, 1, 0
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
