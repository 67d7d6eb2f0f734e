"""Memory shared by the processes of a group, and all-reduce through it (Sandwich §7.2).

In: a memfd that the first rank made and the others inherited. Out: arrays in it, and a
`Communicator`. Nothing has a name, so nothing is left behind however a process ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.ir.errors import CapacityError, RankError
from dovetail.runtime.abi import int32_array


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
    """One rank of a group: sums float32 arrays over all ranks, bit for bit alike on each.

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

    def all_reduce(self, array: npt.NDArray[np.float32]) -> None:
        """Replace the values of a C-contiguous `array` by their sums over all ranks.

        Every rank must call with the same size. Raises RankError when a rank has died.
        """
        x: Any = array.ctypes.data
        if self._c.dt_all_reduce(self.handle, x, 1, array.size, array.size, 0, 1):
            raise RankError("a process of the group has ended, so nothing can be summed")

    def fail(self) -> None:
        """Make all ranks give up what they wait for."""
        self._c.dt_comm_fail(self.handle)

    def close(self) -> None:
        """Leave the group."""
        self._end()


def comm_bytes(library: ctypes.CDLL, ranks: int, lanes: int) -> int:
    """Return the bytes of shared memory a group needs; CapacityError for an impossible group."""
    size = int(library.dt_comm_bytes(ranks, lanes))
    if size < 0:
        raise CapacityError(f"a group of {ranks} processes with {lanes} threads cannot be made")
    return size
