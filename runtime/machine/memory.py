"""Page-aligned memory for buffers and KV pools: zeroed, committed on first touch, huge pages."""

from __future__ import annotations

import mmap
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
        raise CapacityError(f"cannot allocate {nbytes} bytes ({error})") from None
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
