"""Intrinsics as data: each instruction has its C signature, high-IR form and numpy meaning.

In: rows `intrinsic(name, "params -> result", meaning)`. Out: tables for the interpreter, lift
and the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dovetail.ir.low.types import SCALARS, VECTORS, Scalar


@dataclass(frozen=True, slots=True)
class VectorType:
    """A C vector type: numpy element dtype and lane count of its canonical value."""

    dtype: str
    lanes: int


def _dtype(type_: Scalar) -> str:
    kind = "float" if type_.floating else "int" if type_.signed else "uint"
    return f"{kind}{8 * type_.size}"


SCALAR_TYPES: dict[str, str] = {s.name: _dtype(s) for s in SCALARS.values() if s.size <= 8}
"""C scalar types (LP64) and their numpy dtypes; a bfloat16 has none and counts as its 16 bits."""

VECTOR_TYPES: dict[str, VectorType] = {
    v.name: VectorType(SCALAR_TYPES[lane], v.size // SCALARS[lane].size)
    for v in VECTORS.values()
    for lane in (v.lane or "int32_t",)
    if lane in SCALAR_TYPES
}
"""Every vector type of the low IR. Integer vectors of x86 count as int32 lanes."""

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
