"""Call kernels from tests: natively through their tape entries, or interpreted on any target.

A `Runner` is called as `run(name, *slots, nth=1)`: arrays pass their address, None a null pointer,
and the threads' shares run one after the other.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from dovetail.codegen.catalog import (
    DTYPE_PARAMETER,
    KERNELS,
    PROMPTS,
    STANDALONE,
    HeadShape,
    KernelRequest,
    device_kernels,
    kernel_request,
    load_kernel_module,
    pairs_prompts,
    resolve_imports,
)
from dovetail.codegen.isa.target import Target
from dovetail.codegen.library import LibrarySpec, build_library
from dovetail.codegen.lower import lower
from dovetail.codegen.targets import (
    ALL_TARGETS,
    DEVICE_TARGETS,
    TARGETS,
    host_features,
    runs_on,
)
from dovetail.ir.diagnostics import Source
from dovetail.ir.formats import FORMATS, is_quantised
from dovetail.ir.high.nodes import Unit
from dovetail.ir.high.parse import parse_high
from dovetail.runtime.machine import abi
from tests.codegen.float_targets import FLOAT_TARGETS
from tests.codegen.gpu_kernels import GpuKernels
from tests.codegen.interpret import interpret
from tests.codegen.warp_host import WarpLibrary, warp_library

MATH_H = (
    *("vacos", "vacosh", "vasin", "vasinh", "vatan", "vatanh", "vcbrt", "vcos", "vcosh", "verf"),
    *("vexp2", "vexpm1", "vlog", "vlog10", "vlog1p", "vlog2", "vround_away", "vsin", "vsinh"),
    *("verfc", "vtan", "vtanh"),
)
PAIRS_H = ("vatan2", "vcopysign", "vfmod", "vhypot", "vpow")
"""Functions of one vector and of two that math_h has for those of C."""
ACTIVATING = ("vexp", "vexp2_neg", "vsigmoid", "vsilu", "vgelu", "vgelu_tanh")
PROBE = """

@kernel
def {name}_probe(n: i64, x: ptr[f32], out: ptr[f32], tid: thread, nth: thread):
    for c in vrange(0, n):
        vstore(out + c, {name}(vload(x + c)))
"""
PAIR_PROBE = """

@kernel
def {name}_probe(n: i64, x: ptr[f32], y: ptr[f32], out: ptr[f32], tid: thread, nth: thread):
    for c in vrange(0, n):
        vstore(out + c, {name}(vload(x + c), vload(y + c)))
"""
PROBES = (
    "import gelu\nimport math_f32\nimport math_h\n"
    + "".join(PROBE.format(name=name) for name in (*ACTIVATING, *MATH_H))
    + "".join(PAIR_PROBE.format(name=name) for name in PAIRS_H)
)
"""Kernels that show the @inline functions of these modules one by one."""
DTYPES = {"W": ("f32", "bf16"), "KV": ("f32", "bf16", "f16"), "METRIC": ("l2", "ip")}
ACTIVATIONS = {
    "activate_rows": ("tanh", "gelu", "gelu_tanh"),
    **dict.fromkeys(("gate_rows", "gate_pairs"), ("gelu_tanh", "silu")),
}
WIDE = HeadShape(512, 1)
QUANTISED = tuple(name for name in FORMATS if is_quantised(name))
DISTINCT = {n: t for n, t in FLOAT_TARGETS.items() if not t.rounds_rows}
"""Targets that differ in more than the matrix products, which have tests of their own."""
NATIVE = [
    *(n for n, t in DISTINCT.items() if runs_on(t, platform.machine(), host_features())),
]
"""CPU targets whose text runs here."""


class Slot(ctypes.Union):
    """dt_slot of abi.h."""

    _fields_ = (("p", ctypes.c_void_p), ("i", ctypes.c_int64), ("f", ctypes.c_double))


@dataclass(frozen=True)
class Runner:
    """Kernels of one target. `lanes` is its VL."""

    name: str
    lanes: int
    call: Callable[..., None]

    def __call__(self, kernel: str, *slots: Any, nth: int = 1) -> None:
        """Run every thread's share of the kernel called `kernel`."""
        for tid in range(nth):
            self.call(kernel, slots, tid, nth)


def edges(*sizes: int) -> list[int]:
    """Return 1 and n-1, n, n+1 of every size, those above zero, sorted."""
    return sorted({1, *(n + d for n in sizes for d in (-1, 0, 1) if n + d > 0)})


