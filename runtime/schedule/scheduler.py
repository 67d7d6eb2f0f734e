"""Decides what the next step computes on one device: continuous batching, first come first served.

In: requests, the KV pool's state, limits of a step. Out: a frozen StepPlan. Pure: no tensors, no
threads, and time only through the clock that is handed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from dovetail.ir.model import KV_BLOCK
from dovetail.runtime.schedule.cost_tables import Predictor
from dovetail.runtime.schedule.kv_pool import KvPool
from dovetail.runtime.schedule.pipeline import LayerTimes
from dovetail.runtime.schedule.plan import (
    Batch,
    Limits,
    Move,
    PrefillChunk,
    SchedulerSettings,
    StepPlan,
)
from dovetail.runtime.schedule.queue import RequestQueues
from dovetail.runtime.schedule.request import Home, Request
from dovetail.runtime.schedule.speculation import Speculation

STEP_ROWS = 8
"""Rows of prompts that take as long as what a step takes besides (measured: SmolLM2, bfloat16)."""
STATE_TOKENS = 4 * KV_BLOCK
"""Tokens of a prompt's last part from which the state behind them is worth a step of its own."""
SAMPLE = 16
"""Waiting requests whose prompts tell how long all are."""


@dataclass(slots=True)
class Draft:
    """A step being planned, and what it may still take."""

    tokens: int
    sequences: int
    decodes: dict[Home, list[Request]] = field(default_factory=lambda: {home: [] for home in Home})
    chunks: list[PrefillChunk] = field(default_factory=list)
    entrants: list[Request] = field(default_factory=list)  # admitted by this plan
    preempted: list[int] = field(default_factory=list)
    swapped_out: list[Move] = field(default_factory=list)
    swapped_in: list[Move] = field(default_factory=list)

    @property
    def short(self) -> bool:
        """Whether blocks ran out: then the running ones go on first."""
        return bool(self.preempted or self.swapped_out)

    @property
    def empty(self) -> bool:
        """Whether nothing has been taken yet."""
        return not self.chunks and not any(self.decodes.values())

    @property
    def full(self) -> bool:
        """Whether the step takes no more."""
        return self.tokens < 1 or self.sequences < 1

    def take(self, tokens: int, places: int = 1) -> None:
        """Count `tokens` more rows in `places` of the sequences."""
        self.tokens -= tokens
        self.sequences -= places


def cut_at_block(start: int, length: int, tokens: int) -> int:
    """Return how many of `length` tokens from `start` on to take so that a state may be kept.

    It is kept where a block ends, the last time at the last one that may be shared (the last token
    never is). A short rest would cost a step and spare little: it is taken with the others.
    """
    last = (tokens - 1) // KV_BLOCK * KV_BLOCK
    end = start + length
    if start < last < end:
        return last - start if last - start >= STATE_TOKENS else length
    whole = end // KV_BLOCK * KV_BLOCK
    return whole - start if end < tokens and whole > start else length


