"""One rank's device and CPU: weights and KV on both, two sub-batches, and a step through them.

In: a rank's part of a model, then filled sub-batches or orders. Out: these, run layer by layer:
tensors on the compute stream, KV behind it, the CPU's attention on a thread of its own (NEO §3.1).
Nothing here schedules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeAlias

import numpy as np
import torch

from dovetail.ir.errors import CapacityError, DovetailError, RankError
from dovetail.ir.model import KV_BLOCK, ModelSpec
from dovetail.runtime.accel.device import TYPES, TorchDevice
from dovetail.runtime.accel.experts import without_experts
from dovetail.runtime.accel.generated import GeneratedProducts
from dovetail.runtime.accel.graph_cache import GraphCache
from dovetail.runtime.accel.orders import StepOrder
from dovetail.runtime.accel.step import PagedAttention
from dovetail.runtime.accel.sub_batch import LINK, DeviceModel, SubBatch, record_nothing
from dovetail.runtime.accel.tape import DevicePools
from dovetail.runtime.accel.weights import load_weights
from dovetail.runtime.artifact import Artifact, ModelPart
from dovetail.runtime.engine.engine import RecordSpan
from dovetail.runtime.native.forward import ForwardModel, kv_block_bytes
from dovetail.runtime.native.runner import Runner
from dovetail.runtime.schedule.device_limits import DeviceLimits
from dovetail.runtime.schedule.plan import Move
from dovetail.runtime.schedule.request import Home

Layers: TypeAlias = Sequence[torch.Tensor]
"""K, or V, of each layer."""
UNSEEN = 2
"""Blocks of a pool behind all others: an unread one, and one of zeros."""


class DevicePair:
    """What a rank computes with."""

    def __init__(
        self,
        model: ForwardModel,
        device: TorchDevice,
        dtype: torch.dtype,
        limits: DeviceLimits,
        attention: type[PagedAttention],
        source: tuple[Artifact, ModelPart] | None = None,
    ) -> None:
        """Put everything on the device: this rank's part of the model, activations of `dtype`.

        attention: over its KV there. source: what may hold generated products for the device.

        Raises CapacityError where weights, KV or activations do not fit.
        """
        self._layers, self._moved, self.device = model.spec.n_layers, 0, device
        self._collective: Any = None
        tape, shares = model.device_share()
        with device.working():
            weights = load_weights(device, model.weights, dtype, shares)
            given = (model.weights, without_experts(tape, weights), device.device, dtype)
            products = GeneratedProducts.open(*source, *given) if source else None
            if products is not None:
                products.choose(lambda name, rows: torch.mm(rows, weights[name].t()))
            self.model = DeviceModel(
                tape=tape,
                device=device,
                weights=weights,
                dtype=dtype,
                pools=make_pools(model, device, limits.blocks, limits.landing),
                cpu=model,
                cpu_pools=cpu_pools(model),
                sizes=(limits.step_tokens, limits.sequences),
                products=products,
                attention=attention,
            )
            self._runner = Runner(model.team, model.decode.plan.cpus)
            graphs = GraphCache(device)
            self.sub_batches = [
                SubBatch(f"batch {i}", self.model, graphs, self._runner) for i in range(2)
            ]
        self._record_span: RecordSpan = record_nothing
        self._held = ExitStack()
        if limits.landing:
            self._held.enter_context(device.pinned(model.kv.k, model.kv.v))

    def join(self, collective: Any) -> None:
        """Sum over the ranks of `collective` from now on."""
        self._collective = collective
        for sub_batch in self.sub_batches:
            sub_batch.forward.collective = collective

    def record(self, record_span: RecordSpan) -> None:
        """Draw what devices and link do from now on."""
        self._record_span = record_span
        for sub_batch in self.sub_batches:
            sub_batch.record_span = record_span

    # ---- a step ----

    def begin(self) -> None:
        """Begin a step: nothing has been moved."""
        self._moved = 0

    def obey(self, order: StepOrder) -> None:
        """Run a step as the rank that made `order`."""
        self.begin()
        sub_batches = self.sub_batches[: len(order.batches)]
        with self.device.working(), self.finishing(sub_batches):
            for sub_batch, filled in zip(sub_batches, order.batches, strict=True):
                sub_batch.obey(filled)
            self.run(order.moves, order.leaving, sub_batches)

    @contextmanager
    def finishing(self, sub_batches: Sequence[SubBatch]) -> Iterator[None]:
        """Wait for the work that the body gives to the device, even if it fails.

        Raises RankError where the group has failed meanwhile.
        """
        try:
            yield
            self.device.finish()
            if self._collective is not None and self._collective.failed:
                raise RankError("a process of the group has ended, so nothing can be summed")
        except BaseException:
            with suppress(DovetailError, RuntimeError):  # what failed is on its way already
                self.device.finish()
            self._runner.drop()
            for sub_batch in sub_batches:
                sub_batch.abandon()
            raise

    def run(self, moves: Sequence[Move], leaving: int, sub_batches: Sequence[SubBatch]) -> None:
        """Give filled sub-batches to the device side by side, each behind its attention on the CPU.

        The first `leaving` of the moves go to the CPU. A layer is moved once, however often the
        step is tried.
        """
        device = self.device
        pieces = 0 if len(sub_batches) == 1 and sub_batches[0].whole else self._layers
        for layer in range(pieces):
            moved = self._move(layer, moves, leaving, sub_batches)
            for sub_batch in sub_batches:
                sub_batch.collect()
                if moved:
                    device.follow(device.compute, device.mark(device.copy))
                sub_batch.start_layer(layer)
        for sub_batch in sub_batches:
            sub_batch.collect()
            sub_batch.end()

    def _move(
        self, layer: int, moves: Sequence[Move], leaving: int, sub_batches: Sequence[SubBatch]
    ) -> bool:
        """Move one layer of KV, and bring what prompts need; tell whether there was any."""
        moves = moves if layer >= self._moved else ()
        for i, move in enumerate(moves):
            out = i < leaving
            ends = (move.source, move.target) if out else (move.target, move.source)
            home = Home.CPU if out else Home.GPU
            with self._record_span(LINK, "KV moves out" if out else "KV moves in"):
                self.model.copy_blocks(layer, np.array(ends, np.int32), home)
        self._moved = max(self._moved, layer + 1)
        # a prompt may begin like a request that moves in this very step
        brought = [sub_batch.bring(layer) for sub_batch in sub_batches]
        return bool(moves) or any(brought)

    def close(self) -> None:
        """End the thread and give the device's memory back; safe to call twice."""
        self._runner.close()
        self._held.close()
        self.sub_batches.clear()
        self.__dict__.pop("model", None)
        self.device.release()


