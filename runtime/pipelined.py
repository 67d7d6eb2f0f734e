"""The executor for two pools: runs a StepPlan of one or two batches layer by layer (NEO §3.1).

In: what `Engine` takes, and the accelerator to emulate. Out: the same tokens as `Engine`, with the
KV of each request wholly on the accelerator or wholly on the CPU.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from dovetail.runtime.artifact import Artifact, ModelPart
from dovetail.runtime.collective import Collective
from dovetail.runtime.device import Bytes
from dovetail.runtime.emulated import EmulatedDevice, Emulation
from dovetail.runtime.engine import Engine
from dovetail.runtime.forward import layer_block_bytes
from dovetail.runtime.kv_pool import KvPool
from dovetail.runtime.library import KernelLibrary
from dovetail.runtime.meeting import RankOptions
from dovetail.runtime.neo import NeoScheduler
from dovetail.runtime.orders import LaneOrder, LaneSizes, PairSetup, order_step
from dovetail.runtime.pair import Lane, Pair
from dovetail.runtime.pair_group import PairGroup
from dovetail.runtime.plan import Batch, SchedulerSettings, StepPlan
from dovetail.runtime.predictor import Predictor
from dovetail.runtime.ranks import RankSetup
from dovetail.runtime.request import Home, Request
from dovetail.runtime.sim.simulated_step import StepTime
from dovetail.runtime.step import StepBuffers, StepShape
from dovetail.topology.hardware import HardwareSpec


class StepLane(Protocol):
    """What one batch of a step is computed in."""

    buffers: StepBuffers

    def fill(
        self, batch: Batch, requests: Mapping[int, Request], pools: Mapping[Home, KvPool]
    ) -> StepShape:
        """Write the arguments of a batch."""

    def set_args(self, sizes: LaneSizes) -> None:
        """Say how the filled batch runs."""

    def order(self) -> LaneOrder:
        """Return what makes a lane of another rank run the same batch."""


class TwoPoolEngine(Engine):
    """One model over two pools; `pool` is the CPU's. A subclass computes filled lanes.

    With several processes each has an accelerator and a CPU of its own, and of both pools the KV
    of its heads; this one schedules, and tells the others what to run.
    """

    device_name: ClassVar[str]
    own_logits: ClassVar[bool] = True
    lanes: Sequence[StepLane]

    def __init__(
        self,
        gpu_blocks: int,
        artifact: Artifact,
        part: ModelPart,
        hardware: HardwareSpec,
        *,
        ranks: RankOptions | None = None,
        **options: Any,
    ) -> None:
        """As `Engine`; `ranks` says how processes beyond this one are started and joined."""
        self._options, self._gpu_blocks = ranks or RankOptions(), gpu_blocks
        self._pairs: PairGroup | None = None
        super().__init__(artifact, part, hardware, **options)

    def _form_group(
        self, library: KernelLibrary, setups: Sequence[RankSetup]
    ) -> Callable[[int], Bytes]:
        pairs = [
            PairSetup(
                artifact=setup.artifact,
                model=setup.model,
                fingerprint=setup.fingerprint,
                plan=setup.plan,
                device=self.device_name,
                ordinal=self._place_rank(setup.plan.rank),
                backend=self._options.backend,
                gpu_blocks=self._gpu_blocks,
                sequences=setup.max_sequences,
                lanes=setup.lanes,
            )
            for setup in setups
        ]
        self.group = self._pairs = PairGroup(library, pairs, self._options)
        return self.model.device.alloc

    def _place_rank(self, rank: int) -> int:
        """Return which accelerator of its machine a rank has."""
        return 0

    def _join_group(self) -> None:
        if self._pairs is not None:
            self._join_pairs(self._pairs.collective)

    @abstractmethod
    def _join_pairs(self, collective: Collective) -> None:
        """Sum over the ranks of `collective` from now on."""

    def _tell(self, plan: StepPlan, lanes: Sequence[StepLane]) -> None:
        """Have the other ranks run the filled lanes, too."""
        if self._pairs is not None:
            self._pairs.tell(order_step(plan, tuple(lane.order() for lane in lanes)))

    def _schedule(
        self,
        gpu: KvPool,
        predictor: Predictor,
        now: Callable[[], float],
        settings: SchedulerSettings,
    ) -> None:
        """Schedule for both pools from now on."""
        limits = replace(
            self.scheduler.limits,
            n_layers=self.spec.n_layers,
            block_bytes=2 * layer_block_bytes(self.spec) * self.spec.n_layers,
        )
        self.scheduler = NeoScheduler(limits, gpu, self.pool, predictor, now, settings)

    def _execute(self, plan: StepPlan) -> tuple[Request, ...]:
        scheduler = self.scheduler
        lanes = [*self.lanes[: len(plan.batches)]]
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
            scheduler.complete(batch)
            if shape.outputs or shape.scored:
                self._sample(shape, lane.buffers)
        return tuple(request for shape in shapes for request in shape.touched)

    def _prepare(self, lane: StepLane, batch: Batch) -> StepShape:
        shape = lane.fill(batch, self.scheduler.requests, self.scheduler.pools)
        prefill = shape.prefill_tokens >= self.threshold
        decodes = {Home.GPU: batch.gpu_decode, Home.CPU: batch.cpu_decode}
        splits = {
            home: self.kv_splits(
                self._decodes(shape, numbers),
                self._threads(home, prefill=prefill),
                self._part_tokens(home, prefill=prefill),
                apart=home is Home.GPU,
            )
            for home, numbers in decodes.items()
        }
        sizes = LaneSizes(
            n_tokens=shape.n_tokens,
            n_prefill=shape.n_prefill,
            gpu_decode=len(batch.gpu_decode),
            cpu_decode=len(batch.cpu_decode),
            n_out=shape.n_out,
            gpu_splits=splits[Home.GPU],
            cpu_splits=splits[Home.CPU],
            prefill=prefill,
        )
        lane.set_args(sizes)
        return shape

    def _decodes(self, shape: StepShape, numbers: Sequence[int]) -> StepShape:
        """Return the shape with no decodes but `numbers`, those that one device attends."""
        requests = self.scheduler.requests
        longest = max((len(requests[number].tokens) for number in numbers), default=0)
        return replace(shape, n_decode=len(numbers), longest_decode=longest)

    def _part_tokens(self, home: Home, *, prefill: bool) -> int:
        """Return the fewest keys of a part where `home` shares decode attention."""
        return self.part_tokens[prefill]

    def _threads(self, home: Home, *, prefill: bool) -> int:
        """Return how many share the attention of decodes."""
        return self.model.phase(prefill).plan.threads

    def note_attention(self, seconds: float) -> None:
        """Tell the scheduler what the CPU's attention of a layer took, over both batches."""
        assert isinstance(self.scheduler, NeoScheduler)
        self.scheduler.note_attention(seconds)

    def note_time(self, time: StepTime) -> None:
        """Count a step's waits of the devices for each other, where it used both."""
        if time.cpu > 0:
            self.note_waits(time.cpu, gpu=time.seconds - time.gpu, cpu=time.seconds - time.cpu)

    @abstractmethod
    def _compute(self, plan: StepPlan, lanes: list[Any]) -> None:
        """Move KV and run the filled lanes, one for each batch."""


