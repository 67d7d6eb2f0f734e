"""NEON instructions that multiply bytes: of ARMv8.0, of DotProd and of I8MM.

In: nothing. Out: `Meant` rows with their numpy meanings; those that DotProd and I8MM add stand
apart, as the targets that have them do.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from tests.codegen.interp import meaning as m
from tests.codegen.interp.dots import dot_quads
from tests.codegen.interp.meant import Meant, meant


def byte_rows() -> Iterator[Meant]:
    """Yield widening products and sums of neighbours (ARMv8.0)."""
    for kind, wide in (("s8", "int16"), ("u8", "uint16"), ("s16", "int32"), ("u16", "uint32")):
        product = partial(_product, wide)
        yield meant(f"vmull_{kind}", product)
        yield meant(f"vmlal_{kind}", lambda acc, a, b, product=product: acc + product(a, b))
        yield meant(f"vpaddq_{kind}", _add_neighbours)
        yield meant(f"vpaddlq_{kind}", partial(_widened_sums, wide))
        yield meant(f"vpadalq_{kind}", lambda acc, v, wide=wide: acc + _widened_sums(wide, v))
    yield meant("vpaddq_s32", _add_neighbours)
    yield meant("vaddvq_s32", lambda v: v.astype(np.int64).sum().astype(np.int32))
    yield meant("vqtbl1q_u8", lambda table, at: np.append(table, np.uint8(0))[np.minimum(at, 16)])
    for q in ("", "q"):
        yield meant(f"vabs{q}_s8", np.abs)


def _product(wide: str, a: m.Array, b: m.Array) -> m.Array:
    out: m.Array = a.astype(wide) * b.astype(wide)
    return out


def _add_neighbours(a: m.Array, b: m.Array) -> m.Array:
    joined = np.concatenate([a, b])
    out: m.Array = joined[0::2] + joined[1::2]
    return out


def _widened_sums(wide: str, v: m.Array) -> m.Array:
    out: m.Array = v[0::2].astype(wide) + v[1::2].astype(wide)
    return out


def _dot_lane(acc: m.Array, a: m.Array, b: m.Array, lane: int) -> m.Array:
    return dot_quads(acc, a, np.tile(b.reshape(-1, 4)[lane], acc.size))


def multiply_tiles(acc: m.Array, a: m.Array, b: m.Array) -> m.Array:
    """Return acc + a b^T: acc 2 x 2, a and b two rows of eight bytes, wrapping."""
    left, right = (v.astype(np.int64).reshape(2, 8) for v in (a, b))
    total: m.Array = (acc + (left @ right.T).reshape(-1)).astype(acc.dtype)
    return total


def _dots(name: str) -> Iterator[Meant]:
    """Yield dot products of quads, also with one quad of the second operand."""
    stem, _, acc = name.rpartition("_")
    for q in ("", "q"):
        if stem != "vsudot":
            yield meant(f"{stem}{q}_{acc}", dot_quads)
        for suffix, width in (("lane", 64), ("laneq", 128)):
            yield meant(f"{stem}{q}_{suffix}_{acc}", _dot_lane, immediates=range(width // 32))


def dotprod_rows() -> Iterator[Meant]:
    """Yield what DotProd adds: quads of bytes of one sign."""
    yield from (*_dots("vdot_s32"), *_dots("vdot_u32"))


def i8mm_rows() -> Iterator[Meant]:
    """Yield what I8MM adds: quads of unsigned and signed bytes, products of 2 x 8 and 8 x 2."""
    yield from (*_dots("vusdot_s32"), *_dots("vsudot_s32"))
    for name in ("vmmlaq_s32", "vmmlaq_u32", "vusmmlaq_s32"):
        yield meant(name, multiply_tiles)
