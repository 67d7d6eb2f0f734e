"""Measures the cost tables of a model on the device that is there, beside the CPU that is there.

In: an idle `DevicePair` with its CPU, and seconds to spend. Out: a `ProfileFile` of measured rows
(NEO §3.2), kept in the cache by model, device and threads; few points, the most telling ones first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec
import numpy as np
import torch

from dovetail.ir.errors import ArtifactError
from dovetail.ir.model import KV_BLOCK
from dovetail.ir.profile import CostRow, ProfileFile, ProfileKey
from dovetail.runtime.accel.device import TorchDevice
from dovetail.runtime.accel.graph_cache import ROWS
from dovetail.runtime.accel.pair import DevicePair
from dovetail.runtime.artifact import Artifact
from dovetail.runtime.engine.executor import CpuExecutor
from dovetail.runtime.engine.profiler import (
    Point,
    measure_points,
    measure_profile,
    profile_key,
    refine,
)
from dovetail.runtime.schedule.cost_tables import (
    Curve,
    Surface,
    keep_profile,
    make_profile,
    profile_folder,
    read_profile,
)
from dovetail.runtime.schedule.plan import Limits
from dovetail.runtime.schedule.request import Home
from dovetail.topology.hardware import HardwareSpec

BUDGET = 10.0
"""Seconds that a profile takes; each table gets its end points whatever they take."""
CPU_SHARE = 0.3
"""Part of it for the CPU's attention."""
POINT_SHARE = 0.03
"""Part of it after which a point gets no more runs than the least."""
EACH = 512
"""Tokens of a sequence, on average, where decode attention is measured by tokens in all."""
LAYERS = 4
"""Layers that a point is measured over, at most: they cost alike."""
SWAPPED = 64
"""Most blocks that are moved at once to be timed."""
CPU_BYTES = 1 << 28
"""KV that is touched to be measured on `torch:cpu`."""
CHUNK = "chunk"
"""Stands for later chunks of prompts until these are added up to rows of `prefill`."""
HANDED = "handed"
"""Stands for attention of many rows on the CPU until what each adds is in `cpu_decode`."""
DOUBTFUL = "a profile in the cache is of no use (%s); measuring anew"

log = logging.getLogger("dovetail")


def device_key(
    artifact: Artifact, cpu: CpuExecutor, pair: DevicePair, hardware: HardwareSpec
) -> ProfileKey:
    """Return what a profile of both holds for: the CPU's part, and the device's."""
    device, sizes = pair.device, pair.model
    own = f"{describe_device(device)}, {device.threads} threads, torch {torch.__version__}"
    key = profile_key(artifact, cpu.model, hardware)
    assert sizes.attention is not None
    made = f"{sizes.dtype}, attention of {sizes.attention.name}"
    made += ", steps of {} tokens, {} sequences".format(*sizes.sizes)
    pools = (sizes.pools.blocks, cpu.blocks)  # tables reach as far; twice is another one
    made += ", pools of up to {} and {} blocks".format(*(1 << n.bit_length() for n in pools))
    return msgspec.structs.replace(key, device=f"{key.device} beside {own}, {made}")


def describe_device(device: TorchDevice) -> str:
    """Return the device by its own name, such as `NVIDIA H200`."""
    if device.device.type == "cuda":
        return str(torch.cuda.get_device_name(device.device))
    return device.name


def find_profile(
    artifact: Artifact, cpu: CpuExecutor, pair: DevicePair, limits: Limits, hardware: HardwareSpec
) -> ProfileFile:
    """Return the profile that is kept for both; where there is none, measure and keep it.

    limits: of steps and requests.
    """
    key = device_key(artifact, cpu, pair, hardware)
    folder = profile_folder(key)
    try:
        found = read_profile(folder, key)
    except ArtifactError as error:
        log.warning(DOUBTFUL, error)
        found = None
    if found is None:
        found = measure_device(cpu, pair, limits, key, BUDGET)
        keep_profile(folder, found)
    return found


def measure_device(
    cpu: CpuExecutor, pair: DevicePair, limits: Limits, key: ProfileKey, seconds: float = BUDGET
) -> ProfileFile:
    """Measure all tables on an idle device and CPU."""
    attention = measure_profile(cpu, limits, key, CPU_SHARE * seconds, only=("cpu_decode",))
    bench = _DeviceBench(pair, limits, cpu.blocks)
    with pair.device.working():
        tables = measure_points(
            bench.points(), bench.prepare, (1 - CPU_SHARE) * seconds, POINT_SHARE * seconds
        )
    tables["cpu_decode"] = list(attention.tables["cpu_decode"])
    if late := tables.pop(CHUNK, None):
        tables["prefill"] += later_chunks(max(tables["prefill"], key=lambda row: row.at), late)
    if handed := tables.pop(HANDED, None):
        tables["cpu_decode"] = carry_rows(tables["cpu_decode"], tables["launch"][0], handed[0])
    return make_profile(key, tables)


def carry_rows(rows: Sequence[CostRow], launch: CostRow, handed: CostRow) -> list[CostRow]:
    """Return the CPU's attention with what each sequence's row adds on its way and in its pool.

    handed: attention of so many sequences of one token, from the device and back; of that of one
    `launch` says all.
    """
    surface = Surface([(row.at[0], row.at[1], row.seconds) for row in rows])
    count = handed.at[0]
    attended = surface.at(count, count) - surface.at(1, 1)
    each = max(0.0, handed.seconds - launch.seconds - attended) / max(1, count - 1)
    return [msgspec.structs.replace(r, seconds=r.seconds + each * r.at[0]) for r in rows]


