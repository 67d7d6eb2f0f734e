"""The GPUs of a machine that embed: encoders are started on each to find out.

In: an artifact, the machine. Out: instances by device. A GPU that cannot have the encoders is left
out, and the log says why: nobody has asked for it.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack

import msgspec

from dovetail.ir.errors import DovetailError
from dovetail.runtime.artifact import Artifact
from dovetail.runtime.embedding.instance import Instance
from dovetail.runtime.embedding.process import ProcessInstance
from dovetail.runtime.embedding.service import Models
from dovetail.runtime.embedding.source import gpu_source
from dovetail.topology.hardware import HardwareSpec

CUDA = "cuda"

log = logging.getLogger("dovetail")


def start_gpus(artifact: Artifact, hardware: HardwareSpec, opened: ExitStack) -> dict[str, Models]:
    """Return every encoder on each GPU that can have them, in processes that `opened` closes."""
    gpus = [device for device in hardware.accelerators if device.kind == CUDA]
    if CUDA not in artifact.manifest.targets:
        for device in gpus:
            log.info(
                "%s: the artifact has no kernels for it, so it does not embed; compile with "
                "`--target cuda`",
                device.name,
            )
        return {}
    found: dict[str, Models] = {}
    for ordinal, device in enumerate(gpus):
        try:
            found[device.name] = _start(artifact, ordinal, device.near, opened)
        except DovetailError as error:
            log.warning("%s does not embed: %s", device.name, error)
    return found


def only(hardware: HardwareSpec, found: dict[str, Models]) -> HardwareSpec:
    """Return the machine with the accelerators that embed."""
    able = tuple(device for device in hardware.accelerators if device.name in found)
    return msgspec.structs.replace(hardware, accelerators=able)


def _start(artifact: Artifact, ordinal: int, near: tuple[int, ...], opened: ExitStack) -> Models:
    models: dict[str, Instance] = {}
    with ExitStack() as started:
        for name in artifact.encoders:
            instance = ProcessInstance(gpu_source(artifact.path, ordinal, name), near)
            models[name] = instance
            started.callback(instance.close)
        opened.enter_context(started.pop_all())
    return models
