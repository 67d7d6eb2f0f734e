"""CUDA compilers: the text builds for every architecture; without one the error says what to do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dovetail.codegen import nvidia
from dovetail.codegen.catalog import HeadShape, KernelRequest, kernel_request
from dovetail.codegen.emit import UnitSpec
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
def test_nvcc_makes_machine_code_for_every_architecture(tmp_path: Path) -> None:
    built = build_library(SPEC, tmp_path)
    data = built.path.read_bytes()
    assert built.index.library == built.path.name == "kernels.fatbin"
    assert built.index.target == "cuda" and built.index.compiler.startswith("nvcc ")
    assert {k.warps for k in built.index.kernels} == {8}
    for architecture in nvidia.ARCHITECTURES:
        assert f"sm_{architecture}".encode() in data
    assert data.count(b"\x7fELF") == len(nvidia.ARCHITECTURES)
    assert build_library(SPEC, tmp_path).path.stat().st_mtime_ns == built.path.stat().st_mtime_ns


@needs_nvcc
def test_a_wrong_text_carries_what_nvcc_wrote(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match="nvcc failed") as caught:
        nvidia.compile_cuda("wrong", "int x = ;\n", CUDA, tmp_path)
    assert "expected an expression" in caught.value.stderr


@pytest.mark.parametrize("architecture", nvidia.ARCHITECTURES)
def test_nvrtc_compiles_the_same_text(architecture: str) -> None:
    library = next(nvidia.nvrtc_libraries(), None)
    if library is None:
        pytest.skip("NVRTC is not installed (pip install nvidia-cuda-nvrtc)")
    source = emitted()
    flags = (*CUDA.cflags, f"--gpu-architecture=sm_{architecture}")
    assert nvidia.compile_nvrtc(library, source, flags, "CUBIN").startswith(b"\x7fELF")
    with pytest.raises(ToolchainError, match=r"(?s)NVRTC failed.*kernels\.cu"):
        nvidia.compile_nvrtc(library, f"{source}\nint x = ;", flags, "CUBIN")


def emitted() -> str:
    kernels = tuple(lower_request(r, CUDA, SPEC.modules.get(r.module)) for r in SPEC.kernels)
    return emit_cuda(UnitSpec("kernels", CUDA, kernels))


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


@needs_nvcc
@pytest.mark.parametrize(
    ("family", "head_dim"),
    [
        *(("prefill_attention_lanes", hd) for hd in (128, 256)),
        *(("packed_attention_lanes", hd) for hd in (32, 64, 128)),
    ],
)
def test_attention_of_prompts_stays_in_registers(
    tmp_path: Path, family: str, head_dim: int
) -> None:
    shape = HeadShape(head_dim, 4)
    kernel = lower_request(kernel_request(family, CUDA, "bf16", shape), CUDA)
    (tmp_path / "k.cu").write_text(emit_cuda(UnitSpec("k", CUDA, (kernel,))))
    nvcc = nvidia.find_cuda_compiler().path
    command = (nvcc, *CUDA.cflags, "-cubin", "-arch=sm_80", "-Xptxas=-v", "-o", "k.o", "k.cu")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (tmp_path / "k.o").read_bytes().startswith(b"\x7fELF")
    assert " 0 bytes spill stores" in done.stderr
