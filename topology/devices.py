"""Finds the accelerators of a Linux machine without loading a driver's library.

In: a root directory with `/proc/driver/nvidia` and `/sys/bus/pci`. Out: AcceleratorSpecs.
"""

from __future__ import annotations

from pathlib import Path

from dovetail.topology.textfile import parse_id_list, read_text
from dovetail.topology.values import AcceleratorSpec

MAX_DEVICES = 256


def read_accelerators(root: Path, online: tuple[int, ...]) -> tuple[AcceleratorSpec, ...]:
    """Return the CUDA devices under `root` by bus address; none where there is no driver."""
    folder = root / "proc/driver/nvidia/gpus"
    try:
        addresses = sorted(path.name for path in folder.iterdir())[:MAX_DEVICES]
    except OSError:
        return ()
    return tuple(
        AcceleratorSpec(
            kind="cuda",
            name=f"cuda{index}",
            model=_model(folder / address / "information"),
            near=_near(root / "sys/bus/pci/devices" / address, online),
        )
        for index, address in enumerate(addresses)
    )


def _model(path: Path) -> str:
    for line in (read_text(path) or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "Model":
            return value.strip()
    return ""


def _near(device: Path, online: tuple[int, ...]) -> tuple[int, ...]:
    path = device / "local_cpulist"
    return tuple(pu for pu in parse_id_list(read_text(path) or "", path) if pu in set(online))
