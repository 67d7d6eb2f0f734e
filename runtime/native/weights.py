"""Packed weights of one model, mapped read-only from weights.bin.

In: a ModelPart. Out: the address of each weight. Pages are shared with every process that maps the
same artifact, and nothing is read before a kernel touches it, or its place is asked for.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from dovetail.ir.dtypes import DTYPES
from dovetail.ir.errors import ArtifactError
from dovetail.ir.formats import FORMATS
from dovetail.ir.model import WeightEntry
from dovetail.ir.tape import Tape
from dovetail.runtime.artifact import Part
from dovetail.runtime.machine.placement import place_pages

UNUSED = ("partial", "split_k", "scratch")
"""Buffers of a tape that only the CPU's kernels need."""
_POPULATE_READ = 22
"""Advice of Linux 5.14 that the module mmap has no name for: read and map the pages now."""


class Weights:
    """The mapped file and its index; keep it alive as long as any address is in use."""

    def __init__(self, part: Part) -> None:
        """Map `part.weights`; ArtifactError when the file cannot be mapped."""
        self.entries = {entry.name: entry for entry in part.file.weights}
        try:
            with part.weights.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise ArtifactError(
                f"{part.weights}: cannot be mapped ({error}); "
                f"run `dovetail verify {part.folder.parent.parent}`"
            ) from None
        with suppress(OSError):  # a kernel without huge pages: slower, not wrong
            self._map.madvise(mmap.MADV_HUGEPAGE)  # what is read from now on comes into huge ones
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._base = int(self._bytes.ctypes.data)

    def read_ahead(self) -> None:
        """Have the whole file read meanwhile."""
        self._map.madvise(mmap.MADV_WILLNEED)

    def place(self, ranges: Iterable[tuple[int, int]], nodes: Sequence[int]) -> None:
        """Read these bytes now, into memory of `nodes`; pages that lie elsewhere are moved.

        A page that another process has mapped, too, stays where it is.
        """
        with suppress(OSError):  # an older kernel: pages lie where they are touched
            for start, end in ranges:
                first = start - start % mmap.PAGESIZE
                self._map.madvise(_POPULATE_READ, first, end - first)
        place_pages(self._bytes, nodes)

    @property
    def nbytes(self) -> int:
        """Bytes of all packed weights."""
        return len(self._bytes)

    def address(self, name: str) -> int:
        """Return the address of weight `name`; KeyError where there is none."""
        return self._base + self.entries[name].offset

    def array(self, name: str) -> npt.NDArray[np.generic]:
        """Return a read-only flat view of the stored values of weight `name`.

        bf16 as uint16; weights in blocks as bytes.
        """
        entry: WeightEntry = self.entries[name]
        stored = self._bytes[entry.offset : entry.offset + entry.bytes]
        known = FORMATS.get(entry.dtype)
        return stored.view((known.dtype if known else DTYPES[entry.dtype]).numpy)


def weight_bytes(entries: Iterable[WeightEntry], value_bytes: int) -> int:
    """Return the bytes of weights on a device; those that are no matrices are float32 there."""
    return sum(e.n * e.k * (value_bytes if e.k > 1 else 4) for e in entries)


def row_bytes(tape: Tape, value_bytes: int, widest: int = 0) -> int:
    """Return the bytes of a token's activations on a device, with what lives for a moment.

    widest: columns of what is no buffer of the tape.
    """
    columns = [
        b.columns * max(1, b.rows // tape.max_tokens)  # of experts several rows a token
        for b in tape.buffers
        if b.name not in UNUSED
    ]
    return value_bytes * (sum(columns) + 2 * max(*columns, widest))
