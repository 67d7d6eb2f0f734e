"""Keeps the pages that a process touches first on one NUMA node: weights, KV, activations.

In: a node. Out: while the context lasts, new pages of this thread, and of threads it starts, come
from there; where the node is full or the kernel has no NUMA, from anywhere.
"""

from __future__ import annotations

import ctypes
import logging
import platform
from collections.abc import Iterator
from contextlib import contextmanager

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Number of the system call, which the C library does not wrap."""
_DEFAULT, _PREFERRED = 0, 1
MAX_NODES = 1024

log = logging.getLogger("dovetail")


@contextmanager
def preferring_node(node: int | None) -> Iterator[None]:
    """Take new pages from NUMA node `node`; None leaves it to the system, as does a wrong one."""
    if node is None or not _prefer(node):
        yield
        return
    try:
        yield
    finally:
        _set_policy(_DEFAULT, 0)


def _prefer(node: int) -> bool:
    if 0 <= node < MAX_NODES and _set_policy(_PREFERRED, 1 << node):
        return True
    log.warning("memory cannot be placed on NUMA node %d; it is placed where it is used", node)
    return False


def _set_policy(policy: int, nodes: int) -> bool:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return False
    mask = (ctypes.c_ulong * (MAX_NODES // 64))(
        *((nodes >> 64 * i) & (2**64 - 1) for i in range(MAX_NODES // 64))
    )
    call = ctypes.CDLL(None, use_errno=True).syscall
    used = ctypes.byref(mask) if nodes else None
    status = call(
        ctypes.c_long(number), ctypes.c_int(policy), used, ctypes.c_ulong(MAX_NODES if nodes else 0)
    )
    return int(status) == 0
