"""What the ranks of a group do together, and how they do it through shared memory (Sandwich §7.2).

In: a memfd that the first rank made and the others inherited. Out: arrays in it, and a
`Communicator`. Nothing has a name, so nothing is left behind however a process ends.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from dovetail.ir.errors import CapacityError, RankError
from dovetail.runtime.abi import int32_array

F32: TypeAlias = npt.NDArray[np.float32]


class Collective(Protocol):
    """One rank of a group. All ranks call the same methods in the same order, with equal shapes.

    Arrays are rows of float32 values, [columns] or [rows, columns], columns side by side. Methods
    raise RankError when a rank has died, from then on always.
    """

    rank: int
    ranks: int

    @property
    def failed(self) -> bool:
        """Whether a rank has died or the group was ended."""

    def all_reduce(self, x: F32) -> None:
        """Replace the values of `x` by their sums over all ranks, alike on each to the last bit."""

    def all_gather(self, x: F32, units: int, size: int) -> None:
        """Give every rank all columns of `x`.

        `units` units of `size` columns are dealt in equal stretches in the order of the ranks;
        the last unit may be cut short.
        """

    def fail(self) -> None:
        """Make all ranks give up what they wait for."""

    def close(self) -> None:
        """Leave the group."""


def own_columns(collective: Collective, units: int, size: int, columns: int) -> list[range]:
    """Return the columns that each rank brings to an `all_gather`."""
    bounds = [
        min(units * rank // collective.ranks * size, columns)
        for rank in range(collective.ranks + 1)
    ]
    return [range(*ends) for ends in itertools.pairwise(bounds)]


class SharedMemory:
    """Zeroed bytes that every process with the descriptor `fd` sees. Owns the descriptor.

    The mapping (which holds a descriptor of its own) ends with the last array in it.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map the first `nbytes` of `fd`; CapacityError where the system refuses."""
        self.fd = fd
        try:
            pages = mmap.mmap(fd, nbytes, mmap.MAP_SHARED)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise CapacityError(f"cannot map {nbytes} bytes of shared memory ({error})") from None
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(pages, np.uint8)
        self._used = 0
        self._end = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, nbytes: int) -> SharedMemory:
        """Return new shared memory; CapacityError where there is none to be had."""
        try:
            fd = os.memfd_create("dovetail", os.MFD_CLOEXEC)
        except OSError as error:
            raise CapacityError(f"cannot make shared memory ({error})") from None
        try:
            os.ftruncate(fd, nbytes)
        except OSError as error:
            os.close(fd)
            raise CapacityError(f"cannot get {nbytes} bytes of shared memory ({error})") from None
        return cls(fd, nbytes)

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return the next `nbytes` bytes from a page's start on.

        Processes that take alike get the same bytes.
        """
        start = self._used
        self._used += -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        assert self._used <= len(self.bytes), "more was taken than was made"
        return self.bytes[start : start + nbytes]

    def close(self) -> None:
        """Give back the descriptor, so that nobody else can join; safe to call twice."""
        self._end()


class Communicator:
    """A `Collective` through shared memory; sums are in the order of the ranks.

    `peers` are sockets to other ranks: one that hangs up has died, and the group has failed.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        shared: npt.NDArray[np.uint8],
        *,
        rank: int,
        ranks: int,
        lanes: int,
        spin: int,
        peers: Sequence[int] = (),
    ) -> None:
        """Join the group in `shared`, `comm_bytes(library, ranks, lanes)` long and page-aligned."""
        self.rank, self.ranks, self._c, self._shared = rank, ranks, library, shared
        handle = library.dt_comm_create(
            int(shared.ctypes.data), rank, ranks, lanes, spin, int32_array(tuple(peers)), len(peers)
        )
        if not handle:
            raise CapacityError(f"cannot join rank {rank} of {ranks} with {lanes} threads")
        self.handle: int = handle
        self._failed = library.dt_comm_failed(handle)
        self._end = weakref.finalize(self, library.dt_comm_destroy, handle)

    @property
    def failed(self) -> bool:
        """Whether a rank has died or the group was ended."""
        return bool(self._failed[0])

    @property
    def stop_word(self) -> int:
        """Address of the word that is not 0 once the group has failed: a tape's `stop`."""
        return ctypes.cast(self._failed, ctypes.c_void_p).value or 0

    def all_reduce(self, x: F32) -> None:
        """See Collective."""
        self._check(self._c.dt_all_reduce(self.handle, x.ctypes.data, *_layout(x), 0, 1))

    def all_gather(self, x: F32, units: int, size: int) -> None:
        """See Collective."""
        data = x.ctypes.data
        self._check(self._c.dt_all_gather(self.handle, data, *_layout(x), units, size, 0, 1))

    def _check(self, status: int) -> None:
        if status:
            raise RankError("a process of the group has ended, so nothing can be summed")

    def fail(self) -> None:
        """Make all ranks give up what they wait for."""
        self._c.dt_comm_fail(self.handle)

    def close(self) -> None:
        """Leave the group."""
        self._end()


def _layout(x: F32) -> tuple[int, int, int]:
    """Return rows, columns and the values from one row to the next."""
    if x.ndim == 1:
        return 1, x.size, x.size
    return x.shape[0], x.shape[1], x.strides[0] // x.itemsize


def comm_bytes(library: ctypes.CDLL, ranks: int, lanes: int) -> int:
    """Return the bytes of shared memory a group needs; CapacityError for an impossible group."""
    size = int(library.dt_comm_bytes(ranks, lanes))
    if size < 0:
        raise CapacityError(f"a group of {ranks} processes with {lanes} threads cannot be made")
    return size
