"""Kernel requests to one library of a target: lower each, emit C texts, compile and link them.

In: a `LibrarySpec`. Out: a `BuiltLibrary`: the .so in the build cache, its C text and its index.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE

import msgspec

from dovetail.codegen.catalog import KernelRequest, load_kernel_module
from dovetail.codegen.emit import (
    KernelSpec,
    KernelText,
    emit_unit,
    kernel_text,
    part_texts,
    read_template,
)
from dovetail.codegen.emit_cuda import block_warps, emit_cuda
from dovetail.codegen.isa.target import Target
from dovetail.codegen.lower import bind_tunables, find_kernel, lower
from dovetail.codegen.lower.fold import fold_type
from dovetail.codegen.lower.names import C_WORDS
from dovetail.codegen.lower.pipeline import PLAIN_TYPES
from dovetail.codegen.nvidia import SOURCE_NAME as CUDA_SOURCE_NAME
from dovetail.codegen.nvidia import CudaCompiler, compile_cuda, find_cuda_compiler
from dovetail.codegen.targets import TARGETS
from dovetail.codegen.text_cache import remember_text, text_path
from dovetail.codegen.toolchain import (
    Advance,
    BuildSpec,
    Compiler,
    compile_shared,
    find_compiler,
    unheard,
)
from dovetail.ir.artifact import KernelEntry, KernelIndex, KernelParam
from dovetail.ir.cache import cache_directory
from dovetail.ir.errors import SpecError
from dovetail.ir.expr import Expr
from dovetail.ir.high import nodes as high
from dovetail.ir.high.print import print_high
from dovetail.ir.low.print import print_low
from dovetail.ir.node import no_collector

ABI = 11
"""`DT_ABI` of templates/abi.h."""
SOURCE_NAME = "kernels.c"
TEAM_FILES = ("abi.h", "wait.h", "team.c", "collective.c")
TEXT_CHILD = (sys.executable, "-P", "-m", "dovetail.codegen.text_child")
LEAST_SHARE = 3
"""Kernels that are worth a process which lowers them: it takes half a second to start."""


@dataclass(frozen=True, slots=True)
class LibrarySpec:
    """What to build. `team` adds thread team and all-reduce, `tvm_ffi` the `__tvm_ffi_*` wrappers.

    A request's module is looked up in `modules` (parsed kernel files of the user), then among ours.
    """

    target: Target
    kernels: tuple[KernelRequest, ...]
    name: str = "kernels"
    modules: Mapping[str, high.Unit] = field(default_factory=dict)
    team: bool = True
    tvm_ffi: bool = True


class EmittedKernel(msgspec.Struct, frozen=True, kw_only=True):
    """The index entry and the pieces of C text of one kernel, which any library may hold."""

    entry: KernelEntry
    text: KernelText


class DeviceText(msgspec.Struct, frozen=True, kw_only=True):
    """The text of an accelerator's module and the index entries of its kernels."""

    source: str
    kernels: tuple[KernelEntry, ...]


@dataclass(frozen=True, slots=True)
class BuiltLibrary:
    """A library in the build cache, the C text of its kernels, and its index."""

    path: Path
    source: str
    index: KernelIndex


def build_library(
    spec: LibrarySpec, cache: Path | None = None, advance: Advance = unheard
) -> BuiltLibrary:
    """Return the library of `spec`, from the build cache where it is there already.

    Half of a CPU's is made once its texts are there.
    Raises SpecError for two kernels of one name, ScheduleError for an unknown kernel or a binding
    outside a tunable's choices, ToolchainError when the compiler fails.
    """
    check_names(spec)
    if spec.target.device:
        return _build_device_library(spec, cache)
    kernels = emit_kernels(spec, cache, lambda done, total: advance(done, 2 * total))
    texts = [kernel.text for kernel in kernels]
    path = compile_shared(
        _build_spec(spec, texts), cache, lambda done, total: advance(total + done, 2 * total)
    )
    source = emit_unit(spec.name, spec.target, texts, texts if spec.tvm_ffi else ())
    return BuiltLibrary(path, source, _cpu_index(spec, kernels, path.name))


