"""Intrinsics as data: each instruction has its C signature, high-IR form and numpy meaning.

In: rows `intrinsic(name, "params -> result", meaning)`. Out: tables for the interpreter, lift
and the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class VectorType:
    """A C vector type: numpy element dtype and lane count of its canonical value."""

    dtype: str
    lanes: int


VECTOR_TYPES: dict[str, VectorType] = {
    "__m64": VectorType("int32", 2),
    "__m128": VectorType("float32", 4),
    "__m256": VectorType("float32", 8),
    "__m512": VectorType("float32", 16),
    "__m128i": VectorType("int32", 4),
    "__m256i": VectorType("int32", 8),
    "__m512i": VectorType("int32", 16),
    "__m128d": VectorType("float64", 2),
    "__m256d": VectorType("float64", 4),
    "__m512d": VectorType("float64", 8),
    **{
        f"{kind}{bits}x{total // bits}_t": VectorType(f"{dtype}{bits}", total // bits)
        for total in (64, 128)
        for kind, dtype, widths in (
            ("float", "float", (16, 32, 64)),
            ("int", "int", (8, 16, 32, 64)),
            ("uint", "uint", (8, 16, 32, 64)),
        )
        for bits in widths
    },
}
"""Every vector type of the low IR. Integer vectors of x86 count as int32 lanes."""

SCALAR_TYPES: dict[str, str] = {
    "char": "int8",
    "signed char": "int8",
    "unsigned char": "uint8",
    "short": "int16",
    "unsigned short": "uint16",
    "int": "int32",
    "unsigned": "uint32",
    "unsigned int": "uint32",
    "long": "int64",
    "unsigned long": "uint64",
    "long long": "int64",
    "unsigned long long": "uint64",
    "int8_t": "int8",
    "uint8_t": "uint8",
    "int16_t": "int16",
    "uint16_t": "uint16",
    "int32_t": "int32",
    "uint32_t": "uint32",
    "int64_t": "int64",
    "uint64_t": "uint64",
    "size_t": "uint64",
    "ssize_t": "int64",
    "ptrdiff_t": "int64",
    "intptr_t": "int64",
    "uintptr_t": "uint64",
    "bool": "uint8",
    "_Bool": "uint8",
    "__mmask8": "uint8",
    "__mmask16": "uint16",
    "__mmask32": "uint32",
    "float16_t": "float16",
    "__fp16": "float16",
    "float": "float32",
    "float32_t": "float32",
    "double": "float64",
}
"""C scalar types (LP64) and their numpy dtypes."""

Meaning = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Intrinsic:
    """One instruction.

    `params` and `returns` are C spellings; `imm` stands for a compile-time integer, whose legal
    values (those the tests try) are `immediates`. `op` is the same thing as a high-IR expression
    over `{0}`, `{1}` ... when one vector is `lanes` float32 lanes, or empty. `meaning` computes the
    result from numpy arrays, numpy scalars, Python integers and `Pointer`s.
    """

    name: str
    params: tuple[str, ...]
    returns: str
    meaning: Meaning
    op: str = ""
    lanes: int = 0
    immediates: tuple[int, ...] = ()


def intrinsic(
    name: str,
    signature: str,
    meaning: Meaning,
    *,
    op: str = "",
    lanes: int = 0,
    immediates: Iterable[int] = (),
) -> Intrinsic:
    """Return an intrinsic from a signature such as `"__m256, __m256 -> __m256"`."""
    left, _, returns = signature.partition("->")
    params = tuple(p.strip() for p in left.split(",") if p.strip())
    return Intrinsic(name, params, returns.strip(), meaning, op, lanes, tuple(immediates))


def table(rows: Iterable[Intrinsic]) -> dict[str, Intrinsic]:
    """Return the rows by name; a name given twice is a fault of the table."""
    out: dict[str, Intrinsic] = {}
    for row in rows:
        assert row.name not in out, f"intrinsic {row.name} stands twice in a table"
        out[row.name] = row
    return out
