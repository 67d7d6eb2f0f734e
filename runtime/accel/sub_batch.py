"""One batch of a step on a torch device: its arguments, activations, and attention on the CPU.

In: a planned batch. Out: work for the device, and a task for the CPU's thread for each layer. What
crosses the link for a request that lives on the CPU: a decode's q, k and v go there and its
attention comes back; a prompt's blocks are computed in a landing place and go there (NEO §3.1).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from dovetail.ir.model import KV_BLOCK
from dovetail.ir.tape import BufferRef, Entry, IntConst, Tape, WeightRef
from dovetail.runtime.accel.graph_cache import GraphCache, pad_arrays, padded_rows
from dovetail.runtime.accel.operators import decoder_operators
from dovetail.runtime.accel.orders import BatchOrder, BatchSizes, pack_arrays, unpack_arrays
from dovetail.runtime.accel.sampling import choose_tokens
from dovetail.runtime.accel.step import Step
from dovetail.runtime.accel.tape import DevicePools, PlacedModel, TorchTape
from dovetail.runtime.engine.engine import RecordSpan
from dovetail.runtime.native.forward import ForwardModel, layer_block_bytes
from dovetail.runtime.native.runner import Runner
from dovetail.runtime.native.step import StepBuffers, StepShape
from dovetail.runtime.native.tape import Operands
from dovetail.runtime.schedule.kv_pool import KvPool, blocks_for
from dovetail.runtime.schedule.plan import Batch
from dovetail.runtime.schedule.request import Home, Request

CROSSING = ("qkv", "attention")
"""Buffers of which rows cross the link: to the CPU, and back."""
DEVICE, ATTENTION, LINK = "device", "CPU attention", "link"
"""Tracks of a recording: what runs; but of a device with streams, when work was given to it."""
OUT_ROWS = ("out_rows", "temperature", "top_k", "top_p", "min_p", "uniform")

Blocks = npt.NDArray[np.int32]
_UNRECORDED = nullcontext()


def record_nothing(*_what: object) -> AbstractContextManager[None]:
    """Return a body that nobody records."""
    return _UNRECORDED


@dataclass(frozen=True, kw_only=True)
class DeviceModel(PlacedModel):
    """What the sub-batches of an executor share: a rank's part of a model, on device and CPU."""

    pools: DevicePools
    cpu: ForwardModel
    cpu_pools: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]

    def copy_blocks(self, layer: int, blocks: Blocks, target: Home) -> None:
        """Copy one layer of `blocks` [2][n], here and on the CPU, on the copy stream."""
        if not blocks.size or not self.cpu.spec.kv_values(layer):
            return
        here = (self.pools.k, self.pools.v)
        runs = block_runs(*blocks)
        with self.device.copying():
            for ours, theirs in zip(here, self.cpu_pools, strict=True):
                for first, at, count in runs:
                    a, b = ours[layer][first : first + count], theirs[layer][at : at + count]
                    to, held = (a, b) if target is Home.GPU else (b, a)
                    to.copy_(held, non_blocking=True)


def block_runs(left: Blocks, right: Blocks) -> list[tuple[int, int, int]]:
    """Return (left, right, count) of the longest stretches in which both count up by one."""
    breaks = np.flatnonzero((np.diff(left) != 1) | (np.diff(right) != 1)) + 1
    starts = [0, *breaks.tolist()]
    stops = [*breaks.tolist(), len(left)]
    return [(int(left[i]), int(right[i]), j - i) for i, j in zip(starts, stops, strict=True)]


def attention_tape(tape: Tape, sequences: int) -> Tape:
    """Return what the CPU does of a forward tape for decodes of its own, rows of `sequences`.

    In each layer their keys and values are stored, which are normed and turned by then; and their
    queries attend.
    """
    entries = []
    for entry in tape.entries:
        if entry.op == "rope_store":
            entries.append(store_only(entry, entry.segment.removeprefix("pre_")))
        elif entry.op == "decode_attention":
            entries.append(msgspec.structs.replace(entry, barrier=True))
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
        tape,
        buffers=tuple(buffers),
        entries=tuple(entries),
        arena_bytes=offset,
        max_tokens=sequences,
    )


