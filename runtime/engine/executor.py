"""Runs planned batches on the CPU; in a group, as the first of its ranks. Decides nothing.

In: an opened artifact and options, then batches. Out: logits and chosen tokens in `StepBuffers`.
`open_on_cpu` makes an engine of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import cache, partial

from dovetail.ir.artifact import PHASES, ServicePlan
from dovetail.ir.errors import CapacityError, RequestError
from dovetail.ir.model import KV_BLOCK, ModelSpec
from dovetail.runtime.artifact import Artifact, ModelPart
from dovetail.runtime.engine.engine import Engine, Filled, RecordSpan
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.group.ranks import RankGroup, make_setups, plan_ranks
from dovetail.runtime.machine.cpu_time import read_busy
from dovetail.runtime.machine.memory import Bytes, SharedMemory, allocate, available_memory
from dovetail.runtime.machine.seat import ENGINE_SLOT, Board, Seat
from dovetail.runtime.native.adapt import adapt_service, deal_cpus
from dovetail.runtime.native.forward import (
    ForwardModel,
    arena_bytes,
    find_tape,
    kv_block_bytes,
    shared_kv_bytes,
)
from dovetail.runtime.native.step import StepBuffers, StepShape, count_parts, step_bytes
from dovetail.runtime.native.tape import Operands
from dovetail.runtime.schedule.cost_tables import Predictor
from dovetail.runtime.schedule.device_limits import ANY, DeviceLimits, LimitOptions, MemoryNeed
from dovetail.runtime.schedule.kv_pool import KvPool, blocks_for
from dovetail.runtime.schedule.plan import Limits, StepPlan
from dovetail.runtime.schedule.scheduler import Scheduler
from dovetail.runtime.schedule.states import StateSlots
from dovetail.topology.binding import describe_idle
from dovetail.topology.division import DECODE, PREFILL
from dovetail.topology.hardware import HardwareSpec

MEMORY_SHARE = 0.5
"""Part of the memory that weights leave, which a KV pool sized at load may take."""
STATE_SHARE = 0.25
"""Part of the memory beside one request that states of recurrent layers may take."""

log = logging.getLogger("dovetail")
_warn_once = cache(partial(log.warning, "%s"))


class CpuExecutor:
    """One model on the CPU, with threads and memory of its own."""

    def __init__(
        self,
        artifact: Artifact,
        part: ModelPart,
        hardware: HardwareSpec,
        options: EngineOptions,
        *,
        own_logits: bool = False,
    ) -> None:
        """Map weights, start threads and processes, size the KV pool and bind the tapes.

        The plan of `options` stands for the artifact's own, which is fitted to what this machine
        has free; its threads count for each process. own_logits: a device computes them; then only
        `setups` tell of the other ranks, and no group is started.

        Raises:
            ArtifactError: the artifact's parts do not fit each other.
            CapacityError: the KV pool does not fit into memory, or threads cannot be started.
            SpecError: the model cannot be shared by so many processes, or the artifact holds less
                than is asked for.
            RankError: a process could not be started.
        """
        self.spec: ModelSpec = part.file.spec
        self.service = options.plan or fit_service(artifact.service, hardware)
        idle = describe_idle(artifact.machine, hardware)
        if idle and options.plan is None and options.threads is None:
            _warn_once(idle)
        self.threshold = self.service.prefill_token_threshold
        bounds = bound_steps(part, options)
        tokens, sequences = bounds.step_tokens, bounds.sequences
        need = memory_need(part, self.service, options, own_logits=own_logits)
        wanted = self.service.kv_blocks or sequences * blocks_for(bounds.context)
        free = available_memory(hardware)
        free = free if options.memory is None else min(free, options.memory)
        self.state_slots = count_states(self.spec.state_bytes, need, free, sequences)
        others = max(0, self.state_slots - 1) * self.spec.state_bytes
        self.blocks = count_blocks(need, free - others, options.kv_blocks, wanted)
        plans = plan_ranks(
            self.service,
            hardware,
            options.threads,
            self.blocks,
            state_slots=self.state_slots,
            floats=options.activations == "float",
            deterministic=options.deterministic,
            own_logits=own_logits,
        )
        library = artifact.open_kernels()
        self.setups = make_setups(artifact, part, plans, tokens, sequences)
        self.group: RankGroup | None = None
        if self.setups and not own_logits:
            kv = shared_kv_bytes(self.spec, plans[0])
            steps = SharedMemory.create(step_bytes(self.spec, tokens, sequences) + kv)
            self.model = ForwardModel(artifact, part, library, plans[0], steps)
            self.group = RankGroup(library, steps, self.setups)
            self.join()
            alloc: Callable[[int], Bytes] = steps.take
        else:
            self.model, alloc = ForwardModel(artifact, part, library, plans[0]), allocate
        self._cpus = {
            phase: tuple(plan.plan_of(phase).cpus for plan in plans if phase in plan.phases)
            for phase in PHASES
        }
        self.part_tokens = {phase: self.model.part_tokens(phase) for phase in PHASES}
        sample = find_tape(part, "sample")
        operands = Operands(self.model.weights, allocate(sample.arena_bytes))
        self.sampler = self.model.bind(sample, operands, "decode")
        self.buffers = StepBuffers(alloc, self.spec, tokens, sequences)
        self.seat: Seat | None = None
        self._usable: tuple[int, ...] | None = None  # CPUs, as the seat told before this step
        ends = frozenset(self.spec.eos_token_ids)
        self.limits = Limits(tokens, sequences, bounds.context, self.spec.vocab_size, ends)

    # ---- an Executor: see there ----

    def begin(self, plan: StepPlan, scheduler: Scheduler) -> tuple[StepPlan]:
        """Return the step whole."""
        return (plan,)

    def fill(self, plan: StepPlan, scheduler: Scheduler) -> Sequence[Filled]:
        """Write the one batch that there is on one device."""
        (batch,) = plan.batches
        pool = scheduler.pool
        if pool.states is not None:
            self.model.copy_states(pool.states.take_copies())
        shape = self.buffers.fill(batch, scheduler.requests, pool.table, pool.slot)
        return (Filled(batch, shape, self.buffers),) if shape.n_tokens else ()

    def compute(self, plan: StepPlan, filled: Sequence[Filled]) -> None:
        """Run the forward tape."""
        for one in filled:
            self.forward(one.shape)

    def sample(self, filled: Filled, row: int | None = None) -> None:
        """Run the sample tape."""
        args = filled.buffers.sample_args(filled.shape, row)
        rows = max(1, args["n_rows"])  # each is sampled by one thread
        self.sampler.run(self.model.team, args, most=rows, usable=self._usable)

    def rest(self) -> None:
        """Lend its cores until the next step."""
        if self.seat is not None:
            self.seat.leave()

    def join(self) -> None:
        """Sum with the ranks of a group that has just been started."""
        if self.group is not None:
            self.model.join(self.group.sums)

    def record(self, record_span: RecordSpan | None) -> None:
        """Nothing runs beside the engine's thread."""

    def close(self) -> None:
        """End the threads and processes."""
        if self.group is not None:
            self.group.close()
        self.model.close()

    # ---- a step ----

    def forward(self, shape: StepShape) -> None:
        """Run the forward tape over a filled step, under the plan its prefill tokens call for."""
        phase, args = self.forward_args(shape)
        if self.seat is not None:
            self._usable = self.seat.take(phase)
        if self.group is not None:
            cpus, dealt = self._cpus[phase], None
            if self._usable is not None and all(cpus):
                dealt = deal_cpus(cpus, self._usable)
                self._usable = dealt[0]
            self.group.step(args, phase, dealt)
        self.model.run(args, phase, self._usable)

    def forward_args(self, shape: StepShape) -> tuple[str, dict[str, int]]:
        """Return the phase that a filled step is run in, and the tape's arguments."""
        phase = PREFILL if shape.prefill_tokens >= self.threshold else DECODE
        threads = self.model.tapes[phase].plan.threads
        n_kv = self.model.parts[phase].spec.n_kv_heads
        splits = self.kv_splits(shape, threads, self.part_tokens[phase], n_kv)
        return phase, self.buffers.forward_args(shape, splits)

    def kv_splits(self, shape: StepShape, threads: int, least: int, n_kv: int | None = None) -> int:
        """Return into how many parts a step's decodes cut their keys; arguments: `count_parts`.

        n_kv: of this rank in the phase, by default in decode.
        """
        n_kv = n_kv or self.model.spec.n_kv_heads
        return count_parts(shape.decoders, n_kv, shape.longest_decode, threads, least)


