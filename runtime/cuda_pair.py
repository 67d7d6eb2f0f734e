"""One rank's GPU and CPU: weights and KV on both, two lanes, and a step's way through them.

In: a rank's part of a model, then filled lanes or orders. Out: these, run layer by layer: kernels
on the compute stream, KV behind it, the CPU's attention on a thread of its own (NEO §3.1).
Nothing here schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from dovetail.ir.artifact import KernelIndex
from dovetail.ir.errors import DovetailError, SpecError
from dovetail.ir.tape import Tape
from dovetail.runtime.accelerator.orders import StepOrder
from dovetail.runtime.artifact import Artifact, ModelPart, device_module
from dovetail.runtime.collective import Collective
from dovetail.runtime.cuda import CudaDevice
from dovetail.runtime.cuda_lane import CudaLane
from dovetail.runtime.device_weights import DeviceWeight, DeviceWeights
from dovetail.runtime.forward import ForwardModel, find_tape, layer_block_bytes
from dovetail.runtime.gpu_model import DevicePools, GpuModel
from dovetail.runtime.kv_pool import blocks_for
from dovetail.runtime.launches import Products, Sums
from dovetail.runtime.plan import Move
from dovetail.runtime.request import Home
from dovetail.runtime.streams import GpuStreams

WARPS_PER_PROCESSOR = 16
"""Warps that a kernel is started with, for each multiprocessor: two blocks."""

MakeProducts: TypeAlias = Callable[[Mapping[str, DeviceWeight], int], Products]
"""Makes the library of products for weights by name on a GPU."""


class GroupSums(Sums, Protocol):
    """Sums over a group that has to be met first."""

    def join(self, collective: Any) -> None:
        """Sum over the ranks of `collective` from now on."""

    def check(self) -> None:
        """Raise RankError where the group has failed while work for it was under way."""


@dataclass(frozen=True, slots=True)
class GpuParts:
    """What stands for the usual parts of a GPU, e.g. in tests; None is the usual one."""

    device: CudaDevice | None = None
    module: tuple[Path, KernelIndex] | None = None
    products: MakeProducts | None = None
    sums: Callable[[Any], GroupSums] | None = None
    landing: int | None = None


class CudaPair:
    """What a rank computes with."""

    def __init__(
        self,
        artifact: Artifact,
        part: ModelPart,
        model: ForwardModel,
        *,
        ordinal: int,
        blocks: int,
        sequences: int,
        graphs: bool = False,
        parts: GpuParts | None = None,
    ) -> None:
        """Put everything on GPU `ordinal`; what is there when it fails is given back.

        Args:
            artifact: where the kernels for the GPU are.
            part: the whole model.
            model: this rank's part of it on the CPU.
            ordinal: which GPU.
            blocks: of the KV pool on the GPU.
            sequences: most of a step.
            graphs: whether steps are recorded.
            parts: see GpuParts.

        Raises:
            SpecError: there is no GPU, or torch is missing.
            ArtifactError: the artifact has no kernels for the GPU.
            CapacityError: weights, KV or activations do not fit on the GPU.
        """
        parts = parts or GpuParts()
        self._sums: GroupSums | None = None
        self._layers, self._moved = model.spec.n_layers, 0
        with ExitStack() as held:
            self.gpu = self._open(artifact, part, model, (ordinal, blocks), parts, held)
            self.lanes: list[CudaLane] = []
            for _ in range(2):
                self.lanes.append(CudaLane(self.gpu, find_tape(part, "sample"), sequences))
                held.callback(self.lanes[-1].close)
            self.worker = held.enter_context(ThreadPoolExecutor(1, "cpu-attention"))
            self._held = held.pop_all()

    def _open(
        self,
        artifact: Artifact,
        part: ModelPart,
        model: ForwardModel,
        place: tuple[int, int],
        parts: GpuParts,
        held: ExitStack,
    ) -> GpuModel:
        (ordinal, blocks), spec = place, model.spec
        tape, shares = model.device_share()
        module = parts.module or device_module(artifact)
        make_products = parts.products or find_products()
        gpu = parts.device or CudaDevice(ordinal)
        held.callback(gpu.close)
        loaded = gpu.load(*module)
        held.callback(loaded.close)
        weights = DeviceWeights(gpu, model.weights, shares)
        held.callback(weights.close)

        def alloc(nbytes: int) -> int:
            address = gpu.alloc(nbytes)
            held.callback(gpu.free, address)
            return address

        landing = min(count_blocks(model), parts.landing or _most_landing(tape, model))
        pools = DevicePools(0, 0, blocks, landing, layer_block_bytes(spec))
        keys, values = (alloc(pools.layer_bytes * spec.n_layers) for _ in "kv")
        streams = GpuStreams(gpu)
        held.callback(streams.close)
        for memory in (model.kv.k, model.kv.v):
            streams.pin(memory)
        library = make_products(weights.held, gpu.ordinal)
        if model.shard is not None:
            self._sums = (parts.sums or find_sums())(library)
        return GpuModel(
            spec=spec,
            tape=tape,
            streams=streams,
            module=loaded,
            weights=weights,
            products=library,
            pools=replace(pools, keys=keys, values=values),
            cpu=model,
            gated=alloc(4 * 2 * spec.intermediate_size * tape.max_tokens),
            warps=WARPS_PER_PROCESSOR * gpu.multiprocessors,
            sums=self._sums,
        )

    def join(self, collective: Collective) -> None:
        """Sum over the ranks of `collective` from now on."""
        assert self._sums is not None
        self._sums.join(collective)

    def activate(self) -> None:
        """Have this thread work with the GPU."""
        self.gpu.module.device.activate()

    # ---- a step ----

    def begin(self) -> None:
        """Begin a step: nothing has been moved."""
        self._moved = 0

    def obey(self, order: StepOrder) -> None:
        """Run a step as the rank that made `order`."""
        self.activate()
        self.begin()
        lanes = self.lanes[: len(order.lanes)]
        with self.finishing(lanes):
            for lane, filled in zip(lanes, order.lanes, strict=True):
                lane.obey(filled)
            self.run(order.moves, order.leaving, lanes)

    @contextmanager
    def finishing(self, lanes: Sequence[CudaLane]) -> Iterator[None]:
        """Wait for the work that the body gives to the GPU, even if it fails.

        Raises RankError where the group has failed meanwhile.
        """
        streams = self.gpu.streams
        try:
            yield
            streams.finish()
            if self._sums is not None:
                self._sums.check()
        except BaseException:
            for lane in lanes:
                lane.abandon()
            with suppress(DovetailError):  # what failed is on its way already
                streams.finish()
            raise

    def run(self, moves: Sequence[Move], leaving: int, lanes: Sequence[CudaLane]) -> None:
        """Give filled lanes to the GPU side by side, each behind its attention on the CPU.

        The first `leaving` of the moves go to the CPU. A layer is moved once, however often the
        step is tried.
        """
        streams = self.gpu.streams
        for layer in range(self._layers):
            moved = self._move(layer, moves, leaving, lanes)
            for lane in lanes:
                lane.collect()
                if moved is not None:
                    streams.follow(streams.compute, moved)
                lane.start_layer(layer, self.worker)
        for lane in lanes:
            lane.collect()
            lane.end()

    def _move(
        self, layer: int, moves: Sequence[Move], leaving: int, lanes: Sequence[CudaLane]
    ) -> int | None:
        """Move one layer of KV, and bring what prompts need; return the event behind it, if any."""
        brought = [lane.bring(layer) for lane in lanes]
        moves = moves if layer >= self._moved else ()
        self._moved = max(self._moved, layer + 1)
        for i, move in enumerate(moves):
            out = i < leaving
            ends = (move.source, move.target) if out else (move.target, move.source)
            self.gpu.copy_blocks(layer, np.array(ends, np.int32), Home.CPU if out else Home.GPU)
        streams = self.gpu.streams
        return streams.event(streams.copy) if moves or any(brought) else None

    def close(self) -> None:
        """End the thread and give the GPU's memory back, as far as a lost GPU lets it."""
        with self._held:
            self.activate()


def count_blocks(model: ForwardModel) -> int:
    """Return the blocks of a rank's KV pool on the CPU."""
    return model.kv.layer_bytes // layer_block_bytes(model.spec)


def _most_landing(tape: Tape, model: ForwardModel) -> int:
    return blocks_for(model.spec.max_context) + blocks_for(tape.max_tokens)


def find_products() -> MakeProducts:
    """Return torch's products; SpecError where it is not installed."""
    try:
        from dovetail.runtime.torch_products import TorchProducts  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise SpecError(
            f"products on a GPU need torch ({error}); pip install 'dovetail[gpu]'"
        ) from None
    return TorchProducts


def find_sums() -> Callable[[Any], GroupSums]:
    """Return torch's sums over a group, where its products are installed."""
    from dovetail.runtime.torch_sums import TorchSums  # noqa: PLC0415 - an extra

    return TorchSums
