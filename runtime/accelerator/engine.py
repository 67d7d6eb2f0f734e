"""The executor for two pools: runs a StepPlan of one or two batches on a torch device and the CPU.

In: what `Engine` takes, and a device. Out: the same tokens as `Engine`, with the KV of each request
wholly on the device or wholly on the CPU (NEO §3.1). What a rank computes with is a `DevicePair`;
here are plans and requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from msgspec.structs import replace as changed

from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.errors import CapacityError, DeviceError, SpecError
from dovetail.ir.profile import ProfileFile
from dovetail.runtime.accelerator.device import CPU, TorchDevice
from dovetail.runtime.accelerator.generated import GeneratedProducts
from dovetail.runtime.accelerator.group import PairGroup
from dovetail.runtime.accelerator.lane import Lane, draw_nothing
from dovetail.runtime.accelerator.orders import LaneSizes, PairSetup, order_step
from dovetail.runtime.accelerator.pair import DevicePair
from dovetail.runtime.accelerator.profile import find_profile
from dovetail.runtime.accelerator.rounds import largest_member, split_rounds, without
from dovetail.runtime.accelerator.tape import row_bytes
from dovetail.runtime.accelerator.weights import TYPES, weight_bytes
from dovetail.runtime.artifact import Artifact, ModelPart
from dovetail.runtime.cost_tables import TablePredictor
from dovetail.runtime.device import Bytes
from dovetail.runtime.device_limits import DeviceLimits, Wishes, device_limits
from dovetail.runtime.engine import Engine, fit_service
from dovetail.runtime.forward import layer_block_bytes
from dovetail.runtime.kv_pool import KvPool, blocks_for
from dovetail.runtime.library import KernelLibrary
from dovetail.runtime.neo import NeoScheduler
from dovetail.runtime.plan import Batch, PrefillChunk, SchedulerSettings, StepPlan
from dovetail.runtime.predictor import Predictor, ZeroPredictor
from dovetail.runtime.rank_options import RankOptions
from dovetail.runtime.ranks import RankSetup
from dovetail.runtime.recorder import StepRecorder
from dovetail.runtime.request import Home, Request
from dovetail.runtime.step import StepBuffers, StepShape
from dovetail.topology.hardware import HardwareSpec

log = logging.getLogger("dovetail")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """The device to use beside the CPU; every field but the first has a default found at load.

    name: `cuda:0`, `xpu:1`, `torch:cpu` ... gpu_memory_utilization: part of its free memory that
    may be used. gpu_blocks: its KV pool. dtype: of activations, f32, bf16 or f16.
    """

    name: str
    gpu_memory_utilization: float = 0.9
    wishes: Wishes = field(default_factory=Wishes)
    gpu_blocks: int | None = None
    dtype: str | None = None


class DeviceEngine(Engine):
    """One model on a torch device and the CPU; `pool` is the CPU's.

    With several processes each has a device and a CPU of its own, and of both pools the KV of its
    heads; this one schedules, and tells the others what to run.
    """

    own_logits: ClassVar[bool] = True

    def __init__(
        self,
        options: DeviceOptions,
        artifact: Artifact,
        part: ModelPart,
        hardware: HardwareSpec,
        *,
        ranks: RankOptions | None = None,
        settings: SchedulerSettings | None = None,
        **more: Any,
    ) -> None:
        """As `Engine`; `ranks` says how processes beyond this one are started and joined.

        Raises:
            SpecError: deterministic logits are asked for.
            DeviceError: there is no such device, or torch does not know it.
            CapacityError: weights, KV or activations do not fit on the device.
        """
        if more.get("deterministic"):
            raise SpecError("deterministic logits are the CPU's alone; load with device='cpu'")
        self._options, self._given = ranks or RankOptions(), options
        self._pairs: PairGroup | None = None
        self.profile: ProfileFile | None = None
        self._others: Sequence[RankSetup] = ()
        service = more.pop("plan", None) or artifact.service
        threads = more.pop("threads", None)
        settings = settings or SchedulerSettings()
        self._offloads = settings.offload != "off"
        if not self._offloads:
            more["kv_blocks"] = more.get("kv_blocks") or 1  # nobody will live there
        name, alone = options.name, not self._offloads
        service, own = share_cpus(service, hardware, threads, name, alone=alone)
        self.accelerator = TorchDevice(options.name, own)
        super().__init__(artifact, part, hardware, plan=service, settings=settings, **more)
        ours = self.model.decode.plan.cpus  # else the system may put torch where these are awaited
        rest = frozenset(hardware.allowed_pus).difference(ours)
        if ours and len(rest) >= own:
            self.accelerator.cpus = rest
        with ExitStack() as undo:
            undo.callback(super().close)
            name = options.dtype or self._activations()
            self._limits = self._choose_sizes(options, TYPES[name])
            kind = TYPES[name]
            generate = None if self._others else partial(self._generate, artifact, part, kind)
            self.pair = DevicePair(self.model, self.accelerator, kind, self._limits, generate)
            undo.callback(self.pair.close)
            self.lanes = self.pair.lanes
            self._start_group(name)
            self._schedule(settings, ZeroPredictor())
            if self._offloads:
                self._schedule(settings, self._measure(artifact, hardware))
            undo.pop_all()

    @property
    def room(self) -> int:
        """Bytes of the device that KV may take, beside weights and workspace."""
        return self._limits.room

    # ---- opening ----

    def _activations(self) -> str:
        """Return the type of activations: the device's; on `torch:cpu` that of the weights."""
        if self.accelerator.apart:
            return self.accelerator.activations
        return self.spec.weight_dtype if self.spec.weight_dtype in TYPES else "bf16"

    def _choose_sizes(self, options: DeviceOptions, kind: torch.dtype) -> DeviceLimits:
        """Return what the device's free memory holds; CapacityError where that is nothing."""
        spec, block = self.spec, 2 * self.spec.n_layers * layer_block_bytes(self.model.spec)
        context = options.wishes.bound_context(spec.max_context)
        landing = min(blocks_for(context), self.pool.n_blocks) if self._offloads else 0
        weights = weight_bytes(self.model.weights, kind) // self.service.processes
        limits = device_limits(
            free=self.accelerator.free_bytes(),
            weights=weights + landing * block,
            block_bytes=block,
            row_bytes=2 * row_bytes(self.model.device_share()[0], kind),
            logits_bytes=2 * 4 * spec.vocab_size,
            context=spec.max_context,
            wishes=options.wishes,
            utilization=options.gpu_memory_utilization,
            blocks=options.gpu_blocks,
        )
        return replace(limits, landing=landing)

    def _generate(
        self,
        artifact: Artifact,
        part: ModelPart,
        dtype: torch.dtype,
        weights: Mapping[str, torch.Tensor],
    ) -> GeneratedProducts | None:
        """Return generated products, compared with torch's on this device; None without any."""
        stored, device = self.model.weights, self.accelerator.device
        products = GeneratedProducts.open(artifact, part, stored, weights, device, dtype)
        if products is not None:
            products.choose(lambda name, rows: torch.mm(rows, weights[name].t()))
        return products

    def _measure(self, artifact: Artifact, hardware: HardwareSpec) -> Predictor:
        """Return what parts of a step cost here; of a group nothing is known, so all counts alike.

        A group offloads what its devices have no room for, and no more.
        """
        if self.group is not None:
            return ZeroPredictor()
        self.profile = find_profile(artifact, self, hardware)
        return TablePredictor(self.profile)

    def _schedule(self, settings: SchedulerSettings, predictor: Predictor) -> None:
        """Schedule for both pools from now on."""
        limits = replace(
            self.scheduler.limits,
            max_step_tokens=self._limits.step_tokens,
            max_step_sequences=self._limits.sequences,
            max_context=self._limits.context,
            n_layers=self.spec.n_layers,
            block_bytes=2 * layer_block_bytes(self.spec) * self.spec.n_layers,
        )
        gpu = KvPool(self._limits.blocks, keep=settings.keep_prefixes)
        self.scheduler = NeoScheduler(
            limits, gpu, self.pool, predictor, time.perf_counter, settings
        )

    def _form_group(
        self, library: KernelLibrary, setups: Sequence[RankSetup]
    ) -> Callable[[int], Bytes]:
        """Note the ranks: they start when it is known what the device holds."""
        self._others = setups
        return self.model.device.alloc

    def _start_group(self, activations: str) -> None:
        """Start the other ranks, where there are any, and sum with them."""
        if not self._others:
            return
        pairs = [
            PairSetup(
                artifact=setup.artifact,
                model=setup.model,
                fingerprint=setup.fingerprint,
                plan=setup.plan,
                device=place_rank(
                    self._given.name, setup.plan.rank, alone=self._options.ray is not None
                ),
                activations=activations,
                blocks=self._limits.blocks,
                landing=self._limits.landing,
                tokens=self._limits.step_tokens,
                sequences=self._limits.sequences,
                threads=self.accelerator.threads,
            )
            for setup in self._others
        ]
        backend = self._options.backend or ("nccl" if self.accelerator.apart else "gloo")
        self.group = self._pairs = PairGroup(pairs, self._options, backend)
        self._join_group()

    def _join_group(self) -> None:
        if self._pairs is not None:
            self.pair.join(self._pairs.collective)

    def close(self) -> None:
        """End the threads and processes, and give the device's memory back."""
        try:
            self.lanes = []
            self.pair.close()
        finally:
            super().close()

    def start_recording(self, recorder: StepRecorder) -> None:
        """See Engine; device, CPU attention and link have tracks of their own."""
        super().start_recording(recorder)
        self.pair.record(recorder.beside)

    def stop_recording(self) -> None:
        """See Engine."""
        self.pair.record(draw_nothing)
        super().stop_recording()

    # ---- a step ----

    def _execute(self, plan: StepPlan) -> tuple[Request, ...]:
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

        return split_rounds(plan.batches, landed, self.pair.model.pools.landing)

    def _run_round(self, plan: StepPlan) -> list[Request]:
        """Run batches; while the device has no memory for them, without their largest request.

        Of a group all stand at different entries then: that ends with the step (`_give_up`).
        """
        failed: list[Request] = []
        while plan.batches:
            try:
                with self.accelerator.working():
                    return [*failed, *self._run_batches(plan)]
            except CapacityError as error:
                if self.group is not None:
                    raise
                number = largest_member(plan)
                request = self.scheduler.requests[number]
                self._fail(request, _no_memory(error))
                failed.append(request)
                plan = without(plan, number)
        with self.accelerator.working(), self.pair.finishing(()):
            self._run_lanes(plan, [])
        return failed

    def _run_batches(self, plan: StepPlan) -> tuple[Request, ...]:
        lanes = self.lanes[: len(plan.batches)]
        with self._span("fill"):
            shapes = [
                self._prepare(lane, batch) for lane, batch in zip(lanes, plan.batches, strict=True)
            ]
        with self._span("forward", tokens=sum(shape.n_tokens for shape in shapes)):
            if self.recorder:
                for batch, shape in zip(plan.batches, shapes, strict=True):
                    self.recorder.follow(batch, shape.outputs)
            self._compute(plan, lanes)
        for lane, batch, shape in zip(lanes, plan.batches, shapes, strict=True):
            self.scheduler.complete(batch)
            if shape.outputs or shape.scored:
                self._sample(shape, lane.buffers)
        return tuple(request for shape in shapes for request in shape.touched)

    def _prepare(self, lane: Lane, batch: Batch) -> StepShape:
        shape = lane.fill(batch, self.scheduler.requests, self.scheduler.pools)
        requests = self.scheduler.requests
        longest = max((len(requests[n].tokens) for n in batch.cpu_decode), default=0)
        cpu = replace(shape, n_decode=len(batch.cpu_decode), longest_decode=longest)
        threads = self.model.decode.plan.threads
        sizes = LaneSizes(
            n_tokens=shape.n_tokens,
            n_prefill=shape.n_prefill,
            gpu_decode=len(batch.gpu_decode),
            cpu_decode=len(batch.cpu_decode),
            n_out=shape.n_out,
            cpu_splits=self.kv_splits(cpu, threads, self.part_tokens[False]),
        )
        lane.set_args(sizes)
        return shape

    def _compute(self, plan: StepPlan, lanes: Sequence[Lane]) -> None:
        begun = time.perf_counter()
        with self.pair.finishing(lanes):
            self._run_lanes(plan, lanes)
            for lane in lanes:
                lane.fetch()
        self._note_waits(lanes, time.perf_counter() - begun)

    def _run_lanes(self, plan: StepPlan, lanes: Sequence[Lane]) -> None:
        """Run filled lanes, here and at the other ranks."""
        if self._pairs is not None:
            self._pairs.tell(order_step(plan, tuple(lane.order() for lane in lanes)))
        self.pair.run(plan.moves, len(plan.swap_out), lanes)

    def _note_waits(self, lanes: Sequence[Lane], seconds: float) -> None:
        """Count the CPU's part of a step, and how long CPU and device waited for each other."""
        attending = sum(lane.attending for lane in lanes)
        waited = sum(lane.waited for lane in lanes)
        if attending:
            assert isinstance(self.scheduler, NeoScheduler)
            self.scheduler.note_attention(attending / self.spec.n_layers)
            self.note_waits(attending, gpu=waited, cpu=seconds - attending)
        for lane in lanes:
            lane.attending = lane.waited = 0.0

    def _sample(self, shape: StepShape, buffers: StepBuffers) -> None:
        if any(request.params.changes_logits for request in shape.outputs):
            super()._sample(shape, buffers)  # from logits that the host changes
        else:
            self._accept(shape, buffers, {})  # the device has chosen


