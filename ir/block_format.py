"""Quantised weight formats: integer codes of a few bits in blocks along K, each with its scale.

In: `Blocks`, row-major codes and scales. Out: panels of 16 columns of bytes, as `weights_codes.dk`
reads them. One parametric family holds the formats of GGUF files, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
import numpy.typing as npt

from dovetail.ir.code_books import BOOKS, book_number
from dovetail.ir.dtypes import DTYPES, Array, DType
from dovetail.ir.model import PANEL

SUPER = 256
"""Values of K that share the float16 of a nested scale."""
GROUP = 32
"""Values of K that share the scale of quantised activations: no unit is shorter."""
QUAD = 4
"""Values of K that lie side by side in a column: what integer dot instructions take together."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Quantised rows [n][k]: value = scale (code - zero) + minimum, block by block.

    codes: uint8 [n][k]; of 8 bits the bytes are int8 and zero is 0; where there is a code book they
    stand for its values, and zero is 0. scales: float16, one per block;
    of nested formats one per 256 values, which int8 `steps` per block multiply. minimums and lows:
    the same for what is added, where the format has it.
    """

    codes: Array
    scales: Array
    minimums: Array | None = None
    steps: Array | None = None
    lows: Array | None = None

    def __getitem__(self, rows: slice) -> Blocks:
        """Return some of the rows."""
        return Blocks(*(None if a is None else a[rows] for a in self._arrays()))  # type: ignore[arg-type]

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.codes)

    def _arrays(self) -> tuple[Array | None, ...]:
        return self.codes, self.scales, self.minimums, self.steps, self.lows


def stack_blocks(parts: list[Blocks]) -> Blocks:
    """Return the rows of all parts, one under the other."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(part._arrays() for part in parts), strict=True)
    return Blocks(*(None if c[0] is None else np.concatenate(c) for c in columns))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Codes of `bits` (4, 5, 6 or 8) in blocks of `block` values (16, 32, 64 or 128) of a column.

    A panel is a sequence of units; a unit of a nested format is 256 values of K, else a block, but
    32 values at least. Nested units begin with [16] float16 scales (and minimums); every block with
    [16] int8 steps (and lows) of nested, or [16] float16 scales (and minimums) of plain formats.
    Then its codes, in quads: 4 values of K of one column side by side, 16 columns after another:
    8 bits as int8 [block / 4][16][4]; else the low four bits, two quads in a byte (the first in its
    lower half) [block / 8][16][4], then of 5 bits the upper one of eight quads in a byte
    [block / 32][16][4], of 6 bits the upper two of four quads [block / 16][16][4]. What is past K
    has scale 0. book: a code book's name, where codes of 4 bits stand for its values.
    """

    bits: int
    block: int
    nested: bool = False
    minimum: bool = False
    book: str = ""

    def __post_init__(self) -> None:
        assert self.bits in (4, 5, 6, 8)
        assert not self.book or (self.bits == 4 and not self.minimum)
        assert self.block in (16, 32, 64, 128)
        assert self.bits != 5 or self.block >= GROUP  # its upper bits lie eight quads in a byte

    @property
    def name(self) -> str:
        """The format's name, e.g. q4_32 or q4_32km: bits, block, nested (k), with minimums (m)."""
        codes = self.book or f"q{self.bits}"
        return f"{codes}_{self.block}{'k' * self.nested}{'m' * self.minimum}"

    @property
    def dtype(self) -> DType:
        """The type of what lies in a panel: bytes."""
        return DTYPES["u8"]

    @property
    def zero(self) -> int:
        """The code of the value 0: half of the codes, or 0 where that is no code's."""
        return 0 if self.minimum or self.bits == 8 or self.book else 1 << (self.bits - 1)

    @property
    def depth(self) -> int:
        """Bits of the integers that are multiplied: of a code book those it holds."""
        if not self.book:
            return self.bits
        return 5 if np.abs(BOOKS[self.book]).max() < 16 else 8

    @property
    def unit(self) -> int:
        """Values of K that lie together: where K may be cut."""
        return SUPER if self.nested else max(self.block, GROUP)

    @property
    def value_bytes(self) -> float:
        """Bytes that a value takes, its share of the scales included."""
        return self.unit_bytes / (self.unit * PANEL)

    @property
    def binding(self) -> dict[str, int | str]:
        """The values of the kernels' tunables that stand for this format."""
        return {
            "W": "u8",
            "BITS": self.bits,
            "BLOCK": self.block,
            "NESTED": int(self.nested),
            "MINIMUM": int(self.minimum),
            "BOOK": book_number(self.book),
        }

    @property
    def head_bytes(self) -> int:
        """Bytes of a nested unit before its first block."""
        return (2 + 2 * self.minimum) * PANEL if self.nested else 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of a panel: scales, then codes."""
        scale = 1 if self.nested else 2
        return (scale + scale * self.minimum) * PANEL + self.block * PANEL * self.bits // 8

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit of a panel."""
        return self.head_bytes + self.unit // self.block * self.block_bytes

    def panel_elements(self, k: int) -> int:
        """Return the bytes of a panel of K = `k`: the panel stride of a whole weight."""
        return ceil(k / self.unit) * self.unit_bytes

    def panel_bytes(self, k: int) -> int:
        """Return the bytes of one panel of K = `k`."""
        return self.panel_elements(k)

    def row_bytes(self, k: int) -> int:
        """Return the bytes of a panel before row `k` of K, a multiple of `unit`."""
        return k // self.unit * self.unit_bytes

    # ---- packing ----

    def pack(self, blocks: Blocks) -> Array:
        """Return uint8 [ceil(n / 16)][panel bytes]; `blocks` are of this format."""
        n, k = blocks.codes.shape
        panels, units = ceil(n / PANEL), ceil(k / self.unit)
        rows, deep = panels * PANEL, units * self.unit
        per_unit = self.unit // self.block
        out = np.zeros((panels, units, self.unit_bytes), np.uint8)
        codes = _padded(blocks.codes, rows, deep, self.zero)
        body = out[:, :, self.head_bytes :].reshape(panels, units * per_unit, self.block_bytes)
        start = 0
        pairs = (blocks.scales, blocks.minimums), (blocks.steps, blocks.lows)
        of_units, of_blocks = pairs if self.nested else ((), pairs[0])
        for values in (v for v in of_blocks if v is not None):
            wide = _columns(_padded(values, rows, units * per_unit, 0), panels)
            size = PANEL * values.dtype.itemsize
            body[:, :, start : start + size] = wide.view(np.uint8).reshape(panels, -1, size)
            start += size
        body[:, :, start:] = self._code_bytes(codes, panels)
        out[:, :, self.head_bytes :] = body.reshape(panels, units, -1)
        for at, values in enumerate(v for v in of_units if v is not None):
            wide = _columns(_padded(values, rows, units, 0), panels)
            out[:, :, 2 * PANEL * at : 2 * PANEL * (at + 1)] = wide.view(np.uint8)
        return out.reshape(panels, -1)

    def _code_bytes(self, codes: Array, panels: int) -> Array:
        """Return [panels][blocks][bytes] of padded row-major codes."""
        quads = codes.reshape(panels, PANEL, -1, self.block // QUAD, QUAD).transpose(0, 2, 3, 1, 4)
        planes = [quads]
        if self.bits < 8:
            planes = [_join(quads & 15, 4)]
            if self.bits > 4:
                planes.append(_join(quads >> 4, self.bits - 4))
        flat = [plane.reshape(panels, quads.shape[1], -1) for plane in planes]
        return np.concatenate(flat, axis=2)

    # ---- unpacking ----

    def unpack_blocks(self, packed: Array, n: int, k: int) -> Blocks:
        """Return the codes and scales of [n][k] whose panels are `packed`, of any shape."""
        units, per_unit = ceil(k / self.unit), self.unit // self.block
        panels = packed.reshape(-1, units, self.unit_bytes)
        body = np.ascontiguousarray(panels[:, :, self.head_bytes :])
        body = body.reshape(len(panels), units * per_unit, self.block_bytes)
        pair = ("scales", "minimums")[: 1 + self.minimum]
        found: dict[str, Array] = {}
        if self.nested:
            for at, name in enumerate(pair):
                found[name] = _scales(panels, np.float16, 2 * PANEL * at)[:n]
            pair = ("steps", "lows")[: 1 + self.minimum]
        dtype = np.int8 if self.nested else np.float16
        size = PANEL * np.dtype(dtype).itemsize
        for at, name in enumerate(pair):
            found[name] = _scales(body, dtype, size * at)[:n, : ceil(k / self.block)]
        codes = self._codes(body[:, :, size * len(pair) :])
        return Blocks(codes=codes[:n, :k], **found)

    def unpack(self, packed: Array, n: int, k: int) -> Array:
        """Return the float32 row-major [n][k] whose panels are `packed`, of any shape."""
        return self.values(self.unpack_blocks(packed, n, k))

    def _codes(self, planes: Array) -> Array:
        """Return the row-major codes, those past K included."""
        panels, count, _ = planes.shape
        quads = self.block // QUAD
        if self.bits == 8:
            codes = planes.reshape(panels, count, quads, PANEL, QUAD)
        else:
            split = self.block * PANEL // 2
            codes = _part(planes[:, :, :split], 4, quads)
            if self.bits > 4:
                codes = codes | _part(planes[:, :, split:], self.bits - 4, quads) << 4
        rows: Array = codes.transpose(0, 3, 1, 2, 4).reshape(panels * PANEL, -1)
        return rows

    def values(self, blocks: Blocks, *, whole: bool = False) -> Array:
        """Return the float32 values of quantised rows: each rounded once at most.

        whole: as integer products have them, which round the values of a code book.
        """
        k = blocks.codes.shape[1]
        if self.book:
            book = BOOKS[self.book]
            codes = (np.rint(book) if whole else book)[blocks.codes]
        else:
            codes = blocks.codes.view(np.int8) if self.bits == 8 else blocks.codes
        counted = codes.astype(np.float32) - np.float32(self.zero)
        scale = self._wide(blocks.scales, blocks.steps, k)
        out: Array = counted * scale
        if blocks.minimums is not None:
            out += self._wide(blocks.minimums, blocks.lows, k)
        return out

    def _wide(self, scales: Array, steps: Array | None, k: int) -> Array:
        """Return the float32 factor of every value."""
        wide = scales.astype(np.float32)
        if steps is not None:
            wide = wide.repeat(SUPER // self.block, axis=1)[:, : steps.shape[1]]
            wide = wide * steps.astype(np.float32)
        return wide.repeat(self.block, axis=1)[:, :k]


def _padded(values: Array, rows: int, columns: int, fill: int) -> Array:
    """Return `values` with rows and columns of `fill` after them."""
    if values.shape == (rows, columns):
        return values
    out = np.full((rows, columns), fill, values.dtype)
    out[: values.shape[0], : values.shape[1]] = values
    return out


def _columns(values: Array, panels: int) -> Array:
    """Return row-major [16 panels][count] as [panels][count][16]."""
    return np.ascontiguousarray(values.reshape(panels, PANEL, -1).transpose(0, 2, 1))


def _scales(panels: Array, dtype: npt.DTypeLike, start: int) -> Array:
    """Return row-major [rows][count] of the 16 values at byte `start` of each [panel][count]."""
    size = PANEL * np.dtype(dtype).itemsize
    found = np.ascontiguousarray(panels[:, :, start : start + size]).view(dtype)
    return found.transpose(0, 2, 1).reshape(len(panels) * PANEL, -1)


def _join(quads: Array, bits: int) -> Array:
    """Return quads [panels][blocks][quads][16][4] of `bits` as bytes, the first quad lowest."""
    share = 8 // bits
    parts = quads.reshape(*quads.shape[:2], -1, share, *quads.shape[3:])
    out = np.zeros((*parts.shape[:3], *parts.shape[4:]), np.uint8)
    for at in range(share):
        out |= parts[:, :, :, at] << np.uint8(at * bits)
    return out


def _part(planes: Array, bits: int, quads: int) -> Array:
    """Undo `_join`."""
    share = 8 // bits
    joined = planes.reshape(*planes.shape[:2], quads // share, 1, PANEL, QUAD)
    shifts = (np.arange(share, dtype=np.uint8) * bits).reshape(1, 1, 1, share, 1, 1)
    parts = (joined >> shifts) & np.uint8((1 << bits) - 1)
    return parts.reshape(*planes.shape[:2], quads, PANEL, QUAD)
