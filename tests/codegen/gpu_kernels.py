"""Kernels on a GPU, called with numpy arrays: they go to the device, and come back changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.ir.artifact import KernelIndex
from dovetail.runtime.cuda import CudaDevice


class GpuKernels:
    """A module on a device."""

    def __init__(self, device: CudaDevice, path: Path, index: KernelIndex) -> None:
        self.device = device
        self.module = device.load(path, index)

    def call(self, kernel: str, slots: Sequence[Any], warps: int) -> None:
        """Launch `kernel` on about `warps` warps; arrays are copied there and back."""
        held: dict[int, tuple[np.ndarray, int]] = {}  # address here -> the array, address there
        operands = [self._operand(slot, held) for slot in slots]
        try:
            self.module.launch(kernel, operands, warps)
            self.device.wait()
            for array, address in held.values():
                self.device.download(array, address)
        finally:
            for _, address in held.values():
                self.device.free(address)

    def _operand(self, slot: Any, held: dict[int, tuple[np.ndarray, int]]) -> Any:
        if not isinstance(slot, np.ndarray):
            return slot
        root = slot
        while isinstance(root.base, np.ndarray):
            root = root.base
        assert root.flags.c_contiguous
        start = root.ctypes.data
        if start not in held:
            held[start] = (root, self.device.alloc(root.nbytes))
            self.device.upload(held[start][1], root)
        return held[start][1] + slot.ctypes.data - start
