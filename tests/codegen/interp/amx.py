"""Intrinsics of AMX's tile registers with their numpy meanings: they share a `TileFile`.

As on hardware, what a thread does with its tiles lasts from `_tile_loadconfig` to `_tile_release`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from tests.codegen.interp import meaning as m
from tests.codegen.interp.dots import dot_tiles
from tests.codegen.interp.meant import meant
from tests.codegen.interp.memory import MemoryFault, Pointer

COUNT, ROW_BYTES = 8, 64
BYTES = {"s": np.int8, "u": np.uint8}
"""How a name spells the sign of an operand's bytes."""


class TileFile:
    """The tile registers: of each its rows, as the configuration says, as bytes."""

    def __init__(self) -> None:
        self._tiles: list[m.Array] = []

    def configure(self, at: Pointer) -> None:
        """Give each register its rows and bytes of a row, palette 1; all become zero."""
        if at.load(np.uint8, 1)[0] != 1:
            raise MemoryFault("tile registers are configured by palette 1")
        widths = at.advance(16).load(np.uint16, COUNT)
        rows = at.advance(48).load(np.uint8, COUNT)
        if (widths > ROW_BYTES).any() or (rows > 16).any():
            raise MemoryFault("a tile register has at most 16 rows of 64 bytes")
        shapes = zip(rows.tolist(), widths.tolist(), strict=True)
        self._tiles = [np.zeros(shape, np.uint8) for shape in shapes]

    def release(self) -> None:
        """Give up the registers."""
        self._tiles = []

    def load(self, tile: int, at: Pointer, stride: int) -> None:
        """Read the rows of a tile, `stride` bytes apart."""
        into = self._tile(tile)
        for r in range(len(into)):
            into[r] = at.advance(r * int(stride)).load(np.uint8, into.shape[1])

    def store(self, tile: int, at: Pointer, stride: int) -> None:
        """Write the rows of a tile, `stride` bytes apart."""
        for r, row in enumerate(self._tile(tile)):
            at.advance(r * int(stride)).store(row)

    def zero(self, tile: int) -> None:
        """Clear a tile."""
        self._tile(tile)[:] = 0

    def dot(self, to: int, left: int, right: int) -> None:
        """Add the products of pairs of bfloat16 of the rows `left` and the columns `right`."""
        sums, a, b = (self._tile(tile).view(np.float32) for tile in (to, left, right))
        sums[:] = dot_tiles(sums, a, b)

    def dot_bytes(self, left: Any, right: Any, to: int, rows: int, columns: int) -> None:
        """Add the products of quads of bytes, of these signs; sums wrap."""
        sums = self._tile(to).view(np.int32)
        a, b = (
            self._tile(tile).view(dtype).astype(np.int64)
            for tile, dtype in ((rows, left), (columns, right))
        )
        quads = b.reshape(len(b), -1, 4).transpose(0, 2, 1).reshape(a.shape[1], -1)
        sums[:] = (sums + a @ quads).astype(np.int32)

    def _tile(self, tile: int) -> m.Array:
        if not self._tiles:
            raise MemoryFault("tile registers are used before they are configured")
        return self._tiles[tile]


TILES = TileFile()

ROWS = (
    meant("_tile_loadconfig", TILES.configure),
    meant("_tile_release", TILES.release),
    meant("_tile_loadd", TILES.load),
    meant("_tile_stored", TILES.store),
    meant("_tile_zero", TILES.zero),
    meant("_tile_dpbf16ps", TILES.dot),
    *(
        meant(f"_tile_dpb{a}{b}d", partial(TILES.dot_bytes, BYTES[a], BYTES[b]))
        for a in BYTES
        for b in BYTES
    ),
)
