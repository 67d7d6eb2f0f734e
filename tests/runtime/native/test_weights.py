"""Weights are mapped, shared and read-only; damage to the mapping's file is reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dovetail.ir.errors import ArtifactError
from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.machine.memory import allocate, available_memory
from dovetail.runtime.native.weights import Weights
from dovetail.topology.hardware import read_hardware


def test_weights_are_shared_pages_of_the_file(make_artifact: Callable[..., Path]) -> None:
    part = open_artifact(make_artifact(), read_hardware()).models["llm"]
    weights = Weights(part)
    assert weights.nbytes == 10_000
    np.testing.assert_array_equal(weights.array("w").view(np.uint8), np.ones(32, np.uint8))
    assert weights.address("w") % 4096 == 0 and not weights.array("w").flags.writeable
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "toy.dove" in line]
    assert any("r--s" in line and line.endswith("weights.bin") for line in maps)


def test_weights_are_read_into_huge_pages(make_artifact: Callable[..., Path]) -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no transparent huge pages")
    part = open_artifact(make_artifact(), read_hardware()).models["llm"]
    weights = Weights(part)
    maps = Path("/proc/self/smaps").read_text()
    own = maps[maps.index(f"{weights.address('w') - weights.entries['w'].offset:x}-") :]
    flags = next(line for line in own.splitlines() if line.startswith("VmFlags:"))
    assert "hg" in flags.split()


def test_empty_weights_are_an_artifact_error(make_artifact: Callable[..., Path]) -> None:
    part = open_artifact(make_artifact(), read_hardware()).models["llm"]
    part.weights.write_bytes(b"")
    with pytest.raises(ArtifactError, match=r"weights\.bin"):
        Weights(part)


def test_memory_is_aligned_zeroed_and_bounded() -> None:
    for size in (0, 1, 4096, 5 << 20):
        memory = allocate(size)
        assert len(memory) == size and not memory.any()
        assert memory.ctypes.data % 4096 == 0
    hardware = read_hardware()
    assert 0 < available_memory(hardware) <= hardware.memory_bytes
