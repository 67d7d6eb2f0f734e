"""The accelerators of a machine that embed: encoders are started on each to find out.

In: an artifact, the accelerators that are asked for. Out: instances by device. Torch is asked for
its devices where it is imported: in their processes. One that cannot have the encoders is left out
and the log says why, unless it was asked for by name.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack

import msgspec

from dovetail.ir.errors import DeviceError, DovetailError
from dovetail.runtime.artifact import Artifact
from dovetail.runtime.devices import AUTO, find_torch
from dovetail.runtime.embedding.detector import torch_names
from dovetail.runtime.embedding.instance import Instance
from dovetail.runtime.embedding.process import ProcessInstance
from dovetail.runtime.embedding.service import Models
from dovetail.runtime.embedding.source import device_source
from dovetail.topology.hardware import HardwareSpec

log = logging.getLogger("dovetail")


def start_accelerators(
    artifact: Artifact, hardware: HardwareSpec, device: str, opened: ExitStack
) -> dict[str, Models]:
    """Return every encoder on each accelerator that can have them, in processes of their own.

    hardware: with the accelerators that `device` asks for (`choose_accelerators`). opened: closes
    the processes.

    Raises DovetailError for a device that is asked for by name and cannot have them.
    """
    found: dict[str, Models] = {}
    for accelerator, name in zip(hardware.accelerators, torch_names(hardware), strict=True):
        try:
            _check_torch()
            found[accelerator.name] = _start(artifact, name, accelerator.near, opened)
        except DovetailError as error:
            if device != AUTO:
                raise
            log.warning("%s does not embed: %s", accelerator.name, error)
    return found


def only(hardware: HardwareSpec, found: dict[str, Models]) -> HardwareSpec:
    """Return the machine with the accelerators that embed."""
    able = tuple(device for device in hardware.accelerators if device.name in found)
    return msgspec.structs.replace(hardware, accelerators=able)


def _check_torch() -> None:
    if find_torch() is None:
        raise DeviceError("torch is not installed; install torch for it, or give device cpu")


def _start(artifact: Artifact, device: str, near: tuple[int, ...], opened: ExitStack) -> Models:
    models: dict[str, Instance] = {}
    with ExitStack() as started:
        for name in artifact.encoders:
            instance = ProcessInstance(device_source(artifact.path, device, name), near)
            models[name] = instance
            started.callback(instance.close)
        opened.enter_context(started.pop_all())
    return models
