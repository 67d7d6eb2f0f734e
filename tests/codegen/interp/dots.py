"""Numpy meanings of dot products: pairs of bfloat16, quads of bytes, tiles."""

from __future__ import annotations

import numpy as np

from tests.codegen.interp import meaning as m


def dot_pairs(c: m.Array, a: m.Array, b: m.Array) -> m.Array:
    """Return c + a . b for pairs of bfloat16 in 32-bit lanes, as x86's instruction.

    Subnormals count as zero, the odd product is added first, each sum is rounded once.
    """
    total = flush(c)
    for part in (odd_bf16, even_bf16):
        total = flush(m.fma(flush(part(a)), flush(part(b)), total))
    return total


def dot_quads(acc: m.Array, a: m.Array, b: m.Array) -> m.Array:
    """Return acc + a . b of each lane's four bytes, wrapping; a and b are of int8 or uint8."""
    products = (a.astype(np.int64) * b.astype(np.int64)).reshape(-1, 4).sum(axis=1)
    total: m.Array = (acc + products).astype(acc.dtype)
    return total


def dot_tiles(c: m.Array, a: m.Array, b: m.Array) -> m.Array:
    """Return c + a b for float32 c [M][N] and pairs of bfloat16 a [M][K], b [K][N], as AMX does.

    Subnormals count as zero. The first products of pairs and the second ones are summed apart, from
    zero and along K, each step rounded once; then both sums are added, and that to c.
    """
    total = np.zeros_like(c)
    for part in (even_bf16, odd_bf16):
        sums = np.zeros_like(c)
        left, right = flush(part(a)), flush(part(b))
        for k in range(a.shape[1]):
            sums = flush(m.fma(left[:, k : k + 1], right[k : k + 1], sums))
        total = flush(total + sums)
    return flush(flush(c) + total)


def even_bf16(pairs: m.Array) -> m.Array:
    """Return the lower bfloat16 of each 32-bit lane as float32."""
    return (pairs.view(np.uint32) << np.uint32(16)).view(np.float32)


def odd_bf16(pairs: m.Array) -> m.Array:
    """Return the upper bfloat16 of each 32-bit lane as float32."""
    return (pairs.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def flush(v: m.Array) -> m.Array:
    """Return `v` with subnormals replaced by zeros of their sign."""
    return np.where(np.abs(v) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), v), v)