def later_chunks(first: CostRow, ends: Sequence[CostRow]) -> list[CostRow]:
    """Return what prompts longer than a step take in all, up to the longest of `ends`.

    first: the row of a prompt that fills a step. ends: seconds of a full step of a prompt that ends
    there; between them a step takes more in proportion, as it sees more.
    """
    size, seconds, rows = first.at[0], first.seconds, []
    curve = Curve(sorted((row.at[0], row.seconds) for row in ends))
    for number in range(2, -(-max(row.at[0] for row in ends) // size) + 1):
        seconds += curve.at(number * size)
        spread = max(row.spread for row in ends)
        rows.append(CostRow(at=(number * size,), seconds=seconds, origin="measured", spread=spread))
    return rows


class _DeviceBench:
    """Runs parts of a step on the device over made-up sequences."""

    def __init__(self, pair: DevicePair, limits: Limits, cpu_blocks: int) -> None:
        self._device, self._pair, self._cpu_blocks = pair.device, pair, cpu_blocks
        self._sub_batch, model = pair.sub_batches[0], pair.model
        self._fill = self._sub_batch.rehearse
        self._layers, self._context = model.cpu.spec.n_layers, model.cpu.spec.max_context
        self._tokens, self._sequences = model.sizes
        self._block_bytes = limits.block_bytes
        self._pool = model.pools.blocks + model.pools.landing
        if not self._device.apart:  # untouched pages are one page of zeros, read from a cache
            self._pool = min(self._pool, max(1, CPU_BYTES // self._block_bytes))
            with self._device.working():
                for layer in (*model.pools.k, *model.pools.v):
                    layer[: self._pool].zero_()

    def points(self) -> Iterator[tuple[bool, Point]]:
        """Yield (is an end point, point), ever finer."""
        moved = min(SWAPPED, self._pool, self._cpu_blocks)
        stored = min(self._sequences * self._context, self._pool * KV_BLOCK)
        lines = {
            "linear": refine(1, min(self._tokens, self._sequences * self._context)),
            "prefill": refine(1, min(self._tokens, self._context)),
            "gpu_decode": refine(1, stored),
            "head": refine(1, self._sequences),
            "swap": [[n * self._block_bytes for n in level] for level in refine(1, moved)],
            "launch": [[1]],
            HANDED: [[self._sequences]],
        }
        if self._context > self._tokens:
            lines[CHUNK] = refine(min(2 * self._tokens, self._context), self._context)
        for level in range(max(map(len, lines.values()))):
            for table, line in lines.items():
                for x in line[level] if level < len(line) else ():
                    yield level == 0, (table, (x,) if table != "launch" else ())

    def prepare(self, table: str, at: tuple[int, ...]) -> Callable[[], float]:
        """Return what measures a point once, in seconds of one layer (swap, head: of a step)."""
        made: Callable[[], float] = getattr(self, table)(*at)
        return made

    def linear(self, rows: int) -> Callable[[], float]:
        whole, rest = divmod(rows, self._context)
        prompts = [self._context] * whole + [rest] * bool(rest)
        few = rows <= min(ROWS[-1], self._sequences)  # as decodes, which may be recorded
        self._fill([] if few else prompts, [1] * rows if few else [])
        between = self._sub_batch.between
        return self._layered(between[1:-1] or between[:1], self._sub_batch.give)

    def prefill(self, length: int) -> Callable[[], float]:
        self._fill([length], [])
        return self._layered(self._sub_batch.attention)

    def chunk(self, end: int) -> Callable[[], float]:
        """What a step full of the last tokens of a prompt takes."""
        self._fill([self._tokens], [], stored=max(0, end - self._tokens))
        return self._layered(self._sub_batch.attention)

    def gpu_decode(self, tokens: int) -> Callable[[], float]:
        each = min(EACH, self._context, tokens)
        count = min(self._sequences, max(1, tokens // each))
        mean = min(self._context, tokens // count)
        self._fill([], _spread_out(mean, count, self._context))
        return self._layered(self._sub_batch.attention)

    def head(self, rows: int) -> Callable[[], float]:
        self._fill([], [1] * rows)
        return self._timed(self._sub_batch.end, 1)

    def swap(self, nbytes: int) -> Callable[[], float]:
        count = nbytes // self._block_bytes
        blocks = np.array([np.arange(count)] * 2, np.int32)
        copy = self._pair.model.copy_blocks
        return self._timed(
            lambda: [copy(layer, blocks, Home.CPU) for layer in range(self._layers)], 1
        )

    def launch(self, rows: int = 1) -> Callable[[], float]:
        """What the CPU's attention costs beside itself: two crossings and waking its thread."""
        self._fill([], [], on_cpu=rows)

        def give() -> None:
            for _ in range(self._layers):
                self._sub_batch.hand_over(0)
                self._sub_batch.collect()

        return self._timed(give)

    handed = launch

    def _layered(
        self, spans: Sequence[range], give: Callable[[range], None] | None = None
    ) -> Callable[[], float]:
        """Measure a layer of these entries, given as they are in steps; else attention."""
        taken, step = spans[:LAYERS], self._sub_batch.step
        give = give or partial(self._sub_batch.forward.run, step=step)
        return self._timed(lambda: [give(span) for span in taken], len(taken))

    def _timed(self, give: Callable[[], object], layers: int | None = None) -> Callable[[], float]:
        device = self._device

        def run() -> float:
            begun = time.perf_counter()
            give()
            device.finish()
            return (time.perf_counter() - begun) / (layers or self._layers)

        return run


def _spread_out(mean: int, count: int, most: int) -> list[int]:
    """Return lengths of this mean, from its half on, `most` at most: batches are never alike."""
    reach = min(mean / 2, most - mean)
    return [max(1, round(mean + reach * ((2 * i + 1) / count - 1))) for i in range(count)]