def requests(target: Target) -> tuple[KernelRequest, ...]:
    """Return every catalogued kernel in every dtype, and the probes."""
    if target.device:
        return device_kernels(QUANTISED)
    catalogued = tuple(
        kernel_request(family, target, dtype)
        for family in (*KERNELS, *STANDALONE)
        for dtype in ACTIVATIONS.get(family) or DTYPES.get(DTYPE_PARAMETER.get(family, ""), (None,))
    )
    probes = [f.name for f in probe_unit().functions if f.kind == "kernel"]
    named = (KernelRequest("probes", name, {}, name) for name in probes)
    wide = tuple(kernel_request(f, target, kv, WIDE) for f in PROMPTS for kv in DTYPES["KV"])
    return (*catalogued, *wide, *pair_requests(target), *named)


def pair_requests(target: Target) -> tuple[KernelRequest, ...]:
    """Return attention of prompts that multiplies bfloat16 pairs, where the target does."""
    heads = HeadShape(32, 1, rounded=True)
    if not pairs_prompts(target, heads):
        return ()
    return tuple(kernel_request(f, target, kv, heads) for f in PROMPTS for kv in DTYPES["KV"])


@cache
def probe_unit() -> Unit:
    """Return the parsed PROBES with what they import."""
    return resolve_imports(parse_high(Source("probes", PROBES)))


SOME_FORMATS = ("q8_32", "q4_32", "q4_32m", "q4_32km", "q6_16k")
"""Formats of blocks whose text for devices is compiled every day; that of all is interpreted."""


@cache
def warp_runner() -> Runner:
    """Return the runner of the target cuda on this CPU, as plain C++: a warp is 32 floats."""
    target = DEVICE_TARGETS["cuda"]
    some, every = device_kernels(SOME_FORMATS), requests(target)
    names = {request.name for request in some}

    @cache
    def library(daily: bool) -> WarpLibrary:
        return warp_library(some if daily else [r for r in every if r.name not in names])

    def call(kernel: str, slots: tuple[Any, ...], tid: int, nth: int) -> None:
        library(kernel in names).call(kernel, slots, tid, nth)

    return Runner("cuda", target.lanes, call)


@cache
def gpu_runner() -> Runner:
    """Return the runner of the first NVIDIA GPU, which runs all shares in one launch."""
    target = DEVICE_TARGETS["cuda"]
    built = build_library(LibrarySpec(target=target, kernels=requests(target)))
    gpu = GpuKernels(built.path, built.index)

    def call(kernel: str, slots: tuple[Any, ...], tid: int, nth: int) -> None:
        if tid == 0:
            gpu.call(kernel, slots, nth)

    return Runner("gpu", target.lanes, call)


@cache
def native_runner(name: str) -> Runner:
    """Return the runner of a library compiled for the target `name`, built once."""
    return compiled_runner(TARGETS[name], requests(TARGETS[name]))


def build_default() -> None:
    """Build the libraries of the runners above that default tests use, before they run."""
    warp_library(device_kernels(SOME_FORMATS))
    for name in NATIVE:
        native_runner(name)


def compiled_runner(target: Target, kernels: tuple[KernelRequest, ...]) -> Runner:
    """Return the runner of a library of these kernels, for a target of this machine."""
    modules = {"probes": probe_unit()}
    spec = LibrarySpec(target=target, kernels=kernels, modules=modules, tvm_ffi=False)
    library = ctypes.CDLL(str(build_library(spec).path))

    def call(kernel: str, slots: tuple[Any, ...], tid: int, nth: int) -> None:
        entry = library[f"dt_entry_{kernel}"]
        entry.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
        entry.restype = None
        packed = (Slot * len(slots))(*(pack(slot) for slot in slots))
        schedule = (ctypes.c_int64 * abi.SCHEDULE_LENGTH)()
        entry(ctypes.addressof(packed), ctypes.addressof(schedule), tid, nth)

    return Runner(target.name, target.lanes, call)


def pack(value: Any) -> Slot:
    """Return one operand as a slot."""
    if value is None:
        return Slot(p=None)
    if isinstance(value, np.ndarray):
        assert value.flags.c_contiguous
        return Slot(p=value.ctypes.data)
    return Slot(f=value) if isinstance(value, float | np.floating) else Slot(i=int(value))


@cache
def interpreted_runner(name: str) -> Runner:
    """Return the runner that interprets the text lowered for the target `name`."""
    target = ALL_TARGETS[name]
    by_name = {request.name: request for request in requests(target)}

    @cache
    def lowered(kernel: str) -> Any:
        request = by_name[kernel]
        unit = probe_unit() if request.module == "probes" else load_kernel_module(request.module)
        return lower(unit, request.kernel, request.binding, target, name=kernel)

    def call(kernel: str, slots: tuple[Any, ...], tid: int, nth: int) -> None:
        interpret(lowered(kernel), kernel, [*slots, tid, nth], target)

    return Runner(name, target.lanes, call)
