"""Runs the small model whose guesses an engine verifies, on the CPU beside it. Decides nothing.

In: an opened engine and the artifact of the draft model. Out: the engine with a `Drafter`, whose
batches this computes.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from dovetail.ir.artifact import ServicePlan
from dovetail.ir.errors import RequestError
from dovetail.runtime.artifact import Artifact, ModelPart
from dovetail.runtime.engine.engine import Engine, Filled
from dovetail.runtime.engine.executor import CpuExecutor
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.native.forward import kv_block_bytes
from dovetail.runtime.schedule.draft_model import Drafter
from dovetail.runtime.schedule.kv_pool import KvPool, blocks_for
from dovetail.runtime.schedule.plan import Batch
from dovetail.runtime.schedule.request import Request
from dovetail.topology.hardware import HardwareSpec

MOST_TOKENS = 8192
"""Of all texts that a draft model has in memory at a time, and of each."""

log = logging.getLogger("dovetail")


def add_draft_model(
    engine: Engine, artifact: Artifact, hardware: HardwareSpec, options: EngineOptions
) -> None:
    """Open the model of `artifact` and have it draft for `engine`, which closes it.

    It is one process, on the CPUs of the engine's first: the two take turns. Raises as
    `CpuExecutor`; nothing where nothing is drafted.
    """
    speculation = engine.scheduler.speculation
    if speculation is None:
        return
    part = next(iter(artifact.models.values()))
    if part.file.spec.recurrent:
        raise RequestError("a model that drafts must have keys in all layers; give another draft")
    context = engine.scheduler.limits.max_context
    given = draft_options(part, engine.executor.service, context, options)
    executor = CpuExecutor(artifact, part, hardware, given)
    engine.draft_model = executor
    if isinstance(engine.executor, CpuExecutor):
        executor.seat = engine.executor.seat
    both = min(executor.limits.vocab_size, engine.scheduler.limits.vocab_size)
    limits = dataclasses.replace(executor.limits, vocab_size=both)
    pool = KvPool(executor.blocks, keep=True)
    speculation.drafter = Drafter(limits, pool, partial(_read, executor), time.perf_counter)
    speculation.drafter.warm()
    kv = kv_block_bytes(executor.spec) * executor.blocks
    sizes = part.chunks.total_bytes >> 20, kv >> 20
    log.info("the draft model takes %d MiB of weights and %d MiB of KV", *sizes)


def draft_options(
    part: ModelPart, service: ServicePlan, context: int, options: EngineOptions
) -> EngineOptions:
    """Return how the draft model of an engine of such a plan and context is opened."""
    blocks = blocks_for(MOST_TOKENS)
    return EngineOptions(
        plan=replace(service, processes=1, prefill_processes=0, kv_blocks=blocks),
        threads=options.threads,
        activations=options.activations,
        max_model_len=min(part.file.spec.max_context, context, MOST_TOKENS),
    )


def _read(
    executor: CpuExecutor,
    batch: Batch,
    texts: Mapping[int, Request],
    table: Callable[[int], array[int]],
) -> Sequence[tuple[int, float]]:
    """See `schedule.draft_model.Read`."""
    buffers = executor.buffers
    shape = buffers.fill(batch, texts, table)
    executor.forward(shape)
    if shape.outputs:
        executor.sample(Filled(batch, shape, buffers))
    return [buffers.chosen(row) for row in range(len(shape.outputs))]