def make_pools(model: ForwardModel, device: TorchDevice, blocks: int, landing: int) -> DevicePools:
    """Return KV memory on the device; CapacityError where it does not fit."""
    spec = model.spec
    whole, kind = blocks + landing + UNSEEN, TYPES[spec.kv_dtype]
    sizes = [whole * KV_BLOCK * spec.kv_values(layer) for layer in range(spec.n_layers)]
    try:
        pools = [device.zeros((sum(sizes),), kind) for _ in "kv"]
    except CapacityError as error:
        size = (blocks + landing) * kv_block_bytes(spec)
        raise CapacityError(
            f"a KV pool of {blocks} blocks ({size / 2**20:.0f} MiB) does not fit on {device.name} "
            f"({error}); lower --gpu-memory-utilization"
        ) from None
    keys, values = (shape_layers(spec, pool.split(sizes)) for pool in pools)
    return DevicePools(keys, values, blocks, landing)


def cpu_pools(model: ForwardModel) -> tuple[Layers, Layers]:
    """Return K and V of each layer on the CPU, laid out as on the device."""
    spec, kind = model.spec, TYPES[model.spec.kv_dtype]
    keys, values = (
        shape_layers(spec, [torch.from_numpy(layer).view(kind) for layer in model.kv.layers(pool)])
        for pool in "kv"
    )
    return keys, values


def shape_layers(spec: ModelSpec, layers: Layers) -> Layers:
    """Return K or V of each layer, given flat, as [block][kv_head][16][head_dim]."""
    shaped = []
    for number, layer in enumerate(layers):
        _, heads, size = spec.layer_heads(number)
        blocks = len(layer) // (heads * KV_BLOCK * size)
        shaped.append(layer.view(blocks, heads, KV_BLOCK, size))
    return shaped
