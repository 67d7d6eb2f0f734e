"""The generated kernels of an artifact on an NVIDIA GPU: loaded and launched by `cuda.core`.

In: PTX and its index. Out: `GpuModule`, whose kernels run on torch's current stream, so that CUDA
graphs which torch records hold them, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from dovetail.ir.artifact import KernelIndex
from dovetail.ir.errors import DeviceError
from dovetail.runtime.native.polymerize import GpuSpec

WARP = 32


class GpuModule:
    """A module on one GPU; kernels: its index entries by name.

    ImportError where `cuda.core` (extra `gpu`) is not installed.
    """

    def __init__(self, path: Path, index: KernelIndex, device: torch.device) -> None:
        """Load it; DeviceError where the driver refuses."""
        from cuda import core  # noqa: PLC0415 - an extra

        self._core, self._device = core, device
        self.kernels = {kernel.name: kernel for kernel in index.kernels}
        gpu = core.Device(torch.cuda.current_device() if device.index is None else device.index)
        try:
            gpu.set_current()  # torch's own context: the device's first
            code = core.ObjectCode.from_ptx(path.read_bytes(), name=path.name)
            self._handles = {name: code.get_kernel(f"dt_cuda_{name}") for name in self.kernels}
        except Exception as error:  # cuda.core has an error of its own for each version of CUDA
            raise DeviceError(
                f"{path} cannot be loaded on {gpu.name} ({error}); run `dovetail compile` again "
                "with `--target cuda`"
            ) from error
        about = gpu.properties
        self.rates = GpuSpec(
            about.multiprocessor_count,
            1e3 * about.clock_rate,
            2 * 1e3 * about.memory_clock_rate * about.global_memory_bus_width / 8,
        )

    def launch(self, kernel: str, operands: Sequence[int], warps: int) -> None:
        """Give a kernel to the current stream, on about `warps` warps.

        operands: its integers and addresses, 0 for null.
        """
        block = self.kernels[kernel].warps
        shape = self._core.LaunchConfig(grid=-(-warps // block), block=block * WARP)
        self._core.launch(_CurrentStream(self._device), shape, self._handles[kernel], *operands)


class _CurrentStream:
    """Torch's current stream, as `cuda.core` takes streams of others."""

    def __init__(self, device: torch.device) -> None:
        self._handle = torch.cuda.current_stream(device).cuda_stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle
