"""The text of the cuda target run on this machine's CPU: other header, same kernels.

In: lowered kernels. Out: a library whose `dt_cuda_<kernel>` runs one warp, here a struct of 32
floats per vector, and `WarpLibrary.call`, which runs it on numpy arrays.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.codegen.emit import KernelSpec
from dovetail.codegen.emit_cuda import emit_cuda
from dovetail.codegen.targets import ALL_TARGETS, host_target
from dovetail.codegen.toolchain import BuildSpec, TranslationUnit, compile_shared

HEADER = "warp_host.h"
C_TYPES = {"f32": ctypes.c_float, "f64": ctypes.c_double, "i64": ctypes.c_int64}
FLAGS = ("-O0", "-std=c++17", f'-DDT_WARP_HEADER="{HEADER}"', "-w")


class WarpLibrary:
    """CUDA C++ text compiled as plain C++."""

    def __init__(self, kernels: Sequence[KernelSpec], cache: Path | None = None) -> None:
        text = emit_cuda("warp", ALL_TARGETS["cuda"], tuple(kernels))
        header = Path(__file__).with_name(HEADER).read_text(encoding="utf-8")
        spec = BuildSpec(
            name="warp",
            target=host_target(),
            files=(("kernels.cpp", text), (HEADER, header)),
            units=(TranslationUnit("kernels.cpp", FLAGS),),
        )
        self._library = ctypes.CDLL(str(compile_shared(spec, cache)))
        self.kernels = {k.entry.name: k.entry for k in kernels}

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
