"""Which device an engine runs on beside the CPU, found before torch is imported.

In: what `device` says, the machine's accelerators, the installed torch. Out: a `DeviceChoice`.
Drivers and libraries are looked for as files; nothing here loads them.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.ir.errors import DeviceError, RequestError, install
from dovetail.topology.devices import AMD
from dovetail.topology.values import AcceleratorSpec

AUTO, CPU, TORCH_CPU = "auto", "cpu", "torch:cpu"
VISIBLE = {
    "cuda": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    "xpu": ("ZE_AFFINITY_MASK",),
    "npu": ("ASCEND_RT_VISIBLE_DEVICES",),
}
"""Accelerators by torch's names, best known first; what hides some of each from a process."""
ROCM = "ROCm"
NEEDS = {
    "cuda": "lib/libtorch_cuda.so",
    ROCM: "lib/libtorch_hip.so",
    "xpu": "lib/libtorch_xpu.so",
    "npu": "../torch_npu/__init__.py",
}
"""Where an accelerator computes, seen from the folder of torch; `torch:cpu` needs the folder."""
OF_EXTRA = ("cuda", TORCH_CPU)
"""What the torch of the extra is built for."""

log = logging.getLogger("dovetail")


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """A device. kind: auto, cpu (our kernels alone), torch:cpu, cuda, xpu, npu; index: which."""

    kind: str
    index: int = 0

    @property
    def name(self) -> str:
        """As torch calls it, `cuda:0`; `cpu` and `torch:cpu` are what they are."""
        return f"{self.kind}:{self.index}" if self.kind in VISIBLE else self.kind

    @property
    def beside_cpu(self) -> bool:
        """Whether torch computes, and the CPU beside it."""
        return self.kind != CPU


def parse_device(text: str) -> DeviceChoice:
    """Return the device that a text names; RequestError for one that names none."""
    if text in (AUTO, CPU, TORCH_CPU):
        return DeviceChoice(text)
    found = re.fullmatch(rf"({'|'.join(VISIBLE)})(?::(\d{{1,3}}))?", text)
    if found is None:
        raise RequestError(
            f"device is auto, cpu, cuda, cuda:1, xpu, npu or torch:cpu, not {text!r}"
        )
    return DeviceChoice(found[1], int(found[2] or 0))


def find_torch() -> Path | None:
    """Return the folder of the torch that is installed, None without one; imports nothing."""
    spec = importlib.util.find_spec("torch")
    folders = spec.submodule_search_locations if spec else None
    return Path(folders[0]) if folders else None


def choose_device(
    text: str,
    accelerators: Sequence[AcceleratorSpec],
    *,
    torch: Path | None,
    environ: Mapping[str, str] = os.environ,
) -> DeviceChoice:
    """Return the device to use, which is here and which torch was built for; never `auto`.

    `auto` takes the first accelerator, the CPU where there is none; where only torch lacks, the log
    says what to install. It never takes `torch:cpu`. torch: its folder. environ: names the devices
    that this process may see.

    Raises RequestError as `parse_device`, DeviceError where a device is not here or torch lacks.
    """
    wanted = parse_device(text)
    if wanted.kind == AUTO:
        return _choose_best(accelerators, torch, environ)
    if wanted.kind in VISIBLE:
        count = _count(wanted.kind, accelerators, environ)
        if wanted.index >= count:
            raise DeviceError(
                f"there is no device {wanted.name} here ({_tell(wanted.kind, count)})"
            )
    if lacks := _lacks(wanted, accelerators, torch):
        raise DeviceError(f"device {wanted.name} needs {lacks}; install it, or use device cpu")
    return wanted


def _choose_best(
    accelerators: Sequence[AcceleratorSpec], torch: Path | None, environ: Mapping[str, str]
) -> DeviceChoice:
    for kind in VISIBLE:
        if _count(kind, accelerators, environ):
            choice = DeviceChoice(kind)
            lacks = _lacks(choice, accelerators, torch)
            if not lacks:
                return choice
            log.warning("device %s is not used: it needs %s", choice.name, lacks)
    return DeviceChoice(CPU)


def _count(kind: str, accelerators: Sequence[AcceleratorSpec], environ: Mapping[str, str]) -> int:
    """Return how many devices of a kind the process sees: torch numbers these."""
    there = sum(device.kind == kind for device in accelerators)
    lists = [shown for name in VISIBLE[kind] if (shown := environ.get(name)) is not None]
    if not lists or not there:
        return there
    return min(map(_count_shown, lists))


def _count_shown(shown: str) -> int:
    names = [name.strip() for name in shown.split(",")]
    hidden = [place for place, name in enumerate(names) if name in ("", "-1")]
    return hidden[0] if hidden else len(names)  # parts of one device may have names of their own


def _tell(kind: str, count: int) -> str:
    if count:
        return f"{kind}:0 to {kind}:{count - 1} are" if count > 1 else f"{kind}:0 is"
    return f"no driver shows one, or one of {', '.join(VISIBLE[kind])} hides it"


def _lacks(
    choice: DeviceChoice, accelerators: Sequence[AcceleratorSpec], torch: Path | None
) -> str:
    """Return what must be installed for a device, "" where nothing lacks."""
    made_by = {device.kind: ROCM for device in accelerators if device.model.startswith(AMD)}
    build = made_by.get(choice.kind, choice.kind)
    if choice.kind == CPU or (torch is not None and (torch / NEEDS.get(build, "")).exists()):
        return ""
    lacks = f"torch 2.6 or newer, built for {build if build in NEEDS else 'the CPU'}"
    return lacks if torch or build not in OF_EXTRA else f"{lacks} ({install('gpu')})"
