"""NEON instructions that integer kernels have around their products: saturation, joins, lanes.

In: nothing. Out: `Meant` rows of ARMv8.0 with their numpy meanings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from tests.codegen.interp import meaning as m
from tests.codegen.interp.meant import Meant, meant

WIDTHS = {"s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64}
LARGEST = 32
"""Bits of the largest lanes that saturate here: their sums fit 64."""


def _dtype(kind: str) -> np.dtype[Any]:
    return np.dtype(f"{'u' if kind[0] == 'u' else ''}int{WIDTHS[kind]}")


def _narrowed(dtype: np.dtype[Any], v: m.Array) -> m.Array:
    ends = np.iinfo(dtype)
    out: m.Array = np.clip(v, ends.min, ends.max).astype(dtype)
    return out


def _saturated(act: Callable[[m.Array, m.Array], m.Array], a: m.Array, b: m.Array) -> m.Array:
    return _narrowed(a.dtype, act(a.astype(np.int64), b.astype(np.int64)))


def word_rows() -> Iterator[Meant]:
    """Yield saturating sums and conversions, interleaving, windows, products with a lane."""
    for kind, width in WIDTHS.items():
        for q, bits in (("", 64), ("q", 128)):
            if width <= LARGEST:
                for name, act in (("qadd", np.add), ("qsub", np.subtract)):
                    yield meant(f"v{name}{q}_{kind}", partial(_saturated, act))
            yield meant(
                f"vext{q}_{kind}",
                lambda a, b, n: np.concatenate([a, b])[n : n + a.size],
                immediates=range(bits // width),
            )
            if bits // width > 1:
                yield from _joins(kind, q)
    yield from _narrowing()
    yield from _lane_products()


def _joins(kind: str, q: str) -> Iterator[Meant]:
    for name, pick in (("zip", _zip), ("trn", _transpose), ("uzp", _every_other)):
        for part in (0, 1):
            yield meant(f"v{name}{part + 1}{q}_{kind}", partial(pick, part))


def _zip(part: int, a: m.Array, b: m.Array) -> m.Array:
    half = slice(a.size // 2 * part, a.size // 2 * (part + 1))
    return np.stack([a[half], b[half]], axis=1).reshape(-1)


def _transpose(part: int, a: m.Array, b: m.Array) -> m.Array:
    return np.stack([a[part::2], b[part::2]], axis=1).reshape(-1)


def _every_other(part: int, a: m.Array, b: m.Array) -> m.Array:
    return np.concatenate([a[part::2], b[part::2]])


def _narrowing() -> Iterator[Meant]:
    """Yield conversions to half the width, to the nearest value, alone or as an upper half."""
    for name, source, result in (
        ("qmovn", "s16", "s8"),
        ("qmovn", "s32", "s16"),
        ("qmovn", "u16", "u8"),
        ("qmovn", "u32", "u16"),
        ("qmovun", "s16", "u8"),
        ("qmovun", "s32", "u16"),
    ):
        narrow = partial(_narrowed, _dtype(result))
        yield meant(f"v{name}_{source}", narrow)
        yield meant(
            f"v{name}_high_{source}",
            lambda low, v, narrow=narrow: np.concatenate([low, narrow(v)]),
        )


def _lane_products() -> Iterator[Meant]:
    """Yield 32-bit products with one value, and sums of products."""
    for suffix, lanes in (("lane", 2), ("laneq", 4)):
        yield meant(
            f"vmulq_{suffix}_s32",
            lambda a, v, lane: a * v[lane],
            immediates=range(lanes),
        )
    yield meant(
        "vmulq_n_s32",
        lambda a, x: a * np.int32(x),
    )
    yield meant(
        "vmlaq_s32",
        lambda acc, a, b: acc + a * b,
    )
