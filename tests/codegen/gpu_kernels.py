"""Kernels on a GPU, called with numpy arrays: they go to the device, and come back changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.ir.artifact import KernelIndex


class GpuKernels:
    """A module on the first GPU, by torch."""

    def __init__(self, path: Path, index: KernelIndex) -> None:
        import torch

        from dovetail.runtime.accel.skinny import GpuModule

        self._torch, self._device = torch, torch.device("cuda", 0)
        self._module = GpuModule(path, index, self._device)

    def call(self, kernel: str, slots: Sequence[Any], warps: int) -> None:
        """Launch `kernel` on about `warps` warps; arrays are copied there and back."""
        held = {id(s): self._put(s) for s in slots if isinstance(s, np.ndarray)}
        operands = [held[id(s)].data_ptr() if id(s) in held else int(s or 0) for s in slots]
        self._module.launch(kernel, operands, warps)
        for slot in slots:
            if id(slot) in held:
                slot.reshape(-1).view(np.uint8)[:] = held[id(slot)].cpu().numpy()

    def _put(self, array: np.ndarray) -> Any:
        assert array.flags.c_contiguous
        return self._torch.from_numpy(array.reshape(-1).view(np.uint8).copy()).to(self._device)
