"""Measures the cost tables of a model on the CPU it runs on, with the kernels it runs with.

In: an idle engine and seconds to spend. Out: a `ProfileFile` of measured rows, kept in the
artifact; few points, the most telling ones first, so that a short budget gives a coarse table.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

from dovetail.ir.errors import SpecError
from dovetail.ir.model import KV_BLOCK
from dovetail.ir.profile import CostRow, ProfileFile, ProfileKey
from dovetail.runtime.artifact import Artifact, ModelPart
from dovetail.runtime.engine.engine import Engine
from dovetail.runtime.engine.executor import CpuExecutor
from dovetail.runtime.native.forward import ForwardModel
from dovetail.runtime.native.step import StepShape
from dovetail.runtime.schedule.cost_tables import (
    digest_kernels,
    keep_profile,
    make_profile,
    read_profile,
)
from dovetail.runtime.schedule.kv_pool import KvPool, blocks_for
from dovetail.runtime.schedule.plan import Batch, Limits, PrefillChunk
from dovetail.runtime.schedule.request import Metrics, Request, SamplingParams
from dovetail.topology.hardware import HardwareSpec

BUDGET = 10.0
"""Seconds that a profile takes by default; each table gets its end points whatever they take."""
REPEATS, LEAST = 7, 3
"""Runs of a point, and those it gets however slow it is."""
POINT_SHARE = 0.05
"""Part of the budget after which a point gets no more runs than the least."""
KV_BYTES = 1 << 30
"""Bytes of KV memory that decode attention is measured with, at most.

Of more tokens fewer layers are taken: what will be asked must not lie beyond the table.
"""
PAGE = 4096
TABLES = ("linear", "prefill", "cpu_decode", "head")

Point = tuple[str, tuple[int, ...]]
"""A table, and where in it."""
Tables: TypeAlias = dict[str, list[CostRow]]

log = logging.getLogger("dovetail")


def profile_key(artifact: Artifact, model: ForwardModel, hardware: HardwareSpec) -> ProfileKey:
    """Return what a profile of this model on the CPU would hold for."""
    return ProfileKey(
        model=artifact.manifest.model_fingerprint,
        device=f"{hardware.cpu_model} {artifact.target}",
        threads=model.decode.plan.threads,
        tensor_parallel=artifact.service.processes,
        kernels=digest_kernels(artifact.kernels.kernels),
    )


def load_profile(
    artifact: Artifact,
    part: ModelPart,
    engine: Engine,
    hardware: HardwareSpec,
    seconds: float = BUDGET,
) -> ProfileFile:
    """Return the profile kept in the artifact; where there is none, measure and keep it.

    Raises:
        ArtifactError: the one that is kept is damaged, or of another machine or model.
        SpecError: the engine is busy, or is a group of processes.
    """
    key = profile_key(artifact, engine.executor.model, hardware)
    found = read_profile(part.folder, key)
    if found is None:
        executor = idle_executor(engine)
        engine.scheduler.pool.forget()  # its memory is written
        found = measure_profile(executor, executor.limits, key, seconds)
        keep_profile(part.folder, found)
    return found


def idle_executor(engine: Engine) -> CpuExecutor:
    """Return what runs an engine's steps; SpecError where that cannot be profiled now."""
    executor = engine.executor
    if engine.scheduler.busy:
        raise SpecError("a busy engine cannot be profiled; wait until its requests have finished")
    if executor.group is not None or not isinstance(executor, CpuExecutor):
        raise SpecError("only one process on the CPU can be profiled; load with such a plan")
    return executor


def measure_profile(
    executor: CpuExecutor,
    limits: Limits,
    key: ProfileKey,
    seconds: float = BUDGET,
    only: Sequence[str] = TABLES,
) -> ProfileFile:
    """Measure the tables `linear`, `prefill`, `cpu_decode` and `head`, or some.

    The executor computes nothing else meanwhile, and its KV memory is overwritten.
    """
    bench = _TapeBench(executor, limits)
    points = (point for point in plan_points(*bench.limits) if point[1][0] in only)
    return make_profile(key, measure_points(points, bench.prepare, seconds, POINT_SHARE * seconds))


