"""Numpy meanings shared by the instruction sets, bit exact: arithmetic, conversions, shuffles.

In and out: numpy arrays of one vector each. NaN results are NaN; their payload is not modelled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
F32, I32 = np.float32, np.int32
INT_MIN = -(2**31)
_LOW_BITS = "vand_i32({}, vbroadcast_i32(2139062143))"  # 0x7f7f7f7f
_HIGH_BIT = "vand_i32(vshr_i32({}, 7), vbroadcast_i32(16843009))"  # 0x01010101


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


def dot_pairs(c: Array, a: Array, b: Array) -> Array:
    """Return c + a . b for pairs of bfloat16 in 32-bit lanes, as x86's instruction.

    Subnormals count as zero, the odd product is added first, each sum is rounded once.
    """
    total = flush(c)
    for part in (odd_bf16, even_bf16):
        total = flush(fma(flush(part(a)), flush(part(b)), total))
    return total


def dot_quads(acc: Array, a: Array, b: Array) -> Array:
    """Return acc + a . b of each lane's four bytes, wrapping; a and b are of int8 or uint8."""
    products = (a.astype(np.int64) * b.astype(np.int64)).reshape(-1, 4).sum(axis=1)
    total: Array = (acc + products).astype(acc.dtype)
    return total


def dot_form(acc: str, w: str, x: str, join: str) -> str:
    """Return acc + w . x of quads for w of all 256 codes, in ops that narrow targets do, too.

    The upper bit of a code counts 128 where it is unsigned (`join` is add), else -128 (sub).
    """
    low = f"vdot_quads({_LOW_BITS.format(w)}, {x}, {acc})"
    high = f"vdot_quads({_HIGH_BIT.format(w)}, {x}, vbroadcast_i32(0))"
    return f"v{join}_i32({low}, vshl_i32({high}, 7))"


def dot_tiles(c: Array, a: Array, b: Array) -> Array:
    """Return c + a b for float32 c [M][N] and pairs of bfloat16 a [M][K], b [K][N], as AMX does.

    Subnormals count as zero. The first products of pairs and the second ones are summed apart, from
    zero and along K, each step rounded once; then both sums are added, and that to c.
    """
    total = np.zeros_like(c)
    for part in (even_bf16, odd_bf16):
        sums = np.zeros_like(c)
        left, right = flush(part(a)), flush(part(b))
        for k in range(a.shape[1]):
            sums = flush(fma(left[:, k : k + 1], right[k : k + 1], sums))
        total = flush(total + sums)
    return flush(flush(c) + total)


def even_bf16(pairs: Array) -> Array:
    """Return the lower bfloat16 of each 32-bit lane as float32."""
    return (pairs.view(np.uint32) << np.uint32(16)).view(F32)


def odd_bf16(pairs: Array) -> Array:
    """Return the upper bfloat16 of each 32-bit lane as float32."""
    return (pairs.view(np.uint32) & np.uint32(0xFFFF0000)).view(F32)


def flush(v: Array) -> Array:
    """Return `v` with subnormals replaced by zeros of their sign."""
    return np.where(np.abs(v) < np.finfo(F32).tiny, np.copysign(F32(0), v), v)


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


def reinterpret(dtype: npt.DTypeLike) -> Callable[[Array], Array]:
    """Return the meaning of a bit cast to lanes of `dtype`."""
    return lambda v: v.view(dtype)


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


def lane_mask(condition: Array, dtype: npt.DTypeLike) -> Array:
    """Return all-ones lanes of `dtype` where the condition holds, else zero lanes."""
    size = np.dtype(dtype).itemsize
    return np.where(condition, -1, 0).astype(f"int{size * 8}").view(dtype)


def bitwise(op: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """Return a bitwise operation on vectors of any lane type."""
    return lambda a, b: op(a.view(np.uint32), b.view(np.uint32)).view(a.dtype)


def and_not(a: Array, b: Array) -> Array:
    """Return ~a & b on bits."""
    return ~a & b


def by_blocks(v: Array) -> Array:
    """Return the vector as rows of four 32-bit lanes: the blocks most x86 shuffles work in."""
    return v.reshape(-1, 4)


def unpack(a: Array, b: Array, first: int) -> Array:
    """Interleave lanes first, first+1 of each 128-bit block of a and b."""
    x, y = by_blocks(a), by_blocks(b)
    out = np.stack([x[:, first], y[:, first], x[:, first + 1], y[:, first + 1]], axis=1)
    return out.reshape(-1)


def shuffle_blocks(a: Array, b: Array, control: int) -> Array:
    """Take two 128-bit blocks of a, then two of b, by 2-bit fields of `control`."""
    pick = [(control >> (2 * i)) & 3 for i in range(4)]
    x, y = by_blocks(a), by_blocks(b)
    return np.concatenate([x[pick[:2]], y[pick[2:]]]).reshape(-1)


def shuffle(a: Array, b: Array, control: int) -> Array:
    """Take two lanes of a, then two of b, in each 128-bit block, by 2-bit fields of `control`."""
    pick = [(control >> (2 * i)) & 3 for i in range(4)]
    x, y = by_blocks(a), by_blocks(b)
    return np.concatenate([x[:, pick[:2]], y[:, pick[2:]]], axis=1).reshape(-1)


def permute(a: Array, control: int) -> Array:
    """Permute the four lanes of each 128-bit block by 2-bit fields of `control`."""
    return shuffle(a, a, control)


def bits_of(mask: int, lanes: int) -> Array:
    """Return an integer mask as booleans, lane 0 first."""
    return np.array([(int(mask) >> i) & 1 for i in range(lanes)], bool)


def mask_of(lanes: Array) -> int:
    """Return booleans as an integer mask, lane 0 in bit 0."""
    return sum(1 << i for i, bit in enumerate(lanes) if bit)
