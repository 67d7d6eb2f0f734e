"""NVIDIA GPUs through the CUDA driver's C interface: memory, modules, launches. No toolkit needed.

In: a module built for the target `cuda`, and its index. Out: `CudaDevice` and `CudaModule`.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dovetail.ir.artifact import KernelEntry, KernelIndex
from dovetail.ir.errors import ArtifactError, CapacityError, DeviceError, SpecError

DRIVER = "libcuda.so.1"
WARP = 32
Operand: TypeAlias = "int | float | None"
"""A number, or an address on the device; None is the null pointer."""

SCALARS: Mapping[str, Any] = {
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u8": ctypes.c_uint8,
    "i8": ctypes.c_int8,
    "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32,
}
_HANDLE, _SIZE, _UINT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
_ADDRESS = ctypes.c_uint64
SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "cuInit": (_UINT,),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDeviceGetCount": (ctypes.POINTER(ctypes.c_int),),
    "cuDeviceGetName": (ctypes.c_char_p, ctypes.c_int, ctypes.c_int),
    "cuDeviceGetAttribute": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(_HANDLE), ctypes.c_int),
    "cuDevicePrimaryCtxRelease_v2": (ctypes.c_int,),
    "cuCtxSetCurrent": (_HANDLE,),
    "cuCtxSynchronize": (),
    "cuMemAlloc_v2": (ctypes.POINTER(_ADDRESS), _SIZE),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemcpyHtoD_v2": (_ADDRESS, _HANDLE, _SIZE),
    "cuMemcpyDtoH_v2": (_HANDLE, _ADDRESS, _SIZE),
    "cuModuleLoadData": (ctypes.POINTER(_HANDLE), _HANDLE),
    "cuModuleGetFunction": (ctypes.POINTER(_HANDLE), _HANDLE, ctypes.c_char_p),
    "cuModuleUnload": (_HANDLE,),
    "cuLaunchKernel": (_HANDLE, *[_UINT] * 7, _HANDLE, _HANDLE, _HANDLE),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuMemHostAlloc": (ctypes.POINTER(_HANDLE), _SIZE, _UINT),
    "cuMemFreeHost": (_HANDLE,),
    "cuMemHostRegister_v2": (_HANDLE, _SIZE, _UINT),
    "cuMemHostUnregister": (_HANDLE,),
    "cuMemcpyHtoDAsync_v2": (_ADDRESS, _HANDLE, _SIZE, _HANDLE),
    "cuMemcpyDtoHAsync_v2": (_HANDLE, _ADDRESS, _SIZE, _HANDLE),
    "cuStreamCreate": (ctypes.POINTER(_HANDLE), _UINT),
    "cuStreamDestroy_v2": (_HANDLE,),
    "cuStreamWaitEvent": (_HANDLE, _HANDLE, _UINT),
    "cuEventCreate": (ctypes.POINTER(_HANDLE), _UINT),
    "cuEventRecord": (_HANDLE, _HANDLE),
    "cuEventSynchronize": (_HANDLE,),
    "cuEventDestroy_v2": (_HANDLE,),
    "cuStreamBeginCapture_v2": (_HANDLE, ctypes.c_int),
    "cuStreamEndCapture": (_HANDLE, ctypes.POINTER(_HANDLE)),
    "cuGraphInstantiateWithFlags": (ctypes.POINTER(_HANDLE), _HANDLE, ctypes.c_ulonglong),
    "cuGraphDestroy": (_HANDLE,),
    "cuGraphExecDestroy": (_HANDLE,),
    "cuGraphLaunch": (_HANDLE, _HANDLE),
}
"""The driver's functions in use; all return a status."""
OUT_OF_MEMORY = 2
MULTIPROCESSORS, MAJOR, MINOR = 16, 75, 76
"""Device attributes."""


class CudaError(DeviceError):
    """The CUDA driver refused a call; names it and what the driver says."""

    def __init__(self, call: str, status: int, reason: str) -> None:
        self.call, self.status = call, status
        super().__init__(f"{call}: {reason} (CUDA error {status})")


class Driver:
    """The driver library with checked calls."""

    def __init__(self, library: str = DRIVER) -> None:
        """Load and initialise it; SpecError where there is none, or no GPU."""
        try:
            self._c = ctypes.CDLL(library)
            for name, types in SIGNATURES.items():
                getattr(self._c, name).argtypes = types
        except (OSError, AttributeError) as error:
            raise SpecError(
                f"the CUDA driver cannot be loaded ({error}); install the NVIDIA driver, or use a "
                "CPU target"
            ) from None
        try:
            self.call("cuInit", 0)
        except CudaError as error:
            raise SpecError(f"no NVIDIA GPU can be used: {error}; use a CPU target") from None

    def call(self, name: str, *args: Any) -> None:
        """Call a function of the driver; CapacityError or CudaError unless it succeeds."""
        status = getattr(self._c, name)(*args)
        if status == OUT_OF_MEMORY:
            raise CapacityError(f"{name}: the GPU is out of memory; ask for less")
        if status:
            raise CudaError(name, status, self._reason(status))

    def handle(self, name: str, *args: Any) -> int:
        """Return the handle that a function writes through its first parameter."""
        value = _HANDLE()
        self.call(name, ctypes.byref(value), *args)
        return int(value.value or 0)

    def integer(self, name: str, *args: Any) -> int:
        """Return the int that a function writes through its first parameter."""
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *args)
        return value.value

    def _reason(self, status: int) -> str:
        text = ctypes.c_char_p()
        self._c.cuGetErrorString(status, ctypes.byref(text))
        return text.value.decode() if text.value else "unknown error"