def bound_steps(part: ModelPart, limits: LimitOptions) -> DeviceLimits:
    """Return what a step on the CPU may hold; SpecError where more is asked for."""
    forward, sample = find_tape(part, "forward"), find_tape(part, "sample")
    sequences = min(forward.max_sequences, sample.max_sequences)
    return limits.bound(forward.max_tokens, sequences, part.file.spec.max_context)


def memory_need(
    part: ModelPart, service: ServicePlan, options: EngineOptions, *, own_logits: bool = False
) -> MemoryNeed:
    """Return what a model needs with the KV that is asked for, by default that of one request.

    own_logits: a device computes them; then the CPU's part of that.
    """
    spec, bounds = part.file.spec, bound_steps(part, ANY if own_logits else options)
    shared = service.prefill_processes not in (0, service.processes)
    copies = 1 if shared else max(1, service.processes // spec.n_kv_heads)
    steps = step_bytes(spec, bounds.step_tokens, bounds.sequences) + spec.state_bytes
    context = KV_BLOCK if own_logits else bounds.context  # a device has room of its own
    return MemoryNeed(
        weights=0 if own_logits else part.chunks.total_bytes,
        block=kv_block_bytes(spec) * copies,  # of a KV head
        activations=arena_bytes(part) + find_tape(part, "sample").arena_bytes + steps,
        context=(options.kv_blocks or 0) * KV_BLOCK or context,
    )


def fit_service(service: ServicePlan, hardware: HardwareSpec) -> ServicePlan:
    """Return the artifact's plan as this machine can run it now.

    The log says what is different, each thing once per process.
    """
    fitted, said = adapt_service(service, hardware, read_busy())
    for text in said:
        _warn_once(text)
    return fitted


def open_on_cpu(
    artifact: Artifact,
    part: ModelPart,
    hardware: HardwareSpec,
    options: EngineOptions,
    board: Board | None = None,
) -> Engine:
    """Return the engine of a model on the CPU alone; raises as `CpuExecutor`.

    board: where it hears in each step which CPUs other workers leave it.
    """
    if part.file.spec.recurrent and options.scheduling.num_speculative_tokens:
        raise RequestError(
            f"{part.file.spec.family} has layers without keys, whose states cannot go back: "
            "nothing can be drafted; load without speculative_config and draft"
        )
    executor = CpuExecutor(artifact, part, hardware, options)
    executor.seat = Seat(board, ENGINE_SLOT) if board else None
    return make_engine(executor, options)


def make_engine(executor: CpuExecutor, options: EngineOptions) -> Engine:
    """Return an engine that schedules for the CPU alone."""
    settings = options.scheduling
    states = StateSlots(executor.state_slots) if executor.state_slots else None
    pool = KvPool(executor.blocks, keep=settings.keep_prefixes, states=states)
    scheduler = Scheduler(executor.limits, pool, Predictor(), time.perf_counter, settings=settings)
    return Engine(executor.spec, scheduler, executor)


def count_states(size: int, need: MemoryNeed, free: int, sequences: int) -> int:
    """Return how many states of `size` bytes to have: for all sequences, and as many prefixes.

    0 where a sequence has none, else at least one, whose memory is a part of `need`.
    """
    if not size:
        return 0
    spare = free - need.total
    return 1 + max(0, min(2 * sequences - 1, int(spare * STATE_SHARE) // size))


def count_blocks(need: MemoryNeed, free: int, asked: int | None, wanted: int) -> int:
    """Return the blocks asked for, else as many of `wanted` as a share of the free memory holds.

    free: bytes. KV of one context is there in any case. CapacityError where it does not fit.
    """
    spare = free - need.fixed
    if asked is not None:
        if asked * need.block > spare:
            raise CapacityError(
                f"{asked} KV blocks take {asked * need.block} bytes, but {max(0, spare)} bytes of "
                f"memory are free beside weights and activations; load with at most "
                f"{max(0, spare) // need.block} kv_blocks"
            )
        return asked
    if need.total > free:
        longest = need.longest(free)
        shorter = f"load with max_model_len={longest} (--max-model-len {longest}), " * bool(longest)
        raise CapacityError(
            f"the model does not fit into the memory that is free: {need.explain(free)}; {shorter}"
            "free some, or compile it with a narrower --weight-dtype, such as int4"
        )
    return min(wanted, max(blocks_for(need.context), int(spare * MEMORY_SHARE) // need.block))
