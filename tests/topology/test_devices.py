from __future__ import annotations

from pathlib import Path

from dovetail.topology.hardware import read_hardware
from tests.topology.snapshot import Machine


def test_cuda_devices(tmp_path: Path) -> None:
    gpu = "0000:3b:00.0"
    extra = {
        f"proc/driver/nvidia/gpus/{gpu}/information": "Model: \t\t Acme GPU\nIRQ: 1",
        f"sys/bus/pci/devices/{gpu}/local_cpulist": "1-7",
    }
    (device,) = read_hardware(root=Machine(extra=extra).build(tmp_path)).accelerators
    assert (device.kind, device.name, device.model, device.near) == (
        "cuda",
        "cuda0",
        "Acme GPU",
        (1,),
    )


def test_without_a_driver_there_are_none(tmp_path: Path) -> None:
    assert read_hardware(root=Machine().build(tmp_path)).accelerators == ()