class CudaDevice:
    """One GPU, by its primary context, which other libraries of the process share."""

    def __init__(
        self, ordinal: int = 0, library: str = DRIVER, driver: Driver | None = None
    ) -> None:
        """Open GPU `ordinal`, through `driver` where one is given; SpecError: it is not there."""
        self.driver = Driver(library) if driver is None else driver
        self.ordinal = ordinal
        count = self.driver.integer("cuDeviceGetCount")
        if not 0 <= ordinal < count:
            raise SpecError(f"there is no GPU {ordinal}: {count} can be used, numbered from 0")
        self._handle = self.driver.integer("cuDeviceGet", ordinal)
        name = ctypes.create_string_buffer(256)
        self.driver.call("cuDeviceGetName", name, len(name), self._handle)
        self.name = name.value.decode()
        major, minor, self.multiprocessors = (
            self.attribute(number) for number in (MAJOR, MINOR, MULTIPROCESSORS)
        )
        self.capability = (major, minor)
        self._context = _HANDLE()
        self.driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._handle)
        self.activate()
        self._end = weakref.finalize(
            self, self.driver.call, "cuDevicePrimaryCtxRelease_v2", self._handle
        )
        self._end.atexit = False  # the driver may have ended by then

    def attribute(self, number: int) -> int:
        """Return an attribute of the device, by its number in the driver's interface."""
        return self.driver.integer("cuDeviceGetAttribute", number, self._handle)

    def activate(self) -> None:
        """Make this the GPU of the calling thread: once in each thread that uses the device."""
        self.driver.call("cuCtxSetCurrent", self._context)

    def alloc(self, nbytes: int) -> int:
        """Return the address of `nbytes` of device memory; CapacityError where there is no room."""
        address = _ADDRESS()
        self.driver.call("cuMemAlloc_v2", ctypes.byref(address), max(nbytes, 1))
        return address.value

    def free(self, address: int) -> None:
        """Give back what `alloc` returned."""
        self.driver.call("cuMemFree_v2", address)

    def upload(self, address: int, source: npt.NDArray[Any]) -> None:
        """Copy a contiguous array to the device."""
        assert source.flags.c_contiguous
        self.driver.call("cuMemcpyHtoD_v2", address, source.ctypes.data, source.nbytes)

    def download(self, target: npt.NDArray[Any], address: int) -> None:
        """Copy from the device to a contiguous array, after all that was launched before."""
        assert target.flags.c_contiguous
        self.driver.call("cuMemcpyDtoH_v2", target.ctypes.data, address, target.nbytes)

    def wait(self) -> None:
        """Return when everything launched is done; CudaError where a kernel failed."""
        self.driver.call("cuCtxSynchronize")

    def load(self, path: Path, index: KernelIndex) -> CudaModule:
        """Return the module at `path`; ArtifactError where this GPU cannot run it."""
        return CudaModule(self, path, index)

    def close(self) -> None:
        """Give the context back; safe to call twice."""
        self._end()


class CudaModule:
    """A loaded module: kernels by name."""

    def __init__(self, device: CudaDevice, path: Path, index: KernelIndex) -> None:
        self.device, self.path = device, path
        self.kernels = {kernel.name: kernel for kernel in index.kernels}
        self._handle = _HANDLE()
        try:
            # PTX is text and ends with a zero
            image = np.frombuffer(path.read_bytes() + b"\0", np.uint8)
            self._call("cuModuleLoadData", ctypes.byref(self._handle), image.ctypes.data)
            self._functions = {name: self._function(name) for name in self.kernels}
        except (OSError, CudaError) as error:
            major, minor = device.capability
            raise ArtifactError(
                f"{path}: cannot be loaded on {device.name} (compute capability {major}.{minor}): "
                f"{error}; build it again with `--target cuda`"
            ) from None

    def launch(
        self, kernel: str, operands: Sequence[Operand], warps: int, stream: int | None = None
    ) -> None:
        """Start `kernel` on `warps` warps, rounded up to whole blocks, after what came before.

        Args:
            kernel: a name of the index.
            operands: its parameters in order but those for the thread: numbers and addresses.
            warps: threads of the kernel language; at least 1.
            stream: a CUstream, by default the one all share.
        """
        entry = self.kernels[kernel]
        block = min(entry.warps, warps)
        values = pack_operands(entry, operands)
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        grid = (-(-warps // block), 1, 1, block * WARP, 1, 1)
        self._call("cuLaunchKernel", self._functions[kernel], *grid, 0, stream, pointers, None)

    def close(self) -> None:
        """Unload the module."""
        self._call("cuModuleUnload", self._handle)

    def _call(self, name: str, *args: Any) -> None:
        self.device.driver.call(name, *args)

    def _function(self, name: str) -> ctypes.c_void_p:
        function = _HANDLE()
        symbol = f"dt_cuda_{name}".encode()
        self._call("cuModuleGetFunction", ctypes.byref(function), self._handle, symbol)
        return function


def pack_operands(entry: KernelEntry, operands: Sequence[Operand]) -> list[Any]:
    """Return the operands as C values of the parameters, those of the thread left out."""
    params = [param for param in entry.params if param.kind != "thread"]
    return [
        _ADDRESS(int(value or 0)) if param.type.startswith("ptr[") else SCALARS[param.type](value)
        for param, value in zip(params, operands, strict=True)
    ]