class Scheduler(RequestQueues):
    """One device: all KV in its pool. `plan`, run it, then `complete` and `append`."""

    def __init__(
        self,
        limits: Limits,
        pool: KvPool,
        predictor: Predictor,
        clock: Callable[[], float],
        *,
        home: Home = Home.CPU,
        settings: SchedulerSettings | None = None,
    ) -> None:
        pools = {other: KvPool(0) for other in Home} | {home: pool}
        super().__init__(limits, pools, clock, settings or SchedulerSettings(offload="off"))
        self.predictor, self.home, self.pool = predictor, home, pool
        drafts, rows = self.settings.num_speculative_tokens, limits.max_decodes
        self.speculation = Speculation(drafts, rows) if drafts else None
        self._weighs = type(predictor) is not Predictor  # else no step need ask it

    def plan(self) -> StepPlan:
        """Return the next step: every decode, then chunks of prompts in order."""
        return self.speculate(self._plan_steady() or self.plan_alone(self.home))

    def speculate(self, plan: StepPlan) -> StepPlan:
        """Return a plan with rows for drafts, where these should pay."""
        return self.speculation.extend(plan, self) if self.speculation else plan

    def confirm(self, request: Request, token: int) -> bool:
        """Tell whether `token`, a request's newest one, was drafted: then its K and V are stored.

        Else the rows of its other drafted tokens do not count.
        """
        assert self.speculation is not None
        held = request.drafted.pop(0) == token
        self.speculation.learn(request, held=held)
        if not held:
            request.drafted.clear()
        elif request.home is not None:
            request.computed += 1
            self.pools[request.home].publish(request.id, request.tokens, request.computed)
        return held

    def _plan_steady(self) -> StepPlan | None:
        """Return the step where there is nothing to decide, None where there is.

        So it is in nearly all steps of an answer: nobody waits, and all have blocks for the next
        token. What `plan_alone` does besides costs more than it seems: each step finds it outside
        of the caches, which the weights have gone through.
        """
        running, limits = self.running[self.home], self.limits
        if self._weighs or self.waiting or not running:
            return None
        if len(running) > limits.max_decodes:
            return None
        missing = self.pool.missing
        if not all(r.decoding and not missing(r.id, len(r.tokens)) for r in running):
            return None
        self.tick()
        ids = tuple([request.id for request in running])
        return StepPlan(
            (Batch(gpu_decode=ids) if self.home is Home.GPU else Batch(cpu_decode=ids),)
        )

    def plan_alone(self, home: Home) -> StepPlan:
        """Return the step in which `home` does everything."""
        self.tick()
        draft = Draft(self.limits.max_step_tokens, self.limits.max_step_sequences)
        self.take_decodes(draft, home)
        if self.settings.prompt_tokens and self.settings.chunked and len(self.requests) > 1:
            draft.tokens = min(draft.tokens, self.prompt_rows(home))
        self.continue_prefills(draft)
        if draft.empty or not draft.short:
            self.admit(draft, home)
        decodes = [tuple(r.id for r in draft.decodes[home]) for home in (Home.GPU, Home.CPU)]
        batch = Batch(tuple(draft.chunks), *decodes)
        seconds = self._predict(draft, batch.tokens) if self._weighs else 0.0
        return StepPlan((batch,), preempt=tuple(draft.preempted), predicted_seconds=seconds)

    def prompt_rows(self, home: Home) -> int:
        """Return the most rows of prompts in a step, beside other requests.

        A step of n rows takes as long as n + STEP_ROWS. With W prompts of R rows in all, and D
        decodes with k tokens to go, requests wait for D k (n + STEP_ROWS) for tokens, for
        W R / 2 (1 + STEP_ROWS / n) for their turn, and for W n / 2 as a step ends later than the
        prompt in it: least at n = sqrt(STEP_ROWS W R / (2 D k + W)).
        """
        settings, running = self.settings, self.running[home]
        assert settings.prompt_tokens is not None
        begun = [request.pending for request in running if not request.decoding]
        sample = [request.pending for request in self.waiting[:SAMPLE]]
        prompts = len(begun) + len(self.waiting)
        rows = sum(begun) + sum(sample) * len(self.waiting) / max(1, len(sample))
        answer = self.answer_tokens or math.inf
        left = sum(
            max(1.0, min(request.max_tokens, answer) - request.generated)
            for request in running
            if request.decoding
        )
        best = math.sqrt(STEP_ROWS * prompts * rows / (2 * left + prompts)) if prompts else 0.0
        return max(settings.prompt_tokens, min(int(best), settings.crowd_tokens))

    def note_attention(self, seconds: float) -> None:
        """Take note of what the CPU's attention of a layer took in the step under way."""

    # ---- parts of a plan ----

    def take_decodes(self, draft: Draft, home: Home) -> None:
        """Take the decodes of `home`; the last in order give way when blocks run out."""
        for request in list(self.running[home]):
            if request.home is not home or not request.decoding or draft.full:
                continue
            self.decode(draft, request)

    def decode(self, draft: Draft, request: Request) -> None:
        """Put a decode into the step with a block for its token, if there is room for that."""
        assert request.home is not None
        pool = self.pools[request.home]
        if pool.missing(request.id, len(request.tokens)):  # rarely: a block holds many tokens
            if not self.make_room(draft, request):
                return
            pool.grow(request.id, len(request.tokens))
        self.serve(draft, request)

    def make_room(self, draft: Draft, request: Request) -> bool:
        """Evict until `request` can store its next token; tell whether it is still there."""
        assert request.home is not None
        home, pool = request.home, self.pools[request.home]
        while pool.missing(request.id, len(request.tokens)) > pool.free_blocks:
            victim = self.running[home][-1]
            self.evict(draft, victim)
            if victim is request:
                return False
        return True

    def evict(self, draft: Draft, victim: Request) -> None:
        """Take the blocks of `victim`."""
        self.preempt(victim)
        draft.preempted.append(victim.id)

    def serve(self, draft: Draft, request: Request) -> None:
        """Put a decode into the step."""
        assert request.home is not None
        draft.decodes[request.home].append(request)
        draft.take(1)

    def continue_prefills(self, draft: Draft) -> None:
        """Go on with the prompts that are stored in part."""
        for home in Home:
            for request in self.running[home]:
                if not request.decoding and not draft.full:
                    self.take_chunk(draft, request)

    def take_chunk(self, draft: Draft, request: Request) -> None:
        """Put as much of a prompt into the step as it takes.

        A step has as many rows of logits as sequences: what is to be scored goes in such blocks.
        """
        start, unscored = request.computed, request.unscored
        length = min(draft.tokens, request.pending)
        if unscored:
            length = min(length, draft.sequences)
        elif request.home is not None and self.pools[request.home].states is not None:
            length = cut_at_block(start, length, len(request.tokens))
        scores = range(max(start, unscored.start), min(start + length, unscored.stop))
        chunk = PrefillChunk(request.id, start, length, scores)
        draft.chunks.append(chunk)
        draft.take(length, chunk.places)

    def admit(
        self, draft: Draft, home: Home, wanted: Callable[[Request], bool] = lambda _: True
    ) -> None:
        """Start waiting requests in order while tokens, sequences and blocks last.

        The KV of their prompts goes to `home` as it is computed. Nobody is overtaken: the first one
        that is not `wanted` there ends it.
        """
        while self.waiting and wanted(request := self.waiting[0]):
            started = self.may_start(draft, request, home)
            if not started or not self.prepare(request, home, spare=len(self.running[home])):
                break
            draft.entrants.append(request)
            self.take_chunk(draft, request)

    def may_start(self, draft: Draft, request: Request, home: Home) -> bool:
        """Tell whether the step has a place for the first rows of a waiting `request`."""
        leader = request.leader
        if leader is not None and leader.home is not None and not leader.generated:
            return False  # its full blocks can soon be shared
        if draft.full or len(self.running[home]) >= self.limits.max_decodes:
            return False
        whole = self.settings.chunked or len(request.tokens) <= draft.tokens
        return whole or not draft.chunks  # the first prompt of a step may be cut

    def _predict(self, draft: Draft, rows: int) -> float:
        """Return the seconds of a step in one batch, whose parts follow each other."""
        times, on_cpu = LayerTimes(self.predictor), len(draft.decodes[Home.CPU])
        gpu, cpu = (sum(len(r.tokens) for r in draft.decodes[h]) for h in (Home.GPU, Home.CPU))
        attention = times.prefill(draft.chunks) + times.gpu_decode(gpu)
        attention += times.cpu_decode(on_cpu, cpu)
        return (attention + times.linear(rows) + times.launch) * self.limits.n_layers
