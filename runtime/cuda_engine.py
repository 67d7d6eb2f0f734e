"""The executor for NVIDIA GPUs and the CPU beside them: runs a StepPlan of one or two batches.

In: what `TwoPoolEngine` takes, and which GPU. Out: tokens, the KV of each request wholly on the
GPU or wholly on the CPU. What a rank computes with is a `CudaPair`; here are plans and requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from dovetail.ir.artifact import ServicePlan
from dovetail.ir.errors import CapacityError, DeviceError, SpecError
from dovetail.ir.profile import ProfileFile
from dovetail.runtime.artifact import Artifact, ModelPart, device_module
from dovetail.runtime.collective import Collective
from dovetail.runtime.cost_tables import TablePredictor
from dovetail.runtime.cuda_lane import CudaLane
from dovetail.runtime.cuda_pair import CudaPair, GpuParts
from dovetail.runtime.kv_parts import WARP_TOKENS
from dovetail.runtime.kv_pool import KvPool, blocks_for
from dovetail.runtime.meeting import RankOptions
from dovetail.runtime.pipelined import TwoPoolEngine
from dovetail.runtime.plan import Batch, PrefillChunk, SchedulerSettings, StepPlan
from dovetail.runtime.request import Home, Request
from dovetail.runtime.sim.machines import Machine, assumed_profile
from dovetail.runtime.step import StepBuffers, StepShape
from dovetail.topology.hardware import HardwareSpec

MAX_BUCKET = 64
"""Decodes up to which a step is recorded as a graph: more keep the GPU busy between launches."""


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """The GPU to use beside the CPU, and how its scheduler chooses.

    machine: the class whose cost tables the scheduler reads and whose `gpu_blocks` are the KV pool
    on the GPU; `profile` stands for its tables where there is one. graphs: whether steps of
    decodes are recorded once and started as one; without, all products are torch's.
    """

    machine: Machine
    settings: SchedulerSettings = field(default_factory=SchedulerSettings)
    profile: ProfileFile | None = None
    ordinal: int = 0
    graphs: bool = True


class CudaEngine(TwoPoolEngine):
    """One model on NVIDIA GPUs and the CPU; with several processes each has a GPU of its own."""

    device_name: ClassVar[str] = "cuda"
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
        ranks: RankOptions | None = None,
        parts: GpuParts | None = None,
        **more: Any,
    ) -> None:
        """As `TwoPoolEngine`.

        Raises:
            SpecError: deterministic logits are asked for, or sums that GPUs cannot make; there is
                no GPU, or torch is missing.
            ArtifactError: the artifact has no kernels for the GPU.
            CapacityError: weights, KV or activations do not fit on the GPU.
        """
        if deterministic:
            raise SpecError("deterministic logits are the CPU's alone; load without a GPU")
        ranks = ranks or RankOptions(backend="nccl")
        if ranks.backend == "shared":
            raise SpecError("GPUs sum by torch.distributed; use the backend nccl (or gloo)")
        parts = parts or GpuParts()
        parts = replace(parts, module=parts.module or device_module(artifact))
        self._ordinal = options.ordinal
        given = {"settings": options.settings, "plan": plan, "ranks": ranks} | more
        super().__init__(options.machine.gpu_blocks, artifact, part, hardware, **given)
        with ExitStack() as undo:
            undo.callback(super().close)
            rows = self.scheduler.limits.max_step_sequences
            graphs = options.graphs and self.group is None  # other ranks are told of no graphs
            self.pair = CudaPair(
                artifact,
                part,
                self.model,
                ordinal=options.ordinal,
                blocks=options.machine.gpu_blocks,
                sequences=rows,
                graphs=graphs,
                parts=parts,
            )
            undo.callback(self.pair.close)
            self._start(options, rows if graphs else 0)
            undo.pop_all()

    def _start(self, options: CudaOptions, recorded: int) -> None:
        """Schedule for the pair, record steps of up to `recorded` sequences, join the group."""
        self.gpu, self.lanes = self.pair.gpu, self.pair.lanes
        profile = options.profile or assumed_profile(options.machine, self.spec)
        pool = KvPool(options.machine.gpu_blocks)
        self._schedule(pool, TablePredictor(profile), self.device.now, options.settings)
        self._most = min(MAX_BUCKET, recorded, self.gpu.tape.max_tokens)
        self._graphs: dict[tuple[int, int], int | None] = {}
        self._join_group()

    def _place_rank(self, rank: int) -> int:
        """Return the GPU: those behind the first rank's; Ray shows each rank its own alone."""
        return self._ordinal + rank if self._options.ray is None else 0

    def _join_pairs(self, collective: Collective) -> None:
        self.pair.join(collective)

    def close(self) -> None:
        """End the threads and processes, and give the GPU's memory back.

        Raises CudaError where the GPU is lost; all the rest has ended then.
        """
        try:
            self.pair.close()
        finally:
            super().close()

    # ---- a step ----

    def _execute(self, plan: StepPlan) -> tuple[Request, ...]:
        self.pair.activate()
        self.pair.begin()
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
        """Run batches; while the GPU has no memory for them, without their largest request.

        Of a group all stand at different entries then: that ends with the step (`_give_up`).
        """
        failed: list[Request] = []
        while plan.batches:
            try:
                return [*failed, *super()._execute(plan)]
            except CapacityError as error:
                if self.group is not None:
                    raise
                number = largest_member(plan)
                request = self.scheduler.requests[number]
                self._fail(request, _no_memory(error))
                failed.append(request)
                plan = without(plan, number)
        with self.pair.finishing(()):
            self._run_lanes(plan, [])
        return failed

    def _part_tokens(self, home: Home, *, prefill: bool) -> int:
        if home is Home.GPU:  # the tables' schedules are of the CPU's threads
            return WARP_TOKENS
        return super()._part_tokens(home, prefill=False)  # lanes attend as the decode phase does

    def _threads(self, home: Home, *, prefill: bool) -> int:
        if home is Home.GPU:
            return self.gpu.warps
        return self.model.decode.plan.threads

    def _compute(self, plan: StepPlan, lanes: list[CudaLane]) -> None:
        begun = time.perf_counter()
        with self.pair.finishing(lanes):
            if not self._run_graph(plan, lanes[0]):
                self._run_lanes(plan, lanes)
            for lane in lanes:
                lane.fetch()
        self._note_attention(lanes, time.perf_counter() - begun)

    def _run_lanes(self, plan: StepPlan, lanes: Sequence[CudaLane]) -> None:
        """Run filled lanes, here and at the other ranks."""
        self._tell(plan, lanes)
        self.pair.run(plan.moves, len(plan.swap_out), lanes)

    def _note_attention(self, lanes: list[CudaLane], seconds: float) -> None:
        """Count the CPU's part of a step; how long the GPU waited for it is not measured."""
        attending = sum(lane.attending for lane in lanes)
        if attending:
            self.note_attention(attending / self.spec.n_layers)
            self.note_waits(attending, cpu=seconds - attending)
        for lane in lanes:
            lane.attending = 0.0

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
        splits = self.kv_splits(lane.pad(bucket), self.gpu.warps, WARP_TOKENS, apart=True)
        lane.args["kv_splits"] = splits
        key = (bucket, splits)
        if key not in self._graphs:
            self._graphs[key] = None
            return False
        graph = self._graphs[key]
        if graph is None:
            with streams.recording() as found:
                for layer in range(self.spec.n_layers):
                    lane.start_layer(layer, self.pair.worker)
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