def share_cpus(
    service: ServicePlan,
    hardware: HardwareSpec,
    threads: int | None,
    name: str,
    *,
    alone: bool = False,
) -> tuple[ServicePlan, int]:
    """Return the plan for the CPU's kernels, and the threads that torch keeps on `torch:cpu`.

    There torch has half of the CPUs, or what `threads` of our kernels leave; both at least one.
    alone: these never attend, so that without `threads` torch has all CPUs.
    Beside another device the CPU's kernels have what was planned.
    """
    if name != CPU:
        return fit_service(service, hardware), 1
    allowed = hardware.allowed_pus
    count = min(len(allowed), int(hardware.cpu_quota or len(allowed))) or 1
    ours = max(1, min(threads or count // 2, count) // service.processes)
    kept = 0 if alone and threads is None else ours
    own = max(1, count // service.processes - kept)
    last = tuple(allowed[-ours:]) if service.processes == 1 and len(allowed) > ours else ()
    phase = PhasePlan(threads=ours, cpus=last)
    return changed(service, prefill=phase, decode=phase, nodes=()), own


def place_rank(name: str, rank: int, *, alone: bool) -> str:
    """Return the device of a rank: those behind the first rank's; `alone`: it sees its own."""
    if name == CPU:
        return name
    kind, _, index = name.partition(":")
    return f"{kind}:0" if alone else f"{kind}:{int(index or 0) + rank}"


def _no_memory(error: BaseException) -> DeviceError:
    return DeviceError(
        f"the device ran out of memory for a request ({error}); send shorter prompts, or load with "
        "less --gpu-memory-utilization"
    )