def index_library(spec: LibrarySpec, cache: Path | None = None) -> KernelIndex:
    """Return the index that `build_library` gives a CPU's library, which is not built for it.

    Raises what that raises before it runs the compiler. The library has no file name in it.
    """
    check_names(spec)
    return _cpu_index(spec, emit_kernels(spec, cache), "")


def _cpu_index(spec: LibrarySpec, kernels: Sequence[EmittedKernel], library: str) -> KernelIndex:
    entries = tuple(kernel.entry for kernel in kernels)
    return _index(spec.target, find_compiler(spec.target), library, SOURCE_NAME, entries)


def _index(
    target: Target,
    compiler: Compiler | CudaCompiler,
    library: str,
    source: str,
    kernels: tuple[KernelEntry, ...],
) -> KernelIndex:
    return KernelIndex(
        target=target.name,
        abi=ABI,
        library=library,
        source=source,
        compiler=compiler.version,
        flags=compiler.flags_for(target),
        kernels=kernels,
    )


def _build_device_library(spec: LibrarySpec, cache: Path | None) -> BuiltLibrary:
    """Return the module of an accelerator; it has neither thread team nor tvm-ffi wrappers."""
    text = device_text(spec, cache_directory() if cache is None else cache)
    path = compile_cuda(spec.name, text.source, spec.target, cache)
    compiler = find_cuda_compiler()
    index = _index(spec.target, compiler, path.name, CUDA_SOURCE_NAME, text.kernels)
    return BuiltLibrary(path, text.source, index)


def device_text(spec: LibrarySpec, cache: Path) -> DeviceText:
    """Return the text of a module; remembered unless it has kernel files of the user."""

    def generate() -> DeviceText:
        kernels = tuple(
            lower_request(r, spec.target, spec.modules.get(r.module)) for r in spec.kernels
        )
        source = emit_cuda(spec.name, spec.target, kernels)
        return DeviceText(source=source, kernels=tuple(kernel.entry for kernel in kernels))

    if spec.modules:
        return generate()
    request = (spec.name, spec.target.name, [request_key(r) for r in spec.kernels])
    return remember_text(request, cache, DeviceText, generate)


def emit_kernels(
    spec: LibrarySpec, cache: Path | None, advance: Advance = unheard
) -> list[EmittedKernel]:
    """Return the kernels of a CPU's library; remembered unless they are of the user's files."""
    folder = cache or cache_directory()
    _lower_beside(spec, folder, advance)
    return [
        remember_kernel(spec.target, request, folder)
        if request.module not in spec.modules
        else emit_kernel(spec.target, request, spec.modules[request.module])
        for request in spec.kernels
    ]


def emit_kernel(
    target: Target, request: KernelRequest, unit: high.Unit | None = None
) -> EmittedKernel:
    """Lower a kernel and return its index entry and text; `unit` as in `lower_request`."""
    lowered = lower_request(request, target, unit)
    return EmittedKernel(entry=lowered.entry, text=kernel_text(lowered, target))


def remember_kernel(target: Target, request: KernelRequest, cache: Path) -> EmittedKernel:
    """Return what `emit_kernel` does for one of our kernels, from the cache where it is there."""
    key = (target.name, request_key(request))
    return remember_text(key, cache, EmittedKernel, lambda: emit_kernel(target, request))


