"""Quantises rows of float weights: codes and scales with the least squared error found.

In: float32 rows [n][k] and a `BlockFormat`, and how much each value of K matters where that is
known. Out: `Blocks`. A block's scale is the best of a few around the one that its largest value
fills.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.ir.block_format import BlockFormat, Blocks

Array = npt.NDArray[Any]

TRIALS = 17
"""Scales that are tried for a block, evenly spaced."""
SPREAD = 0.25
"""The smallest of them reaches so much less far than the block's largest value."""


def quantise_rows(rows: Array, form: BlockFormat, weight: Array | None = None) -> Blocks:
    """Return `rows` quantised; weight: float32 [k], what an error of each value of K costs.

    Of formats without minimum and nested scales; k is a multiple of the block.
    """
    assert not form.nested and not form.minimum, f"{form.name} is read from files alone"
    n, k = rows.shape
    blocks = rows.reshape(n, k // form.block, form.block)
    cost = None if weight is None else weight.reshape(1, k // form.block, form.block)
    scales = _best_scales(blocks, form, cost).astype(np.float16)
    codes = _encode(blocks, scales.astype(np.float32)[:, :, None], form)
    stored = codes.astype(np.int8).view(np.uint8) if form.bits == 8 else codes + form.zero
    return Blocks(stored.astype(np.uint8).reshape(n, k), scales)


def _encode(blocks: Array, scales: Array, form: BlockFormat) -> Array:
    """Return the whole numbers that, times a scale each, are nearest."""
    half = 1 << (form.bits - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.where(scales != 0, blocks / scales, 0)
    return np.clip(np.rint(steps), -half, half - 1)


def _best_scales(blocks: Array, form: BlockFormat, cost: Array | None) -> Array:
    """Return the scale of every block: its value of largest magnitude takes the far, negative end.

    For each scale tried the codes are fitted, then the scale to these codes (least squares).
    """
    half = 1 << (form.bits - 1)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=2)[:, :, None], axis=2)
    reach = largest / -half if form.bits < 8 else np.abs(largest) / (half - 1)
    weighted = blocks if cost is None else blocks * cost
    best = reach[:, :, 0].copy()
    gain = np.full(best.shape, -np.inf, np.float32)
    for factor in np.linspace(1 - SPREAD, 1 + SPREAD / 2, TRIALS if form.bits < 8 else 1):
        codes = _encode(blocks, reach * np.float32(factor if form.bits < 8 else 1), form)
        power = (codes * codes if cost is None else codes * codes * cost).sum(axis=2)
        product = (codes * weighted).sum(axis=2)
        with np.errstate(divide="ignore", invalid="ignore"):
            fitted = np.where(power > 0, product / power, 0)
        won = product * fitted  # by how much the squared error falls below that of zeros
        better = won > gain
        best[better], gain[better] = fitted[better], won[better]
    return best
