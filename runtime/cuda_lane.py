"""One batch of a step on a GPU: its arguments, its activations, and its attention on the CPU.

In: a planned batch. Out: work for the compute and the copy stream, and a task for the CPU's thread
for each layer. What crosses the link for a request that lives on the CPU: a decode's q, k and v go
there and its attention comes back; a prompt's blocks are computed in a landing place and go there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from dovetail.ir.dtypes import DTYPES
from dovetail.ir.model import KV_BLOCK
from dovetail.ir.tape import ArgRef, BufferRef, KvRef, Slot, Tape, WeightRef
from dovetail.runtime.accelerator.orders import LaneOrder, LaneSizes, order_lane, unpack_arrays
from dovetail.runtime.device import Segment
from dovetail.runtime.forward import Phase
from dovetail.runtime.gpu_model import GpuModel
from dovetail.runtime.kv_pool import KvPool, blocks_for
from dovetail.runtime.launches import LaunchTape
from dovetail.runtime.plan import Batch
from dovetail.runtime.request import Home, Request
from dovetail.runtime.sampling import draw_uniform
from dovetail.runtime.step import PAGE, StepBuffers, StepShape, step_bytes
from dovetail.runtime.streams import Bytes
from dovetail.runtime.tape import Operands

CROSSING = ("qkv", "attention")
"""Buffers of which rows cross the link: to the CPU, and back."""


def attention_tape(tape: Tape, sequences: int) -> Tape:
    """Return the decode attention of a forward tape alone, over rows of `sequences` decodes."""
    entries = tuple(
        msgspec.structs.replace(entry, barrier=True)
        for entry in tape.entries
        if entry.op == "decode_attention"
    )
    used = {s.name for entry in entries for s in entry.slots if isinstance(s, BufferRef)}
    buffers, offset = [], 0
    for buffer in tape.buffers:
        if buffer.name in used:
            size = buffer.bytes // buffer.rows * sequences
            buffers.append(
                msgspec.structs.replace(buffer, offset=offset, rows=sequences, bytes=size)
            )
            offset += -(-size // 64) * 64
    return msgspec.structs.replace(
        tape, buffers=tuple(buffers), entries=entries, arena_bytes=offset, max_tokens=sequences
    )


class CudaLane:
    """Buffers of one batch, on both sides, and the tapes bound to them."""

    def __init__(self, model: GpuModel, sample: Tape, sequences: int) -> None:
        """`sample`: what chooses tokens, by the rank that is told which are wanted (`fill`)."""
        spec, tape = model.spec, model.tape
        self._model, self._streams, device = model, model.streams, model.module.device
        size = step_bytes(spec, tape.max_tokens, sequences)
        slab = model.streams.pinned(size)
        self.buffers = StepBuffers(_take_from(slab), spec, tape.max_tokens, sequences)
        self._memory = [device.alloc(n) for n in (size, tape.arena_bytes, sample.arena_bytes)]
        self._shift = self._memory[0] - int(slab.ctypes.data)
        bind = (model.module.kernels, self._address, model.products, model.gated, model.sums)
        self._arena = self._memory[1]
        self._tape = self._bound_tape = tape
        self.forward = LaunchTape(tape, *bind)
        self._arena, self._bound_tape = self._memory[2], sample
        self.sample = LaunchTape(sample, *bind)
        self.attention = [self.forward.segment(f"attn({i})") for i in range(spec.n_layers)]
        starts = [0, *(span.stop for span in self.attention)]
        stops = [*(span.start for span in self.attention), len(tape.entries)]
        self.between = [range(*ends) for ends in zip(starts, stops, strict=True)]
        self._bind_cpu(tape, sequences)
        self.args: dict[str, int] = {}
        self._task: Future[None] | None = None
        self.attending = 0.0  # seconds of the CPU's attention since somebody looked

    def _bind_cpu(self, tape: Tape, sequences: int) -> None:
        model = self._model
        own = attention_tape(tape, sequences)
        arena = self._streams.pinned(own.arena_bytes)
        phase = model.cpu.decode
        operands = Operands(model.cpu.weights, arena, model.cpu.kv)
        self._cpu = Phase(model.cpu.bind(own, operands, "decode", phase.plan), phase.plan)
        self._cpu_spans = [self._cpu.tape.segment(f"attn({i})") for i in range(model.spec.n_layers)]
        self._rows = {
            name: (self._memory[1] + buffer.offset, self._cpu.tape.buffer(name), buffer.stride * 4)
            for name in CROSSING
            for buffer in tape.buffers
            if buffer.name == name
        }
        self._no_rows = self._streams.pinned(4).view(np.int32)  # the CPU's rows begin at 0

    def _address(self, slot: Slot) -> int:
        """Return where an operand lies on the device; an argument that is no pointer, itself."""
        if isinstance(slot, BufferRef):
            (buffer,) = (b for b in self._bound_tape.buffers if b.name == slot.name)
            return self._arena + buffer.offset + slot.offset
        if isinstance(slot, WeightRef):
            return self._model.weights.held[slot.name].address if slot.name else 0
        if isinstance(slot, KvRef):
            return self._model.pools.layer(slot.layer)["kv".index(slot.pool)]
        assert isinstance(slot, ArgRef)
        array = self.buffers.arrays.get(slot.name)
        if array is None:
            return self.buffers.forward_addresses()[slot.name]
        return int(array.ctypes.data) + self._shift + slot.offset

    # ---- arguments ----

    def fill(
        self, batch: Batch, requests: Mapping[int, Request], pools: Mapping[Home, KvPool]
    ) -> StepShape:
        """Write the arguments of a batch."""

        def table(number: int) -> Any:
            home = requests[number].home
            assert home is not None
            return pools[home].table(number)

        shape = self._shape = self.buffers.fill(batch, requests, table)
        self.buffers.sample_args(shape, draw_uniform)
        self._land_prompts(batch, requests)
        count = len(batch.cpu_decode)
        slots = self.buffers.arrays["kv_slots"][shape.n_tokens - count : shape.n_tokens]
        self._cpu_slots = slots.copy()
        self._samples = True
        slots[:] = self._model.pools.unread * KV_BLOCK + np.arange(count) % KV_BLOCK
        return shape

    def _land_prompts(self, batch: Batch, requests: Mapping[int, Request]) -> None:
        """Give the blocks of prompts that live on the CPU their places in the landing."""
        arrays, first = self.buffers.arrays, self._model.pools.blocks
        places: dict[int, int] = {}
        brought: dict[int, None] = {}
        sent: dict[int, None] = {}
        row = 0
        for sequence, chunk in enumerate(batch.prefill):
            end = chunk.start + chunk.length
            if requests[chunk.request].home is Home.CPU:
                table = arrays["block_tables"][sequence, : blocks_for(end)]
                held = table.tolist()
                brought |= dict.fromkeys(held[: blocks_for(chunk.start)])
                sent |= dict.fromkeys(held[chunk.start // KV_BLOCK :])
                table[:] = [first + places.setdefault(block, len(places)) for block in held]
                positions = np.arange(chunk.start, end)
                slots = arrays["kv_slots"][row : row + chunk.length]
                slots[:] = table[positions // KV_BLOCK] * KV_BLOCK + positions % KV_BLOCK
            row += chunk.length
        assert len(places) <= self._model.pools.landing
        self._brought, self._sent = (
            np.array([[first + places[b] for b in blocks], [*blocks]], np.int32)
            for blocks in (brought, sent)
        )

    def set_args(self, sizes: LaneSizes) -> None:
        """Say how the filled batch runs, and give its arguments to the device."""
        self._sizes, self._decodes = sizes, sizes.cpu_decode
        first = sizes.n_prefill + sizes.gpu_decode
        gpu = self.buffers.forward_addresses() | sizes.args
        arrays = self.buffers.arrays
        tails = {n: int(arrays[n][first:].ctypes.data) for n in ("seq_lengths", "block_tables")}
        starts = {"seq_starts": int(self._no_rows.ctypes.data)}
        counts = {"n_prefill": 0, "n_decode": self._decodes, "kv_splits": sizes.cpu_splits}
        self._cpu_args = gpu | tails | starts | counts
        self.args = gpu | {"n_rows": sizes.n_out}
        self._upload()

    def order(self) -> LaneOrder:
        """Return what makes a lane of another rank run the same batch."""
        kv = {"brought": self._brought, "sent": self._sent, "appended": self._cpu_slots}
        return order_lane(self._sizes, self.buffers.arrays, **kv)

    def obey(self, order: LaneOrder) -> None:
        """Fill the lane as that of the rank that made `order`, which chooses the tokens."""
        unpack_arrays(order.arrays, self.buffers.arrays, order.sizes, order.table_width)
        self._brought, self._sent = (
            np.frombuffer(order.kv[name], np.int32).reshape(2, -1) for name in ("brought", "sent")
        )
        self._cpu_slots = np.frombuffer(order.kv["appended"], np.int64)
        self._samples = False
        self.set_args(order.sizes)

    def pad(self, rows: int) -> StepShape:
        """Fill a batch of decodes up to `rows`, whose last ones nobody reads; give it again."""
        arrays, n = self.buffers.arrays, self._shape.n_tokens
        unread = self._model.pools.unread
        padding = {
            **dict.fromkeys(("token_ids", "positions", "temperature"), 0),
            **{"kv_slots": unread * KV_BLOCK, "block_tables": unread, "seq_lengths": 1},
        }
        for name, value in padding.items():
            arrays[name][n:rows] = value
        arrays["out_rows"][n:rows] = np.arange(n, rows)
        counts = dict.fromkeys(("n_tokens", "n_decode", "n_out", "n_rows"), rows)
        self._shape = replace(self._shape, n_tokens=rows, n_decode=rows)
        self.args |= counts
        self._upload()
        return self._shape

    def _upload(self) -> None:
        sequences = self.args["n_prefill"] + self.args["n_decode"] + self._decodes
        rows = {
            **dict.fromkeys(("token_ids", "positions", "kv_slots"), self.args["n_tokens"]),
            "seq_starts": self.args["n_prefill"] + 1,
            **dict.fromkeys(("seq_lengths", "block_tables"), sequences),
            **dict.fromkeys(
                ("out_rows", "temperature", "top_k", "top_p", "min_p", "uniform"),
                self.args["n_rows"],
            ),
        }
        for name, count in rows.items():
            array = self.buffers.arrays[name][:count]
            address = int(array.ctypes.data) + self._shift
            self._streams.upload(address, array, self._streams.compute)

    # ---- layers ----

    def bring(self, layer: int) -> bool:
        """Copy what prompts on the CPU computed before to the landing; tell whether they did."""
        self._model.copy_blocks(layer, self._brought, Home.GPU)
        return self._brought.size > 0

    def start_layer(self, layer: int, worker: ThreadPoolExecutor) -> None:
        """Give all up to and including the attention of a layer; the CPU's part to its thread."""
        self._run(self.forward, self.between[layer])
        streams = self._streams
        if self._decodes or self._sent.size:
            streams.follow(streams.copy, streams.event(streams.compute))
        if self._decodes:
            address, rows, row_bytes = self._rows["qkv"]
            first = self.args["n_tokens"] - self._decodes
            part = rows[: self._decodes * row_bytes]
            streams.download(part, address + first * row_bytes, streams.copy)
            arrived = streams.event(streams.copy)
            self._task = worker.submit(self._attend, layer, arrived)
        self._model.copy_blocks(layer, self._sent, Home.CPU)
        self._run(self.forward, self.attention[layer])

    def collect(self) -> None:
        """Wait for the CPU's attention and give it to the device, which goes on behind it."""
        if self._task is None:
            return
        task, self._task = self._task, None
        task.result()
        streams = self._streams
        address, rows, row_bytes = self._rows["attention"]
        first = self.args["n_tokens"] - self._decodes
        part = rows[: self._decodes * row_bytes]
        streams.upload(address + first * row_bytes, part, streams.copy)
        streams.follow(streams.compute, streams.event(streams.copy))

    def _attend(self, layer: int, arrived: int) -> None:
        """Store the keys and values of the CPU's decodes and attend. On the CPU's thread."""
        device = self._model.module.device
        device.activate()
        self._streams.wait(arrived)
        begun = time.perf_counter()
        self._store(layer)
        span = self._cpu_spans[layer]
        cpu = self._model.cpu.device
        cpu.run(Segment(self._cpu.tape, self._cpu.plan, self._cpu_args, span))
        self.attending += time.perf_counter() - begun

    def _store(self, layer: int) -> None:
        spec, count = self._model.spec, self._decodes
        kv, dtype = self._model.cpu.kv, DTYPES[spec.kv_dtype]
        _, rows, row_bytes = self._rows["qkv"]
        heads = rows[: count * row_bytes].view(np.float32).reshape(count, -1)
        heads = heads[:, : spec.qkv_size].reshape(count, -1, spec.head_dim)[:, spec.n_heads :]
        blocks, places = self._cpu_slots // KV_BLOCK, self._cpu_slots % KV_BLOCK
        parts = heads[:, : spec.n_kv_heads], heads[:, spec.n_kv_heads :]
        for memory, part in zip((kv.k, kv.v), parts, strict=True):
            layers = memory.view(dtype.numpy).reshape(
                spec.n_layers, -1, spec.n_kv_heads, KV_BLOCK, spec.head_dim
            )
            layers[layer, blocks, :, places] = dtype.narrow(part)

    def end(self) -> None:
        """Give the rest of the step and the choice of tokens."""
        self._run(self.forward, self.between[-1])
        if self._samples and self.args["n_rows"]:
            self._run(self.sample, range(len(self.sample.tape.entries)))

    def fetch(self) -> None:
        """Copy the chosen tokens to the host, and the logits where they are asked for."""
        wanted = [request.params for request in self._shape.outputs]
        asked = bool(self._shape.scored)
        asked |= any(one.logprobs is not None or one.changes_logits for one in wanted)
        names = ("out_ids", "out_logprobs", *(["logits"] if asked else []))
        for name in names:
            array = self.buffers.arrays[name][: self.args["n_rows"]]
            address = int(array.ctypes.data) + self._shift
            self._streams.download(array, address, self._streams.compute)

    def abandon(self) -> None:
        """Wait for the CPU's thread after a step that failed."""
        if self._task is not None:
            self._task.exception()
            self._task = None

    def close(self) -> None:
        """Give the device's memory back."""
        for address in self._memory:
            self._model.module.device.free(address)

    def _run(self, tape: LaunchTape, span: range) -> None:
        model = self._model
        tape.run(span, self.args, model.module, model.warps, model.streams.compute)


def _take_from(slab: Bytes) -> Callable[[int], Bytes]:
    """Return an allocator of pieces of `slab`, each from a page's start on."""
    used = 0

    def take(nbytes: int) -> Bytes:
        nonlocal used
        start, used = used, used + -(-nbytes // PAGE) * PAGE
        return slab[start : start + nbytes]

    return take
