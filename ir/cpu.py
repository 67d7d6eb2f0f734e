"""What this process may use of its CPU: some features need the system's leave, users limit others.

In: flags as /proc/cpuinfo spells them, targets by name. Out: those that can and may be used.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Collection, Set
from functools import lru_cache

from dovetail.ir.errors import SpecError

FORCED_TARGET = "DOVETAIL_TARGET"
"""The environment variable that names the target to compile for, run and measure."""

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


def forced_target(names: Collection[str], runs: Callable[[str], bool]) -> str | None:
    """Return the target that DOVETAIL_TARGET names; None where it is not set, or empty.

    names: of all targets. runs: whether this CPU runs one of them. Raises SpecError for another
    name, and for a target that this CPU does not run.
    """
    name = os.environ.get(FORCED_TARGET)
    if not name:
        return None
    if name in names and runs(name):
        return name
    fault = "which this CPU cannot run" if name in names else "which is no target"
    fitting = ", ".join(filter(runs, names))
    raise SpecError(
        f"{FORCED_TARGET} is {name!r}, {fault}; set it to one of {fitting}, or unset it"
    )
