"""Page-aligned memory for buffers and KV pools: zeroed, committed on first touch, huge pages."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

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
    """Return the bytes this process may still use: free memory, cut to its control group's."""
    free = _kilobytes("/proc/meminfo", "MemAvailable") or hardware.memory_bytes
    if hardware.memory_limit is None:
        return free
    return max(0, min(free, hardware.memory_limit - _kilobytes("/proc/self/status", "VmRSS")))


def _kilobytes(file: str, key: str) -> int:
    """Return the value of a `Key:  123 kB` line in bytes, 0 where there is none."""
    try:
        found = re.search(rf"^{key}:\s+(\d+) kB$", Path(file).read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) << 10 if found else 0