def measure_points(
    points: Iterable[tuple[bool, Point]],
    prepare: Callable[[str, tuple[int, ...]], Callable[[], float]],
    seconds: float,
    each: float,
) -> Tables:
    """Measure (is an end point, point) one after the other: in time the ends, then what fits.

    prepare: returns what measures a point once. each: seconds after which one gets no more runs
    than the least.
    """
    tables: Tables = {}
    start = time.perf_counter()
    for number, (is_end, (table, at)) in enumerate(points):
        if not is_end and time.perf_counter() - start > seconds:
            log.info("profiled %d points in %.1f s", number, time.perf_counter() - start)
            break
        times = repeat(prepare(table, at), each)
        tables.setdefault(table, []).append(measured_row(at, times))
    return tables


def measured_row(at: tuple[int, ...], times: Sequence[float]) -> CostRow:
    """Return the row of a point: the median of its times and how far they spread."""
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    spread = (high - low) / middle if middle else 0.0
    return CostRow(at=at, seconds=middle, origin="measured", spread=spread)


def repeat(run: Callable[[], float], limit: float) -> list[float]:
    """Return the seconds of some runs: more where `limit` leaves time for them."""
    run()  # the first one maps pages and wakes threads
    times: list[float] = []
    end = time.perf_counter() + limit
    while len(times) < LEAST or (len(times) < REPEATS and time.perf_counter() < end):
        times.append(run())
    return times


# ---- which points ----


