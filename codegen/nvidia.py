"""CUDA C++ text to a module the CUDA driver loads: PTX, made by nvcc or by NVRTC.

In: text of `emit_cuda`. Out: the module's path in the build cache, or `ToolchainError` that says
what to install or what the compiler wrote.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from dovetail.codegen.isa.target import Target
from dovetail.codegen.toolchain import cached_build, content_key, run_tool
from dovetail.ir.errors import ToolchainError

ARCHITECTURE = "75"
"""The oldest compute capability (Turing); a driver makes machine code of its PTX for later ones."""
PTX_VERSION = b"6.3"
"""The PTX ISA that knows it, CUDA 10's. Compilers name their own version in what they write, which
drivers older than they are refuse; the text needs nothing newer than this."""
SOURCE_NAME = "kernels.cu"
DEFAULT_NVCC = "/usr/local/cuda/bin/nvcc"
ADVICE = (
    "install the CUDA toolkit (or name its nvcc in DOVETAIL_NVCC), or run: "
    "pip install nvidia-cuda-nvrtc (which the extra `gpu` brings, too)"
)


@dataclass(frozen=True, slots=True)
class CudaCompiler:
    """nvcc, or the NVRTC library: `kind`, where it is, and its version."""

    kind: str
    path: Path
    version: str

    def flags_for(self, target: Target) -> tuple[str, ...]:
        """Return the options that select target and architecture."""
        kind = ("-ptx",) if self.kind == "nvcc" else ()
        return (*target.cflags, *kind, f"--gpu-architecture=compute_{ARCHITECTURE}")


def find_cuda_compiler() -> CudaCompiler:
    """Return $DOVETAIL_NVCC, nvcc on PATH or in its usual place, else the NVRTC wheel."""
    chosen = os.environ.get("DOVETAIL_NVCC", "").strip()
    if chosen and shutil.which(chosen) is None:
        raise ToolchainError(f"DOVETAIL_NVCC names {chosen!r}, which does not exist; {ADVICE}")
    found = shutil.which(chosen or "nvcc") or shutil.which(DEFAULT_NVCC)
    if found is not None:
        return _nvcc(Path(found), Path(found).stat().st_mtime_ns)
    for library in nvrtc_libraries():
        major, minor = ctypes.c_int(), ctypes.c_int()
        nvrtc = _load_nvrtc(library)
        _check(nvrtc, nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return CudaCompiler("nvrtc", library, f"NVRTC {major.value}.{minor.value}")
    raise ToolchainError(f"no CUDA compiler was found for target cuda; {ADVICE}")


@lru_cache
def _nvcc(path: Path, _modified: int) -> CudaCompiler:
    text = run_tool((str(path), "--version"), None, "nvcc does not tell its version", None, ADVICE)
    found = re.search(r"release (.*)", text)
    if found is None:
        raise ToolchainError(f"{path} is no nvcc: it names no release; {ADVICE}")
    return CudaCompiler("nvcc", path, f"nvcc {found[1].strip()}")


def nvrtc_libraries() -> Iterator[Path]:
    """Yield the NVRTC libraries of installed wheels, which share the namespace `nvidia`."""
    spec = find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for pattern in ("cu13/lib", "cuda_nvrtc/lib"):
            yield from sorted((Path(folder) / pattern).glob("libnvrtc.so.*"))


def compile_cuda(name: str, source: str, target: Target, cache: Path | None = None) -> Path:
    """Return `<name>.ptx`, from the build cache where it is there already."""
    compiler = find_cuda_compiler()
    flags = compiler.flags_for(target)
    result = f"{name}.ptx"

    def build(work: Path) -> None:
        (work / SOURCE_NAME).write_text(source, encoding="utf-8")
        if compiler.kind == "nvrtc":
            (work / result).write_bytes(compile_nvrtc(compiler.path, source, flags))
        else:
            command = (str(compiler.path), *flags, SOURCE_NAME, "-o", result)
            run_tool(command, work, "nvcc failed", {**os.environ, "LC_ALL": "C"}, ADVICE)
        (work / result).write_bytes(name_old_version((work / result).read_bytes()))

    key = content_key(
        [compiler.kind, str(compiler.path), compiler.version, flags, name, source, str(PTX_VERSION)]
    )
    return cached_build(key, result, cache, build)


def name_old_version(ptx: bytes) -> bytes:
    """Return PTX of the ISA version `PTX_VERSION`, without the zero byte that ends a text of C."""
    text, found = re.subn(rb"(?m)^\.version \d+\.\d+$", b".version " + PTX_VERSION, ptx, count=1)
    if not found:
        raise ToolchainError("the CUDA compiler wrote PTX without a version")
    return text.rstrip(b"\0")


def compile_nvrtc(library: Path, source: str, flags: Sequence[str]) -> bytes:
    """Return the PTX of a text; ToolchainError with the compiler's log."""
    nvrtc = _load_nvrtc(library)
    program = ctypes.c_void_p()
    text = source.encode()
    name = SOURCE_NAME.encode()
    _check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None))
    try:
        options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        status = nvrtc.nvrtcCompileProgram(program, len(flags), options)
        if status:
            log = _read(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            raise ToolchainError("NVRTC failed", ("nvrtc", *flags), log)
        return _read(nvrtc, program, "PTX")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _load_nvrtc(library: Path) -> ctypes.CDLL:
    try:
        nvrtc = ctypes.CDLL(str(library))
    except OSError as error:
        raise ToolchainError(f"{library} cannot be loaded: {error}; {ADVICE}") from None
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    return nvrtc


def _check(nvrtc: ctypes.CDLL, status: int) -> None:
    if status:
        raise ToolchainError(f"NVRTC failed: {nvrtc.nvrtcGetErrorString(status).decode()}")


def _read(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    """Return one result of a program: `ProgramLog` or `PTX`."""
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    data = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, data))
    return data.raw
