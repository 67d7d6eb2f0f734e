"""What a rank computes a step with: the KV memory of an accelerator and a CPU, and two lanes.

In: filled batches or orders, and moves of KV. Out: activations and logits of each batch, KV where
its request lives. Nothing here schedules.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dovetail.ir.model import KV_BLOCK, ModelSpec
from dovetail.runtime.accelerator.orders import (
    LaneOrder,
    LaneSizes,
    StepOrder,
    order_lane,
    unpack_arrays,
)
from dovetail.runtime.collective import Collective
from dovetail.runtime.device import Device, Segment
from dovetail.runtime.forward import ForwardModel, Phase, layer_block_bytes
from dovetail.runtime.group_device import GroupDevice
from dovetail.runtime.kv_pool import KvPool, blocks_for
from dovetail.runtime.plan import Batch, Move, PrefillChunk
from dovetail.runtime.request import Home, Request
from dovetail.runtime.step import Blocks, StepBuffers, StepShape
from dovetail.runtime.tape import KvArrays, Operands

Rows = npt.NDArray[np.uint8]
"""K or V as [layer][block][kv_head][KV_BLOCK][bytes of a head]."""


class KvLink:
    """Both pools and the way between them.

    Behind its own blocks the accelerator has a landing place for every block of the CPU: the KV of
    requests that live on the CPU is computed there and leaves in the same layer.
    """

    def __init__(self, gpu: KvArrays, cpu: KvArrays, spec: ModelSpec, landing: int) -> None:
        """`landing`: the accelerator's block in which block 0 of the CPU lands."""
        self.gpu, self.cpu, self.landing = gpu, cpu, landing
        shape = (spec.n_layers, -1, spec.n_kv_heads, KV_BLOCK)
        size = layer_block_bytes(spec) // (spec.n_kv_heads * KV_BLOCK)
        self._views: dict[Home, tuple[Rows, Rows]] = {
            home: (kv.k.reshape(*shape, size), kv.v.reshape(*shape, size))
            for home, kv in ((Home.GPU, gpu), (Home.CPU, cpu))
        }

    def move(self, layer: int, move: Move, target: Home) -> None:
        """Copy one layer of the blocks of a request to the pool of `target`."""
        source = Home.CPU if target is Home.GPU else Home.GPU
        pairs = zip(self._views[target], self._views[source], strict=True)
        for to, held in pairs:
            to[layer, list(move.target)] = held[layer, list(move.source)]

    def bring(self, layer: int, blocks: npt.NDArray[np.int32]) -> None:
        """Copy one layer of blocks of the CPU to where they land."""
        for to, held in zip(self._views[Home.GPU], self._views[Home.CPU], strict=True):
            to[layer, blocks + self.landing] = held[layer, blocks]

    def send(self, layer: int, slots: npt.NDArray[np.int64]) -> None:
        """Copy one layer of single tokens, in slots of the CPU, from where they landed."""
        blocks, places = slots // KV_BLOCK, slots % KV_BLOCK
        for to, landed in zip(self._views[Home.CPU], self._views[Home.GPU], strict=True):
            to[layer, blocks, :, places] = landed[layer, blocks + self.landing, :, places]


