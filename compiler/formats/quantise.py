"""Quantises rows of float weights: codes and scales with the least squared error found.

In: float32 rows [n][k] and a `BlockFormat`, and how much each value of K matters where that is
known. Out: `Blocks`. A block's scale is the best of some around the one that its largest value
fills; to the codes of each of them the scale is fitted by least squares.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.ir.block_format import SUPER, BlockFormat, Blocks

Array = npt.NDArray[Any]

TRIALS = {4: (0.76, 1.1, 8), 5: (0.86, 1.06, 8), 6: (0.93, 1.04, 8), 8: (0.976, 1.008, 9)}
"""Bits -> how far the codes reach in the scales that are tried, as shares of what a block's largest
value takes: least, most, how many. Finer codes lose more by what they cut off than they win. Twice
as many, or both signs, take 0.2 % off the error (normal values, 4 bits)."""
TILE = 1 << 16
"""Values that are worked on at once: they and what is made of them stay in the second cache."""
LARGEST_STEP = 127
"""Of the integer scales of a nested format."""


def quantise_rows(rows: Array, form: BlockFormat, weight: Array | None = None) -> Blocks:
    """Return `rows` quantised; weight: float32 [k], what an error of each value of K costs.

    Of formats without minimum; k is a multiple of the unit.
    """
    assert not form.minimum, f"{form.name} is read from files alone"
    n, k = rows.shape
    count = k // form.block
    codes, scales = np.empty((n, k), np.float32), np.empty((n, count), np.float32)
    high = max(1, TILE // k)
    cost = None if weight is None else _columns(weight.reshape(1, k), form.block)
    parts = [slice(top, top + high) for top in range(0, n, high)]
    for part in parts:
        scales[part] = _best_scales(_columns(rows[part], form.block), form, cost)
    stored, steps = _store(scales, form)
    wide = stored.astype(np.float32)
    if steps is not None:
        wide = wide.repeat(SUPER // form.block, axis=1) * steps
    for part in parts:
        blocks = rows[part].reshape(-1, count, form.block)
        made = _encode(blocks, wide[part][:, :, None], form, np.empty_like(blocks))
        codes[part] = made.reshape(-1, k)
    if form.bits == 8:
        packed = codes.astype(np.int8).view(np.uint8)
    else:
        packed = (codes + form.zero).astype(np.uint8)
    return Blocks(packed, stored, steps=steps)


def squared_error(
    rows: Array, form: BlockFormat, weight: Array | None = None
) -> tuple[float, float]:
    """Return (squared error of the quantised rows, their squares), both times `weight`."""
    found = form.values(quantise_rows(rows, form, weight)) - rows
    cost = np.float32(1) if weight is None else weight
    return float((found * found * cost).sum()), float((rows * rows * cost).sum())


def _columns(rows: Array, block: int) -> Array:
    """Return [block][rows][blocks]: what is done to all blocks runs along the last axes."""
    return np.ascontiguousarray(rows.reshape(len(rows), -1, block).transpose(2, 0, 1))


def _encode(blocks: Array, scales: Array, form: BlockFormat, out: Array) -> Array:
    """Return in `out` the whole numbers that, times a scale each, are nearest."""
    with np.errstate(divide="ignore"):
        inverse = np.where(scales != 0, np.float32(1) / scales, np.float32(0))
    least, most = _range(form)
    np.multiply(blocks, inverse, out=out)
    np.rint(out, out=out)
    np.maximum(out, np.float32(least), out=out)
    return np.minimum(out, np.float32(most), out=out)


def _range(form: BlockFormat) -> tuple[int, int]:
    """Return the least and the largest code; of 8 bits both signs alike, as files have them."""
    half = 1 << (form.bits - 1)
    return (1 - half if form.bits == 8 else -half), half - 1


def _first_scales(blocks: Array, form: BlockFormat) -> Iterator[Array]:
    """Yield scales [rows][blocks] to try: the largest value takes the far end, or nearly."""
    low, high = blocks.min(axis=0), blocks.max(axis=0)
    reach = np.where(high > -low, high, low)  # with its sign
    least, _ = _range(form)
    for share in np.linspace(*TRIALS[form.bits]).astype(np.float32):
        yield reach * (share / least)


def _best_scales(blocks: Array, form: BlockFormat, cost: Array | None) -> Array:
    """Return the scale of every block [rows][blocks] of blocks [block][rows][blocks].

    For each scale tried the codes are fitted, then the scale to these codes (least squares).
    """
    codes, squares = np.empty_like(blocks), np.empty_like(blocks)
    weighted = blocks if cost is None else blocks * cost
    best = np.zeros(blocks.shape[1:], np.float32)
    gain = np.full(best.shape, -np.inf, np.float32)

    def attempt(scale: Array) -> None:
        _encode(blocks, scale, form, codes)
        np.multiply(codes, codes, out=squares)
        if cost is not None:
            np.multiply(squares, cost, out=squares)
        power = squares.sum(axis=0)
        np.multiply(codes, weighted, out=squares)
        product = squares.sum(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            fitted = np.where(power > 0, product / power, np.float32(0))
        won = product * fitted  # by how much the squared error falls below that of zeros
        better = won > gain
        np.copyto(best, fitted, where=better)
        np.copyto(gain, won, where=better)

    for scale in _first_scales(blocks, form):
        attempt(scale)
    attempt(best.copy())  # its codes are others than those that it was fitted to
    return best


def _store(scales: Array, form: BlockFormat) -> tuple[Array, Array | None]:
    """Return float16 scales, and int8 steps of a nested format, nearest to `scales`."""
    if not form.nested:
        return scales.astype(np.float16), None
    units = scales.reshape(len(scales), -1, SUPER // form.block)
    whole = (np.abs(units).max(axis=2) / LARGEST_STEP).astype(np.float16)
    wide = whole.astype(np.float32)[:, :, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.where(wide != 0, np.rint(units / wide), 0)
    steps = np.clip(steps, -LARGEST_STEP, LARGEST_STEP).astype(np.int8)
    return whole, steps.reshape(len(scales), -1)
