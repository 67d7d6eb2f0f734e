"""Page-aligned memory for buffers and KV pools: zeroed, committed on first touch, huge pages."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt
import psutil

from dovetail.ir.errors import CapacityError
from dovetail.topology.hardware import HardwareSpec

HUGE_PAGE = 2 << 20


def allocate(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return `nbytes` zeroed bytes, page-aligned; CapacityError where the system refuses.

    Asks for huge pages: kernels walk KV and activations in strides that 4 KiB pages make slow.
    """
    try:
        pages = mmap.mmap(-1, max(nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise CapacityError(f"cannot allocate {nbytes} bytes ({error})") from None
    if nbytes >= HUGE_PAGE:
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without transparent huge pages: slower, not wrong
    return np.frombuffer(pages, np.uint8)[:nbytes]


def available_memory(hardware: HardwareSpec) -> int:
    """Return the bytes this process may still use: free memory, cut to the control group's limit."""
    free = int(psutil.virtual_memory().available)
    if hardware.memory_limit is None:
        return free
    return max(0, min(free, hardware.memory_limit - int(psutil.Process().memory_info().rss)))
