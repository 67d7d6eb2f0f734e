"""Runs steps on a torch device and the CPU: plans of one or two batches over two pools of KV.

In: what `CpuExecutor` takes, and a device. Out: the same tokens, with the KV of each request wholly
on the device or wholly on the CPU (NEO §3.1). What a rank computes with is a `DevicePair`; here are
plans and requests. `open_on_device` makes an engine of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from msgspec.structs import replace as changed

from dovetail.ir.artifact import PhasePlan, ServicePlan
from dovetail.ir.errors import CapacityError, SpecError
from dovetail.ir.profile import ProfileFile
from dovetail.runtime.accel.attention_choice import choose_attention
from dovetail.runtime.accel.device import CPU, TYPES, TorchDevice
from dovetail.runtime.accel.experts import without_experts
from dovetail.runtime.accel.generated import panel_bytes
from dovetail.runtime.accel.graph_cache import ROWS
from dovetail.runtime.accel.group import PairGroup
from dovetail.runtime.accel.orders import BatchSizes, PairSetup, StepOrder
from dovetail.runtime.accel.pair import UNSEEN, DevicePair
from dovetail.runtime.accel.profile import find_profile
from dovetail.runtime.accel.sampling import DRAWN_BYTES
from dovetail.runtime.accel.step import moment_bytes
from dovetail.runtime.accel.sub_batch import record_nothing
from dovetail.runtime.artifact import Artifact, ModelPart
from dovetail.runtime.engine.engine import Engine, Filled, RecordSpan, StepTooLarge, StepWaits
from dovetail.runtime.engine.executor import CpuExecutor, fit_service
from dovetail.runtime.engine.options import EngineOptions, RankOptions
from dovetail.runtime.machine.seat import ENGINE_SLOT, Board, Seat
from dovetail.runtime.native.forward import kv_block_bytes
from dovetail.runtime.native.weights import row_bytes, weight_bytes
from dovetail.runtime.schedule.cost_tables import Predictor, TablePredictor
from dovetail.runtime.schedule.device_limits import DeviceLimits, device_limits
from dovetail.runtime.schedule.kv_pool import KvPool, blocks_for
from dovetail.runtime.schedule.neo import NeoScheduler
from dovetail.runtime.schedule.plan import PrefillChunk, StepPlan, split_rounds
from dovetail.runtime.schedule.request import Home
from dovetail.runtime.schedule.scheduler import Scheduler
from dovetail.topology.division import DECODE
from dovetail.topology.hardware import HardwareSpec


def open_on_device(
    artifact: Artifact,
    part: ModelPart,
    hardware: HardwareSpec,
    options: EngineOptions,
    board: Board | None = None,
) -> Engine:
    """Return the engine of a model on a device and the CPU; raises as `DeviceExecutor`.

    Where the CPU takes a part, steps are weighed by cost tables. board: where it hears in each step
    which CPUs other workers leave its attention.
    """
    settings = options.scheduling
    executor = DeviceExecutor(artifact, part, hardware, options)
    try:
        offloads = settings.offload != "off"
        predictor = predict(artifact, executor, hardware) if offloads else Predictor()
        gpu, cpu = (
            KvPool(blocks, keep=settings.keep_prefixes)
            for blocks in (executor.sizes.blocks, executor.cpu.blocks)
        )
        scheduler = NeoScheduler(executor.limits, gpu, cpu, predictor, time.perf_counter, settings)
        executor.cpu.seat = Seat(board, ENGINE_SLOT) if board else None
    except BaseException:
        executor.close()
        raise
    return Engine(executor.spec, scheduler, executor)


def predict(artifact: Artifact, executor: DeviceExecutor, hardware: HardwareSpec) -> Predictor:
    """Return what parts of a step cost here; of a group nothing is known, so all counts alike.

    A group offloads what its devices have no room for, and no more.
    """
    if executor.group is not None:
        return Predictor()
    executor.profile = find_profile(
        artifact, executor.cpu, executor.pair, executor.limits, hardware
    )
    return TablePredictor(executor.profile)


class DeviceExecutor:
    """One model on a torch device and the CPU.

    With several processes each has a device and a CPU of its own, and of both pools the KV of its
    heads; this one schedules, and tells the others what to run.
    """

    def __init__(
        self, artifact: Artifact, part: ModelPart, hardware: HardwareSpec, options: EngineOptions
    ) -> None:
        """Share the CPUs, put weights and pools on the device, and start the group.

        Raises as `CpuExecutor`, and:
            SpecError: deterministic logits are asked for.
            DeviceError: there is no such device, or torch does not know it.
            CapacityError: weights, KV or activations do not fit on the device.
        """
        if options.deterministic:
            raise SpecError("deterministic logits are the CPU's alone; load with device='cpu'")
        self._options, ranks = options, options.ranks or RankOptions()
        self._offloads = options.offload != "off"
        self.profile: ProfileFile | None = None
        service, own = share_cpus(
            options.plan or artifact.service,
            hardware,
            options.threads,
            options.device,
            alone=not self._offloads,
        )
        self.accelerator = TorchDevice(options.device, own)
        kv_blocks = options.kv_blocks if self._offloads else options.kv_blocks or 1
        on_cpu = replace(
            options,
            plan=service,
            threads=None if options.device == CPU else options.threads,
            kv_blocks=kv_blocks,  # 1: nobody will live there
            max_num_seqs=None,
            max_num_batched_tokens=None,
            max_model_len=None,
        )
        with ExitStack() as undo:
            self.cpu = CpuExecutor(artifact, part, hardware, on_cpu, own_logits=True)
            undo.callback(self.cpu.close)
            self.spec, self.service, self.model = self.cpu.spec, service, self.cpu.model
            ours = self.model.decode.plan.cpus  # else torch may be put where these are awaited
            rest = frozenset(hardware.allowed_pus).difference(ours)
            if ours and len(rest) >= own:
                self.accelerator.cpus = rest
            name = options.dtype
            if name == "auto":
                name = self.accelerator.activations(self.spec.weight_dtype)
            kind = TYPES[name]
            self._attention = choose_attention(self.accelerator, self.model.spec, kind)
            self.sizes = self._choose_sizes(kind, artifact)
            self.limits = replace(
                self.cpu.limits,
                max_step_tokens=self.sizes.step_tokens,
                max_step_sequences=self.sizes.sequences,
                max_context=self.sizes.context,
                n_layers=self.spec.n_layers,
                block_bytes=kv_block_bytes(self.spec),
            )
            setups = self.cpu.setups
            source = None if setups else (artifact, part)
            given = (self.model, self.accelerator, kind, self.sizes, self._attention, source)
            self.pair = DevicePair(*given)
            undo.callback(self.pair.close)
            self.group = self._start_group(ranks, name) if setups else None
            self.join()
            undo.pop_all()

    # ---- opening ----

    def _choose_sizes(self, kind: torch.dtype, artifact: Artifact) -> DeviceLimits:
        """Return what the device's free memory holds; CapacityError where that is nothing."""
        spec, options = self.spec, self._options
        block = kv_block_bytes(self.model.spec)
        context = options.bound_context(spec.max_context)
        landing = min(blocks_for(context), self.cpu.blocks) if self._offloads else 0
        entries = self.model.weights.entries.values()
        weights = weight_bytes(entries, kind.itemsize) // self.service.processes
        tape, device = self.model.device_share()[0], self.accelerator.device
        served = without_experts(tape, self.model.weights.entries).values()
        row = row_bytes(tape, kind.itemsize)
        fixed = (landing + UNSEEN) * block + self._workspace(context, kind)
        fixed += 0 if self.cpu.setups else panel_bytes(artifact, served, device)
        if self.accelerator.records:
            fixed += ROWS[-1] * row
        here = 1 if options.ranks and options.ranks.ray is not None else self.service.processes
        taken = self.cpu.blocks * block * here
        free = self.accelerator.free_bytes(taken=taken, ranks=here, most=options.memory)
        limits = device_limits(
            free=free,
            weights=weights + fixed,
            block_bytes=block,
            row_bytes=2 * row,
            logits_bytes=(2 * 4 + 4 + kind.itemsize) * spec.vocab_size,
            context=spec.max_context,
            asked=options,
            utilization=options.gpu_memory_utilization,
            blocks=options.gpu_blocks,
        )
        return replace(limits, landing=landing)

    def _workspace(self, context: int, kind: torch.dtype) -> int:
        """Return the bytes that attention and the choice of tokens take beside their buffers."""
        spec, kv = self.model.spec, TYPES[self.spec.kv_dtype]
        row = 2 * max(map(spec.kv_values, range(spec.n_layers))) * kv.itemsize
        widened = 0.0 if kv is kind else kind.itemsize / kv.itemsize
        device = self.accelerator.device
        drawn = max(moment_bytes(device), DRAWN_BYTES * spec.vocab_size)
        return self._attention.workspace(device, row, context, widened) + drawn

    def _start_group(self, ranks: RankOptions, activations: str) -> PairGroup:
        """Start the other ranks, now that it is known what the device holds."""
        pairs = [
            PairSetup(
                part=setup,
                device=place_rank(
                    self._options.device, setup.plan.rank, alone=ranks.ray is not None
                ),
                activations=activations,
                limits=self.sizes,
                threads=self.accelerator.threads,
            )
            for setup in self.cpu.setups
        ]
        backend = ranks.backend or ("nccl" if self.accelerator.apart else "gloo")
        return PairGroup(pairs, ranks, backend)

    # ---- an Executor: see there ----

    def rest(self) -> None:
        """Lend the CPUs of its attention until the next step."""
        self.cpu.rest()

    def join(self) -> None:
        """Sum with the ranks of a group that has just been started."""
        if self.group is not None:
            self.pair.join(self.group.collective)

    def record(self, record_span: RecordSpan | None) -> None:
        """Device, CPU attention and link have tracks of their own."""
        self.pair.record(record_span or record_nothing)

    def close(self) -> None:
        """End the threads and processes, and give the device's memory back."""
        try:
            self.pair.close()
        finally:
            if self.group is not None:
                self.group.close()
            self.cpu.close()

    def begin(self, plan: StepPlan, scheduler: Scheduler) -> list[StepPlan]:
        """Return the step, and prompts of the CPU that have no room to land beside it."""
        self.pair.begin()
        requests, pool = scheduler.requests, scheduler.pools[Home.CPU]

        def landed(chunk: PrefillChunk) -> Sequence[int]:
            if requests[chunk.request].home is not Home.CPU:
                return ()
            return pool.table(chunk.request)[: blocks_for(chunk.start + chunk.length)]

        first, *later = split_rounds(plan.batches, landed, self.sizes.landing) or [()]
        others = [replace(plan, batches=batches, moves=()) for batches in later]
        return [replace(plan, batches=first), *others]

    def fill(self, plan: StepPlan, scheduler: Scheduler) -> list[Filled]:
        """Fill a sub-batch for each batch."""
        cpu, requests, filled = self.cpu, scheduler.requests, list[Filled]()
        alone, usable = len(plan.batches) == 1 and not plan.moves, None
        if cpu.seat is not None and any(batch.cpu_decode for batch in plan.batches):
            usable = cpu.seat.take(DECODE)
        threads = self.model.decode.plan.threads
        with self._working():
            for sub_batch, batch in zip(self.pair.sub_batches, plan.batches, strict=False):
                shape = sub_batch.fill(batch, requests, scheduler.pools)
                lengths = {n: len(requests[n].tokens) for n in batch.cpu_decode}
                longest = max(lengths.values(), default=0)
                there = replace(shape, decoders=len(lengths), longest_decode=longest)
                sizes = BatchSizes(
                    n_tokens=shape.n_tokens,
                    n_prefill=shape.n_prefill,
                    gpu_decode=len(batch.gpu_decode),
                    cpu_decode=len(batch.cpu_decode),
                    n_out=shape.n_out,
                    cpu_splits=cpu.kv_splits(there, threads, cpu.part_tokens[DECODE]),
                )
                sub_batch.set_args(sizes, alone=alone, usable=usable)
                filled.append(Filled(batch, shape, sub_batch.buffers))
        return filled

    def compute(self, plan: StepPlan, filled: Sequence[Filled]) -> StepWaits | None:
        """Run them, here and at the other ranks."""
        sub_batches = self.pair.sub_batches[: len(filled)]
        begun = time.perf_counter()
        with self._working(), self.pair.finishing(sub_batches):
            if self.group is not None:
                orders = tuple(sub_batch.order() for sub_batch in sub_batches)
                leaving = len(plan.swap_out)
                self.group.tell(StepOrder(moves=plan.moves, leaving=leaving, batches=orders))
            self.pair.run(plan.moves, len(plan.swap_out), sub_batches)
            for sub_batch in sub_batches:
                sub_batch.fetch()
        seconds = time.perf_counter() - begun
        attending = sum(sub_batch.attending for sub_batch in sub_batches)
        waited = sum(sub_batch.waited for sub_batch in sub_batches)
        for sub_batch in sub_batches:
            sub_batch.attending = sub_batch.waited = 0.0
        return StepWaits(attending, waited, seconds - attending) if attending else None

    def sample(self, filled: Filled, row: int | None = None) -> None:
        """Choose tokens from logits that the host changes; of others the device has chosen."""
        if any(request.ruled for request in filled.shape.outputs):
            self.cpu.sample(filled, row)

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Give work to the device; StepTooLarge where it has no memory, unless it has a group.

        Of a group all stand at different entries then: that ends with the step.
        """
        try:
            with self.accelerator.working():
                yield
        except CapacityError as error:
            if self.group is not None:
                raise
            raise StepTooLarge(*error.args) from error


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
    if service.prefill_processes:  # a device has its KV to itself
        service = changed(service, prefill=service.decode, prefill_processes=0)
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
