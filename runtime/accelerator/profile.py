"""Measures the cost tables of a model on the device that is there, beside the CPU that is there.

In: an idle `DeviceEngine` and seconds to spend. Out: a `ProfileFile` of measured rows (NEO §3.2),
kept in the cache by model, device and threads; few points, the most telling ones first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from dovetail.ir.errors import ArtifactError
from dovetail.ir.model import KV_BLOCK
from dovetail.ir.profile import CostRow, ProfileFile, ProfileKey
from dovetail.runtime.accelerator.lane import Lane
from dovetail.runtime.artifact import Artifact
from dovetail.runtime.cost_tables import (
    Curve,
    Surface,
    profile_folder,
    read_profile,
    write_profile,
)
from dovetail.runtime.profiler import measure_profile, measured_row, profile_key, refine, repeat
from dovetail.runtime.request import Home
from dovetail.topology.hardware import HardwareSpec

if TYPE_CHECKING:
    from dovetail.runtime.accelerator.engine import DeviceEngine

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


def device_key(artifact: Artifact, engine: DeviceEngine, hardware: HardwareSpec) -> ProfileKey:
    """Return what a profile of this engine holds for: the CPU's part, and the device's."""
    device, sizes = engine.accelerator, engine.pair.model
    own = f"{describe_device(engine)}, {device.threads} threads, torch {torch.__version__}"
    key = profile_key(artifact, engine, hardware)
    made = f"{sizes.dtype}, steps of {sizes.sizes[0]} tokens, {sizes.sizes[1]} sequences"
    pools = (sizes.pools.blocks, engine.pool.n_blocks)  # tables reach as far; twice is another one
    made += ", pools of up to {} and {} blocks".format(*(1 << n.bit_length() for n in pools))
    return msgspec.structs.replace(key, device=f"{key.device} beside {own}, {made}")


def describe_device(engine: DeviceEngine) -> str:
    """Return the device by its own name, such as `NVIDIA H200`."""
    device = engine.accelerator
    if device.device.type == "cuda":
        return str(torch.cuda.get_device_name(device.device))
    return device.name


def find_profile(artifact: Artifact, engine: DeviceEngine, hardware: HardwareSpec) -> ProfileFile:
    """Return the profile that is kept for this engine; where there is none, measure and keep it."""
    key = device_key(artifact, engine, hardware)
    folder = profile_folder(key)
    try:
        found = read_profile(folder, key)
    except ArtifactError as error:
        log.warning(DOUBTFUL, error)
        found = None
    if found is None:
        found = measure_device(engine, key, BUDGET)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_profile(folder, found)
        except OSError as error:
            log.warning("the profile could not be kept in %s: %s", folder, error.strerror)
    return found


def measure_device(engine: DeviceEngine, key: ProfileKey, seconds: float = BUDGET) -> ProfileFile:
    """Measure all tables on an idle engine; SpecError where it is busy or a group."""
    cpu = measure_profile(engine, key, CPU_SHARE * seconds, only=("cpu_decode",))
    tables = {name: list(rows) for name, rows in cpu.tables.items()}
    bench, start = _Bench(engine), time.perf_counter()
    left, spent = (1 - CPU_SHARE) * seconds, 0
    for least, table, at in bench.points():
        if not least and time.perf_counter() - start > left:
            break
        with engine.accelerator.working():
            times = repeat(bench.prepare(table, at), time.perf_counter, POINT_SHARE * seconds)
        tables.setdefault(table, []).append(measured_row((at,) if table != "launch" else (), times))
        spent += 1
    if late := tables.pop(CHUNK, None):
        tables["prefill"] += later_chunks(sorted(tables["prefill"], key=_place)[-1], late)
    if handed := tables.pop(HANDED, None):
        tables["cpu_decode"] = carry_rows(tables["cpu_decode"], tables["launch"][0], handed[0])
    took = time.perf_counter() - start
    log.info("measured %d points of %s in %.1f s", spent, describe_device(engine), took)
    return ProfileFile(
        key=key,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tables={t: tuple(sorted(rows, key=_place)) for t, rows in tables.items()},
    )


def carry_rows(rows: Sequence[CostRow], launch: CostRow, handed: CostRow) -> list[CostRow]:
    """Return the CPU's attention with what each sequence's row adds on its way and in its pool.

    handed: attention of so many sequences of one token, from the device and back; of that of one
    `launch` says all.
    """
    surface = Surface([(row.at[0], row.at[1], row.seconds) for row in rows])
    count = handed.at[0]
    attended = surface.at(count, count)[0] - surface.at(1, 1)[0]
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
        seconds += curve.at(number * size)[0]
        spread = max(row.spread for row in ends)
        rows.append(CostRow(at=(number * size,), seconds=seconds, origin="measured", spread=spread))
    return rows


def _place(row: CostRow) -> tuple[int, ...]:
    return row.at


class _Bench:
    """Runs parts of a step on the device over made-up sequences."""

    def __init__(self, engine: DeviceEngine) -> None:
        self._device, self._pair = engine.accelerator, engine.pair
        self._lane, model = engine.lanes[0], engine.pair.model
        self._layers, self._context = model.spec.n_layers, model.spec.max_context
        self._tokens, self._sequences = model.sizes
        self._block_bytes = engine.scheduler.limits.block_bytes
        self._pool = model.pools.blocks + model.pools.landing
        if not self._device.apart:  # untouched pages are one page of zeros, read from a cache
            self._pool = min(self._pool, max(1, CPU_BYTES // self._block_bytes))
            with self._device.working():
                for pool in (model.pools.k, model.pools.v):
                    pool[:, : self._pool].zero_()
        self._cpu_blocks = engine.pool.n_blocks

    def points(self) -> Iterator[tuple[bool, str, int]]:
        """Yield (is an end point, table, coordinate), ever finer."""
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
                    yield level == 0, table, x

    def prepare(self, table: str, at: int) -> Callable[[], float]:
        """Return what measures a point once, in seconds of one layer (swap, head: of a step)."""
        return _PREPARE[table](self, at)

    def linear(self, rows: int) -> Callable[[], float]:
        whole, rest = divmod(rows, self._context)
        lane = self._fill([self._context] * whole + [rest] * bool(rest), [])
        return self._layered(lane, lane.between[1:-1] or lane.between[:1])

    def prefill(self, length: int) -> Callable[[], float]:
        lane = self._fill([length], [])
        return self._layered(lane, lane.attention)

    def chunk(self, end: int) -> Callable[[], float]:
        """What a step full of the last tokens of a prompt takes."""
        lane = self._lane
        lane.rehearse([self._tokens], [], stored=max(0, end - self._tokens))
        return self._layered(lane, lane.attention)

    def gpu_decode(self, tokens: int) -> Callable[[], float]:
        each = min(EACH, self._context, tokens)
        count = min(self._sequences, max(1, tokens // each))
        mean = min(self._context, tokens // count)
        lane = self._fill([], _spread_out(mean, count, self._context))
        return self._layered(lane, lane.attention)

    def head(self, rows: int) -> Callable[[], float]:
        lane = self._fill([], [1] * rows)
        return self._timed(lane.end, 1)

    def swap(self, nbytes: int) -> Callable[[], float]:
        count = nbytes // self._block_bytes
        blocks = np.array([np.arange(count)] * 2, np.int32)
        copy = self._pair.model.copy_blocks
        return self._timed(
            lambda: [copy(layer, blocks, Home.CPU) for layer in range(self._layers)], 1
        )

    def launch(self, rows: int) -> Callable[[], float]:
        """What the CPU's attention costs beside itself: two crossings and waking its thread."""
        lane = self._fill([], [], on_cpu=rows)
        worker = self._pair.worker

        def give() -> None:
            for _ in range(self._layers):
                lane.hand_over(worker)

        return self._timed(give)

    def _fill(self, prompts: list[int], decodes: list[int], on_cpu: int = 0) -> Lane:
        self._lane.rehearse(prompts, decodes, on_cpu)
        return self._lane

    def _layered(self, lane: Lane, spans: Sequence[range]) -> Callable[[], float]:
        taken = spans[:LAYERS]
        run = lane.forward.run
        return self._timed(lambda: [run(span, lane.step) for span in taken], len(taken))

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


_PREPARE: dict[str, Callable[[_Bench, int], Callable[[], float]]] = {
    "linear": _Bench.linear,
    "prefill": _Bench.prefill,
    CHUNK: _Bench.chunk,
    "gpu_decode": _Bench.gpu_decode,
    "head": _Bench.head,
    "swap": _Bench.swap,
    "launch": _Bench.launch,
    HANDED: _Bench.launch,
}
