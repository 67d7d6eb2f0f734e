"""`torch.ops.dovetail.gemm_skinny`: products of few rows by a generated kernel on an NVIDIA GPU.

In: PTX and its index; rows, a weight, and a plan of `polymerize.py` as a tensor. Out: a new tensor
of the rows' type. `cuda.core` loads kernels and launches them on torch's current stream, so that
CUDA graphs hold them; it runs under `torch.compile`, and on tensors without data (`meta`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import TypeAlias
from weakref import WeakValueDictionary

import torch

from dovetail.ir.artifact import KernelIndex
from dovetail.ir.errors import DeviceError
from dovetail.runtime.accel.device import TYPES
from dovetail.runtime.native.polymerize import GpuSpec

Tensor: TypeAlias = torch.Tensor
NAMES = {dtype: name for name, dtype in TYPES.items()}
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


_modules: WeakValueDictionary[str, GpuModule] = WeakValueDictionary()
_numbers = count()


def register_module(module: GpuModule) -> str:
    """Return the name by which the operator finds `module`, as long as that lives."""
    name = f"module{next(_numbers)}"
    _modules[name] = module
    return name


@torch.library.custom_op("dovetail::gemm_skinny", mutates_args=())  # type: ignore[untyped-decorator]
def gemm_skinny(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    regions: Tensor,
    n: int,
    stride: int,
    halves: int,
    splits: int,
    warps: int,
    form: str,
    module: str,
) -> Tensor:
    """Return x [rows][K] times the transpose of a weight [n][K], plus bias [n].

    weight: row-major, of x's type; or uint8, panels of the format `form`. stride: values from a row
    to the next, or bytes from a panel to the next. halves: 2 where panels of the first and the
    second half of the columns lie in turns, else 1; regions [regions][7], splits and warps are of
    a plan for the columns of one. module: of `register_module`.

    Raises:
        DeviceError: the module is gone, or has no kernel for this format and type.
    """
    kernels, (rows, depth), columns = _find(module), x.shape, n // halves
    names = f"gemm_skinny_{form}_{NAMES[x.dtype]}", f"gemm_skinny_merge_{NAMES[x.dtype]}"
    if lacking := [name for name in names if name not in kernels.kernels]:
        raise DeviceError(
            f"the artifact has no {lacking[0]}; run `dovetail compile` again with `--target cuda`"
        )
    x = x if x.stride(1) == 1 else x.contiguous()
    out = x.new_empty(rows, n)
    sums = x.new_empty(splits * rows * columns if splits > 1 else 0, dtype=torch.float32)
    for half in range(halves):
        at = half * columns * out.element_size()
        added = 0 if bias is None else bias.data_ptr() + at
        end = out.data_ptr() + at, n
        head = rows, columns, depth, x.data_ptr(), x.stride(0)
        panels = weight.data_ptr() + half * stride * weight.element_size()
        plan = splits, sums.data_ptr(), len(regions), regions.data_ptr()
        operands = *head, panels, halves * stride, added, *end, *plan
        kernels.launch(names[0], operands, warps)
        if splits > 1:
            merge = rows, columns, splits, sums.data_ptr(), added, *end
            kernels.launch(names[1], merge, warps)
    return out


@gemm_skinny.register_fake  # type: ignore[untyped-decorator]
def _shape_only(
    x: Tensor, weight: Tensor, bias: Tensor | None, regions: Tensor, n: int, *_: object
) -> Tensor:
    return x.new_empty(x.shape[0], n)


def _find(module: str) -> GpuModule:
    found = _modules.get(module)
    if found is None:
        raise DeviceError(
            f"no generated kernels are loaded as {module!r}; they run on NVIDIA GPUs, from an "
            "artifact compiled with `--target cuda`"
        )
    return found
