"""What this process may use of its CPU: some features need the system's leave.

In: flags as /proc/cpuinfo spells them. Out: those that can be used.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Set
from functools import lru_cache

TILE_FLAGS = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
"""Flags of CPUs with tile registers (AMX) that multiply bfloat16 and bytes."""
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18
"""arch_prctl(2) on x86-64, its ARCH_REQ_XCOMP_PERM, and the state component it is asked for."""


def usable_flags(flags: Set[str]) -> frozenset[str]:
    """Return `flags` of this CPU without those of tile registers where the system refuses these."""
    if TILE_FLAGS <= flags and not tiles_permitted():
        return frozenset(flags) - TILE_FLAGS
    return frozenset(flags)


@lru_cache(maxsize=1)
def tiles_permitted() -> bool:
    """Ask that threads of this process may use tile registers; return whether they may.

    Linux grows a thread's saved state by 8 KiB then, and has known of it since 5.16; a sandbox may
    not let it through. Kernel libraries ask for themselves when they are loaded.
    """
    if sys.platform != "linux":
        return False
    try:
        syscall = ctypes.CDLL(None).syscall
    except (OSError, AttributeError):
        return False
    syscall.restype = ctypes.c_long
    number, request, component = map(ctypes.c_long, (ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA))
    granted: int = syscall(number, request, component)
    return granted == 0
