"""Numpy meanings of arithmetic and conversions, bit exact, beside those that the tables have.

In and out: numpy arrays of one vector each. NaN results are NaN; their payload is not modelled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dovetail.codegen.isa.meaning import Array, bits_of, lane_mask, mask_of, reinterpret

__all__ = ["Array", "bits_of", "lane_mask", "mask_of", "reinterpret"]

F32, I32 = np.float32, np.int32
INT_MIN = -(2**31)


def fma(a: Array, b: Array, c: Array) -> Array:
    """Return a*b + c rounded once to float32.

    The product of two float32 is exact in float64; the sum is rounded to odd there, so that the
    second rounding, to float32, is the correct one.
    """
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    addend = np.asarray(c, np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    inexact = np.isfinite(total) & (error != 0)
    even = (total.view(np.uint64) & 1) == 0
    toward = np.where(error > 0, np.inf, -np.inf)
    return np.where(inexact & even, np.nextafter(total, toward), total).astype(F32)


def min_second(a: Array, b: Array) -> Array:
    """Return x86's min: `a < b ? a : b`, so b where either is NaN or both are zero."""
    return np.where(a < b, a, b)


def max_second(a: Array, b: Array) -> Array:
    """Return x86's max: `a > b ? a : b`."""
    return np.where(a > b, a, b)


def min_nan(a: Array, b: Array) -> Array:
    """Return the IEEE 754-2019 minimum (NEON): NaN wins, -0 < +0."""
    out = np.minimum(a, b)
    zeros = (a == 0) & (b == 0)
    return np.where(zeros, np.where(np.signbit(a), a, b), out)


def max_nan(a: Array, b: Array) -> Array:
    """Return the IEEE 754-2019 maximum (NEON): NaN wins, +0 > -0."""
    out = np.maximum(a, b)
    zeros = (a == 0) & (b == 0)
    return np.where(zeros, np.where(np.signbit(a), b, a), out)


def to_i32_x86(v: Array, rounding: Callable[[Array], Array] = np.rint) -> Array:
    """Convert to int32; NaN and values out of range become INT_MIN, as on x86."""
    wide = rounding(v.astype(np.float64))
    good = (wide >= INT_MIN) & (wide < 2**31)
    return np.where(good, wide, INT_MIN).astype(np.int64).astype(I32)


def to_i32_saturating(v: Array, rounding: Callable[[Array], Array] = np.rint) -> Array:
    """Convert to int32; NaN becomes 0 and values out of range the nearest end, as on NEON."""
    wide = rounding(np.nan_to_num(v.astype(np.float64), nan=0.0))
    return np.clip(wide, INT_MIN, 2**31 - 1).astype(np.int64).astype(I32)


def look_up(v: Array, *words: int) -> Array:
    """Return the bytes of a table in four words that the bytes of v name."""
    found: Array = np.array(words, I32).view(np.uint8)[v.view(np.uint8)].view(I32)
    return found


def f16_bits(v: Array) -> Array:
    """Return float16 bits of float32 values, to nearest even; NaN is quieted, its top bits kept."""
    bits = np.asarray(v, F32).view(np.uint32)
    quiet = ((bits >> 16) & 0x8000) | 0x7E00 | ((bits >> 13) & 0x3FF)
    normal = np.asarray(v, F32).astype(np.float16).view(np.uint16)
    return np.where(np.isnan(v), quiet.astype(np.uint16), normal)


def f32_of_f16(bits: Array) -> Array:
    """Return the float32 values of float16 bits (exact)."""
    return np.asarray(bits, np.uint16).view(np.float16).astype(F32)


def halves_tree(op: Callable[[Array, Array], Array], v: Array) -> Any:
    """Reduce by adding the upper half to the lower until one lane is left."""
    while v.size > 1:
        half = v.size // 2
        v = op(v[:half], v[half:])
    return v[0]


def pairs_tree(op: Callable[[Array, Array], Array], v: Array) -> Any:
    """Reduce by combining neighbours until one lane is left."""
    while v.size > 1:
        v = op(v[0::2], v[1::2])
    return v[0]


def round_mode(v: Array, mode: int) -> Array:
    """Round to an integral float by x86 mode: 0, 8 nearest; 1, 9 down; 2, 10 up; 3, 11 to zero."""
    return (np.rint, np.floor, np.ceil, np.trunc)[mode & 3](v)


def compare_mode(a: Array, b: Array, mode: int) -> Array:
    """Return x86's compare predicate `mode` (0..31) lane by lane."""
    unordered = np.isnan(a) | np.isnan(b)
    base = (
        a == b,
        a < b,
        a <= b,
        unordered,
        a != b,
        ~(a < b),
        ~(a <= b),
        ~unordered,
        (a == b) | unordered,
        ~(a >= b),
        ~(a > b),
        np.zeros(a.shape, bool),
        (a != b) & ~unordered,
        a >= b,
        a > b,
        np.ones(a.shape, bool),
    )
    return base[mode & 15]


def bitwise(op: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """Return a bitwise operation on vectors of any lane type."""
    return lambda a, b: op(a.view(np.uint32), b.view(np.uint32)).view(a.dtype)
