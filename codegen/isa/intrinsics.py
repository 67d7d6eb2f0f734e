"""Intrinsics as data: each instruction has its C signature; most a high-IR form or numpy meaning.

In: rows `intrinsic(name, "params -> result", meaning)`. Out: tables for the verifier, lift and the
tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.ir.low.types import SCALARS, Scalar


def _dtype(type_: Scalar) -> str:
    kind = "float" if type_.floating else "int" if type_.signed else "uint"
    return f"{kind}{8 * type_.size}"


SCALAR_TYPES: dict[str, str] = {s.name: _dtype(s) for s in SCALARS.values() if s.size <= 8}
"""C scalar types (LP64) and their numpy dtypes; a bfloat16 has none and counts as its 16 bits."""

Meaning = Callable[..., Any]
_LOW_BITS = "vand_i32({}, vbroadcast_i32(2139062143))"  # 0x7f7f7f7f
_HIGH_BIT = "vand_i32(vshr_i32({}, 7), vbroadcast_i32(16843009))"  # 0x01010101


@dataclass(frozen=True, slots=True)
class Intrinsic:
    """One instruction.

    `params` and `returns` are C spellings; `imm` stands for a compile-time integer. `op` is the
    same thing as a high-IR expression over `{0}`, `{1}` ... when one vector is `lanes` float32
    lanes, or empty. `meaning` computes the result from numpy arrays, numpy scalars, Python
    integers and `Pointer`s; None where the lifter has no use for it: floats are computed by `op`,
    and of integers it follows those that make masks and constants.
    """

    name: str
    params: tuple[str, ...]
    returns: str
    meaning: Meaning | None = None
    op: str = ""
    lanes: int = 0


def intrinsic(
    name: str,
    signature: str,
    meaning: Meaning | None = None,
    *,
    op: str = "",
    lanes: int = 0,
) -> Intrinsic:
    """Return an intrinsic from a signature such as `"__m256, __m256 -> __m256"`."""
    left, _, returns = signature.partition("->")
    params = tuple(p.strip() for p in left.split(",") if p.strip())
    return Intrinsic(name, params, returns.strip(), meaning, op, lanes)


def signatures(rows: Mapping[str, str], prefix: str = "", lanes: int = 0) -> Iterator[Intrinsic]:
    """Yield rows without meaning: names, each after `prefix`, to the signature they share."""
    for names, signature in rows.items():
        for name in names.split():
            yield intrinsic(f"{prefix}{name}", signature, lanes=lanes)


def meanings(rows: Mapping[str, tuple[str, Meaning]]) -> Iterator[Intrinsic]:
    """Yield rows that the lifter follows by their meaning: name to signature and meaning."""
    for name, (signature, meaning) in rows.items():
        yield intrinsic(name, signature, meaning)


def dot_form(acc: str, w: str, x: str, join: str) -> str:
    """Return acc + w . x of quads for w of all 256 codes, in ops that narrow targets do, too.

    The upper bit of a code counts 128 where it is unsigned (`join` is add), else -128 (sub).
    """
    low = f"vdot_quads({_LOW_BITS.format(w)}, {x}, {acc})"
    high = f"vdot_quads({_HIGH_BIT.format(w)}, {x}, vbroadcast_i32(0))"
    return f"v{join}_i32({low}, vshl_i32({high}, 7))"


def table(rows: Iterable[Intrinsic]) -> dict[str, Intrinsic]:
    """Return the rows by name; a name given twice is a fault of the table."""
    out: dict[str, Intrinsic] = {}
    for row in rows:
        assert row.name not in out, f"intrinsic {row.name} stands twice in a table"
        out[row.name] = row
    return out