class PipelinedEngine(TwoPoolEngine):
    """One model on the CPU and an emulated accelerator."""

    device_name: ClassVar[str] = EmulatedDevice.name
    device_type: ClassVar[type[EmulatedDevice]] = EmulatedDevice
    lanes: list[Lane]

    def __init__(
        self,
        emulation: Emulation,
        artifact: Artifact,
        part: ModelPart,
        hardware: HardwareSpec,
        **options: Any,
    ) -> None:
        """As `TwoPoolEngine`; raises SpecError also for KV other than is emulated."""
        super().__init__(emulation.machine.gpu_blocks, artifact, part, hardware, **options)
        spec = self.spec
        device = self.accelerator = self.device_type(self.model.device, emulation, spec)
        self.device, gpu = device, KvPool(self._gpu_blocks)
        self._schedule(gpu, device.predictor, device.now, emulation.settings)
        rows = self.scheduler.limits.max_step_sequences
        self.pair = Pair(spec, self.model, device, self._gpu_blocks, rows)
        self.link, self.lanes = self.pair.link, self.pair.lanes
        self._join_group()

    def _join_pairs(self, collective: Collective) -> None:
        self.pair.join(collective)

    def _compute(self, plan: StepPlan, lanes: list[Lane]) -> None:
        """Move KV and run the filled lanes; the device's clock shows what it took."""
        self._tell(plan, lanes)
        self.pair.run(plan.moves, len(plan.swap_out), lanes)
        self.note_time(self.accelerator.advance(plan, self.scheduler.requests))
