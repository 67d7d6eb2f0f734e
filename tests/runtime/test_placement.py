"""The memory policy of this thread, as the kernel reports it."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import pytest

from dovetail.runtime.placement import preferring_node

GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}


def policy() -> tuple[int, int]:
    """Return (mode, mask of the first 64 nodes)."""
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    number = GET_MEMPOLICY[platform.machine()]
    call = ctypes.CDLL(None).syscall
    if call(number, ctypes.byref(mode), mask, ctypes.c_ulong(1024), None, ctypes.c_ulong(0)):
        pytest.skip("this kernel has no NUMA policies")
    return mode.value, mask[0]


@pytest.mark.skipif(platform.machine() not in GET_MEMPOLICY, reason="unknown system call numbers")
def test_pages_are_wanted_from_the_node_for_a_time() -> None:
    before = policy()
    node = int(Path("/sys/devices/system/node/online").read_text().split("-")[0].split(",")[0])
    with preferring_node(node):
        assert policy() == (1, 1 << node)
    with preferring_node(None):
        assert policy() == before
    assert policy() == before


def test_a_node_that_is_not_there_is_only_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for node in (999, 5000, -1):
        with preferring_node(node):
            pass
        assert f"NUMA node {node}" in caplog.messages[-1]
