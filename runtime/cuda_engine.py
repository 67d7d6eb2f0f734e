"""The executor for an NVIDIA GPU and the CPU beside it: runs a StepPlan of one or two batches.

In: what `Engine` takes, and which GPU. Out: tokens, the KV of each request wholly on the GPU or
wholly on the CPU. Kernels are the generated ones, products torch's; KV moves behind the compute
stream in the layer that uses it next, and the CPU attends on a thread of its own (NEO §3.1).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dovetail.ir.artifact import KernelIndex, ServicePlan
from dovetail.ir.errors import CapacityError, DeviceError, DovetailError, SpecError
from dovetail.ir.profile import ProfileFile
from dovetail.runtime.artifact import Artifact, ModelPart, device_module
from dovetail.runtime.cost_tables import TablePredictor
from dovetail.runtime.cuda import CudaDevice
from dovetail.runtime.cuda_lane import CudaLane, DevicePools, GpuModel
from dovetail.runtime.device_weights import DeviceWeight, DeviceWeights
from dovetail.runtime.forward import find_tape, layer_block_bytes
from dovetail.runtime.kv_pool import KvPool, blocks_for
from dovetail.runtime.launches import Products
from dovetail.runtime.machines import Machine, assumed_profile
from dovetail.runtime.pipelined import TwoPoolEngine
from dovetail.runtime.plan import Batch, PrefillChunk, SchedulerSettings, StepPlan
from dovetail.runtime.request import Home, Request
from dovetail.runtime.step import StepBuffers, StepShape
from dovetail.runtime.streams import GpuStreams
from dovetail.topology.hardware import HardwareSpec

MAX_BUCKET = 64
"""Decodes up to which a step is recorded as a graph: more keep the GPU busy between launches."""
WARPS_PER_PROCESSOR = 16
"""Warps that a kernel is started with, for each multiprocessor: two blocks."""

MakeProducts: TypeAlias = Callable[[Mapping[str, DeviceWeight], int], Products]
"""Makes the library of products for weights by name on a GPU."""


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """The GPU to use beside the CPU, and how its scheduler chooses.

    machine: the class whose cost tables the scheduler reads and whose `gpu_blocks` are the KV pool
    on the GPU; `profile` stands for its tables where there is one. graphs: whether steps of
    decodes are recorded once and started as one.
    """

    machine: Machine
    settings: SchedulerSettings = field(default_factory=SchedulerSettings)
    profile: ProfileFile | None = None
    ordinal: int = 0
    graphs: bool = True


@dataclass(frozen=True, slots=True)
class GpuParts:
    """What stands for the usual parts of a GPU, e.g. in tests; None is the usual one."""

    device: CudaDevice | None = None
    module: tuple[Path, KernelIndex] | None = None
    products: MakeProducts | None = None
    landing: int | None = None


class CudaEngine(TwoPoolEngine):
    """One model on an NVIDIA GPU and the CPU."""

    lanes: list[CudaLane]

    def __init__(
        self,
        options: CudaOptions,
        artifact: Artifact,
        part: ModelPart,
        hardware: HardwareSpec,
        *,
        plan: ServicePlan | None = None,
        deterministic: bool = False,
        parts: GpuParts | None = None,
        **more: Any,
    ) -> None:
        """As `Engine`.

        Raises:
            SpecError: several processes or deterministic logits are asked for, there is no GPU, or
                torch is missing.
            ArtifactError: the artifact has no kernels for the GPU.
            CapacityError: weights, KV or activations do not fit on the GPU.
        """
        if (artifact.service if plan is None else plan).processes > 1:
            raise SpecError("a GPU works beside one process; give a plan of one")
        if deterministic:
            raise SpecError("deterministic logits are the CPU's alone; load without a GPU")
        parts = GpuParts() if parts is None else parts
        module = parts.module or device_module(artifact)
        make_products = parts.products or find_products()
        given = {"settings": options.settings} | more
        super().__init__(artifact, part, hardware, plan=plan, **given)
        self._held = ExitStack()
        self._held.callback(super().close)
        try:
            self._open(options, part, parts, module, make_products)
        except BaseException:
            self._held.close()
            raise

    def _open(
        self,
        options: CudaOptions,
        part: ModelPart,
        parts: GpuParts,
        module: tuple[Path, KernelIndex],
        make_products: MakeProducts,
    ) -> None:
        """Put everything on the GPU; what is there when it fails is given back."""
        held, spec, tape = self._held, self.spec, find_tape(part, "forward")
        gpu = parts.device or CudaDevice(options.ordinal)
        held.callback(gpu.close)
        loaded = gpu.load(*module)
        held.callback(loaded.close)
        weights = DeviceWeights(gpu, self.model.weights)
        held.callback(weights.close)

        def alloc(nbytes: int) -> int:
            address = gpu.alloc(nbytes)
            held.callback(gpu.free, address)
            return address

        most = blocks_for(spec.max_context) + blocks_for(tape.max_tokens)
        landing = min(self.pool.n_blocks, parts.landing or most)
        pools = DevicePools(0, 0, options.machine.gpu_blocks, landing, layer_block_bytes(spec))
        keys, values = (alloc(pools.layer_bytes * spec.n_layers) for _ in "kv")
        streams = GpuStreams(gpu)
        held.callback(streams.close)
        for memory in (self.model.kv.k, self.model.kv.v):
            streams.pin(memory)
        self.gpu = GpuModel(
            spec=spec,
            streams=streams,
            module=loaded,
            weights=weights,
            products=make_products(weights.held, gpu.ordinal),
            pools=replace(pools, keys=keys, values=values),
            cpu=self.model,
            gated=alloc(4 * 2 * spec.intermediate_size * tape.max_tokens),
            warps=WARPS_PER_PROCESSOR * gpu.multiprocessors,
        )
        profile = options.profile or assumed_profile(options.machine, spec)
        pool = KvPool(options.machine.gpu_blocks)
        self._schedule(pool, TablePredictor(profile), self.device.now, options.settings)
        rows = self.scheduler.limits.max_step_sequences
        self.lanes = []
        for _ in range(2):
            self.lanes.append(CudaLane(self.gpu, find_tape(part, "sample"), rows))
            held.callback(self.lanes[-1].close)
        self._worker = held.enter_context(ThreadPoolExecutor(1, "cpu-attention"))
        self._most = min(MAX_BUCKET, rows, tape.max_tokens) if options.graphs else 0
        self._graphs: dict[tuple[int, int], int | None] = {}
        self._moved = 0

    def close(self) -> None:
        """End the threads and give the GPU's memory back."""
        self.gpu.module.device.activate()
        self._held.close()

    # ---- a step ----

    def _execute(self, plan: StepPlan) -> tuple[Request, ...]:
        self.gpu.module.device.activate()
        self._moved = 0
        touched: list[Request] = []
        for number, batches in enumerate(self._rounds(plan) or [()]):
            moves = plan.moves if number == 0 else ()
            touched += self._run_round(replace(plan, batches=batches, moves=moves))
        return tuple(touched)

    def _rounds(self, plan: StepPlan) -> list[tuple[Batch, ...]]:
        """Return the plan's batches, and prompts of the CPU that have no room to land beside."""
        requests, pool = self.scheduler.requests, self.pool

        def landed(chunk: PrefillChunk) -> Sequence[int]:
            if requests[chunk.request].home is not Home.CPU:
                return ()
            return pool.table(chunk.request)[: blocks_for(chunk.start + chunk.length)]

        return split_rounds(plan.batches, landed, self.gpu.pools.landing)

    def _run_round(self, plan: StepPlan) -> list[Request]:
        """Run batches; while the GPU has no memory for them, without their largest request."""
        failed: list[Request] = []
        while plan.batches:
            try:
                return [*failed, *super()._execute(plan)]
            except CapacityError as error:
                number = largest_member(plan)
                request = self.scheduler.requests[number]
                self._fail(request, _no_memory(error))
                failed.append(request)
                plan = without(plan, number)
        for layer in range(self._moved, self.spec.n_layers):
            self._move(plan, [], layer)
        self.gpu.streams.finish()
        return failed

    def _threads(self, home: Home, *, prefill: bool) -> int:
        if home is Home.GPU:
            return self.gpu.warps
        return self.model.decode.plan.threads

    def _compute(self, plan: StepPlan, lanes: list[CudaLane]) -> None:
        streams, begun = self.gpu.streams, time.perf_counter()
        try:
            if not self._run_graph(plan, lanes[0]):
                self._run_layers(plan, lanes)
            for lane in lanes:
                lane.fetch()
            streams.finish()
            self._note_attention(lanes, time.perf_counter() - begun)
        except BaseException:
            for lane in lanes:
                lane.abandon()
            with suppress(DovetailError):  # what failed is on its way already
                streams.finish()
            raise

    def _note_attention(self, lanes: list[CudaLane], seconds: float) -> None:
        """Count the CPU's part of a step; how long the GPU waited for it is not measured."""
        attending = sum(lane.attending for lane in lanes)
        if attending:
            self.note_waits(attending, cpu=seconds - attending)
        for lane in lanes:
            lane.attending = 0.0

    def _run_layers(self, plan: StepPlan, lanes: Sequence[CudaLane]) -> None:
        """Give both batches to the GPU side by side, each behind its attention on the CPU."""
        streams = self.gpu.streams
        for layer in range(self.spec.n_layers):
            moved = self._move(plan, lanes, layer)
            for lane in lanes:
                lane.collect()
                if moved is not None:
                    streams.follow(streams.compute, moved)
                lane.start_layer(layer, self._worker)
        for lane in lanes:
            lane.collect()
            lane.end()

    def _move(self, plan: StepPlan, lanes: Sequence[CudaLane], layer: int) -> int | None:
        """Move one layer of KV, and bring what prompts need; return the event behind it, if any.

        A layer is moved once, however often the step is tried.
        """
        brought = [lane.bring(layer) for lane in lanes]
        moves = plan.moves if layer >= self._moved else ()
        self._moved = max(self._moved, layer + 1)
        for i, move in enumerate(moves):
            out = i < len(plan.swap_out)  # `moves` names them first
            here, there = (np.array(blocks, np.int32) for blocks in (move.source, move.target))
            device, host = (here, there) if out else (there, here)
            self.gpu.copy_blocks(layer, device, host, Home.CPU if out else Home.GPU)
        streams = self.gpu.streams
        return streams.event(streams.copy) if moves or any(brought) else None

    def _run_graph(self, plan: StepPlan, lane: CudaLane) -> bool:
        """Run a step of decodes on the GPU alone as a graph; False where it is none.

        Decodes are filled up to a power of two. A graph is recorded when it is wanted for the
        second time: libraries take memory in their first run.
        """
        batch, streams = plan.batches[0], self.gpu.streams
        bucket = 1 << (len(batch.gpu_decode) - 1).bit_length()
        others = batch.prefill or batch.cpu_decode or plan.moves or len(plan.batches) > 1
        if others or bucket > self._most:
            return False
        splits = self.kv_splits(lane.pad(bucket), self.gpu.warps)
        lane.args["kv_splits"] = splits
        key = (bucket, splits)
        if key not in self._graphs:
            self._graphs[key] = None
            return False
        graph = self._graphs[key]
        if graph is None:
            with streams.recording() as found:
                for layer in range(self.spec.n_layers):
                    lane.start_layer(layer, self._worker)
                lane.end()
            (graph,) = found
            self._graphs[key] = graph
        streams.replay(graph)
        return True

    def _sample(self, shape: StepShape, buffers: StepBuffers) -> None:
        if any(request.params.changes_logits for request in shape.outputs):
            super()._sample(shape, buffers)  # from logits that the host changes
        else:
            self._accept(shape, buffers, {})  # the GPU has chosen


