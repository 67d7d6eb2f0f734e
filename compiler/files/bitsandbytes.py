"""Matrices that bitsandbytes has rounded: codes of 4 bits with a code book, rows of bytes.

In: the tensors of a matrix. Out: one tensor. Codes keep their 4 bits; a block's scale, which may be
a byte of a block of scales, becomes float16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import numpy as np

from dovetail.compiler.files.checkpoint import TensorInfo, map_tensor
from dovetail.compiler.files.config import Config, parse_json_object
from dovetail.compiler.files.packed_rows import FLOATS, Array, Codes, PackedMatrix
from dovetail.ir.block_format import GROUP, BlockFormat, Blocks
from dovetail.ir.code_books import FRACTIONS, TIMES
from dovetail.ir.formats import FORMATS

LARGEST_BYTE = 127
"""The byte of a row's largest value, which its scale is."""
LARGEST_SIDE = 1 << 31


@dataclass(frozen=True, slots=True)
class _Scales:
    """Scales of blocks: floats; or places in a table, times one float per `block`, + `offset`."""

    stored: TensorInfo
    table: TensorInfo | None = None
    outer: TensorInfo | None = None
    block: int = 1
    offset: float = 0.0

    def read(self, first: int, last: int) -> Array:
        """Return the scales [first, last)."""
        found: Array = map_tensor(self.stored).reshape(-1)[first:last]
        if self.table is None or self.outer is None:
            return self.stored.dtype.widen(found)
        outer: Array = map_tensor(self.outer).reshape(-1)[np.arange(first, last) // self.block]
        scales: Array = map_tensor(self.table).reshape(-1)[found] * outer + np.float32(self.offset)
        return scales


@dataclass(frozen=True, slots=True)
class BookRows:
    """Rows of codes of 4 bits, the first of two in the upper half of a byte.

    sizes: n, k, and the values that share a scale.
    """

    form: BlockFormat
    codes: TensorInfo
    scales: _Scales
    sizes: tuple[int, int, int]

    def blocks(self, first: int, last: int) -> Blocks:
        """Return rows [first, last) as codes and float16 scales of `form`."""
        n, k, size = self.sizes
        pairs = map_tensor(self.codes).reshape(-1).view(np.uint8).reshape(n, k // 2)[first:last]
        codes = np.stack((pairs >> 4, pairs & 15), -1).reshape(last - first, k)
        scales = self.scales.read(first * k // size, last * k // size) / TIMES[self.form.book]
        with np.errstate(over="ignore"):  # the check that all are finite tells
            halves = scales.astype(np.float16).reshape(last - first, -1)
        return Blocks(codes, halves.repeat(size // self.form.block, axis=1))

    def values(self, first: int, last: int) -> Array:
        """Return the same rows as float32."""
        return self.form.values(self.blocks(first, last))


def read_codes(matrix: PackedMatrix) -> TensorInfo:
    """Codes of 4 bits along rows, whose state is JSON in a tensor of bytes."""
    book, state = _read_state(matrix)
    form = FORMATS[BlockFormat(4, GROUP, book=book).name]
    assert isinstance(form, BlockFormat)
    main, shape = matrix.any("weight", ("u8", *FLOATS)), state.values.get("shape")
    if (
        not isinstance(shape, list)
        or [type(side) for side in shape] != [int, int]
        or min(shape) < 1
    ):
        raise state.fail("shape", "but two positive integers are needed")
    n, k = shape
    size, stored = state.integer("blocksize", 1, LARGEST_SIDE), prod(main.shape) * main.dtype.size
    if 2 * stored != n * k:
        raise matrix.fail(f"has {stored} bytes, not {n * k / 2:g} for {n} x {k} values")
    if k % size:
        raise matrix.fail_blocks(f"rows of {k} values, which its blocks of {size} do not divide")
    if size % form.block:
        raise matrix.fail_blocks(f"blocks of {size} values, not multiples of {form.block}")
    table = matrix.any("quant_map", ("f32",))
    if table.shape != (16,) or not np.allclose(map_tensor(table), FRACTIONS[book], atol=1e-6):
        raise matrix.fail(f"has codes that stand for other values than those of {book}")
    scales = _read_scales(matrix, state, n * k // size)
    return matrix.coded(main, (n, k), form, BookRows(form, main, scales, (n, k, size)))


def _read_state(matrix: PackedMatrix) -> tuple[str, Config]:
    """Return a matrix's code book, and its sizes."""
    name = next(part for part in matrix.parts if part.startswith("quant_state."))
    what = f"{matrix.name}.{name}"
    data = map_tensor(matrix.any(name, ("u8",))).tobytes()
    return name.rpartition("__")[2], Config(what, parse_json_object(data, what))


def _read_scales(matrix: PackedMatrix, state: Config, count: int) -> _Scales:
    """Return a scale for each block: floats, or where these are rounded, what they are made of."""
    if "nested_absmax" not in matrix.parts:
        found, wanted = _Scales(matrix.any("absmax", FLOATS)), {"absmax": count}
    else:
        block = state.integer("nested_blocksize", 1, LARGEST_SIDE)
        offset = state.number("nested_offset", -1e30, 1e30)
        table, outer = (matrix.any(f"nested_{n}", ("f32",)) for n in ("quant_map", "absmax"))
        found = _Scales(matrix.any("absmax", ("u8",)), table, outer, block, offset)
        wanted = {"absmax": count, "nested_absmax": -(-count // block), "nested_quant_map": 256}
    for name, size in wanted.items():
        if prod(matrix.parts[name].shape) != size:
            raise matrix.fail(f"has {prod(matrix.parts[name].shape)} values in {name}, not {size}")
    return found


def read_bytes(matrix: PackedMatrix) -> TensorInfo:
    """Rows of bytes, each with what the largest value of it was."""
    main, most = matrix.part("weight", ("i8",)), matrix.any("SCB", FLOATS)
    if (order := matrix.parts.get("weight_format")) and map_tensor(order).any():
        raise matrix.fail(
            "has bytes in an order of another machine; save it again with row-major weights"
        )
    scales = replace(most, shape=(prod(most.shape), 1))
    return matrix.info(Codes(main, 8), scales, parts=LARGEST_BYTE)
