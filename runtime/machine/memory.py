"""Zeroed memory for buffers and KV pools, of one process or of several.

In: a count of bytes. Out: page-aligned bytes, committed on first touch. Shared memory is reached by
an inherited descriptor and has no name, so nothing is left behind however a process ends.
"""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dovetail.ir.errors import CapacityError
from dovetail.topology.hardware import HardwareSpec
from dovetail.topology.sysfs import meminfo_bytes

HUGE_PAGE = 2 << 20

Bytes: TypeAlias = npt.NDArray[np.uint8]


def allocate(nbytes: int) -> Bytes:
    """Return `nbytes` zeroed bytes, page-aligned; CapacityError where the system refuses.

    Asks for huge pages: kernels walk KV and activations in strides that 4 KiB pages make slow.
    """
    try:
        pages = mmap.mmap(-1, max(nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise CapacityError(
            f"cannot allocate {nbytes} bytes ({error}); raise the limit (`ulimit -v`), or give the "
            "KV cache less: `--kv-blocks` of serve, `kv_blocks=` of load"
        ) from None
    if nbytes >= HUGE_PAGE:
        with suppress(OSError):  # a kernel without huge pages: slower, not wrong
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)[:nbytes]


def available_memory(hardware: HardwareSpec) -> int:
    """Return the bytes this process may still use: free memory, cut to its control group's."""
    free = meminfo_bytes(Path("/proc/meminfo"), "MemAvailable") or hardware.memory_bytes
    if hardware.memory_limit is None:
        return free
    used = meminfo_bytes(Path("/proc/self/status"), "VmRSS") or 0
    return max(0, min(free, hardware.memory_limit - used))


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
        self.bytes: Bytes = np.frombuffer(pages, np.uint8)
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

    def take(self, nbytes: int) -> Bytes:
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