def find_products() -> MakeProducts:
    """Return torch's products; SpecError where it is not installed."""
    try:
        from dovetail.runtime.torch_products import TorchProducts  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise SpecError(
            f"products on a GPU need torch ({error}); pip install 'dovetail[cuda]'"
        ) from None
    return TorchProducts


# ---- plans ----


def split_rounds(
    batches: tuple[Batch, ...], landed: Callable[[PrefillChunk], Sequence[int]], room: int
) -> list[tuple[Batch, ...]]:
    """Return the batches, and behind them one for each `room` blocks of prompts beyond the first.

    `landed` names the CPU's blocks that a chunk has to have on the GPU while it is computed.
    """
    used: set[int] = set()
    first: list[Batch] = []
    later: list[PrefillChunk] = []
    for batch in batches:
        kept = []
        for chunk in batch.prefill:
            blocks = set(landed(chunk))
            if len(used | blocks) <= room:
                used |= blocks
                kept.append(chunk)
            else:
                later.append(chunk)
        first.append(replace(batch, prefill=tuple(kept)))
    rounds = [tuple(batch for batch in first if batch.sequences)]
    if later:
        rounds += [(Batch(prefill=(chunk,)),) for chunk in later]
    return [batch for batch in rounds if batch]


def largest_member(plan: StepPlan) -> int:
    """Return the request of a step with the most tokens in it; of equals, the last."""
    sizes = [(1, n) for batch in plan.batches for n in (*batch.gpu_decode, *batch.cpu_decode)]
    sizes += [(chunk.length, chunk.request) for batch in plan.batches for chunk in batch.prefill]
    return max(sizes)[1]


def without(plan: StepPlan, request: int) -> StepPlan:
    """Return the plan without a request, and without batches that nothing is left of."""
    batches = (
        Batch(
            prefill=tuple(c for c in batch.prefill if c.request != request),
            gpu_decode=tuple(n for n in batch.gpu_decode if n != request),
            cpu_decode=tuple(n for n in batch.cpu_decode if n != request),
        )
        for batch in plan.batches
    )
    return replace(plan, batches=tuple(batch for batch in batches if batch.sequences))


def _no_memory(error: CapacityError) -> DeviceError:
    return DeviceError(
        f"the GPU ran out of memory for a request ({error}); send shorter prompts, or load with "
        "fewer gpu_blocks"
    )
