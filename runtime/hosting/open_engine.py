"""Opens an artifact's engine as the options of `load` ask for it."""

from __future__ import annotations

import logging
from dataclasses import replace

from dovetail.ir.errors import DeviceError, SpecError
from dovetail.runtime.artifact import Artifact, ModelPart
from dovetail.runtime.engine.engine import Engine
from dovetail.runtime.engine.executor import open_on_cpu
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.machine.devices import CPU
from dovetail.runtime.machine.seat import Board
from dovetail.runtime.text.masks import Grammars
from dovetail.topology.hardware import HardwareSpec

log = logging.getLogger("dovetail")


def open_engine(
    artifact: Artifact, hardware: HardwareSpec, options: EngineOptions, board: Board | None = None
) -> Engine:
    """Return the engine of the model of `artifact` that generates; raises as `load`.

    board: of the workers that share the CPUs.

    A driver may be too old for torch, which is known once torch has been imported.
    """
    part = next(iter(artifact.models.values()))
    engine = _open(artifact, part, hardware, options, board)
    spec = part.file.spec
    engine.grammars = Grammars(part.tokenizer, spec.vocab_size, spec.eos_token_ids)
    return engine


def _open(
    artifact: Artifact,
    part: ModelPart,
    hardware: HardwareSpec,
    options: EngineOptions,
    board: Board | None,
) -> Engine:
    if options.beside_cpu:
        from dovetail.runtime.accel.executor import (  # noqa: PLC0415 - it imports torch
            open_on_device,
        )

        try:
            return open_on_device(artifact, part, hardware, options)
        except DeviceError as error:
            if not options.spare_cpu:
                raise
            log.warning("device %s is not used: %s", options.device, error)
        options = replace(options, device=CPU, gpu_blocks=None)
    if options.ranks is not None:
        raise SpecError("`ranks` are for processes that each have a device; give `device`, too")
    return open_on_cpu(artifact, part, hardware, options, board)
