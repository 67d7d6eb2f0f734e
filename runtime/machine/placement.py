"""Says from which NUMA nodes pages come: weights, KV, activations.

In: nodes. Out: pages of one node where one is named, page by page in turns where several are. Where
a node is full or the kernel refuses, they lie where they are touched first.
"""

from __future__ import annotations

import ctypes
import logging
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dovetail.ir.artifact import PhasePlan
from dovetail.topology.hardware import HardwareSpec

_CALLS = {
    "x86_64": {"mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239},
    "aarch64": {"mbind": 235, "set_mempolicy": 237, "get_mempolicy": 236},
}
"""Numbers of the system calls, which the C library does not wrap."""
_PREFERRED, _INTERLEAVE = 1, 3
_MOVE = 2
MAX_NODES = 1024
_Mask = ctypes.c_ulong * (MAX_NODES // 64)
_Policy: TypeAlias = "tuple[int, ctypes.Array[ctypes.c_ulong]]"
"""A mode, and a mask of nodes."""

log = logging.getLogger("dovetail")


def choose_nodes(
    decode: PhasePlan, hardware: HardwareSpec, planned: int | None = None
) -> tuple[int, ...]:
    """Return the nodes that the memory of a process is taken from; () = where it is touched.

    The planned one, else those of decode's CPUs, because decode reads weights and KV as fast as
    memory gives them. Of several, every thread reads all pages: they are dealt to the nodes, so
    that no controller serves them alone. Where all CPUs are on one node, no rule is needed.
    """
    if planned is not None:
        return (planned,)
    homes = {pu.id: pu.node for pu in hardware.pus}
    allowed, wanted = (
        {homes[cpu] for cpu in cpus if cpu in homes}
        for cpus in (hardware.allowed_pus, decode.cpus or hardware.allowed_pus)
    )
    return tuple(sorted(wanted)) if len(allowed) > 1 else ()


@contextmanager
def placing_on(nodes: Sequence[int]) -> Iterator[None]:
    """Take new pages of this thread, of threads it starts and of files it reads from `nodes`."""
    before = _read_policy() if nodes else None
    placed = before is not None and _set_policy(_policy_of(nodes))
    if nodes and not placed:
        _warn(nodes)
    try:
        yield
    finally:
        if placed:
            _set_policy(before)


def place_pages(memory: npt.NDArray[np.uint8], nodes: Sequence[int]) -> None:
    """Take the pages of page-aligned `memory` from `nodes`, whichever thread touches them.

    Those that this process alone has mapped are moved.
    """
    if not nodes or not memory.nbytes:
        return
    policy, start = _policy_of(nodes), memory.ctypes.data
    if policy is None or not _call("mbind", start, memory.nbytes, *policy, MAX_NODES, _MOVE):
        _warn(nodes)


def _policy_of(nodes: Sequence[int]) -> _Policy | None:
    """Return the policy that takes pages from `nodes`; None where one cannot be a node."""
    if not all(0 <= node < MAX_NODES for node in nodes):
        return None
    mask = _Mask()
    for node in nodes:
        mask[node // 64] |= 1 << node % 64
    return _PREFERRED if len(nodes) == 1 else _INTERLEAVE, mask


def _read_policy() -> _Policy | None:
    """Return this thread's policy: it may have been started with one."""
    mode, mask = (ctypes.c_int * 1)(), _Mask()
    return (mode[0], mask) if _call("get_mempolicy", mode, mask, MAX_NODES, 0, 0) else None


def _set_policy(policy: _Policy | None) -> bool:
    return policy is not None and _call("set_mempolicy", *policy, MAX_NODES)


def _call(name: str, *arguments: int | ctypes.Array[Any]) -> bool:
    """Make a system call; return whether it did what was asked. Arrays are given by address."""
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        return False
    call = ctypes.CDLL(None, use_errno=True).syscall
    given = (ctypes.c_long(one) if isinstance(one, int) else one for one in arguments)
    return int(call(ctypes.c_long(numbers[name]), *given)) == 0


def _warn(nodes: Sequence[int]) -> None:
    log.warning(
        "memory cannot be placed on NUMA node %s; it is placed where it is used",
        ", ".join(map(str, nodes)),
    )
