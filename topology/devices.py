"""Finds the accelerators of a Linux machine without loading a driver's library, or torch.

In: a root directory with `/proc`, `/sys` and `/dev`. Out: AcceleratorSpecs, whose kinds are torch's
names. What has no node under `/dev` is not this process's: containers show the drivers of others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dovetail.topology.textfile import read_id_list, read_text
from dovetail.topology.values import AcceleratorSpec

MAX_DEVICES = 256
INTEL_DRIVERS = ("xe", "i915")
LEVEL_ZERO = "libze_loader.so.1"
"""Intel's GPUs compute through it; without it they draw, and are no accelerators."""
LIBRARIES = (
    *("usr/lib", "usr/lib64", "usr/local/lib", "usr/local/lib64"),
    *("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu"),
)
WSL_CUDA = "usr/lib/wsl/lib/libcuda.so.1"
AMD = "AMD"
"""What models of AMD's GPUs begin with: a torch that is built for ROCm calls them `cuda`, too."""


def read_accelerators(root: Path, online: tuple[int, ...]) -> tuple[AcceleratorSpec, ...]:
    """Return the devices under `root`: NVIDIA's, Intel's, Ascend's, each kind in torch's order.

    AMD's take the place of NVIDIA's where there are none of these: no torch computes on both.
    """
    cuda = (*_nvidia(root, online),) or (*_amd(root, online),)
    return (*cuda, *_intel(root, online), *_ascend(root))[:MAX_DEVICES]


def _nvidia(root: Path, online: tuple[int, ...]) -> Iterator[AcceleratorSpec]:
    folder, number = root / "proc/driver/nvidia/gpus", 0
    for address in _names(folder):
        facts = _read_facts(folder / address / "information")
        minor = facts.get("Device Minor", str(number))
        if (root / "dev" / f"nvidia{minor}").exists():
            near = _near(root / "sys/bus/pci/devices" / address, online)
            yield _spec("cuda", number, near, facts.get("Model", ""))
            number += 1
    if not number and (root / "dev/dxg").exists() and (root / WSL_CUDA).exists():
        yield _spec("cuda", 0)  # Windows tells its guests of no more


def _amd(root: Path, online: tuple[int, ...]) -> Iterator[AcceleratorSpec]:
    """CPUs are nodes there, too, of GPU id 0."""
    nodes, number = root / "sys/class/kfd/kfd/topology/nodes", 0
    names = [name for name in _names(nodes) if name.isdecimal() and (root / "dev/kfd").exists()]
    for folder in (nodes / name for name in sorted(names, key=int)):
        facts = dict(line.split()[:2] for line in _lines(folder / "properties"))
        render = f"renderD{facts.get('drm_render_minor', '')}"
        gpu = (read_text(folder / "gpu_id") or "0").strip() != "0"
        if gpu and (root / "dev/dri" / render).exists():
            near = _near(root / "sys/class/drm" / render / "device", online)
            model = f"{AMD} {(read_text(folder / 'name') or '').strip()}".strip()
            yield _spec("cuda", number, near, model)
            number += 1


def _intel(root: Path, online: tuple[int, ...]) -> Iterator[AcceleratorSpec]:
    drm, number = root / "sys/class/drm", 0
    if not any((root / folder / LEVEL_ZERO).exists() for folder in LIBRARIES):
        return
    for name in _names(drm):
        if not name.startswith("renderD") or not (root / "dev/dri" / name).exists():
            continue
        if (drm / name / "device/driver").resolve().name in INTEL_DRIVERS:
            yield _spec("xpu", number, _near(drm / name / "device", online))
            number += 1


def _ascend(root: Path) -> Iterator[AcceleratorSpec]:
    """Its nodes are numbered: davinci0, davinci1 ...; `davinci_manager` is none."""
    numbers = (name.removeprefix("davinci") for name in _names(root / "dev", "davinci"))
    for number, _ in enumerate(sorted(int(n) for n in numbers if n.isdecimal())):
        yield _spec("npu", number)


def _spec(kind: str, number: int, near: tuple[int, ...] = (), model: str = "") -> AcceleratorSpec:
    return AcceleratorSpec(kind=kind, name=f"{kind}{number}", model=model, near=near)


def _names(folder: Path, prefix: str = "") -> list[str]:
    """Return what is in a folder, in order; nothing where it cannot be read."""
    try:
        return sorted(path.name for path in folder.iterdir() if path.name.startswith(prefix))
    except OSError:
        return []


def _lines(path: Path) -> list[str]:
    """Return the lines of two words or more."""
    return [line for line in (read_text(path) or "").splitlines() if len(line.split()) > 1]


def _read_facts(path: Path) -> dict[str, str]:
    """Return the lines `key: value` of a file."""
    parts = (line.partition(":") for line in (read_text(path) or "").splitlines())
    return {key.strip(): value.strip() for key, _, value in parts}


def _near(device: Path, online: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(pu for pu in read_id_list(device / "local_cpulist") if pu in set(online))
