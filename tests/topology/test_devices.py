"""Accelerators as drivers show them in files, and what must not be taken for one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dovetail.topology.hardware import read_hardware
from dovetail.topology.values import AcceleratorSpec
from tests.topology.snapshot import Machine

SMALL, LARGE = "0000:3b:00.0", "0000:af:00.0"


def nvidia(address: str, minor: int, model: str = "Acme GPU") -> dict[str, str]:
    """Return the files of one GPU, its node under `/dev` left out."""
    information = f"Model: \t\t {model}\nIRQ: 1\nDevice Minor: \t {minor}"
    return {
        f"proc/driver/nvidia/gpus/{address}/information": information,
        f"sys/bus/pci/devices/{address}/local_cpulist": "1-7",
    }


def seen(root: Path, extra: Mapping[str, str]) -> tuple[AcceleratorSpec, ...]:
    return read_hardware(root=Machine(extra=extra).build(root)).accelerators


def test_cuda_devices(tmp_path: Path) -> None:
    (device,) = seen(tmp_path, nvidia(SMALL, 0) | {"dev/nvidia0": ""})
    assert device == AcceleratorSpec(kind="cuda", name="cuda0", model="Acme GPU", near=(1,))


def test_a_gpu_without_its_node_belongs_to_another_container(tmp_path: Path) -> None:
    files = nvidia(SMALL, 0, "Other") | nvidia(LARGE, 1, "Ours") | {"dev/nvidia1": ""}
    (device,) = seen(tmp_path, files)
    assert (device.name, device.model) == ("cuda0", "Ours")


def test_a_guest_of_windows_has_a_gpu_where_there_is_its_library(tmp_path: Path) -> None:
    assert seen(tmp_path / "bare", {"dev/dxg": ""}) == ()
    files = {"dev/dxg": "", "usr/lib/wsl/lib/libcuda.so.1": ""}
    assert [device.name for device in seen(tmp_path / "cuda", files)] == ["cuda0"]


def test_gpus_of_intel_compute_where_there_is_level_zero(tmp_path: Path) -> None:
    for name, library in (("draws", {}), ("computes", {"usr/lib64/libze_loader.so.1": ""})):
        root = tmp_path / name
        files = {f"dev/dri/renderD{n}": "" for n in (128, 129, 130)} | library
        for node, driver in ((128, "xe"), (129, "amdgpu"), (130, "i915"), (131, "xe")):
            device = root / f"sys/class/drm/renderD{node}/device"
            (root / f"sys/bus/pci/drivers/{driver}").mkdir(parents=True, exist_ok=True)
            device.mkdir(parents=True)
            (device / "driver").symlink_to(root / f"sys/bus/pci/drivers/{driver}")
        found = [device.name for device in seen(root, files)]
        assert found == (["xpu0", "xpu1"] if library else [])


def test_gpus_of_amd_are_cuda_devices_of_torch_where_there_are_none_of_nvidia(
    tmp_path: Path,
) -> None:
    nodes = "sys/class/kfd/kfd/topology/nodes"
    files = {f"{nodes}/0/gpu_id": "0", f"{nodes}/0/properties": "cpu_cores_count 8"}
    for node, minor, name in ((2, 129, "gfx90a"), (10, 128, "gfx942"), (11, 130, "gfx942")):
        files |= {f"{nodes}/{node}/gpu_id": f"{node}77", f"{nodes}/{node}/name": f"{name}\n"}
        files[f"{nodes}/{node}/properties"] = f"simd_count 440\ndrm_render_minor {minor}\n"
        files[f"sys/class/drm/renderD{minor}/device/local_cpulist"] = "1-7"
    files |= {f"dev/dri/renderD{minor}": "" for minor in (128, 129)}  # 130 is another container's
    assert seen(tmp_path / "hidden", files) == ()
    files["dev/kfd"] = ""
    found = seen(tmp_path / "shown", files)
    assert [(d.kind, d.name, d.model, d.near) for d in found] == [
        ("cuda", "cuda0", "AMD gfx90a", (1,)),
        ("cuda", "cuda1", "AMD gfx942", (1,)),
    ]
    both = seen(tmp_path / "both", files | nvidia(SMALL, 0) | {"dev/nvidia0": ""})
    assert [device.model for device in both] == ["Acme GPU"]


def test_ascend_devices(tmp_path: Path) -> None:
    files = {f"dev/{name}": "" for name in ("davinci_manager", "davinci1", "davinci0")}
    assert [(d.kind, d.name) for d in seen(tmp_path, files)] == [("npu", "npu0"), ("npu", "npu1")]


def test_without_a_driver_there_are_none(tmp_path: Path) -> None:
    assert seen(tmp_path, {}) == ()