class Lane:
    """What one batch of a step runs in: buffers, activations, the tape bound to either pool."""

    def __init__(
        self, spec: ModelSpec, model: ForwardModel, device: Device, link: KvLink, sequences: int
    ) -> None:
        tape = model.decode.tape.tape
        self.buffers = StepBuffers(device.alloc, spec, tape.max_tokens, sequences)
        self._device, self._link = device, link
        arena = device.alloc(tape.arena_bytes)
        phases = {"prefill": model.prefill.plan, "decode": model.decode.plan}
        self._phases = {
            (home, name): Phase(
                model.bind(tape, Operands(model.weights, arena, kv), name, plan), plan
            )
            for home, kv in ((Home.GPU, link.gpu), (Home.CPU, link.cpu))
            for name, plan in phases.items()
        }
        bound = self._phases[Home.GPU, "decode"].tape
        self._attention = [bound.segment(f"attn({i})") for i in range(spec.n_layers)]
        starts = [0, *(span.stop for span in self._attention)]
        stops = [*(span.start for span in self._attention), len(tape.entries)]
        self._between = [range(*ends) for ends in zip(starts, stops, strict=True)]
        self._args: dict[Home, dict[str, int]] = {}
        self._phase = "decode"

    def fill(
        self, batch: Batch, requests: Mapping[int, Request], pools: Mapping[Home, KvPool]
    ) -> StepShape:
        """Write the arguments of a batch."""

        def table(number: int) -> Blocks:
            home = requests[number].home
            assert home is not None
            return pools[home].table(number)

        shape = self.buffers.fill(batch, requests, table)
        arrays, first = self.buffers.arrays, shape.n_prefill + len(batch.gpu_decode)
        start = shape.n_tokens - len(batch.cpu_decode)
        arrays["seq_starts"][first] = start
        self._brought = _stored_before(batch.prefill, requests, pools[Home.CPU])
        slots = arrays["kv_slots"]
        self._appended = slots[start : shape.n_tokens].copy()
        self._sent = np.concatenate([*self._land_prompts(batch, requests), self._appended])
        slots[start : shape.n_tokens] += self._link.landing * KV_BLOCK
        return shape

    def _land_prompts(
        self, batch: Batch, requests: Mapping[int, Request]
    ) -> list[npt.NDArray[np.int64]]:
        """Have the prompts of the CPU land; return the slots of their tokens there."""
        arrays, landing, row = self.buffers.arrays, self._link.landing, 0
        found = []
        for sequence, chunk in enumerate(batch.prefill):
            if requests[chunk.request].home is Home.CPU:
                slots = arrays["kv_slots"][row : row + chunk.length]
                found.append(slots.copy())
                slots += landing * KV_BLOCK
                held = blocks_for(chunk.start + chunk.length)
                arrays["block_tables"][sequence, :held] += landing
            row += chunk.length
        return found

    def set_args(self, sizes: LaneSizes) -> None:
        """Say how the filled batch runs: the attention of its last decodes on the CPU."""
        self._phase, self._sizes = "prefill" if sizes.prefill else "decode", sizes
        first = sizes.n_prefill + sizes.gpu_decode
        arrays = self.buffers.arrays
        gpu = self.buffers.forward_addresses() | sizes.args
        tails = {
            name: int(arrays[name][first:].ctypes.data)
            for name in ("seq_starts", "seq_lengths", "block_tables")
        }
        cpu = gpu | tails | {"n_prefill": 0, "n_decode": sizes.cpu_decode}
        self._args = {Home.GPU: gpu, Home.CPU: cpu | {"kv_splits": sizes.cpu_splits}}

    def order(self) -> LaneOrder:
        """Return what makes a lane of another rank run the same batch."""
        arrays = self.buffers.arrays
        return order_lane(self._sizes, arrays, brought=self._brought, sent=self._sent)

    def obey(self, order: LaneOrder) -> None:
        """Fill the lane as that of the rank that made `order`."""
        unpack_arrays(order.arrays, self.buffers.arrays, order.sizes, order.table_width)
        self._brought = np.frombuffer(order.kv["brought"], np.int32)
        self._sent = np.frombuffer(order.kv["sent"], np.int64)
        self.set_args(order.sizes)

    def start_layer(self, layer: int) -> None:
        """Run what lies between the attention of the layer before and that of `layer`."""
        self._link.bring(layer, self._brought)
        self._run(Home.GPU, self._between[layer])
        self._link.send(layer, self._sent)

    def append(self, layer: int) -> None:
        """Store the keys and values of the CPU's decodes alone, from where they landed."""
        self._link.send(layer, self._appended)

    def attend(self, layer: int) -> None:
        """Run the attention of a layer, each sequence where its KV is; prompts on the GPU."""
        for home in Home:
            self.attend_on(home, layer)

    def attend_on(self, home: Home, layer: int) -> None:
        """Run the attention of a layer over the KV in one pool."""
        self._run(home, self._attention[layer])

    def end(self) -> None:
        """Run what follows the last attention."""
        self._run(Home.GPU, self._between[-1])

    def _run(self, home: Home, span: range) -> None:
        phase = self._phases[home, self._phase]
        self._device.run(Segment(phase.tape, phase.plan, self._args[home], span))


def _stored_before(
    chunks: tuple[PrefillChunk, ...], requests: Mapping[int, Request], pool: KvPool
) -> npt.NDArray[np.int32]:
    """Return the CPU's blocks with tokens before the starts of chunks that live there."""
    tables = [
        pool.table(chunk.request)[: blocks_for(chunk.start)]
        for chunk in chunks
        if requests[chunk.request].home is Home.CPU
    ]
    return np.array([*itertools.chain.from_iterable(tables)], np.int32)


class Pair:
    """One rank's accelerator and CPU: the KV memory of both, and lanes for two batches."""

    def __init__(
        self, spec: ModelSpec, model: ForwardModel, device: Device, gpu_blocks: int, sequences: int
    ) -> None:
        """`spec`: the whole model, of which `model` has this rank's heads, on `device`."""
        self._layers = spec.n_layers
        device = self._member = GroupDevice(device)
        layer = gpu_blocks * layer_block_bytes(model.spec) + model.kv.layer_bytes
        keys, values = (device.alloc(layer * spec.n_layers) for _ in "kv")
        self.link = KvLink(KvArrays(keys, values, layer), model.kv, model.spec, gpu_blocks)
        self.lanes = [Lane(spec, model, device, self.link, sequences) for _ in range(2)]

    def join(self, collective: Collective) -> None:
        """Sum over the ranks of `collective` from now on."""
        self._member.join(collective)

    def run(self, moves: Sequence[Move], leaving: int, lanes: Sequence[Lane]) -> None:
        """Run filled lanes side by side; KV moves in the layer in which it is used next.

        The first `leaving` of the moves go to the CPU.
        """
        targets = [Home.CPU if i < leaving else Home.GPU for i in range(len(moves))]
        for layer in range(self._layers):
            for move, target in zip(moves, targets, strict=True):
                self.link.move(layer, move, target)
            for lane in lanes:
                lane.start_layer(layer)
            for lane in lanes:
                lane.attend(layer)
        for lane in lanes:
            lane.end()

    def obey(self, order: StepOrder) -> None:
        """Run a step as the rank that made `order`."""
        lanes = self.lanes[: len(order.lanes)]
        for lane, filled in zip(lanes, order.lanes, strict=True):
            lane.obey(filled)
        self.run(order.moves, order.leaving, lanes)
