"""Decides what a step computes on an accelerator and the CPU together (NEO §3.2).

In: requests, two KV pools, predicted times. Out: a frozen StepPlan of one or two sub-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dovetail.ir.model import KV_BLOCK
from dovetail.runtime.schedule.cost_tables import Predictor
from dovetail.runtime.schedule.kv_pool import KvPool, blocks_for
from dovetail.runtime.schedule.offload import Demand, Lateness, OffloadDecision, Pace, weigh_offload
from dovetail.runtime.schedule.pipeline import LayerTimes, Pipeline
from dovetail.runtime.schedule.plan import Batch, Limits, SchedulerSettings, StepPlan
from dovetail.runtime.schedule.request import Home, Request
from dovetail.runtime.schedule.scheduler import Draft, Scheduler

Members = tuple[list[Request], list[Request]]
"""CPU decodes of batch 0 and of batch 1."""
Filled = tuple[Members, Pipeline]
Ready = tuple[Request, int, int]
"""A request that may decode on the CPU, its tokens, and the blocks it lacks."""

PLAYED_MARGIN = 0.4
"""Part of `min_gain`'s margin that is asked for where all run at once: with and without the CPU the
queue is then played forward in the same way, and what is told wrong, is so in both. Not where the
decision is `doubted`."""


class NeoScheduler(Scheduler):
    """Requests live wholly on the GPU or wholly on the CPU.

    What differs from the paper: CPU decodes may also join batch 0 alone, without a second pass
    over the weights, or exceed what the accelerator hides where the rate is higher so; whether to
    send requests to the CPU at all follows from the steady rate; one that is larger than the
    GPU's pool, or was passed over too often, runs at any price.
    """

    def __init__(
        self,
        limits: Limits,
        gpu: KvPool,
        cpu: KvPool,
        predictor: Predictor,
        clock: Callable[[], float],
        settings: SchedulerSettings | None = None,
    ) -> None:
        settings = settings or SchedulerSettings()
        super().__init__(limits, gpu, predictor, clock, home=Home.GPU, settings=settings)
        self.pools[Home.CPU] = cpu
        self.decision = OffloadDecision(1.0, 0)
        self._offloading = self._at_once = False
        self._weighed = (0, 0)  # plans and requests when the decision was found
        self._known = 0  # requests that had come by then
        known = predictor.launch() > 0.0
        self.lateness = Lateness(0.0 if known else settings.first_lateness)
        self.pace = Pace()
        self._running: tuple[Pipeline, float] | None = None  # the step under way, when it began
        self._times = LayerTimes(predictor)

    @property
    def homes(self) -> tuple[Home, ...]:
        """The devices that requests may live on."""
        return {"auto": tuple(Home), "off": (Home.GPU,), "full": (Home.CPU,)}[self.settings.offload]

    def plan(self) -> StepPlan:
        """Return the next step: the steps of the paper in their order."""
        if self.settings.offload == "off":
            return self.speculate(self.plan_alone(Home.GPU))
        self.tick()
        self._running = None  # a step that failed tells nothing
        self._weigh()
        draft = Draft(self.limits.max_step_tokens, self.limits.max_step_sequences)
        self._serve_overdue(draft)
        self.take_decodes(draft, Home.GPU)
        behind = not draft.short and self._swap_in(draft)
        kept = self._keep_rows(draft)
        self.continue_prefills(draft)
        if draft.empty or not (draft.short or behind):
            if self.settings.offload == "auto" and not self._spares_gpu():
                self.admit(draft, Home.GPU)
            self.admit(draft, Home.CPU, self._belongs_to_cpu)
        draft.tokens += kept
        plan = self._choose(draft)
        extended = self.speculate(plan)
        if extended is not plan:
            self._running = None  # it takes longer than was predicted
        return extended

    def complete(self, batch: Batch) -> tuple[Request, ...]:
        """See RequestQueues; the first batch to be reported tells how long the step took."""
        if self._running is not None:
            pipeline, start = self._running
            seconds = (self.clock() - start) / self.limits.n_layers
            self.lateness.learn(pipeline.stages, seconds - pipeline.starts)
            self._running = None
        return super().complete(batch)

    def note_attention(self, seconds: float) -> None:
        """See Scheduler; the next steps are planned with it."""
        if self._running is not None:
            self.pace.learn(self._running[0].attention, seconds)

    # ---- who lives where ----

    def _weigh(self) -> None:
        """Ask now and then, and when many have come or gone, whether offloading pays."""
        plans, count = self._weighed
        grown = not count / 2 <= len(self.requests) <= count * 1.25
        if self.settings.offload == "full" or not self.requests:
            return
        if not grown and self.plans < plans + self.settings.weigh_every:
            return
        if self._at_once and self._next_id == self._known:
            return  # what is started at once ends at once, unless others come
        self.pace.review()
        self.lateness.review()
        requests = self.requests.values()
        longest = sum(max(1, r.max_tokens) for r in requests) / len(requests)
        answer = longest if self.answer_tokens is None else self.answer_tokens
        running = [r for home in Home for r in self.running[home]]
        demand = Demand(
            requests=len(requests),
            prompt=sum(r.prompt_length for r in requests) / len(requests),
            answer=answer,
            gpu_tokens=self.pools[Home.GPU].n_blocks * KV_BLOCK,
            cpu_tokens=self.pools[Home.CPU].n_blocks * KV_BLOCK,
            left=tuple(max(1, round(answer) - r.generated) for r in running),
            on_gpu=len(self.running[Home.GPU]),
        )
        times = LayerTimes(self.predictor, self.lateness.seconds, self.pace.factor)
        self.decision = weigh_offload(demand, self.limits, times, self.settings.min_gain)
        self._offloading = self._gains(self.decision, len(running))
        self._at_once = self._offloading and self.decision.at_once
        self._weighed, self._known = (self.plans, len(requests)), self._next_id

    def _gains(self, found: OffloadDecision, running: int) -> bool:
        """Tell whether to begin to offload, or to go on: what has been begun is paid for."""
        if self._offloading:
            return found.cpu_requests > 0 and found.gain >= 1.0
        # Few that wait behind many start soon anyhow, where these end
        if found.at_once and len(self.waiting) < running:
            return False
        played = found.at_once and not found.doubted
        margin = (self.settings.min_gain - 1.0) * (PLAYED_MARGIN if played else 1.0)
        return found.cpu_requests > 0 and min(found.gain, found.steady) >= 1.0 + margin

    @property
    def pays(self) -> bool:
        """Whether requests that fit the GPU should go to the CPU all the same."""
        return self.settings.offload == "full" or self._offloading

    def _spares_gpu(self) -> bool:
        """Tell whether the next request should not decode on the GPU; the CPU must hold it all."""
        if not self._at_once or not self.decision.cpu_only:
            return False
        most = max((r.prompt_length + r.max_tokens for r in self.waiting[:1]), default=0)
        return blocks_for(most) <= self.pools[Home.CPU].n_blocks

    def _belongs_to_cpu(self, request: Request) -> bool:
        """Tell whether the CPU should take one more request, this one."""
        if blocks_for(len(request.tokens)) > self.pools[Home.GPU].n_blocks:
            return True
        room = self._at_once or len(self.running[Home.CPU]) < self.decision.cpu_requests
        return self.pays and (room or self.settings.offload == "full")

    def evict(self, draft: Draft, victim: Request) -> None:
        """Swap `victim` out to the CPU where that is wanted and possible, else drop its KV.

        Where offloading pays that does not end at as many as the CPU should take new ones: what
        was stored need not be computed anew.
        """
        cpu = self.pools[Home.CPU]
        needed = blocks_for(len(victim.tokens)) + len(self.running[Home.CPU]) + 1
        movable = victim.home is Home.GPU and victim.decoding and needed <= cpu.free_blocks
        if movable and (self.pays or self._belongs_to_cpu(victim)):
            draft.swapped_out.append(self.move(victim, Home.CPU))
        else:
            super().evict(draft, victim)

    def _swap_in(self, draft: Draft) -> bool:
        """Bring CPU requests back while the GPU has ample space; tell whether one must wait for it.

        Space that waiting prompts can take is not ample as long as offloading pays.
        """
        if self.settings.offload == "full" or (self.pays and self.waiting) or self._spares_gpu():
            return False
        pool = self.pools[Home.GPU]
        limit = round(self.settings.swap_in_share * pool.n_blocks)
        for request in [r for r in self.running[Home.CPU] if r.decoding]:
            needed = blocks_for(len(request.tokens) + 1)
            if needed > limit or request in draft.decodes[Home.CPU]:
                continue
            used = pool.n_blocks - pool.free_blocks + len(self.running[Home.GPU])
            if draft.full or used + needed > limit:
                return (
                    not self.pays and bool(self.waiting) and request.order < self.waiting[0].order
                )
            draft.swapped_in.append(self.move(request, Home.GPU))
            self.serve(draft, request)
        return False

    def _serve_overdue(self, draft: Draft) -> None:
        """Keep a block for the first CPU request; run the first one that has waited too long."""
        decoding = [r for r in self.running[Home.CPU] if r.decoding]
        late = next((r for r in decoding if self.overdue(r)), None)
        if decoding and self.make_room(draft, decoding[0]) and late is not None:
            if late.home is Home.CPU:
                self.decode(draft, late)

    def _keep_rows(self, draft: Draft) -> int:
        """Keep prompts from taking the rows that the CPU's decodes need; at most half of them.

        Without a row no decode is hidden, however long the prompts occupy the accelerator.
        """
        decoding = sum(r.decoding for r in self.running[Home.CPU])
        kept = min(decoding - len(draft.decodes[Home.CPU]), draft.tokens // 2)
        draft.tokens -= kept
        return kept

    # ---- which CPU requests decode, and in which batch ----

    def _choose(self, draft: Draft) -> StepPlan:
        """Build schedules without CPU decodes, with one batch and with two; take the best.

        They are filled by the tables alone, and weighed with what the CPU is late: what is left
        free for lateness is lost. Where all run at once no step leaves the CPU out for it.
        """
        if self.settings.pipelining != "asymmetric":
            return self._choose_simply(draft)
        forced = list(draft.decodes[Home.CPU])
        idle = not draft.chunks and not draft.decodes[Home.GPU]
        bounded = self.settings.offload == "auto" and not idle and not self._at_once
        self._times.forget()
        self._times.pace = self.pace.factor
        ready = self._find_ready(draft, forced)
        hidden = self._fill(draft, ready, forced, split=True, bounded=bounded)
        if bounded and self._reduce(draft, hidden[0]):
            hidden = hidden[0], self._pipeline(draft, hidden[0])
        # of equals the first is taken
        options: list[Filled] = [] if forced else [(([], []), self._pipeline(draft, ([], [])))]
        options += [self._fill(draft, ready, forced, split=False, bounded=bounded), hidden]
        if bounded:
            options += [
                self._fill(draft, ready, forced, split=split, bounded=False)
                for split in (False, True)
            ]
        self._times.late = self.lateness.seconds if bounded else 0.0
        members, pipeline = max(options, key=lambda option: option[1].rate)
        self._times.late = 0.0
        if not bounded or not pipeline.hidden:
            forced = [*members[0], *members[1]]
        return self._commit(draft, pipeline, members, forced)

    def _choose_simply(self, draft: Draft) -> StepPlan:
        """Take all CPU decodes that there is room for, hidden or not: in one batch or halves."""
        halved, forced = self.settings.pipelining == "symmetric", list(draft.decodes[Home.CPU])
        self._times.forget()
        ready = [] if halved and draft.chunks else self._find_ready(draft, forced)
        members, pipeline = self._fill(draft, ready, forced, split=False, bounded=False)
        if halved and not draft.chunks:
            members = _halve(members[0])
            pipeline = self._pipeline(draft, members)
        return self._commit(draft, pipeline, members, [*members[0], *members[1]])

    def _find_ready(self, draft: Draft, forced: Sequence[Request]) -> list[Ready]:
        """Return the CPU's requests that may decode beside those in the step already, in order."""
        pool = self.pools[Home.CPU]
        planned = {r.id for r in forced} | {chunk.request for chunk in draft.chunks}
        return [
            (request, len(request.tokens), pool.missing(request.id, len(request.tokens)))
            for request in self.running[Home.CPU]
            if request.decoding and request.id not in planned
        ]

    def _pipeline(self, draft: Draft, members: Members) -> Pipeline:
        lengths = [len(r.tokens) for r in draft.decodes[Home.GPU]]
        pipeline = Pipeline(self._times, draft.chunks, lengths)
        for batch, requests in enumerate(members):
            pipeline.add(batch, sum(len(r.tokens) for r in requests), len(requests))
        return pipeline

    def _fill(
        self,
        draft: Draft,
        ready: Sequence[Ready],
        forced: Sequence[Request],
        *,
        split: bool,
        bounded: bool,
    ) -> Filled:
        """Put CPU decodes where the accelerator hides most, in order, and skip what it cannot."""
        members: Members = ([], list(forced)) if split else (list(forced), [])
        pipeline = self._pipeline(draft, members)
        room, free = min(draft.tokens, draft.sequences), self.pools[Home.CPU].free_blocks
        shortest = self.limits.max_context + 1
        slacks = [pipeline.slack(0), pipeline.slack(1)]
        for request, length, missing in ready:
            if room < 1:
                break
            if length >= shortest or missing > free:
                continue
            batch = _place(pipeline, slacks, length, split=split, bounded=bounded)
            if batch is None:
                shortest = length
                continue
            members[batch].append(request)
            free, room = free - missing, room - 1
        return members, pipeline

    def _reduce(self, draft: Draft, members: Members) -> bool:
        """Take back prompts bound for the CPU while its decodes stay hidden without them.

        Returns whether any was.
        """
        rows = sum(c.length for c in draft.chunks)
        rows += len(draft.decodes[Home.GPU]) + len(members[0])
        reduced = False
        while draft.entrants and draft.entrants[-1].home is Home.CPU:
            request, chunk = draft.entrants[-1], draft.chunks[-1]
            rows -= chunk.length
            first = len(draft.entrants) == 1  # others wait in order behind it
            if rows < self.settings.min_tokens or (first and self.overdue(request)):
                break
            draft.chunks.pop()
            if not self._pipeline(draft, members).hidden:
                draft.chunks.append(chunk)
                break
            reduced = True
            draft.entrants.pop()
            draft.tokens += chunk.length
            draft.sequences += chunk.places
            self.withdraw(request)
        return reduced

    def _commit(
        self, draft: Draft, pipeline: Pipeline, members: Members, forced: Sequence[Request]
    ) -> StepPlan:
        """Give the chosen CPU decodes their blocks and return the step."""
        pool = self.pools[Home.CPU]
        for request in (*members[0], *members[1]):
            pool.grow(request.id, len(request.tokens))
        moves = (*draft.swapped_out, *draft.swapped_in)
        sent = sum(len(move.source) for move in moves)
        sent += sum(
            blocks_for(c.length) for c in draft.chunks if self.requests[c.request].home is Home.CPU
        )
        swap = pipeline.times.swap(sent * self.limits.block_bytes)
        seconds = pipeline.layer_seconds * self.limits.n_layers
        if any(pipeline.sequences) and seconds > swap:
            self._running = pipeline, self.clock()
        return StepPlan(
            self._divide(draft, members),
            swap_out=tuple(move.request for move in draft.swapped_out),
            swap_in=tuple(move.request for move in draft.swapped_in),
            preempt=tuple(draft.preempted),
            predicted_seconds=max(seconds, swap),
            moves=moves,
            forced=tuple(request.id for request in forced),
        )

    def _divide(self, draft: Draft, members: Members) -> tuple[Batch, ...]:
        """Return the batches; what the GPU does alone is in the first, but for `symmetric`.

        That halves decodes on either device (NEO §3.1, strawman 2); prompts have their own steps.
        """
        halves = self.settings.pipelining == "symmetric" and not draft.chunks
        decodes = draft.decodes[Home.GPU]
        first, second = (
            [tuple(request.id for request in part) for part in parts]
            for parts in zip(_halve(decodes) if halves else (decodes, []), members, strict=True)
        )
        batches = Batch(tuple(draft.chunks), *first), Batch((), *second)
        return batches if batches[1].tokens else batches[:1]


def _halve(decodes: Sequence[Request]) -> Members:
    """Return two halves, of every length some in each."""
    return list(decodes[::2]), list(decodes[1::2])


def _place(
    pipeline: Pipeline, slacks: list[float], length: int, *, split: bool, bounded: bool
) -> int | None:
    """Add a CPU decode where there is more slack, else to the other batch; None: nowhere hidden.

    `slacks` are those of both batches, before and after.
    """
    order: tuple[int, ...] = (0,)
    if split:
        order = (0, 1) if pipeline.rows[1] and slacks[0] >= slacks[1] else (1, 0)
    for batch in order:
        pipeline.add(batch, length)
        found = pipeline.slack(0), pipeline.slack(1)
        least = min(0.0, slacks[1 - batch])  # negative only beside forced ones
        if not bounded or (found[batch] >= 0.0 and found[1 - batch] >= least):
            slacks[:] = found
            return batch
        pipeline.add(batch, -length, -1)
    return None