def store_only(entry: Entry, segment: str) -> Entry:
    """Return a `rope_store` that stores: it turns no values, and norms none."""
    T, qkv, ldq, n_q, n_kv, size, _, _, positions, cos, sin, _, _, eps, _, *stored = entry.slots
    nothing, none = WeightRef(name=None), IntConst(value=0)
    kept = T, qkv, ldq, n_q, n_kv, size, none, none, positions, cos, sin, nothing, nothing, eps
    return msgspec.structs.replace(
        entry, slots=(*kept, none, *stored), segment=segment, barrier=True
    )


class SubBatch:
    """Buffers of one batch, on both sides, and the tapes bound to them."""

    def __init__(self, name: str, model: DeviceModel, graphs: GraphCache, runner: Runner) -> None:
        self._name, self._graphs, self._runner = name, graphs, runner
        self.record_span: RecordSpan = record_nothing
        spec, tape, device = model.cpu.spec, model.tape, model.device
        tokens, sequences = model.sizes
        self._model, self._device = model, device
        self.buffers = StepBuffers(device.host, spec, tokens, sequences)
        twins = {name: device.twin(array) for name, array in self.buffers.arrays.items()}
        self.step = Step(self.buffers.arrays, twins)
        self.forward = TorchTape(model, decoder_operators(spec))
        self.attention = [tape.segment(f"attn({i})") for i in range(spec.n_layers)]
        starts = [0, *(span.stop for span in self.attention)]
        stops = [*(span.start for span in self.attention), len(tape.entries)]
        self.between = [range(*ends) for ends in zip(starts, stops, strict=True)]
        self._whole = range(len(tape.entries))
        self.whole = False  # whether the filled batch is recorded in one piece, attention too
        self._bind_cpu(tape, sequences)
        self._given: tuple[int, int, Any] | None = None  # a layer's order, and what it waits for
        self.attending = 0.0  # seconds of the CPU's attention since somebody looked
        self.waited = 0.0  # seconds that the device's thread waited for it since then

    def _bind_cpu(self, tape: Tape, sequences: int) -> None:
        model, own = self._model, attention_tape(tape, sequences)
        arena = self._device.host(own.arena_bytes)
        operands = Operands(model.cpu.weights, arena, model.cpu.kv)
        self._cpu = model.cpu.bind(own, operands, "decode")
        self._crossing: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name in CROSSING:
            rows = self._cpu.buffer(name).view(np.float32).reshape(sequences, -1)
            self._crossing[name] = torch.from_numpy(rows), self._device.twin(rows)
        self._no_rows = np.zeros(1, np.int32)  # the CPU's rows begin at 0
        # where the CPU stores its rows; how many blocks these begin, and which
        self._cpu_slots: npt.NDArray[np.int64] = np.zeros(sequences, np.int64)
        self._begun: npt.NDArray[np.int64] = np.zeros(sequences + 1, np.int64)
        spec = model.cpu.spec
        self._orders = [
            self._cpu.order(
                own.segment(f"attn({layer})"), self._begun, layer_block_bytes(spec, layer)
            )
            for layer in range(spec.n_layers)
        ]

    # ---- arguments ----

    def fill(
        self, batch: Batch, requests: Mapping[int, Request], pools: Mapping[Home, KvPool]
    ) -> StepShape:
        """Write the arguments of a batch."""
        landed = self._land_prompts(batch, requests, pools[Home.CPU])

        def table(number: int) -> Any:
            home = requests[number].home
            assert home is not None
            return landed[number] if number in landed else pools[home].table(number)

        shape = self._shape = self.buffers.fill(batch, requests, table)
        self.buffers.sample_args(shape)
        self._samples = True
        return shape

    def _land_prompts(
        self, batch: Batch, requests: Mapping[int, Request], pool: KvPool
    ) -> dict[int, Blocks]:
        """Return the places in the landing of the blocks of prompts that live on the CPU."""
        landed: dict[int, Blocks] = {}
        first, places = self._model.pools.blocks, dict[int, int]()
        brought, sent = dict[int, None](), dict[int, None]()
        for chunk in batch.prefill:
            if requests[chunk.request].home is Home.CPU:
                held = pool.table(chunk.request)[: blocks_for(chunk.start + chunk.length)]
                brought |= dict.fromkeys(held[: blocks_for(chunk.start)])
                sent |= dict.fromkeys(held[chunk.start // KV_BLOCK :])
                found = [first + places.setdefault(block, len(places)) for block in held]
                landed[chunk.request] = np.array(found, np.int32)
        assert len(places) <= self._model.pools.landing
        self._brought, self._sent = (
            np.array([[first + places[b] for b in blocks], [*blocks]], np.int32)
            for blocks in (brought, sent)
        )
        return landed

    def set_args(
        self, sizes: BatchSizes, *, alone: bool = False, usable: tuple[int, ...] | None = None
    ) -> None:
        """Say how the filled batch runs, and give its arguments to the device.

        alone: no other batch runs beside it, and no KV moves. usable: CPUs that attend, None = all
        of the plan.
        """
        self._sizes, self._decodes = sizes, sizes.cpu_decode
        if sizes.cpu_decode:
            self._prepare_cpu(sizes, usable)
        self.step.counts = {
            "n_tokens": sizes.n_tokens,
            "n_stored": sizes.n_tokens - sizes.cpu_decode,
            "n_prefill": sizes.n_prefill,
            "n_decode": sizes.gpu_decode,
            "decode_row": sizes.n_tokens - sizes.cpu_decode - sizes.gpu_decode,
            "n_out": sizes.n_out,
        }
        self._pad(sizes, alone)
        if self._device.apart:
            self._upload(sizes)
        self.forward.begin(self.step)

    def _pad(self, sizes: BatchSizes, alone: bool) -> None:
        """Have a batch of decodes the shape of others, where its work is recorded."""
        records = self._graphs.on and self.forward.collective is None
        most = min(self._model.sizes) if records else 0
        rows, attention = padded_rows(sizes, most), self.forward.attention
        self.step.recorded, self.whole = rows is not None, False
        if rows is None:
            return
        pad_arrays(self.buffers.arrays, sizes, rows, self._model.pools.unread)
        self.step.counts |= dict.fromkeys(("n_tokens", "n_stored", "n_out"), rows)
        assert attention is not None
        self.whole = alone and not sizes.cpu_decode and attention.records
        if self.whole:
            self.step.counts["n_decode"] = rows

    def _prepare_cpu(self, sizes: BatchSizes, usable: tuple[int, ...] | None) -> None:
        """Say how the CPU attends; blocks that its decodes begin are cleared: see operators."""
        first, arrays = sizes.n_prefill + sizes.gpu_decode, self.buffers.arrays
        given = {n: arrays[n][first:] for n in ("seq_lengths", "block_tables")}
        given |= {"seq_starts": self._no_rows, "kv_slots": self._cpu_slots}
        args = {name: int(array.ctypes.data) for name, array in given.items()}
        args |= {"n_tokens": sizes.cpu_decode, "n_out": 0, "kv_splits": sizes.cpu_splits}
        args |= {"n_prefill": 0, "n_decode": sizes.cpu_decode}
        self._cpu.prepare(self._model.cpu.team, self.buffers.addresses | args, usable)
        slots = self._cpu_slots[: sizes.cpu_decode]
        slots[:] = arrays["kv_slots"][sizes.n_tokens - sizes.cpu_decode : sizes.n_tokens]
        begun = slots[slots % KV_BLOCK == 0] // KV_BLOCK
        self._begun[: len(begun) + 1] = [len(begun), *begun]

    def order(self) -> BatchOrder:
        """Return what makes a sub-batch of another rank run the same batch."""
        sizes, arrays = self._sizes, self.buffers.arrays
        width = blocks_for(int(arrays["seq_lengths"][: sizes.sequences].max(initial=0)))
        return BatchOrder(
            sizes=sizes,
            arrays=pack_arrays(arrays, sizes, width),
            table_width=width,
            kv={"brought": self._brought.tobytes(), "sent": self._sent.tobytes()},
        )

    def obey(self, order: BatchOrder) -> None:
        """Fill the sub-batch as that of the rank that made `order`, which chooses the tokens."""
        unpack_arrays(order.arrays, self.buffers.arrays, order.sizes, order.table_width)
        self._brought, self._sent = (
            np.frombuffer(order.kv[name], np.int32).reshape(2, -1) for name in ("brought", "sent")
        )
        self._samples = False
        self.set_args(order.sizes)

    def _upload(self, sizes: BatchSizes) -> None:
        counts = self.step.counts
        rows = {
            **dict.fromkeys(("token_ids", "positions", "kv_slots"), counts["n_tokens"]),
            **dict.fromkeys(
                ("seq_lengths", "block_tables"),
                max(sizes.sequences, counts["n_prefill"] + counts["n_decode"]),
            ),
            **dict.fromkeys(OUT_ROWS, counts["n_out"]),
        }
        for name, count in rows.items():
            host = torch.from_numpy(self.buffers.arrays[name][:count])
            self.step.arrays[name][:count].copy_(host, non_blocking=True)

    def rehearse(
        self, prompts: Sequence[int], decodes: Sequence[int], on_cpu: int = 0, stored: int = 0
    ) -> None:
        """Fill it with made-up sequences of so many tokens: prompts, decodes, the CPU's decodes.

        For measuring: of their KV nothing is read that matters. `stored`: tokens that each prompt
        had before.
        """
        arrays, pools = self.buffers.arrays, self._model.pools
        whole = [stored + length for length in prompts]
        lengths = np.array([*whole, *decodes, *[1] * on_cpu], np.int32)
        starts = np.cumsum([0, *prompts, *[1] * (len(decodes) + on_cpu)])
        rows = int(starts[-1])
        arrays["token_ids"][:rows] = np.arange(rows) % self._model.cpu.spec.vocab_size
        arrays["positions"][:rows] = np.arange(rows) % self._model.cpu.spec.max_context
        arrays["kv_slots"][:rows] = np.arange(rows) % ((pools.blocks + pools.landing) * KV_BLOCK)
        arrays["seq_starts"][: len(starts)] = starts
        arrays["seq_lengths"][: len(lengths)] = lengths
        width = blocks_for(int(lengths.max()))
        held = np.arange(len(lengths) * width) % (pools.blocks + pools.landing)
        arrays["block_tables"][: len(lengths), :width] = held.reshape(len(lengths), width)
        out = len(decodes) + on_cpu
        arrays["out_rows"][:out] = np.arange(rows - out, rows)
        self._brought = self._sent = np.zeros((2, 0), np.int32)
        arrays["kv_slots"][rows - on_cpu : rows], self._samples = 1, True
        arrays["temperature"][:out] = 0.0
        self.set_args(
            BatchSizes(
                n_tokens=rows,
                n_prefill=len(prompts),
                gpu_decode=len(decodes),
                cpu_decode=on_cpu,
                n_out=out,
                cpu_splits=1,
            )
        )

    # ---- layers ----

    def bring(self, layer: int) -> bool:
        """Copy what prompts on the CPU computed before to the landing; tell whether they did."""
        if not self._brought.size:
            return False
        with self.record_span(LINK, f"{self._name}: KV in"):
            self._model.copy_blocks(layer, self._brought, Home.GPU)
        return True

    def start_layer(self, layer: int) -> None:
        """Give all up to and including the attention of a layer; the CPU's part to its thread."""
        with self.record_span(DEVICE, f"{self._name}: products"):
            self.give(self.between[layer])
        if self._decodes:
            self.hand_over(layer)
        if self._sent.size:
            self._device.follow(self._device.copy, self._device.mark(self._device.compute))
            with self.record_span(LINK, f"{self._name}: KV out"):
                self._model.copy_blocks(layer, self._sent, Home.CPU)
        with self.record_span(DEVICE, f"{self._name}: attention"):
            self.forward.run(self.attention[layer], self.step)

    def hand_over(self, layer: int) -> None:
        """Have the CPU attend for a layer as soon as what it needs has come."""
        device, (host, there) = self._device, self._crossing["qkv"]
        rows = slice(self._decodes)
        with self.record_span(LINK, f"{self._name}: qkv"):
            ours = self._own_rows("qkv")
            there[rows, : ours.shape[1]].copy_(ours)
            if device.apart:
                device.follow(device.copy, device.mark(device.compute))
                with device.copying():
                    host[rows].copy_(there[rows], non_blocking=True)
        self._given = layer, self._runner.give(self._orders[layer]), device.mark(device.copy)
        device.call(self._runner)

    def _own_rows(self, name: str) -> torch.Tensor:
        last = self._sizes.n_tokens
        return self.forward.buffers[name][last - self._decodes : last]

    def collect(self) -> None:
        """Wait for the CPU's attention and give it to the device, which goes on behind it."""
        if self._given is None:
            return
        (layer, number, arrived), self._given = self._given, None
        device, (host, there) = self._device, self._crossing["attention"]
        rows, asked = slice(self._decodes), time.perf_counter()
        device.wait(arrived)  # where the device has failed nothing would come
        times = self._runner.wait(number, self._orders[layer])
        self.waited += time.perf_counter() - asked
        self.attending += times[1] - times[0]
        self.record_span(ATTENTION, f"{self._name}: attention", times)
        with self.record_span(LINK, f"{self._name}: attention"):
            if device.apart:
                with device.copying():
                    there[rows].copy_(host[rows], non_blocking=True)
                device.follow(device.compute, device.mark(device.copy))
            ours = self._own_rows("attention")
            ours.copy_(there[rows, : ours.shape[1]])

    def end(self) -> None:
        """Give the rest of the step, all of it where it is `whole`, and the choice of tokens."""
        rows = self._sizes.n_out
        with self.record_span(DEVICE, f"{self._name}: logits"):
            self.give(self._whole if self.whole else self.between[-1])
            if self._samples and rows:
                choose_tokens(self.step, rows, self._model.cpu.spec.vocab_size)

    def give(self, span: range) -> None:
        """Give entries beside attention to the device, recorded ones where the batch is."""
        if self.step.recorded:
            name = self._name, self.step.counts["n_tokens"], span
            self._graphs.run(name, partial(self.forward.run, span, self.step))
        else:
            self.forward.run(span, self.step)

    def fetch(self) -> None:
        """Copy the chosen tokens to the host, and the logits where they are asked for."""
        if not self._device.apart:
            return
        wanted = [request.params for request in self._shape.outputs]
        asked = bool(self._shape.scored)
        asked |= any(one.logprobs is not None or one.changes_logits for one in wanted)
        count = self._sizes.n_out
        for name in ("out_ids", "out_logprobs", *(["logits"] if asked else [])):
            host = torch.from_numpy(self.buffers.arrays[name][:count])
            host.copy_(self.step.arrays[name][:count], non_blocking=True)

    def abandon(self) -> None:
        """Forget what was handed over in a step that failed."""
        self._given = None
