"""Opens an artifact's engine as the options of `load` ask for it, once its draft model fits it."""

from __future__ import annotations

import logging
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from msgspec import json

from dovetail.ir.errors import DeviceError, DovetailError, RequestError, SpecError
from dovetail.ir.model import ModelSpec
from dovetail.runtime.artifact import Artifact, ModelPart, open_artifact
from dovetail.runtime.engine.draft_executor import add_draft_model
from dovetail.runtime.engine.engine import Engine
from dovetail.runtime.engine.executor import CpuExecutor, open_on_cpu
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.machine.devices import CPU
from dovetail.runtime.machine.kv_file import KvBlocks, KvFile
from dovetail.runtime.machine.seat import Board
from dovetail.runtime.machine.trust import check_trust
from dovetail.runtime.text.masks import Grammars
from dovetail.runtime.text.tokenizer import read_tokenizer
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
    if options.draft is not None:
        try:
            add_draft_model(engine, open_artifact(options.draft, hardware), hardware, options)
        except DovetailError:
            engine.close()
            raise
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
            _refuse_device(part.file.spec)
            return open_on_device(artifact, part, hardware, options, board)
        except DeviceError as error:
            if not options.spare_cpu:
                raise
            log.warning("device %s is not used: %s", options.device, error)
        options = replace(options, device=CPU, gpu_blocks=None)
    if options.ranks is not None:
        raise SpecError("`ranks` are for processes that each have a device; give `device`, too")
    engine = open_on_cpu(artifact, part, hardware, options, board)
    if options.kv_file is not None:
        try:
            _open_file(engine, artifact, options, Path(options.kv_file))
        except RequestError:
            engine.executor.close()
            raise
    return engine


def _refuse_device(spec: ModelSpec) -> None:
    """Raise DeviceError for a model with parts that devices have no operators of."""
    kinds = {
        "layers without keys": spec.recurrent,
        "latent attention": spec.latent,
        "adapters beside a model": spec.adapters,
    }
    if kind := next((kind for kind, there in kinds.items() if there), None):
        raise DeviceError(f"models with {kind} run on the CPU alone; use device cpu")


def _open_file(engine: Engine, artifact: Artifact, options: EngineOptions, path: Path) -> None:
    """Keep KV of an engine in a file, too, where it is all in this process."""
    executor = engine.executor
    assert isinstance(executor, CpuExecutor), "other KV is elsewhere"
    if executor.group is not None:
        log.warning("%s is not used: KV is in several processes here", path)
        return
    if engine.spec.recurrent:
        raise RequestError("kv_file does not support models with recurrent layers; remove kv_file")
    kept = json.encode([artifact.manifest, options.deterministic, options.activations])
    pools = "kv"[: engine.spec.pools]
    layers = (layer for pool in pools for layer in executor.model.kv.layers(pool))
    blocks = KvBlocks(tuple(layer.reshape(executor.blocks, -1) for layer in layers))
    pool = engine.scheduler.pool
    pool.file = KvFile(path, sha256(kept).hexdigest(), blocks, options.kv_file_bytes)


# ---- whether a draft model speaks a model's language: token ids must mean the same to both ----


def check_draft(
    target: Artifact, options: EngineOptions, hardware: HardwareSpec, *, trust: bool
) -> Artifact | None:
    """Return the draft model of `options`, if any and there is a model that it may draft for.

    Raises SpecError where it cannot draft for that of `target`, and as `open_artifact`.
    """
    if options.draft is None or not target.models:
        return None
    draft = open_artifact(options.draft, hardware)
    check_trust(draft.path, trust=trust, code=draft.code)
    if not draft.models:
        raise SpecError(
            f"{draft.path} contains no text-generation model, so it cannot be a draft model; "
            f"{_INSTEAD}"
        )
    model, small = (next(iter(one.models.values())) for one in (target, draft))
    problem = _compare(model, small)
    if problem:
        raise SpecError(f"{draft.path} cannot draft for {target.path}: {problem}; {_INSTEAD}")
    return draft


def _compare(model: ModelPart, small: ModelPart) -> str:
    """Return in what the vocabularies differ, "" where they do not."""
    sizes = small.file.spec.vocab_size, model.file.spec.vocab_size
    if model.tokenizer is None or small.tokenizer is None:
        return "" if sizes[0] == sizes[1] else f"it has {sizes[0]} tokens, the model {sizes[1]}"
    if model.tokenizer.read_bytes() == small.tokenizer.read_bytes():
        return ""
    both = map(read_tokenizer, (model.tokenizer, small.tokenizer))
    theirs, ours = (one.get_vocab(with_added_tokens=True) for one in both)
    differing = sum(ours.get(text) != token for text, token in theirs.items())
    if not differing:
        return ""
    return (
        f"of the {len(theirs)} tokens that the model has, {differing} are others in the draft model"
    )


_INSTEAD = "give a smaller model of the same family, which shares the vocabulary, or omit the draft"
