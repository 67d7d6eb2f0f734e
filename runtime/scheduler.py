"""Decides what the next step computes: first come, first served continuous batching.

In: requests, the KV pool's state, limits of a step. Out: a frozen StepPlan. Pure: no tensors, no
threads, and time only through the clock that is handed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dovetail.ir.errors import CapacityError, RequestError
from dovetail.ir.model import KV_BLOCK
from dovetail.runtime.kv_pool import KvPool, blocks_for
from dovetail.runtime.predictor import Predictor
from dovetail.runtime.request import Metrics, Request, SamplingParams, State


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens start .. start + length of a request's tokens."""

    request: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What one pass over the layers computes."""

    prefill: tuple[PrefillChunk, ...] = ()
    gpu_decode: tuple[int, ...] = ()
    cpu_decode: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Token rows of the batch."""
        chunks = sum(chunk.length for chunk in self.prefill)
        return chunks + len(self.gpu_decode) + len(self.cpu_decode)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: one or two batches, and requests whose KV first moves or goes."""

    batches: tuple[Batch, ...]
    swap_out: tuple[int, ...] = ()
    swap_in: tuple[int, ...] = ()
    preempt: tuple[int, ...] = ()
    predicted_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step and a request may hold, in tokens and sequences."""

    max_step_tokens: int
    max_step_sequences: int
    max_context: int
    vocab_size: int


class Scheduler:
    """Owns the queue. `plan` moves requests between states; the engine reports results back."""

    def __init__(
        self, limits: Limits, pool: KvPool, predictor: Predictor, clock: Callable[[], float]
    ) -> None:
        self.limits, self.pool, self.predictor, self.clock = limits, pool, predictor, clock
        self.requests: dict[int, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in order of arrival
        self._next_id = 0

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._waiting or self._running)

    def check(self, prompt: list[int], params: SamplingParams) -> int:
        """Return how many tokens may be generated for `prompt`.

        Raises:
            RequestError: the prompt is empty, longer than the context, or has an unknown id.
            CapacityError: prompt and answer together never fit the KV pool.
        """
        limits = self.limits
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token")
        if len(prompt) >= limits.max_context:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, the context holds {limits.max_context} and "
                f"one must be left for the answer; shorten the prompt"
            )
        wrong = next((t for t in prompt if not 0 <= t < limits.vocab_size), None)
        if wrong is not None:
            raise RequestError(f"token id {wrong} is outside 0..{limits.vocab_size - 1}")
        answer = min(params.max_tokens, limits.max_context - len(prompt))
        needed = blocks_for(len(prompt) + answer - 1)  # the last token is never stored
        if needed > self.pool.n_blocks:
            raise CapacityError(
                f"the request needs {needed * KV_BLOCK} tokens of KV, the pool holds "
                f"{self.pool.n_blocks * KV_BLOCK}; lower max_tokens or load with more kv_blocks"
            )
        return answer

    def submit(self, prompt: list[int], params: SamplingParams) -> list[Request]:
        """Queue `params.n` samples of `prompt`; raises as `check`."""
        answer = self.check(prompt, params)
        samples: list[Request] = []
        for index in range(params.n):
            request = Request(
                id=self._next_id,
                tokens=list(prompt),
                prompt_length=len(prompt),
                max_tokens=answer,
                params=params,
                metrics=Metrics(arrival=self.clock()),
                index=index,
                leader=samples[0] if samples else None,
            )
            if params.seed is not None:
                request.seed = params.seed
            self._next_id += 1
            self.requests[request.id] = request
            self._waiting.append(request)
            samples.append(request)
        return samples

    def finish(self, request: Request, reason: str) -> None:
        """End `request` in any state and give back its blocks."""
        if request.state is State.RUNNING:
            self._running.remove(request)
            self.pool.close(request.id)
        else:
            self._waiting.remove(request)
        del self.requests[request.id]
        request.finish(reason)

    def plan(self) -> StepPlan:
        """Return the next step: every decode, then chunks of prompts in order of arrival."""
        preempted: list[int] = []
        decodes = self._plan_decodes(preempted)
        budget = self.limits.max_step_tokens - len(decodes)
        chunks = self._continue_prefills(budget)
        if not preempted:  # blocks were short a moment ago: let the running ones go on
            budget -= sum(chunk.length for chunk in chunks)
            chunks += self._admit(budget)
        batch = Batch(prefill=tuple(chunks), cpu_decode=tuple(decodes))
        return StepPlan(
            batches=(batch,), preempt=tuple(preempted), predicted_seconds=self._predict(batch)
        )

    def _plan_decodes(self, preempted: list[int]) -> list[int]:
        """Return the decoding requests; the latest arrivals give way when blocks run out."""
        planned = []
        for request in list(self._running):
            if request.state is not State.RUNNING or not request.decoding:
                continue
            while self.pool.missing(request.id, len(request.tokens)) > self.pool.free_blocks:
                victim = self._running[-1]
                self._preempt(victim)
                preempted.append(victim.id)
                if victim is request:
                    break
            else:
                self.pool.grow(request.id, len(request.tokens))
                planned.append(request.id)
        return planned

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self.pool.close(request.id)
        request.preempt()
        self._waiting.appendleft(request)

    def _continue_prefills(self, budget: int) -> list[PrefillChunk]:
        chunks = []
        for request in self._running:
            length = min(budget, request.pending)
            if not request.decoding and length > 0:
                chunks.append(PrefillChunk(request.id, request.computed, length))
                budget -= length
        return chunks

    def _admit(self, budget: int) -> list[PrefillChunk]:
        """Start waiting requests in order while tokens, sequences and blocks last."""
        chunks = []
        most = min(self.limits.max_step_sequences, self.limits.max_step_tokens)
        while self._waiting and budget > 0 and len(self._running) < most:
            request = self._waiting[0]
            if _prefilling(request.leader):  # soon its full blocks can be shared
                break
            shared = self.pool.open(request.id, request.tokens)
            spare = self.pool.free_blocks - len(self._running)  # each may need one very soon
            if self.pool.missing(request.id, len(request.tokens)) > spare:
                self.pool.close(request.id)
                break
            self.pool.grow(request.id, len(request.tokens))
            self._waiting.popleft()
            request.admit(shared)
            self._insert(request)
            length = min(budget, request.pending)
            chunks.append(PrefillChunk(request.id, request.computed, length))
            budget -= length
        return chunks

    def _insert(self, request: Request) -> None:
        place = len(self._running)
        while place and self._running[place - 1].id > request.id:
            place -= 1
        self._running.insert(place, request)

    def _predict(self, batch: Batch) -> float:
        stored = sum(len(self.requests[i].tokens) for i in batch.cpu_decode)
        parts = (
            self.predictor.linear(batch.tokens),
            self.predictor.prefill([chunk.length for chunk in batch.prefill]),
            self.predictor.cpu_decode(len(batch.cpu_decode), stored),
            self.predictor.launch(),
        )
        return sum(part.seconds for part in parts)


def _prefilling(request: Request | None) -> bool:
    return request is not None and request.state is State.RUNNING and request.generated == 0
