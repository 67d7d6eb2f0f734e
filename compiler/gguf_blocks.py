"""Quantised blocks of GGUF as codes and scales of our own formats, exactly: nothing is rounded.

In: stored bytes of rows, uint8 [rows][bytes]. Out: `Blocks` of the format in `FORM_OF_KIND`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.ir.block_format import BlockFormat, Blocks

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

FORM_OF_KIND: dict[str, BlockFormat] = {
    "Q8_0": BlockFormat(8, 32),
    "Q4_0": BlockFormat(4, 32),
    "Q4_1": BlockFormat(4, 32, minimum=True),
    "Q5_0": BlockFormat(5, 32),
    "Q5_1": BlockFormat(5, 32, minimum=True),
    "Q4_K": BlockFormat(4, 32, nested=True, minimum=True),
    "Q5_K": BlockFormat(5, 32, nested=True, minimum=True),
    "Q6_K": BlockFormat(6, 16, nested=True),
    "Q3_K": BlockFormat(6, 16, nested=True),
    "IQ4_NL": BlockFormat(8, 32),
}
"""Type of a GGUF tensor -> the format that holds the same values; the last two get wider in it."""
IQ4_NL = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
).view(np.uint8)
"""What the codes of that type stand for."""


def read_blocks(kind: str, rows: Bytes) -> Blocks:
    """Return stored rows of the type `kind` as codes and scales."""
    return _READERS[kind](np.ascontiguousarray(rows))


def _split(rows: Bytes, size: int) -> Bytes:
    """Return [rows][blocks][size]."""
    return rows.reshape(len(rows), -1, size)


def _halves(blocks: Bytes, at: int) -> Array:
    """Return the float16 at byte `at` of every block."""
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)[:, :, 0]


def _nibbles(packed: Bytes) -> Array:
    """Return the lower halves of bytes, then their upper ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _read_q8_0(rows: Bytes) -> Blocks:
    blocks = _split(rows, 34)
    return Blocks(blocks[:, :, 2:].reshape(len(rows), -1), _halves(blocks, 0))


def _read_legacy(rows: Bytes, *, upper: bool, minimum: bool) -> Blocks:
    """Q4_0, Q4_1, Q5_0, Q5_1: scale, minimum, the fifth bits, then nibbles."""
    head = 4 if minimum else 2
    start = head + 4 * upper
    blocks = _split(rows, start + 16)
    codes = _nibbles(blocks[:, :, start:])
    if upper:
        bits = np.unpackbits(blocks[:, :, head:start], axis=-1, bitorder="little")
        codes |= bits << 4
    minimums = _halves(blocks, 2) if minimum else None
    return Blocks(codes.reshape(len(rows), -1), _halves(blocks, 0), minimums)


def _six_bits(packed: Bytes) -> tuple[Array, Array]:
    """Return the eight scales and eight minimums of 6 bits that 12 bytes hold."""
    first, second, third = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    scales = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=-1)
    lows = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=-1)
    return scales, lows


def _read_k(rows: Bytes, *, upper: bool) -> Blocks:
    """Q4_K, Q5_K: two scales, scales and minimums of 6 bits, the fifth bits, then nibbles."""
    start = 16 + 32 * upper
    blocks = _split(rows, start + 128)
    count = len(rows)
    steps, lows = _six_bits(blocks[:, :, 4:16])
    codes = _nibbles(blocks[:, :, start:].reshape(count, -1, 4, 32))  # two blocks of 32 each
    if upper:
        shifts = np.arange(8, dtype=np.uint8).reshape(1, 1, 8, 1)
        bits = (blocks[:, :, 16:48].reshape(count, -1, 1, 32) >> shifts) & 1
        codes |= (bits << 4).reshape(codes.shape)
    return Blocks(
        codes=codes.reshape(count, -1),
        scales=_halves(blocks, 0),
        minimums=-_halves(blocks, 2),  # what is taken away there is added here
        steps=steps.reshape(count, -1).view(np.int8),
        lows=lows.reshape(count, -1).view(np.int8),
    )


def _read_q6_k(rows: Bytes) -> Blocks:
    blocks = _split(rows, 210)
    count = len(rows)
    low = blocks[:, :, :128].reshape(count, -1, 2, 1, 64)
    low = np.concatenate((low & 15, low >> 4), axis=3).reshape(count, -1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 1, 4, 1)
    high = (blocks[:, :, 128:192].reshape(count, -1, 2, 1, 32) >> shifts) & 3
    steps = np.ascontiguousarray(blocks[:, :, 192:208]).view(np.int8)
    codes = low | high << 4
    return Blocks(
        codes=codes.reshape(count, -1),
        scales=_halves(blocks, 208),
        steps=steps.reshape(count, -1),
    )


def _read_q3_k(rows: Bytes) -> Blocks:
    """Q3_K: the third bits, pairs of bits, scales of 6 bits, a scale of these."""
    blocks = _split(rows, 110)
    count, pairs = len(rows), np.arange(0, 8, 2, dtype=np.uint8).reshape(4, 1)
    low = blocks[:, :, 32:96].reshape(count, -1, 2, 1, 32) >> pairs & 3
    high = blocks[:, :, None, :32] >> np.arange(8, dtype=np.uint8).reshape(8, 1) & 1
    codes = low.reshape(high.shape) + (high << 2) + 28  # 3 bits are around 4, 6 bits around 32
    upper = (blocks[:, :, None, 104:108] >> pairs & 3).reshape(count, -1, 16)
    steps = (_nibbles(blocks[:, :, 96:104]) | upper << 4).reshape(count, -1).view(np.int8) - 32
    return Blocks(codes.reshape(count, -1), _halves(blocks, 108), steps=steps)


def _read_iq4_nl(rows: Bytes) -> Blocks:
    blocks = _read_legacy(rows, upper=False, minimum=False)
    return replace(blocks, codes=IQ4_NL[blocks.codes])


_READERS: dict[str, Callable[[Bytes], Blocks]] = {
    "Q8_0": _read_q8_0,
    "Q4_0": lambda rows: _read_legacy(rows, upper=False, minimum=False),
    "Q4_1": lambda rows: _read_legacy(rows, upper=False, minimum=True),
    "Q5_0": lambda rows: _read_legacy(rows, upper=True, minimum=False),
    "Q5_1": lambda rows: _read_legacy(rows, upper=True, minimum=True),
    "Q4_K": lambda rows: _read_k(rows, upper=False),
    "Q5_K": lambda rows: _read_k(rows, upper=True),
    "Q6_K": _read_q6_k,
    "Q3_K": _read_q3_k,
    "IQ4_NL": _read_iq4_nl,
}
