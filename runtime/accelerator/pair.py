"""One rank's device and CPU: weights and KV on both, two lanes, and a step's way through them.

In: a rank's part of a model, then filled lanes or orders. Out: these, run layer by layer: tensors
on the compute stream, KV behind it, the CPU's attention on a thread of its own (NEO §3.1).
Nothing here schedules.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from dovetail.ir.errors import CapacityError, DovetailError, RankError
from dovetail.ir.model import KV_BLOCK
from dovetail.runtime.accelerator.device import TorchDevice
from dovetail.runtime.accelerator.lane import LINK, DeviceModel, Lane, Pen, draw_nothing
from dovetail.runtime.accelerator.orders import StepOrder
from dovetail.runtime.accelerator.tape import DevicePools, Products
from dovetail.runtime.accelerator.weights import TYPES, load_weights
from dovetail.runtime.device_limits import DeviceLimits
from dovetail.runtime.forward import ForwardModel, layer_block_bytes
from dovetail.runtime.plan import Move
from dovetail.runtime.request import Home

Generate: TypeAlias = Callable[[Mapping[str, torch.Tensor]], Products | None]


class DevicePair:
    """What a rank computes with."""

    def __init__(
        self,
        model: ForwardModel,
        device: TorchDevice,
        dtype: torch.dtype,
        limits: DeviceLimits,
        generate: Generate | None = None,
    ) -> None:
        """Put everything on the device.

        Args:
            model: this rank's part of the model on the CPU.
            device: where tensors go.
            dtype: of activations and matrices there.
            limits: of the pool and of steps.
            generate: finds generated products for the weights on the device.

        Raises CapacityError where weights, KV or activations do not fit.
        """
        self._layers, self._moved, self.device = model.spec.n_layers, 0, device
        self._collective: Any = None
        tape, shares = model.device_share()
        with device.working():
            weights = load_weights(device, model.weights, dtype, shares)
            products = generate(weights) if generate else None
            self.model = DeviceModel(
                spec=model.spec,
                tape=tape,
                device=device,
                weights=weights,
                dtype=dtype,
                pools=make_pools(model, device, limits.blocks, limits.landing),
                cpu=model,
                cpu_pools=cpu_pools(model),
                sizes=(limits.step_tokens, limits.sequences),
                products=products,
            )
            self.lanes = [Lane(self.model, f"batch {i}") for i in range(2)]
        self._pen: Pen = draw_nothing
        cpus = model.decode.plan.cpus  # not those of the thread that starts it
        stay = partial(os.sched_setaffinity, 0, cpus) if cpus else None
        self.worker = ThreadPoolExecutor(1, "cpu-attention", stay)
        self._held = ExitStack()
        if limits.landing:
            self._held.enter_context(device.pinned(model.kv.k, model.kv.v))

    def join(self, collective: Any) -> None:
        """Sum over the ranks of `collective` from now on."""
        self._collective = collective
        for lane in self.lanes:
            lane.join(collective)

    def record(self, pen: Pen) -> None:
        """Draw what devices and link do from now on."""
        self._pen = pen
        for lane in self.lanes:
            lane.pen = pen

    # ---- a step ----

    def begin(self) -> None:
        """Begin a step: nothing has been moved."""
        self._moved = 0

    def obey(self, order: StepOrder) -> None:
        """Run a step as the rank that made `order`."""
        self.begin()
        lanes = self.lanes[: len(order.lanes)]
        with self.device.working(), self.finishing(lanes):
            for lane, filled in zip(lanes, order.lanes, strict=True):
                lane.obey(filled)
            self.run(order.moves, order.leaving, lanes)

    @contextmanager
    def finishing(self, lanes: Sequence[Lane]) -> Iterator[None]:
        """Wait for the work that the body gives to the device, even if it fails.

        Raises RankError where the group has failed meanwhile.
        """
        try:
            yield
            self.device.finish()
            if self._collective is not None and self._collective.failed:
                raise RankError("a process of the group has ended, so nothing can be summed")
        except BaseException:
            for lane in lanes:
                lane.abandon()
            with suppress(DovetailError, RuntimeError):  # what failed is on its way already
                self.device.finish()
            raise

    def run(self, moves: Sequence[Move], leaving: int, lanes: Sequence[Lane]) -> None:
        """Give filled lanes to the device side by side, each behind its attention on the CPU.

        The first `leaving` of the moves go to the CPU. A layer is moved once, however often the
        step is tried.
        """
        device = self.device
        for layer in range(self._layers):
            moved = self._move(layer, moves, leaving, lanes)
            for lane in lanes:
                lane.collect()
                if moved:
                    device.follow(device.compute, device.mark(device.copy))
                lane.start_layer(layer, self.worker)
        for lane in lanes:
            lane.collect()
            lane.end()

    def _move(self, layer: int, moves: Sequence[Move], leaving: int, lanes: Sequence[Lane]) -> bool:
        """Move one layer of KV, and bring what prompts need; tell whether there was any."""
        moves = moves if layer >= self._moved else ()
        self._moved = max(self._moved, layer + 1)
        for i, move in enumerate(moves):
            out = i < leaving
            ends = (move.source, move.target) if out else (move.target, move.source)
            home = Home.CPU if out else Home.GPU
            with self._pen(LINK, "KV moves out" if out else "KV moves in"):
                self.model.copy_blocks(layer, np.array(ends, np.int32), home)
        # a prompt may begin like a request that moves in this very step
        brought = [lane.bring(layer) for lane in lanes]
        return bool(moves) or any(brought)

    def close(self) -> None:
        """End the thread and give the device's memory back; safe to call twice."""
        self.worker.shutdown()
        self._held.close()
        self.lanes.clear()
        self.__dict__.pop("model", None)
        self.device.release()


def make_pools(model: ForwardModel, device: TorchDevice, blocks: int, landing: int) -> DevicePools:
    """Return KV memory on the device; CapacityError where it does not fit."""
    spec = model.spec
    shape = (spec.n_layers, blocks + landing + 1, spec.n_kv_heads, KV_BLOCK, spec.head_dim)
    try:
        keys, values = (device.zeros(shape, TYPES[spec.kv_dtype]) for _ in "kv")
    except CapacityError as error:
        size = 2 * spec.n_layers * (blocks + landing) * layer_block_bytes(spec)
        raise CapacityError(
            f"a KV pool of {blocks} blocks ({size / 2**20:.0f} MiB) does not fit on {device.name} "
            f"({error}); lower --gpu-memory-utilization"
        ) from None
    return DevicePools(keys, values, blocks, landing)


def cpu_pools(model: ForwardModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of the CPU, laid out as on the device."""
    spec, kv = model.spec, model.kv
    shape = (spec.n_layers, -1, spec.n_kv_heads, KV_BLOCK, spec.head_dim)
    keys, values = (
        torch.from_numpy(memory).view(TYPES[spec.kv_dtype]).view(shape) for memory in (kv.k, kv.v)
    )
    return keys, values
