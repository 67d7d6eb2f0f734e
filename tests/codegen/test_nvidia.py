"""CUDA compilers: the text builds for every architecture; without one the error says what to do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dovetail.codegen import nvidia
from dovetail.codegen.catalog import KernelRequest, device_kernels
from dovetail.codegen.emit_cuda import emit_cuda
from dovetail.codegen.library import LibrarySpec, build_library, lower_request
from dovetail.codegen.targets import DEVICE_TARGETS
from dovetail.ir.diagnostics import Source
from dovetail.ir.errors import ToolchainError
from dovetail.ir.high.parse import parse_high
from tests.codegen.lower.test_ops import MEMORY_TEXT, REDUCE_TEXT, VECTOR_TEXT

CUDA = DEVICE_TARGETS["cuda"]
OPS = parse_high(Source("ops.dk", VECTOR_TEXT + REDUCE_TEXT + MEMORY_TEXT))
SPEC = LibrarySpec(
    target=CUDA,
    kernels=tuple(KernelRequest("ops", f.name, {}, f.name) for f in OPS.functions),
    modules={"ops": OPS},
)
HAS_NVCC = shutil.which("nvcc") or Path(nvidia.DEFAULT_NVCC).exists()
needs_nvcc = pytest.mark.skipif(not HAS_NVCC, reason="nvcc is not installed (CUDA toolkit)")


@needs_nvcc
def test_nvcc_makes_ptx_of_the_oldest_architecture(tmp_path: Path) -> None:
    built = build_library(SPEC, tmp_path)
    assert built.index.library == built.path.name == "kernels.ptx"
    assert built.index.target == "cuda" and built.index.compiler.startswith("nvcc ")
    assert {k.warps for k in built.index.kernels} == {8}
    check_head(built.path.read_bytes())
    assert build_library(SPEC, tmp_path).path.stat().st_mtime_ns == built.path.stat().st_mtime_ns


def check_head(ptx: bytes) -> None:
    """Drivers refuse a version that they do not know, and architectures newer than the GPU."""
    assert re.findall(rb"(?m)^\.version (\S+)$", ptx) == [b"6.3"]
    assert re.findall(rb"(?m)^\.target (\S+)$", ptx) == [b"sm_75"]
    assert b"dt_cuda_" in ptx and ptx.endswith(b"\n")


@pytest.mark.long  # ptxas takes its time
@pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas is not installed (CUDA toolkit)")
@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90", "sm_120"])
def test_machine_code_of_products_spills_little(tmp_path: Path, architecture: str) -> None:
    """The text has nothing that its version or an architecture lacks; blocks stay in registers."""
    wanted = [r for r in device_kernels(["q4_32", "q6_16k"]) if not r.name.endswith("f16_f16")]
    spec = LibrarySpec(target=CUDA, kernels=tuple(wanted))
    built = build_library(spec, tmp_path)
    command = ("ptxas", "-v", f"-arch={architecture}", built.path, "-o", tmp_path / "k.cubin")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (tmp_path / "k.cubin").read_bytes().startswith(b"\x7fELF")
    spills = re.findall(r"properties for dt_cuda_(\w+)\n.* (\d+) bytes spill stores", done.stderr)
    assert len(spills) == len(wanted)
    assert all(int(size) < (1 if "_q" in name else 256) for name, size in spills), spills


@needs_nvcc
def test_a_wrong_text_carries_what_nvcc_wrote(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match="nvcc failed") as caught:
        nvidia.compile_cuda("wrong", "int x = ;\n", CUDA, tmp_path)
    assert "expected an expression" in caught.value.stderr


def test_nvrtc_compiles_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = next(nvidia.nvrtc_libraries(), None)
    if library is None:
        pytest.skip("NVRTC is not installed (pip install nvidia-cuda-nvrtc)")
    compiler = nvidia.CudaCompiler("nvrtc", library, "NVRTC")
    monkeypatch.setattr(nvidia, "find_cuda_compiler", lambda: compiler)
    check_head(nvidia.compile_cuda("kernels", emitted(), CUDA, tmp_path).read_bytes())
    with pytest.raises(ToolchainError, match=r"(?s)NVRTC failed.*kernels\.cu"):
        nvidia.compile_cuda("kernels", f"{emitted()}\nint x = ;", CUDA, tmp_path)


def test_ptx_without_a_version_is_refused() -> None:
    with pytest.raises(ToolchainError, match="without a version"):
        nvidia.name_old_version(b".target sm_75\n")


def emitted() -> str:
    kernels = tuple(lower_request(r, CUDA, SPEC.modules.get(r.module)) for r in SPEC.kernels)
    return emit_cuda("kernels", CUDA, kernels)


def test_without_a_compiler_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("DOVETAIL_NVCC", raising=False)
    monkeypatch.setattr(nvidia, "DEFAULT_NVCC", str(tmp_path / "nvcc"))
    monkeypatch.setattr(nvidia, "nvrtc_libraries", lambda: iter(()))
    with pytest.raises(ToolchainError, match=re.escape("pip install nvidia-cuda-nvrtc")):
        build_library(SPEC, tmp_path)


def test_a_named_compiler_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_NVCC", f"{os.sep}nowhere{os.sep}nvcc")
    with pytest.raises(ToolchainError, match="DOVETAIL_NVCC names"):
        nvidia.find_cuda_compiler()


def test_a_named_program_that_is_no_nvcc_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_NVCC", "true")
    with pytest.raises(ToolchainError, match="is no nvcc"):
        nvidia.find_cuda_compiler()
