"""Divides the memory that is free among the models of apps, before any of them is opened.

In: artifacts, a draft model, options. Out: options or bytes that tell each engine what the others
leave it, or one error with the sum: each model alone may fit where all together do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dovetail.ir.dtypes import DTYPES
from dovetail.ir.model import KV_BLOCK
from dovetail.runtime.artifact import Artifact, EncoderPart, ModelPart, open_artifact
from dovetail.runtime.embed.open import instances_here
from dovetail.runtime.embed.settings import EmbeddingSettings
from dovetail.runtime.engine.draft_executor import draft_options
from dovetail.runtime.engine.executor import memory_need
from dovetail.runtime.engine.options import DTYPES as FLOATS
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.machine.devices import TORCH_CPU
from dovetail.runtime.machine.memory import available_memory
from dovetail.runtime.native.encoder import PASS_TOKENS, device_bytes, encoder_need
from dovetail.runtime.native.forward import find_tape
from dovetail.runtime.native.weights import row_bytes, weight_bytes
from dovetail.runtime.schedule.device_limits import MemoryNeed, check_together
from dovetail.topology.hardware import HardwareSpec, read_hardware

Needs = dict[str, MemoryNeed]


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
    engine, beside = _add_up(artifact, draft, hardware, options, embedding, device)
    if not beside:
        return options
    free = available_memory(hardware)
    free = free if options.memory is None else min(free, options.memory)
    check_together(engine | beside, free)
    return replace(options, memory=free - _total(beside))


def divide_memory(
    artifacts: Mapping[str, Path], options: EngineOptions, embedding: EmbeddingSettings | None
) -> dict[str, int | None]:
    """Return the bytes that each app that generates may use: its need, and a like part of the rest.

    artifacts: by the apps' names. options: of each app, its device not settled yet. None: no bound,
    for an app that is the only one, or keeps nothing. Raises as `share_memory`.
    """
    if len(artifacts) == 1:
        return dict.fromkeys(artifacts)
    hardware, device = read_hardware(), options.device
    options, draft = options.settle(hardware), None
    if options.draft is not None:
        draft = open_artifact(options.draft, hardware, kernels=False)
    apps: dict[str, Needs] = {}
    for name, path in artifacts.items():
        artifact = open_artifact(path, hardware, kernels=False)
        given = draft if draft and draft.models and artifact.models else None
        engine, beside = _add_up(artifact, given, hardware, options, embedding, device)
        apps[name] = engine | beside
    free = available_memory(hardware)
    named = {f"{app}: {part}": n for app, needs in apps.items() for part, n in needs.items()}
    check_together(named, free)
    growing = [app for app, needs in apps.items() if any(need.block for need in needs.values())]
    rest = (free - _total(named)) // max(1, len(growing))  # encoders keep nothing
    return {app: _total(apps[app]) + rest if app in growing else None for app in apps}


def _add_up(
    artifact: Artifact,
    draft: Artifact | None,
    hardware: HardwareSpec,
    options: EngineOptions,
    embedding: EmbeddingSettings | None,
    device: str,
) -> tuple[Needs, Needs]:
    """Return what the engine's model needs by its name, and what the others of an app need.

    With `torch:cpu`, tensors of torch's lie in the same memory, beside what our kernels have.
    """
    here = instances_here(hardware, device, embedding) if artifact.encoders else 0
    beside = {name: encoder_need(part, here) for name, part in artifact.encoders.items() if here}
    if device == TORCH_CPU:
        beside |= {f"{n} on {device}": _torch_encoder(e) for n, e in artifact.encoders.items()}
    if draft is not None:
        beside["the draft model"] = _draft_need(draft, artifact, options)
    alone = options.beside_cpu
    engine = {
        name: memory_need(part, options.plan or artifact.service, options, own_logits=alone)
        for name, part in artifact.models.items()
    }
    if options.device == TORCH_CPU:
        engine |= {
            f"{name} on {TORCH_CPU}": _torch_model(part, engine[name].block, options)
            for name, part in artifact.models.items()
        }
    return engine, beside


def _total(needs: Mapping[str, MemoryNeed]) -> int:
    return sum(need.total for need in needs.values())


def _torch_model(part: ModelPart, block: int, options: EngineOptions) -> MemoryNeed:
    """Return what a model needs as tensors; block: bytes of one of KV, of all processes."""
    spec, value = part.file.spec, _value_bytes(part.file.spec.weight_dtype, options.dtype)
    tokens = options.max_num_batched_tokens or 1  # the least that a step is given room for
    return MemoryNeed(
        weights=weight_bytes(part.file.weights, value),
        block=block,
        activations=2 * tokens * row_bytes(find_tape(part, "forward"), value),
        context=(options.gpu_blocks or 0) * KV_BLOCK or options.bound_context(spec.max_context),
    )


def _torch_encoder(part: EncoderPart) -> MemoryNeed:
    value = _value_bytes(part.file.spec.weight_dtype)
    tape = find_tape(part, "encode")
    weights, activations = device_bytes(part.file, tape, value, PASS_TOKENS)
    context = part.file.spec.max_tokens
    return MemoryNeed(weights=weights, block=0, activations=activations, context=context)


def _value_bytes(weights: str, dtype: str = "auto") -> int:
    """Return the bytes of a value of a matrix on `torch:cpu`: as stored, bfloat16 if quantised."""
    chosen = weights if dtype == "auto" else dtype
    return DTYPES[chosen if chosen in FLOATS else "bf16"].size


def _draft_need(draft: Artifact, artifact: Artifact, options: EngineOptions) -> MemoryNeed:
    (part,), (model,) = draft.models.values(), artifact.models.values()
    context, plan = options.bound_context(model.file.spec.max_context), options.plan
    given = draft_options(part, plan or artifact.service, context, options)
    assert given.plan is not None, "it is set there"
    return memory_need(part, given.plan, given)
