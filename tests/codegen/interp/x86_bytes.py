"""Rows of 8- and 16-bit integers that SSE, AVX2 and AVX-512 share but for the register width.

In: lane count, of 32 bits. Out: `Meant` rows. Registers are int32 lanes, seen as bytes here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from dovetail.codegen.isa.x86_rows import PREFIXES
from tests.codegen.interp import meaning as m
from tests.codegen.interp.meant import Meant, meant

I8, U8, I16, I32 = np.int8, np.uint8, np.int16, np.int32


def lanewise(dtype: Any, act: Callable[..., m.Array]) -> Callable[..., m.Array]:
    """Return the meaning of an operation on lanes of `dtype`."""

    def meaning(*vectors: m.Array) -> m.Array:
        out: m.Array = act(*(v.view(dtype) for v in vectors))
        return np.ascontiguousarray(out.astype(dtype, copy=False)).view(I32)

    return meaning


def add_products_of_bytes(a: m.Array, b: m.Array) -> m.Array:
    """Return sums of two products of unsigned bytes of a and signed ones of b, saturated."""
    products = a.view(U8).astype(I32) * b.view(I8).astype(I32)
    sums = products.reshape(-1, 2).sum(axis=1)
    out: m.Array = np.clip(sums, -(2**15), 2**15 - 1).astype(I16).view(I32)
    return out


def add_products_of_words(a: m.Array, b: m.Array) -> m.Array:
    """Return sums of two products of signed 16-bit integers; the least one wraps, as hardware."""
    products = a.view(I16).astype(np.int64) * b.view(I16).astype(np.int64)
    out: m.Array = products.reshape(-1, 2).sum(axis=1).astype(I32)
    return out


def take_bytes(v: m.Array, pick: m.Array) -> m.Array:
    """Return in each 128-bit block the bytes of v that `pick` names; 0 where its top bit is set."""
    source, at = v.view(U8).reshape(-1, 16), pick.view(U8).reshape(-1, 16)
    taken = np.take_along_axis(source, (at & 15).astype(np.intp), axis=1)
    return np.where(at & 0x80, U8(0), taken).reshape(-1).view(I32)


def with_sign_of(a: m.Array, b: m.Array) -> m.Array:
    """Return a, -a or 0 as b is positive, negative or 0; -128 stays."""
    return a * np.sign(b)


def byte_rows(lanes: int) -> Iterator[Meant]:
    """Yield arithmetic on the bytes and 16-bit integers of `lanes` int32 lanes."""
    prefix = PREFIXES[lanes]
    yield meant(f"{prefix}_maddubs_epi16", add_products_of_bytes)
    yield meant(f"{prefix}_madd_epi16", add_products_of_words)
    yield meant(f"{prefix}_abs_epi8", lanewise(I8, np.abs))
    yield meant(f"{prefix}_shuffle_epi8", take_bytes)
    for bits, dtype in ((8, I8), (16, I16)):
        for name, act in (("add", np.add), ("sub", np.subtract)):
            yield meant(f"{prefix}_{name}_epi{bits}", lanewise(dtype, act))
        yield meant(
            f"{prefix}_set1_epi{bits}",
            lambda x, dtype=dtype, size=bits // 8: np.full(4 // size * lanes, x, dtype).view(I32),
        )


def sign_rows(lanes: int) -> Iterator[Meant]:
    """Yield what ends with 256 bits: a byte with the sign of another."""
    prefix = PREFIXES[lanes]
    yield meant(f"{prefix}_sign_epi8", lanewise(I8, with_sign_of))


def vnni_rows(lanes: int, suffix: str) -> Iterator[Meant]:
    """Yield VNNI's dot products of bytes and of words, which wrap (`s`: which saturate)."""
    prefix = PREFIXES[lanes]
    for name, left, right in (("dpbusd", U8, I8), ("dpwssd", I16, I16)):
        dot = partial(dot_of, left, right)
        yield meant(
            f"{prefix}_{name}_{suffix}",
            lambda acc, a, b, dot=dot: (acc + dot(a, b)).astype(I32),
        )
        yield meant(
            f"{prefix}_{name}s_{suffix}",
            lambda acc, a, b, dot=dot: np.clip(acc + dot(a, b), m.INT_MIN, 2**31 - 1).astype(I32),
        )


def dot_of(left: Any, right: Any, a: m.Array, b: m.Array) -> m.Array:
    """Return the dot product of the parts of each 32-bit lane, exact."""
    products = a.view(left).astype(np.int64) * b.view(right).astype(np.int64)
    sums: m.Array = products.reshape(a.size, -1).sum(axis=1)
    return sums
