"""The driver's interface: whole launches on an emulated driver, and what goes wrong without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dovetail.codegen.catalog import kernel_request
from dovetail.codegen.library import lower_request
from dovetail.codegen.targets import DEVICE_TARGETS
from dovetail.ir.artifact import KernelEntry
from dovetail.ir.errors import ArtifactError, CapacityError, SpecError
from dovetail.runtime.cuda import CudaDevice, CudaModule
from tests.codegen.gpu_kernels import GpuKernels
from tests.emulated_gpu import build_driver, make_index, open_device
from tests.gpus import count_devices

CUDA = DEVICE_TARGETS["cuda"]
KERNELS = [
    lower_request(kernel_request(family, CUDA, dtype), CUDA)
    for family, dtype in (("rmsnorm", None), ("gate_rows", "silu"))
]


@pytest.fixture(scope="module")
def driver() -> str:
    return str(build_driver(KERNELS))


@pytest.fixture
def device(driver: str) -> Iterator[CudaDevice]:
    with open_device(driver) as device:
        yield device


def load(device: CudaDevice, folder: Path, text: str = "emulated") -> CudaModule:
    (folder / "k.ptx").write_text(text)
    return device.load(folder / "k.ptx", make_index(KERNELS))


def test_a_device_tells_what_it_is(device: CudaDevice) -> None:
    assert (device.name, device.capability, device.multiprocessors) == ("emulated", (9, 0), 132)


@pytest.mark.parametrize("warps", [1, 2, 8, 9, 40])
def test_launches_compute_on_device_memory(device: CudaDevice, tmp_path: Path, warps: int) -> None:
    rng = np.random.default_rng(warps)
    x, w = rng.standard_normal((5, 100)).astype(np.float32), rng.random(100, np.float32)
    out = np.zeros_like(x)
    addresses = [device.alloc(array.nbytes) for array in (x, w, out)]
    for address, array in zip(addresses, (x, w, out), strict=True):
        device.upload(address, array)
    module = load(device, tmp_path)
    operands = (5, 100, addresses[0], 100, addresses[1], 1e-5, addresses[2], 100)
    module.launch("rmsnorm", operands, warps)
    device.wait()
    device.download(out, addresses[2])
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * w
    np.testing.assert_allclose(out, want, rtol=3e-6, atol=1e-6)
    module.close()
    for address in addresses:
        device.free(address)


def test_a_wrong_number_of_operands_is_caught(device: CudaDevice, tmp_path: Path) -> None:
    module = load(device, tmp_path)
    with pytest.raises(ValueError, match="shorter"):
        module.launch("rmsnorm", (5, 100), 1)


def test_memory_that_is_not_there(device: CudaDevice) -> None:
    with pytest.raises(CapacityError, match="out of memory"):
        device.alloc(1 << 50)


def test_modules_that_do_not_load(device: CudaDevice, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"k\.ptx: .*9\.0.*image is invalid.*--target cuda"):
        load(device, tmp_path, "something else")
    with pytest.raises(ArtifactError, match="No such file"):
        device.load(tmp_path / "none.ptx", make_index([]))
    (tmp_path / "k.ptx").write_text("emulated")
    other = KernelEntry(name="other", family="other", params=(), binding={}, warps=8)
    index = msgspec.structs.replace(make_index(KERNELS), kernels=(other,))
    with pytest.raises(ArtifactError, match="cuModuleGetFunction"):
        device.load(tmp_path / "k.ptx", index)


def test_a_gpu_that_is_not_there(driver: str) -> None:
    with pytest.raises(SpecError, match="there is no GPU 1: 1 can be used"):
        CudaDevice(1, library=driver)


def test_without_a_driver_the_error_says_what_to_do(tmp_path: Path) -> None:
    missing = str(tmp_path / "libcuda.so.1")
    with pytest.raises(SpecError, match=r"install the NVIDIA driver, or use a CPU target"):
        CudaDevice(library=missing)


def test_a_driver_without_gpu_says_so(tmp_path: Path) -> None:
    if count_devices():
        pytest.skip("this machine has an NVIDIA GPU")
    with pytest.raises(SpecError, match=r"use a CPU target"):
        CudaDevice()


def test_arrays_and_their_views_share_memory_on_the_device(
    device: CudaDevice, tmp_path: Path
) -> None:
    (tmp_path / "k.ptx").write_text("emulated")
    gpu = GpuKernels(device, tmp_path / "k.ptx", make_index(KERNELS))
    both = np.linspace(-3, 3, 80, dtype=np.float32).reshape(2, 40)
    gate, up = both.astype(np.float64)
    gpu.call("gate_rows_silu", (1, 40, both[0], 40, both[1], 40, both[0], 40), 3)
    np.testing.assert_allclose(both[0], gate / (1 + np.exp(-gate)) * up, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(both[1], up, rtol=1e-7)
