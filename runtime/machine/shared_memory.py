"""Memory that several processes see, by an inherited descriptor.

In: a count of bytes. Out: zeroed bytes. Nothing has a name, so nothing is left behind however a
process ends.
"""

from __future__ import annotations

import mmap
import os
import weakref

import numpy as np
import numpy.typing as npt

from dovetail.ir.errors import CapacityError


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