def _lower_beside(spec: LibrarySpec, cache: Path, advance: Advance) -> None:
    """Lower kernels that are not remembered in as many processes as there are CPUs.

    What a child could not do is left to the caller, who then meets the error.
    """
    target = spec.target
    if TARGETS.get(target.name) is not target:
        return
    ours = (request for request in spec.kernels if request.module not in spec.modules)
    lacking = [r for r in ours if not text_path((target.name, request_key(r)), cache).exists()]
    lacking.sort(key=lambda r: int(r.binding.get("MR", 0)) * int(r.binding.get("NP", 0)))
    count = max(1, min(len(os.sched_getaffinity(0)), len(lacking) // LEAST_SHARE))
    children = [
        subprocess.Popen(TEXT_CHILD, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL)
        for _ in range(count - 1)
    ]
    try:
        for i, child in enumerate(children):
            job = {"target": target.name, "cache": str(cache), "requests": lacking[i::count]}
            _feed(child, msgspec.json.encode(job))
        for done, request in enumerate(own := lacking[count - 1 :: count], 1):
            remember_kernel(target, request, cache)
            advance(done, len(own))
        for child in children:
            child.wait()
    finally:
        for child in children:
            child.kill()
            child.wait()


def _feed(child: subprocess.Popen[bytes], data: bytes) -> None:
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin:
        child.stdin.write(data)


def request_key(request: KernelRequest) -> tuple[object, ...]:
    """Return what tells a request from others, JSON-like."""
    return (request.module, request.kernel, sorted(request.binding.items()), request.name)


def _build_spec(spec: LibrarySpec, texts: Sequence[KernelText]) -> BuildSpec:
    wrapped = texts if spec.tvm_ffi else ()
    by_request = list(zip(spec.kernels, texts, strict=True))
    ours = [text for request, text in by_request if request.module not in spec.modules]
    theirs = [text for request, text in by_request if request.module in spec.modules]
    parts = foreign = part_texts(spec.target, ours or theirs, wrapped)
    if ours and theirs:
        foreign = part_texts(spec.target, theirs, tells_abi=False)
    return BuildSpec(
        name=spec.name,
        target=spec.target,
        files=tuple((name, read_template(name)) for name in (TEAM_FILES if spec.team else ())),
        parts=parts if ours else (),  # no compiler runs for the ABI's function alone
        foreign=foreign if theirs else (),
        flags=("-pthread",),
    )


def check_names(spec: LibrarySpec) -> None:
    """Raise SpecError when two kernels of a library have one name, or one has a name of C's."""
    names = [request.name for request in spec.kernels]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SpecError(
            f"a library may hold each kernel name once; given twice: {', '.join(twice)}"
        )
    own = [] if spec.target.device else [r.name for r in spec.kernels if r.module in spec.modules]
    if taken := sorted(filter(_in_c, own)):
        raise SpecError(f"C has its own {taken[0]}: give the kernel of this name another one")


def _in_c(name: str) -> bool:
    """Tell whether C, its library or our C text has something of a name already.

    What a program exports stands before what it loads: that would be called in a kernel's place.
    """
    return name in C_WORDS or name.startswith("dt_") or hasattr(ctypes.CDLL(None), name)


@no_collector()
def lower_request(
    request: KernelRequest, target: Target, unit: high.Unit | None = None
) -> KernelSpec:
    """Return the lowered kernel and its index entry; `unit` is its module, if not one of ours."""
    family = request.kernel if unit is None else f"{request.module}.{request.kernel}"
    unit = load_kernel_module(request.module) if unit is None else unit
    function = find_kernel(unit, request.kernel)
    lowered = lower(unit, request.kernel, request.binding, target, name=request.name)
    texts = tuple(map(print_low, lowered.items))
    values = bind_tunables(function, request.binding, target)
    binding = {t.name: request.binding.get(t.name, t.default) for t in function.tunables}
    entry = KernelEntry(
        name=request.name,
        family=family,
        params=tuple(_kernel_param(p, values) for p in function.params),
        binding=binding,
        digest=hashlib.sha256("".join(texts).encode()).hexdigest(),
        warps=block_warps(lowered.function(request.name)) if target.device else 0,
    )
    return KernelSpec(entry, lowered, texts)


def _kernel_param(param: high.Param, values: Mapping[str, Expr]) -> KernelParam:
    kind = print_high(fold_type(param.type, values))
    if kind in PLAIN_TYPES:
        return KernelParam(name=param.name, type="i64", kind=kind)
    return KernelParam(name=param.name, type=kind, kind="slot")
