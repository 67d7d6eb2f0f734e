"""Divides the memory that is free among the models of an app, before any of them is opened.

In: an artifact, its draft model, options. Out: options that tell the engine what the others leave
it, or one error with the sum: each model alone may fit where all together do not.
"""

from __future__ import annotations

from dataclasses import replace

from dovetail.runtime.artifact import Artifact
from dovetail.runtime.embed.open import instances_here
from dovetail.runtime.embed.settings import EmbeddingSettings
from dovetail.runtime.engine.draft_executor import draft_options
from dovetail.runtime.engine.executor import memory_need
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.machine.memory import available_memory
from dovetail.runtime.native.encoder import encoder_need
from dovetail.runtime.schedule.device_limits import MemoryNeed, check_together
from dovetail.topology.hardware import HardwareSpec


def share_memory(
    artifact: Artifact,
    draft: Artifact | None,
    hardware: HardwareSpec,
    options: EngineOptions,
    embedding: EmbeddingSettings | None,
    device: str,
) -> EngineOptions:
    """Return `options` with the engine's part of the memory.

    device: of the encoders. Raises CapacityError where the models do not fit together, and as
    `choose_accelerators` and `memory_need`.
    """
    here = instances_here(hardware, device, embedding) if artifact.encoders else 0
    beside = {name: encoder_need(part, here) for name, part in artifact.encoders.items() if here}
    if draft is not None:
        beside["the draft model"] = _draft_need(draft, artifact, options)
    if not beside:
        return options
    alone = options.beside_cpu
    needs = {
        name: memory_need(part, options.plan or artifact.service, options, own_logits=alone)
        for name, part in artifact.models.items()
    }
    free = available_memory(hardware)
    check_together(needs | beside, free)
    return replace(options, memory=free - sum(need.total for need in beside.values()))


def _draft_need(draft: Artifact, artifact: Artifact, options: EngineOptions) -> MemoryNeed:
    (part,), (model,) = draft.models.values(), artifact.models.values()
    context, plan = options.bound_context(model.file.spec.max_context), options.plan
    given = draft_options(part, plan or artifact.service, context, options)
    assert given.plan is not None, "it is set there"
    return memory_need(part, given.plan, given)
