"""The executor: runs planned steps on a device and turns logits into tokens.

In: an opened artifact and requests. Out: requests with their tokens. Everything that decides lies
in the scheduler; everything that touches memory, threads and time lies here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.ir.artifact import PhasePlan
from dovetail.ir.dtypes import DTYPES
from dovetail.ir.errors import ArtifactError, CapacityError
from dovetail.ir.model import KV_BLOCK, MAX_KV_SPLITS, ModelSpec
from dovetail.ir.tape import Tape
from dovetail.runtime.artifact import Artifact, ModelPart
from dovetail.runtime.device import CpuDevice, Device, Segment
from dovetail.runtime.kv_pool import KvPool, blocks_for
from dovetail.runtime.library import KernelLibrary, fit_plan
from dovetail.runtime.memory import available_memory
from dovetail.runtime.predictor import ZeroPredictor
from dovetail.runtime.request import Request, SamplingParams, TokenLogprob
from dovetail.runtime.sampling import draw_uniform, top_logprobs
from dovetail.runtime.scheduler import Batch, Limits, Scheduler
from dovetail.runtime.step import StepBuffers, StepShape
from dovetail.runtime.tape import BoundTape, KvArrays, Operands, pick_tables
from dovetail.runtime.weights import Weights
from dovetail.topology.hardware import HardwareSpec

MEMORY_SHARE = 0.5
"""Part of the free memory that a KV pool sized at load may take."""
SPLIT_TOKENS = 64
"""A part of a sequence's keys below this many tokens is not worth its merge."""

log = logging.getLogger("dovetail")


@dataclass(frozen=True, slots=True)
class Phase:
    """The forward tape as one phase runs it."""

    tape: BoundTape
    plan: PhasePlan


@dataclass(frozen=True, slots=True)
class _Binder:
    """Binds tapes of one model with the schedule tables of a phase."""

    artifact: Artifact
    part: ModelPart
    library: KernelLibrary

    def bind(self, tape: Tape, operands: Operands, phase: str, plan: PhasePlan) -> Phase:
        tables = pick_tables(self.part.schedules.tables, self.artifact.target, phase, plan.threads)
        return Phase(BoundTape(self.library, tape, tables, operands), plan)


