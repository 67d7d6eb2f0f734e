"""Made-up machines, schedulers on them and what must hold for every plan: shared by tests."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass

from dovetail.ir.model import KV_BLOCK
from dovetail.runtime.schedule.cost_tables import Predictor
from dovetail.runtime.schedule.kv_pool import KvPool, blocks_for
from dovetail.runtime.schedule.neo import NeoScheduler
from dovetail.runtime.schedule.pipeline import LayerTimes, Pipeline
from dovetail.runtime.schedule.plan import Limits, SchedulerSettings, StepPlan
from dovetail.runtime.schedule.request import Home, Request, SamplingParams
from dovetail.runtime.schedule.scheduler import Scheduler


@dataclass
class Roofline(Predictor):
    """Times of a layer from `weights` (bytes, 2 a parameter), KV bytes a token, rates a second."""

    weights: float = 4e8
    kv: float = 4096.0
    gpu_bytes: float = 450e9
    gpu_flops: float = 60e12
    cpu_bytes: float = 150e9
    start: float = 5e-5

    def linear(self, tokens: int) -> float:
        return max(self.weights / self.gpu_bytes, self.weights * tokens / self.gpu_flops)

    def prefill(self, lengths: list[int]) -> float:  # type: ignore[override]
        return sum(8192.0 * n * n for n in lengths) / self.gpu_flops

    def gpu_decode(self, tokens: int) -> float:
        return tokens * self.kv / self.gpu_bytes

    def cpu_decode(self, sequences: int, tokens: int) -> float:
        return tokens * self.kv / self.cpu_bytes

    def swap(self, nbytes: int) -> float:
        return nbytes / 20e9

    def launch(self) -> float:
        return self.start


T4 = Roofline(4.05e8, 16384.0, 250e9, 25e12, 60e9)
H200 = Roofline(4.36e8, 4096.0, 3.5e12, 500e12, 100e9)


@dataclass
class Noise(Predictor):
    """Times that follow no rule, the same for the same question."""

    seed: int

    def _draw(self, *key: int) -> float:
        return random.Random(hash((self.seed, *key))).random() * 1e-3

    def linear(self, tokens: int) -> float:
        return self._draw(1, tokens)

    def prefill(self, lengths: list[int]) -> float:  # type: ignore[override]
        return sum(self._draw(2, n) for n in lengths)

    def gpu_decode(self, tokens: int) -> float:
        return self._draw(3, tokens)

    def cpu_decode(self, sequences: int, tokens: int) -> float:
        return self._draw(4, sequences, tokens)

    def launch(self) -> float:
        return 1e-5


@dataclass
class PlannedClock:
    """Time passes as plans predict it, when they are reported."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


def pass_time(scheduler: Scheduler, plan: StepPlan) -> None:
    """Let a step take what was predicted, where the clock is one of plans."""
    if isinstance(scheduler.clock, PlannedClock):
        scheduler.clock.seconds += plan.predicted_seconds


def make(
    gpu: int = 54,
    cpu: int = 4000,
    predictor: Predictor = T4,
    tokens: int = 832,
    sequences: int = 512,
    context: int = 4096,
    **options: object,
) -> NeoScheduler:
    limits = Limits(tokens, sequences, context, 1000, n_layers=32, block_bytes=1 << 20)
    return NeoScheduler(
        limits,
        KvPool(gpu),
        KvPool(cpu),
        predictor,
        PlannedClock(),
        SchedulerSettings(**options),  # type: ignore[arg-type]
    )


def submit(
    scheduler: Scheduler, length: int, answer: int, priority: int = 0, n: int = 1
) -> list[Request]:
    fill = len(scheduler.requests) % 7
    return scheduler.submit([fill] * length, SamplingParams(max_tokens=answer, n=n), priority)


def report(scheduler: Scheduler, plan: StepPlan) -> None:
    """Give token 1 to every request that a computed plan asks one for."""
    pass_time(scheduler, plan)
    for batch in plan.batches:
        for request in scheduler.complete(batch):
            scheduler.append(request, 1, scheduler.clock())


