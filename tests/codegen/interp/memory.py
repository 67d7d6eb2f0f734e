"""Bounds-checked memory for the interpreter: typed pointers into byte buffers.

In: numpy arrays or sizes. Out: `Pointer` values that fault outside their buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class MemoryFault(Exception):
    """An access outside a buffer; the interpreter adds the span and turns it into a user error."""


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """A named buffer of bytes; `bytes` is a writable uint8 view of whatever backs it.

    Addresses have no bytes here: those stored in the buffer are kept beside it, by offset.
    """

    name: str
    bytes: npt.NDArray[np.uint8]
    addresses: dict[int, Pointer] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, array: Array) -> Memory:
        """Return the memory of a C-contiguous array; stores go to the array itself."""
        if not array.flags.c_contiguous:
            raise MemoryFault(f"the array given for {name} is not contiguous")
        return cls(name, array.reshape(-1).view(np.uint8))


@dataclass(frozen=True, slots=True)
class Pointer:
    """An address: a buffer and a byte offset. `memory` None is the null pointer."""

    memory: Memory | None
    offset: int = 0

    def advance(self, count: int) -> Pointer:
        """Return the pointer `count` bytes further; going outside faults only on access."""
        return Pointer(self.memory, self.offset + count)

    def view(self, dtype: npt.DTypeLike, count: int) -> Array:
        """Return `count` elements here as a writable view; MemoryFault outside the buffer."""
        size = np.dtype(dtype).itemsize * count
        if self.memory is None:
            raise MemoryFault("access through a null pointer")
        if self.offset < 0 or self.offset + size > self.memory.bytes.size:
            raise MemoryFault(
                f"access to bytes [{self.offset}, {self.offset + size}) of {self.memory.name}, "
                f"which has {self.memory.bytes.size} bytes"
            )
        return self.memory.bytes[self.offset : self.offset + size].view(dtype)

    def load(self, dtype: npt.DTypeLike, count: int) -> Array:
        """Return a copy of `count` elements."""
        return self.view(dtype, count).copy()

    def store(self, values: Array) -> None:
        """Write all elements of `values`."""
        self.view(values.dtype, values.size)[:] = values

    def load_pointer(self) -> Pointer:
        """Return the address stored here; MemoryFault if there is none."""
        if self.memory is None or self.offset not in self.memory.addresses:
            raise MemoryFault("no address was stored where one is loaded")
        return self.memory.addresses[self.offset]

    def store_pointer(self, value: Pointer) -> None:
        """Store an address, 8 bytes long."""
        self.view(np.uint8, 8)
        assert self.memory is not None
        self.memory.addresses[self.offset] = value

    def load_lanes(self, dtype: npt.DTypeLike, mask: Array) -> Array:
        """Return `mask.size` elements, 0 where the mask is false; only true lanes are touched."""
        out = np.zeros(mask.size, dtype)
        size = out.dtype.itemsize
        for lane in np.flatnonzero(mask):
            out[lane] = self.advance(int(lane) * size).view(dtype, 1)[0]
        return out

    def store_lanes(self, values: Array, mask: Array) -> None:
        """Write the elements whose mask is true; only these are touched."""
        for lane in np.flatnonzero(mask):
            self.advance(int(lane) * values.dtype.itemsize).store(values[lane : lane + 1])


NULL = Pointer(None)