def plan_points(
    max_tokens: int, max_sequences: int, max_context: int, kv_tokens: int
) -> Iterator[tuple[bool, Point]]:
    """Yield (is an end point, point): the ends of each table, then ever finer between them."""
    lines = {
        "linear": refine(1, max_tokens),
        "prefill": refine(1, min(max_tokens, max_context)),
        "head": refine(1, max_sequences),
    }
    sequences = refine(1, max_sequences)
    each = refine(min(KV_BLOCK, max_context), min(max_context, kv_tokens))
    grid = {
        (s, s * n): max(i, j)
        for i, row in enumerate(sequences)
        for s in row
        for j, column in enumerate(each)
        for n in column
        if s * blocks_for(n) * KV_BLOCK <= kv_tokens
    }
    for i, row in enumerate(sequences):  # and as many tokens of each as memory holds
        for s in row:
            most = min(max_context, kv_tokens // s // KV_BLOCK * KV_BLOCK)
            if most >= min(KV_BLOCK, max_context):
                grid.setdefault((s, s * most), i)
    depth = max(len(sequences), len(each), *(len(line) for line in lines.values()))
    for level in range(depth):
        for table, line in lines.items():
            for x in line[level] if level < len(line) else ():
                yield level == 0, (table, (x,))
        for at in (at for at, found in grid.items() if found == level):
            yield level == 0, ("cpu_decode", at)


def refine(first: int, last: int) -> list[list[int]]:
    """Return [the ends], [the point between], [those between these], ...: powers of two."""
    known = sorted({first, last})
    levels = [known]
    inner = [1 << i for i in range(first.bit_length(), last.bit_length()) if first < 1 << i < last]
    while inner:
        between = ([x for x in inner if a < x < b] for a, b in pairwise(known))
        level = sorted(found[len(found) // 2] for found in between if found)
        levels.append(level)
        known = sorted({*known, *level})
        inner = [x for x in inner if x not in level]
    return levels


# ---- how a point is measured ----


class _TapeBench:
    """Runs segments of the forward tape over made-up sequences."""

    def __init__(self, executor: CpuExecutor, limits: Limits) -> None:
        self.executor, self.pool = executor, KvPool(executor.blocks)
        self._layers = executor.spec.n_layers
        self._requests: dict[int, Request] = {}
        kv, tape = executor.model.kv, executor.model.decode.tape
        self._pools = tuple(map(kv.layers, "kv"))
        self._block = max(map(len, self._pools[0])) // self.pool.n_blocks
        free = self.pool.n_blocks
        in_one, in_all = (
            KV_BLOCK * max(1, min(free, KV_BYTES // (2 * self._block * layers)))
            for layers in (1, self._layers)
        )
        context = min(limits.max_context, in_one)
        tokens = min(tape.max_tokens, limits.max_step_tokens, context, in_all)
        sequences = min(tape.max_sequences, limits.max_step_sequences)  # a device's may be more
        self.limits = (tokens, sequences, context, in_one)

    def prepare(self, table: str, at: tuple[int, ...]) -> Callable[[], float]:
        """Return what measures a point once, in seconds of one layer."""
        for number in self._requests:  # of the point measured before
            self.pool.close(number)
        self._requests.clear()
        if table == "cpu_decode":
            sequences, tokens = at
            return self._decode(sequences, tokens // sequences)
        if table == "head":
            return self._timed(self._run([1] * at[0], decode=True), ["head"], 1)
        names = {"linear": ("pre_attn", "post_attn"), "prefill": ("attn",)}[table]
        layers = max(1, self._layers - 1)  # the last one multiplies fewer rows
        segments = [f"{name}({i})" for i in range(layers) for name in names]
        return self._timed(self._run(list(at), decode=False), segments, layers)

    def _decode(self, sequences: int, each: int) -> Callable[[], float]:
        nbytes = 2 * self._block * sequences * blocks_for(each)
        layers = range(max(1, min(self._layers, KV_BYTES // nbytes)))
        shape = self._fill([each] * sequences, len(layers), decode=True)
        parts = ("pre_attn", "attn", "post_attn")
        before = ["embed", *(f"{part}({i})" for i in layers for part in parts)]
        self._timed(shape, before, 1)()  # attention finds queries
        return self._timed(shape, [f"attn({i})" for i in layers], len(layers))

    def _run(self, lengths: Iterable[int], *, decode: bool) -> StepShape:
        """Run a step: later segments find what the earlier ones leave behind."""
        shape = self._fill(lengths, self._layers, decode=decode)
        self.executor.forward(shape)
        return shape

    def _fill(self, lengths: Iterable[int], layers: int, *, decode: bool) -> StepShape:
        """Write a step over new sequences: one token each of them, or all of their tokens."""
        for number, length in enumerate(lengths):
            # alike, all rows would choose the same experts
            tokens = [(number + place) % self.executor.spec.vocab_size for place in range(length)]
            request = Request(number, tokens, length, 1, SamplingParams(), Metrics(arrival=0.0))
            request.computed = length - 1 if decode else 0
            self._requests[number] = request
            self.pool.open(number)
            self.pool.grow(number, length)
            self._touch(self.pool.table(number), layers)
        numbers = tuple(self._requests)
        chunks = tuple(PrefillChunk(n, 0, len(self._requests[n].tokens)) for n in numbers)
        batch = Batch(cpu_decode=numbers) if decode else Batch(prefill=chunks)
        return self.executor.buffers.fill(batch, self._requests, self.pool.table)

    def _touch(self, blocks: Sequence[int], layers: int) -> None:
        """Have pages of these blocks: untouched memory is one page of zeros, read from a cache."""
        for layer in (layer for pool in self._pools for layer in pool[:layers]):
            cells = layer.reshape(self.pool.n_blocks, -1)
            for block in blocks:
                cells[block, ::PAGE] = cells[block, ::PAGE]

    def _timed(self, shape: StepShape, names: Sequence[str], layers: int) -> Callable[[], float]:
        executor = self.executor
        phase, args = executor.forward_args(shape)
        tape, team = executor.model.tapes[phase], executor.model.team
        spans = [span for span in map(tape.tape.segment, names) if span]

        def run() -> float:
            start = time.perf_counter()
            for span in spans:
                tape.run(team, args, span)
            return (time.perf_counter() - start) / layers

        return run