class Engine:
    """One model on one device. Not thread-safe: one caller at a time."""

    def __init__(
        self,
        artifact: Artifact,
        part: ModelPart,
        hardware: HardwareSpec,
        *,
        threads: int | None = None,
        kv_blocks: int | None = None,
    ) -> None:
        """Map weights, start threads, size the KV pool and bind the tapes.

        Raises:
            ArtifactError: the artifact's parts do not fit each other.
            CapacityError: the KV pool does not fit into memory, or threads cannot be started.
        """
        self.spec: ModelSpec = part.file.spec
        service = artifact.service
        self.threshold = service.prefill_token_threshold
        prefill, decode = (
            _shrink(plan, threads, hardware) for plan in (service.prefill, service.decode)
        )
        library = KernelLibrary(artifact.library, artifact.kernels)
        most = max(prefill.threads, decode.threads)
        self.device: Device = CpuDevice(library, most, service.spin_iterations)
        self.weights = Weights(part)
        self.pool = KvPool(_count_blocks(part, hardware, kv_blocks, service.kv_blocks))
        forward, sample = _tape(part, "forward"), _tape(part, "sample")
        arena = self.device.alloc(forward.arena_bytes)
        operands = Operands(self.weights, arena, self._alloc_kv())
        binder = _Binder(artifact, part, library)
        self.prefill = binder.bind(forward, operands, "prefill", prefill)
        self.decode = binder.bind(forward, operands, "decode", decode)
        operands = Operands(self.weights, self.device.alloc(sample.arena_bytes))
        self.sampler = binder.bind(sample, operands, "decode", decode)
        tokens, sequences = forward.max_tokens, min(forward.max_sequences, sample.max_sequences)
        self.buffers = StepBuffers(self.device.alloc, self.spec, tokens, sequences)
        limits = Limits(tokens, sequences, self.spec.max_context, self.spec.vocab_size)
        self.scheduler = Scheduler(limits, self.pool, ZeroPredictor(), self.device.now)

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> list[Request]:
        """Queue `params.n` samples of `prompt`; raises RequestError or CapacityError."""
        return self.scheduler.submit(list(prompt), params)

    def finish(self, request: Request, reason: str) -> None:
        """End an unfinished request."""
        self.scheduler.finish(request, reason)

    def step(self) -> list[Request]:
        """Run one step; return the requests that got a token, finished ones included."""
        plan = self.scheduler.plan()
        return [request for batch in plan.batches for request in self._run(batch)]

    def close(self) -> None:
        """End the threads."""
        self.device.close()

    # ---- one step ----

    def _run(self, batch: Batch) -> tuple[Request, ...]:
        requests = self.scheduler.requests
        shape = self.buffers.fill(batch, requests, self.pool)
        if shape.n_tokens == 0:
            return ()
        self.forward(shape)
        for chunk in batch.prefill:
            self._stored(requests[chunk.request], chunk.length)
        for number in batch.cpu_decode:
            self._stored(requests[number], 1)
        if shape.outputs:
            self._sample(shape)
        return shape.outputs

    def forward(self, shape: StepShape) -> None:
        """Run the forward tape over a filled step, under the plan its prefill tokens call for."""
        phase = self.prefill if shape.prefill_tokens >= self.threshold else self.decode
        args = self.buffers.forward_args(shape, self._kv_splits(shape, phase.plan.threads))
        self.device.run(Segment(phase.tape, phase.plan, args))

    def _kv_splits(self, shape: StepShape, threads: int) -> int:
        """Return the fewest parts of each sequence that keep all threads equally busy."""
        units = shape.n_decode * self.spec.n_kv_heads
        most = min(MAX_KV_SPLITS, 1 + shape.longest_decode // SPLIT_TOKENS)
        for splits in range(1, most):
            if units * splits % threads == 0 or units * splits >= 4 * threads:
                return splits
        return most

    def _stored(self, request: Request, count: int) -> None:
        request.computed += count
        self.pool.publish(request.id, request.tokens, request.computed)

    def _sample(self, shape: StepShape) -> None:
        args = self.buffers.sample_args(shape, draw_uniform)
        plan = _first_threads(self.sampler.plan, len(shape.outputs))
        self.device.run(Segment(self.sampler.tape, plan, args))
        now = self.device.now()
        ids = self.buffers.arrays["out_ids"][: len(shape.outputs)].tolist()
        logprobs = self.buffers.arrays["out_logprobs"][: len(shape.outputs)].tolist()
        for row, request in enumerate(shape.outputs):
            if request.params.logprobs is not None:
                top = top_logprobs(self.buffers.logits(row), request.params.logprobs)
                request.logprobs.append(TokenLogprob(ids[row], logprobs[row], top))
            self._append(request, ids[row], now)

    def _append(self, request: Request, token: int, now: float) -> None:
        request.tokens.append(token)
        metrics = request.metrics
        metrics.first_token = now if metrics.first_token is None else metrics.first_token
        metrics.last_token = now
        if token in self.spec.eos_token_ids and not request.params.ignore_eos:
            self.finish(request, "stop")
        elif request.generated >= request.max_tokens:
            self.finish(request, "length")

    def _alloc_kv(self) -> KvArrays:
        layer = self.pool.n_blocks * _layer_block_bytes(self.spec)
        size = layer * self.spec.n_layers
        return KvArrays(self.device.alloc(size), self.device.alloc(size), layer)


def _shrink(plan: PhasePlan, threads: int | None, hardware: HardwareSpec) -> PhasePlan:
    """Return `plan` as this machine can run it: its CPUs and, unless asked otherwise, its quota."""
    wanted = threads or plan.threads
    quota = hardware.cpu_quota
    cut = min(wanted, max(1, int(quota))) if quota is not None and threads is None else wanted
    fitted = fit_plan(plan, cut, hardware.allowed_pus)
    if fitted.threads < wanted:
        log.warning("%d threads wanted, this process gets %d CPUs", wanted, fitted.threads)
    return fitted


def _first_threads(plan: PhasePlan, most: int) -> PhasePlan:
    """Return `plan` with no more than `most` threads; rows are sampled by one thread each."""
    return PhasePlan(threads=min(plan.threads, most), cpus=plan.cpus[:most])


def _tape(part: ModelPart, name: str) -> Tape:
    if name not in part.tapes:
        raise ArtifactError(
            f"{part.folder / 'tapes'}: has no tape {name!r}; run `dovetail compile MODEL` again"
        )
    return part.tapes[name]


def _layer_block_bytes(spec: ModelSpec) -> int:
    """Bytes of one block of K, or of V, in one layer."""
    return KV_BLOCK * spec.n_kv_heads * spec.head_dim * DTYPES[spec.kv_dtype].size


def _count_blocks(part: ModelPart, hardware: HardwareSpec, asked: int | None, planned: int) -> int:
    """Return the blocks asked for, else those of the plan or of a full step of full contexts.

    Without `asked`, as many of these as free memory allows; CapacityError where that is not enough.
    """
    spec = part.file.spec
    block = 2 * spec.n_layers * _layer_block_bytes(spec)
    free = available_memory(hardware)
    if asked is not None and asked * block > free:
        raise CapacityError(
            f"{asked} KV blocks take {asked * block} bytes, but {free} bytes of memory are free; "
            f"load with at most {free // block} kv_blocks"
        )
    fitting = int(free * MEMORY_SHARE) // block
    if asked is None and fitting < 1:
        raise CapacityError(f"no memory for KV: one block of {KV_BLOCK} tokens takes {block} bytes")
    wanted = planned or part.file.max_step_sequences * blocks_for(spec.max_context)
    return asked or min(wanted, fitting)