def check_plan(scheduler: NeoScheduler, plan: StepPlan) -> None:
    """Assert what holds for every plan, before its results are reported."""
    limits, requests = scheduler.limits, scheduler.requests
    assert 1 <= len(plan.batches) <= 2
    assert sum(b.tokens for b in plan.batches) <= limits.max_step_tokens
    assert sum(b.sequences for b in plan.batches) <= limits.max_step_sequences
    rows = [c.request for b in plan.batches for c in b.prefill]
    for batch in plan.batches:
        rows += [*batch.gpu_decode, *batch.cpu_decode]
        assert all(requests[i].home is Home.GPU for i in batch.gpu_decode)
        assert all(requests[i].home is Home.CPU for i in batch.cpu_decode)
        for chunk in batch.prefill:
            assert chunk.start == requests[chunk.request].computed and chunk.length > 0
    assert len(rows) == len(set(rows)), "a request twice"
    for batch in plan.batches[1:]:
        assert not batch.prefill and not batch.gpu_decode and batch.cpu_decode
    for number in rows:
        request = requests[number]
        assert request.home is not None
        held = len(scheduler.pools[request.home].table(number))
        assert held >= blocks_for(len(request.tokens))
    assert [m.request for m in plan.moves] == [*plan.swap_out, *plan.swap_in]
    assert all(len(m.source) == len(m.target) for m in plan.moves)
    assert rows or not scheduler.busy, "an empty step"


def check_hidden(scheduler: NeoScheduler, plan: StepPlan) -> None:
    """Assert both inequalities of a plan that nothing forced."""
    lengths = {i: len(scheduler.requests[i].tokens) for b in plan.batches for i in b.cpu_decode}
    first = plan.batches[0]
    gpu = [len(scheduler.requests[i].tokens) for i in first.gpu_decode]
    pipeline = Pipeline(LayerTimes(scheduler.predictor), first.prefill, gpu)
    for index, batch in enumerate(plan.batches):
        pipeline.add(index, sum(lengths[i] for i in batch.cpu_decode), len(batch.cpu_decode))
    assert plan.forced or pipeline.hidden


class Memory:
    """Both pools' blocks with the tokens stored in them: an executor that computes nothing."""

    def __init__(self, scheduler: NeoScheduler) -> None:
        self.scheduler = scheduler
        self.blocks = {
            home: [[-1] * KV_BLOCK for _ in range(pool.n_blocks)]
            for home, pool in scheduler.pools.items()
        }

    def run(self, plan: StepPlan) -> None:
        """Make the moves, store what is computed, read all that came before, report tokens."""
        pass_time(self.scheduler, plan)
        for index, move in enumerate(plan.moves):
            homes = (Home.GPU, Home.CPU) if index < len(plan.swap_out) else (Home.CPU, Home.GPU)
            for source, target in zip(move.source, move.target, strict=True):
                self.blocks[homes[1]][target] = list(self.blocks[homes[0]][source])
        requests = self.scheduler.requests
        for batch in plan.batches:
            rows = [(c.request, c.length) for c in batch.prefill]
            rows += [(number, 1) for number in (*batch.gpu_decode, *batch.cpu_decode)]
            rows = [(number, length) for number, length in rows if number in requests]
            for number, length in rows:
                self._store(requests[number], length)
            for number, length in rows:
                self._read(requests[number], length)
            for request in self.scheduler.complete(batch):
                token = 500 + (request.id * 31 + len(request.tokens)) % 499
                self.scheduler.append(request, token, self.scheduler.clock())

    def _slots(self, request: Request) -> tuple[list[list[int]], array[int]]:
        assert request.home is not None
        table = self.scheduler.pools[request.home].table(request.id)
        return self.blocks[request.home], table

    def _store(self, request: Request, length: int) -> None:
        blocks, table = self._slots(request)
        for place in range(request.computed, request.computed + length):
            blocks[table[place // KV_BLOCK]][place % KV_BLOCK] = request.tokens[place]

    def _read(self, request: Request, length: int) -> None:
        blocks, table = self._slots(request)
        end = request.computed + length
        found = [blocks[table[i // KV_BLOCK]][i % KV_BLOCK] for i in range(end)]
        assert found == request.tokens[:end], "attention reads what was not stored there"
