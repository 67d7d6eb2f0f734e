"""Quantised blocks of GGUF as codes and scales of our own formats, exactly: nothing is rounded.

In: stored bytes of rows, uint8 [rows][bytes]. Out: `Blocks` of the format in `FORM_OF_KIND`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.ir.block_format import BlockFormat, Blocks

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

MXFP4, MX_BYTES = "MXFP4", 16
"""Its name, here and in safetensors, and the bytes of codes of a block."""


def read_blocks(kind: str, rows: Bytes) -> Blocks:
    """Return stored rows of the type `kind` as codes and scales."""
    return _KINDS[kind][1](np.ascontiguousarray(rows))


def _split(rows: Bytes, size: int) -> Bytes:
    """Return [rows][blocks][size]."""
    return rows.reshape(len(rows), -1, size)


def _halves(blocks: Bytes, at: int) -> Array:
    """Return the float16 at byte `at` of every block."""
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)[:, :, 0]


def _fields(packed: Bytes, bits: int) -> Array:
    """Return along the last axis the lowest `bits` of all bytes, then the next ones."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1)
    fields = packed[..., None, :] >> shifts & np.uint8((1 << bits) - 1)
    return fields.reshape(*packed.shape[:-1], -1)


def _pairs(packed: Bytes) -> Array:
    """Return the pairs of bits of 64 bytes of every block, 32 bytes after another."""
    return _fields(packed.reshape(*packed.shape[:2], 2, 32), 2)


def _read_q8_0(rows: Bytes) -> Blocks:
    blocks = _split(rows, 34)
    return Blocks(blocks[:, :, 2:].reshape(len(rows), -1), _halves(blocks, 0))


def _read_legacy(rows: Bytes, *, upper: bool, minimum: bool) -> Blocks:
    """Q4_0, Q4_1, Q5_0, Q5_1: scale, minimum, the fifth bits, then nibbles."""
    head = 4 if minimum else 2
    start = head + 4 * upper
    blocks = _split(rows, start + 16)
    codes = _fields(blocks[:, :, start:], 4)
    if upper:
        bits = np.unpackbits(blocks[:, :, head:start], axis=-1, bitorder="little")
        codes |= bits << 4
    minimums = _halves(blocks, 2) if minimum else None
    return Blocks(codes.reshape(len(rows), -1), _halves(blocks, 0), minimums)


_read_q4_0 = partial(_read_legacy, upper=False, minimum=False)


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
    codes = _fields(blocks[:, :, start:].reshape(count, -1, 4, 32), 4)  # two blocks of 32 each
    if upper:
        codes |= (_fields(blocks[:, :, 16:48], 1) << 4).reshape(codes.shape)
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
    low = _fields(blocks[:, :, :128].reshape(count, -1, 2, 64), 4)
    codes = low | _pairs(blocks[:, :, 128:192]) << 4
    steps = np.ascontiguousarray(blocks[:, :, 192:208]).view(np.int8)
    return Blocks(
        codes=codes.reshape(count, -1),
        scales=_halves(blocks, 208),
        steps=steps.reshape(count, -1),
    )


def _read_q2_k(rows: Bytes) -> Blocks:
    """Q2_K: scales and minimums of 4 bits, pairs of bits, a scale and a minimum of these."""
    blocks = _split(rows, 84)
    count, scales = len(rows), blocks[:, :, :16].reshape(len(rows), -1)
    return Blocks(
        codes=_pairs(blocks[:, :, 16:80]).reshape(count, -1),
        scales=_halves(blocks, 80),
        minimums=-_halves(blocks, 82),
        steps=(scales & 15).view(np.int8),
        lows=(scales >> 4).view(np.int8),
    )


def _read_q3_k(rows: Bytes) -> Blocks:
    """Q3_K: the third bits, pairs of bits, scales of 6 bits, a scale of these."""
    blocks = _split(rows, 110)
    count, low = len(rows), _pairs(blocks[:, :, 32:96])
    high = _fields(blocks[:, :, :32], 1).reshape(low.shape)
    codes = low + (high << 2) + 28  # 3 bits are around 4, 6 bits around 32
    scales = _fields(blocks[:, :, 96:104], 4) | _fields(blocks[:, :, 104:108], 2) << 4
    steps = scales.reshape(count, -1).view(np.int8) - 32
    return Blocks(codes.reshape(count, -1), _halves(blocks, 108), steps=steps)


def _read_iq4_xs(rows: Bytes) -> Blocks:
    """IQ4_XS: a scale, those of 6 bits that it multiplies (pairs of bits, nibbles), nibbles."""
    blocks = _split(rows, 136)
    count = len(rows)
    scales = (
        _fields(blocks[:, :, 4:8, None], 4)
        | _fields(blocks[:, :, 2:4, None], 2).reshape(count, -1, 4, 2) << 4
    )
    return Blocks(
        codes=_fields(blocks[:, :, 8:].reshape(count, -1, 16), 4).reshape(count, -1),
        scales=_halves(blocks, 0),
        steps=scales.reshape(count, -1).view(np.int8) - 32,
    )


def scale_codes(codes: Array, exponents: Bytes) -> Blocks:
    """Return E2M1 codes [n][k] and E8M0 exponents [n][k / 32] as codes and scales.

    The scales hold powers of two from 2**-24 to 2**15; less is 0, more is infinite.
    """
    with np.errstate(over="ignore"):
        scales = np.ldexp(np.float32(1), exponents.astype(np.int32) - 128).astype(np.float16)
    return Blocks(codes, scales)


def _read_mxfp4(rows: Bytes) -> Blocks:
    blocks = _split(rows, 1 + MX_BYTES)
    codes = _fields(blocks[:, :, 1:], 4)
    return scale_codes(codes.reshape(len(rows), -1), blocks[:, :, 0])


_KINDS: dict[str, tuple[BlockFormat, Callable[[Bytes], Blocks]]] = {
    "Q8_0": (BlockFormat(8, 32), _read_q8_0),
    "Q4_0": (BlockFormat(4, 32), _read_q4_0),
    "Q4_1": (BlockFormat(4, 32, minimum=True), partial(_read_legacy, upper=False, minimum=True)),
    "Q5_0": (BlockFormat(5, 32), partial(_read_legacy, upper=True, minimum=False)),
    "Q5_1": (BlockFormat(5, 32, minimum=True), partial(_read_legacy, upper=True, minimum=True)),
    "Q4_K": (BlockFormat(4, 32, nested=True, minimum=True), partial(_read_k, upper=False)),
    "Q5_K": (BlockFormat(5, 32, nested=True, minimum=True), partial(_read_k, upper=True)),
    "Q6_K": (BlockFormat(6, 16, nested=True), _read_q6_k),
    "Q3_K": (BlockFormat(6, 16, nested=True), _read_q3_k),
    "Q2_K": (BlockFormat(4, 16, nested=True, minimum=True), _read_q2_k),
    MXFP4: (BlockFormat(4, 32, book="mx4"), _read_mxfp4),
    "IQ4_NL": (BlockFormat(4, 32, book="iq4"), _read_q4_0),
    "IQ4_XS": (BlockFormat(4, 32, nested=True, book="iq4"), _read_iq4_xs),
}
"""Type of a GGUF tensor -> the format that holds the same values (Q3_K and Q2_K get wider in it),
and what reads its blocks."""
FORM_OF_KIND = {kind: form for kind, (form, _) in _KINDS.items()}
