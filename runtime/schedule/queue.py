"""All requests, where they are, and every change of their state.

In: arrivals and results. Out: queues in a fixed order: waiting, running on the GPU, running on the
CPU. Who comes first never changes, the last one gives way: so the first always gets on.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

from dovetail.ir.errors import CapacityError, LengthError, RequestError
from dovetail.ir.model import KV_BLOCK
from dovetail.runtime.schedule.kv_pool import KvPool, blocks_for, hash_blocks
from dovetail.runtime.schedule.plan import Batch, Limits, Move, SchedulerSettings
from dovetail.runtime.schedule.request import (
    FAILED,
    Home,
    Metrics,
    Request,
    SamplingParams,
    TokenLogprob,
    check_priority,
)

by_order = attrgetter("order")
"""The key that queues are sorted by."""


class RequestQueues:
    """Requests, KV pools and queues; schedulers decide on top of it."""

    def __init__(
        self,
        limits: Limits,
        pools: Mapping[Home, KvPool],
        clock: Callable[[], float],
        settings: SchedulerSettings,
    ) -> None:
        self.limits, self.clock, self.settings = limits, clock, settings
        self.pools = dict(pools)
        self.requests: dict[int, Request] = {}
        self.waiting: list[Request] = []
        self.running: dict[Home, list[Request]] = {home: [] for home in Home}
        self.plans = 0
        self.swaps = dict.fromkeys(Home, 0)  # requests that went there from the other device
        self.answer_tokens: float | None = None  # mean of finished requests, recent ones weigh more
        self._next_id = 0
        self._pace = 0.0  # seconds between plans
        self._planned_at: float | None = None

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.requests)

    @property
    def homes(self) -> tuple[Home, ...]:
        """The devices that requests may live on."""
        return tuple(home for home in Home if self.pools[home].n_blocks)

    # ---- arrivals and results: what executors and servers call ----

    def check(self, prompt: Sequence[int], params: SamplingParams, beside: int = 0) -> int:
        """Return how many tokens may be generated for `prompt`.

        beside: requests of the same call that wait already. A call that comes when nothing waits is
        never too large: it would be refused again, however often it came back.

        Raises:
            RequestError: the prompt is empty or has an unknown id.
            LengthError: it is longer than the context.
            CapacityError: prompt and answer never fit a pool, or too many requests wait.
        """
        limits = self.limits
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token")
        if len(prompt) + min(params.max_tokens, 1) > limits.max_context:
            left = " and one must be left for the answer" if params.max_tokens else ""
            raise LengthError(
                f"the prompt has {len(prompt)} tokens, but the context holds {limits.max_context}"
                f"{left}; shorten the prompt"
            )
        tokens = (*prompt, *params.named_tokens)
        if not (min(tokens) >= 0 and max(tokens) < limits.vocab_size):
            wrong = next(t for t in tokens if not 0 <= t < limits.vocab_size)
            raise RequestError(f"token id {wrong} is outside 0..{limits.vocab_size - 1}")
        largest = max(self.pools[home].n_blocks for home in self.homes)
        answer = limits.max_context - len(prompt)
        if params.max_tokens < max(1, answer):
            answer = params.max_tokens
        else:  # all there is room for, in the pool as well; the last token is never stored
            answer = max(1, min(answer, largest * KV_BLOCK + 1 - len(prompt)))
        needed = blocks_for(len(prompt) + max(answer, 1) - 1)
        if needed > largest:
            raise CapacityError(
                f"the request needs {needed * KV_BLOCK} tokens of KV, the pool holds "
                f"{largest * KV_BLOCK}; lower max_tokens or load with more kv_blocks"
            )
        most = self.settings.max_waiting
        if most is not None and len(self.waiting) + params.n > max(most, beside + params.n):
            raise CapacityError(
                f"{len(self.waiting) - beside} requests are waiting; send the request again later",
                retry_after=self.estimate_wait(),
            )
        return answer

    def estimate_wait(self) -> float:
        """Return in how many seconds half of what waits will run, at the present pace.

        At the earliest a running request must have ended. Until half has gone there is room for few
        of those who are told so: the others would be refused again, and that costs, too. Where
        nothing runs (a rank group has died) as many will as a step takes.
        """
        left = [r.max_tokens - r.generated for home in Home for r in self.running[home]]
        turns = len(self.waiting) / 2 / (len(left) or self.limits.max_step_sequences)
        return self._pace * max(min(left, default=1), turns * (self.answer_tokens or 0.0))

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, priority: int = 0, beside: int = 0
    ) -> list[Request]:
        """Queue `params.n` samples of `prompt`; raises as `check`.

        A request of lower `priority` (-100..100) goes first; it overtakes a bounded number of
        others, so nobody waits for ever. So it is with shorter prompts where the settings say so.
        """
        answer = self.check(prompt, params, beside)
        check_priority(priority)
        settings = self.settings
        later = priority * settings.priority_span + settings.short_first * blocks_for(len(prompt))
        samples: list[Request] = []
        for index in range(params.n):
            number = self._next_id
            request = Request(
                id=number,
                tokens=list(prompt),
                prompt_length=len(prompt),
                max_tokens=answer,
                params=params,
                metrics=Metrics(arrival=self.clock()),
                index=index,
                leader=samples[0] if samples else None,
                order=(number + later, number),
                served=self.plans,
            )
            if params.seed is not None:
                request.seed = params.seed
            self._next_id += 1
            self.requests[number] = request
            insort(self.waiting, request, key=by_order)
            samples.append(request)
        return samples

    def complete(self, batch: Batch) -> tuple[Request, ...]:
        """Note that `batch` has been computed; return the requests that get a token now.

        In row order: prefills that ended, GPU decodes, CPU decodes. Requests that were ended
        while the batch ran are passed over.
        """
        rows = [(chunk.request, chunk.length) for chunk in batch.prefill]
        decodes = dict.fromkeys((*batch.gpu_decode, *batch.cpu_decode))
        rows += [(number, 1) for number in decodes]  # what was drafted may not count
        outputs, beside = [], self.pools[Home.GPU].n_blocks > 0
        for number, length in rows:
            request = self.requests.get(number)
            if request is None or request.home is None:
                continue
            request.computed += length
            request.served = self.plans
            request.metrics.offloaded |= beside and request.home is Home.CPU
            pool = self.pools[request.home]
            pool.publish(number, request.tokens, request.computed)
            if pool.states is not None:
                decoding = request.computed > request.prompt_length
                pool.keep_state(number, request.computed, decoding=decoding)
            if request.pending == 0 and request.max_tokens:
                outputs.append(request)
        return tuple(outputs)

    def append(self, request: Request, token: int, now: float) -> None:
        """Add a generated token; end the request at its end token or its length."""
        if request.finished:
            return
        request.tokens.append(token)
        metrics = request.metrics
        metrics.first_token = now if metrics.first_token is None else metrics.first_token
        metrics.last_token = now
        if request.ends_at(token, self.limits.eos_token_ids):
            self.finish(request, "stop")
        elif request.generated >= request.max_tokens:
            self.finish(request, "length")

    def room_for(self, request: Request, more: int, spare: int) -> int:
        """Return how many of `more` tokens behind a request's newest one have blocks, or get them.

        They get none of the last `spare` free blocks: others may need these for their next token.
        """
        assert request.home is not None
        pool, length = self.pools[request.home], len(request.tokens)
        if pool.missing(request.id, length + more) <= pool.free_blocks - spare:
            pool.grow(request.id, length + more)
        return min(more, len(pool.table(request.id)) * KV_BLOCK - length)

    def score(self, request: Request, found: Sequence[TokenLogprob], now: float) -> None:
        """Add log probabilities of prompt tokens; end the request where they are all it wants."""
        if request.finished:
            return
        request.prompt_logprobs += found
        if not request.max_tokens and request.pending == 0:
            request.metrics.last_token = now
            self.finish(request, "length")

    def finish(self, request: Request, reason: str) -> None:
        """End `request` in any state and give back its blocks; a failed one's are never shared."""
        if request.home is not None:
            self.running[request.home].remove(request)
            self.pools[request.home].close(request.id, sound=reason != FAILED)
        else:
            self.waiting.remove(request)
        del self.requests[request.id]
        request.finish(reason)
        if reason in ("stop", "length") and request.max_tokens:
            known, part = self.answer_tokens, float(request.generated)
            self.answer_tokens = part if known is None else known + (part - known) / 16
        if not self.requests:
            self._planned_at = None  # the time until the next arrival says nothing of the pace

    # ---- changes of state: what schedulers decide ----

    def tick(self) -> None:
        """Begin a plan: count it and note the pace."""
        self.plans += 1
        now = self.clock()
        if self._planned_at is not None:
            passed = now - self._planned_at
            self._pace = passed if self._pace == 0.0 else self._pace + (passed - self._pace) / 8
        self._planned_at = now if self.requests else None

    def overdue(self, request: Request) -> bool:
        """Tell whether `request` has been passed over for longer than the settings allow."""
        return self.plans - request.served > self.settings.patience

    def prepare(self, request: Request, home: Home, spare: int) -> bool:
        """Open a waiting `request` on `home` if its tokens fit and `spare` blocks stay free."""
        pool = self.pools[home]
        stateless = pool.states is not None and not pool.states.free
        if stateless or blocks_for(len(request.tokens)) > pool.n_blocks:
            return False
        if request.hashes is None:
            request.hashes = hash_blocks(request.tokens, request.params.adapter)
        unscored = request.unscored  # rows that others computed give no logits here
        sharable = unscored.start // KV_BLOCK if unscored else None
        shared = pool.open(request.id, request.hashes[:sharable], request.params.adapter)
        if pool.missing(request.id, len(request.tokens)) > pool.free_blocks - spare:
            pool.close(request.id)
            return False
        pool.grow(request.id, len(request.tokens))
        self.waiting.remove(request)
        request.home, request.computed = home, shared
        if request.metrics.started is None:  # what it finds again after it gave way is its own
            request.metrics.cached_tokens = shared
            request.metrics.started = self.clock()
        insort(self.running[home], request, key=by_order)
        return True

    def withdraw(self, request: Request) -> None:
        """Have a running request wait again; its KV is dropped."""
        assert request.home is not None
        self.running[request.home].remove(request)
        self.pools[request.home].close(request.id)
        request.home, request.computed = None, 0
        insort(self.waiting, request, key=by_order)

    def preempt(self, request: Request) -> None:
        """Withdraw a request that has run: what it stored must be computed anew."""
        self.withdraw(request)
        request.metrics.preemptions += 1
        request.hashes = None  # it has more tokens now

    def move(self, request: Request, target: Home) -> Move:
        """Take a decoding request to the other device; its blocks must fit there."""
        assert request.home is not None and request.home is not target and request.decoding
        source, pool = self.pools[request.home], self.pools[target]
        stored = blocks_for(request.computed)
        blocks = source.table(request.id)[:stored]
        adapter = request.params.adapter
        shared = pool.open(request.id, source.hashes(request.id), adapter) // KV_BLOCK
        pool.grow(request.id, len(request.tokens))
        pool.publish(request.id, request.tokens, request.computed)
        taken = pool.table(request.id)[:stored]
        source.close(request.id)
        self.running[request.home].remove(request)
        request.home = target
        self.swaps[target] += 1
        insort(self.running[target], request, key=by_order)
        return Move(request.id, tuple(blocks[shared:]), tuple(taken[shared:]))
