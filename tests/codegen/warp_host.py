"""The text of the cuda target run on this machine's CPU: other header, same kernels.

In: kernel requests. Out: a library whose `dt_cuda_<kernel>` runs one warp, here a struct of 32
floats per vector, and `WarpLibrary.call`, which runs it on numpy arrays.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from dovetail.codegen.catalog import KernelRequest
from dovetail.codegen.library import DeviceText, LibrarySpec, device_text
from dovetail.codegen.targets import DEVICE_TARGETS, host_target
from dovetail.codegen.toolchain import BuildSpec, compile_shared
from dovetail.ir.cache import cache_directory
from dovetail.ir.high.nodes import Unit

HEADER = "warp_host.h"
C_TYPES = {"f32": ctypes.c_float, "f64": ctypes.c_double, "i64": ctypes.c_int64}
FLAGS = ("-O0", "-std=c++17", f'-DDT_WARP_HEADER="{HEADER}"', "-w")


def warp_library(
    requests: Iterable[KernelRequest], modules: Mapping[str, Unit] | None = None
) -> WarpLibrary:
    """Return the library of kernels, of which a process lowers none that another has lowered."""
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    target, kernels = DEVICE_TARGETS["cuda"], tuple(requests)
    spec = LibrarySpec(target=target, kernels=kernels, name="warp", modules=modules or {})
    with FileLock(cache / "warp.lock"):
        text = device_text(spec, cache)
    return WarpLibrary(text)


class WarpLibrary:
    """CUDA C++ text compiled as plain C++."""

    def __init__(self, text: DeviceText) -> None:
        header = Path(__file__).with_name(HEADER).read_text(encoding="utf-8")
        spec = BuildSpec(
            name="warp",
            target=host_target(),
            files=(("kernels.cpp", text.source), (HEADER, header)),
            flags=FLAGS,
        )
        self._library = ctypes.CDLL(str(compile_shared(spec)))
        self.kernels = {entry.name: entry for entry in text.kernels}

    def call(self, kernel: str, slots: Sequence[Any], tid: int, nth: int) -> None:
        """Run warp `tid` of `nth` on the operands, `thread` parameters left out."""
        params = [p for p in self.kernels[kernel].params if p.kind != "thread"]
        values = [c_value(p.type, slot) for p, slot in zip(params, slots, strict=True)]
        self._library.dt_host_set(ctypes.c_int64(tid), ctypes.c_int64(nth))
        self._library[f"dt_cuda_{kernel}"](*values)

    def launch(self, kernel: str, operands: Sequence[int], warps: int) -> None:
        """Run all warps, one after the other, on integers and addresses."""
        for warp in range(warps):
            self._library.dt_host_set(ctypes.c_int64(warp), ctypes.c_int64(warps))
            self._library[f"dt_cuda_{kernel}"](*map(ctypes.c_int64, operands))


def c_value(kind: str, value: Any) -> Any:
    """Return an operand as ctypes passes it."""
    if kind.startswith("ptr["):
        assert value is None or value.flags.c_contiguous
        return ctypes.c_void_p(None if value is None else value.ctypes.data)
    number = float(value) if isinstance(value, float | np.floating) else int(value)
    return C_TYPES[kind](number)
