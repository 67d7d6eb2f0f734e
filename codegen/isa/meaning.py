"""Numpy meanings shared by the instruction sets: casts, masks and shuffles.

In and out: numpy arrays of one vector each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def reinterpret(dtype: npt.DTypeLike) -> Callable[[Array], Array]:
    """Return the meaning of a bit cast to lanes of `dtype`."""
    return lambda v: v.view(dtype)


def lane_mask(condition: Array, dtype: npt.DTypeLike) -> Array:
    """Return all-ones lanes of `dtype` where the condition holds, else zero lanes."""
    size = np.dtype(dtype).itemsize
    return np.where(condition, -1, 0).astype(f"int{size * 8}").view(dtype)


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
