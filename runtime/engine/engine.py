"""Requests in, tokens out: plans steps by a scheduler, has an executor run them, and ends failures.

In: requests. Out: requests with their tokens. What a step computes is decided in the scheduler;
memory, threads and processes are the executor's, which has the Protocol below.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

from dovetail.ir.artifact import ServicePlan
from dovetail.ir.errors import CapacityError, DeviceError, DovetailError, RankError, RequestError
from dovetail.ir.model import ModelSpec
from dovetail.runtime.engine.logits import log_sum, score_token, top_logprobs
from dovetail.runtime.engine.recorder import StepRecorder
from dovetail.runtime.engine.rules import Rules
from dovetail.runtime.engine.step_watch import StepWatch
from dovetail.runtime.group.ranks import START_SECONDS, Group
from dovetail.runtime.native.forward import ForwardModel
from dovetail.runtime.native.step import StepBuffers, StepShape
from dovetail.runtime.schedule.plan import Batch, StepPlan
from dovetail.runtime.schedule.request import FAILED, Request, SamplingParams, TokenLogprob
from dovetail.runtime.schedule.scheduler import Scheduler
from dovetail.runtime.text.masks import Grammars, Logits

_UNRECORDED = nullcontext()

log = logging.getLogger("dovetail")


class StepTooLarge(CapacityError):
    """The device has no memory for a step, but may have for one without its largest request."""


class Filled(NamedTuple):
    """A batch that was written into the arrays `buffers`, where its logits and tokens come."""

    batch: Batch
    shape: StepShape
    buffers: StepBuffers


class StepWaits(NamedTuple):
    """Seconds of a step: the CPU's attention, and how long each device waited for the other."""

    attention: float
    gpu: float
    cpu: float


RecordSpan: TypeAlias = Callable[..., AbstractContextManager[None]]
"""Records what its body does, a track and a name, or with times what has been done."""


class Executor(Protocol):
    """Runs steps on the CPU, or on a device and the CPU. One caller at a time."""

    spec: ModelSpec
    service: ServicePlan
    model: ForwardModel  # on the CPU

    @property
    def group(self) -> Group | None:
        """The other ranks."""

    def begin(self, plan: StepPlan, scheduler: Scheduler) -> Iterable[StepPlan]:
        """Return the rounds that a step is run in, one after the other."""

    def fill(self, plan: StepPlan, scheduler: Scheduler) -> Sequence[Filled]:
        """Write the batches of a round into arrays, those that compute anything."""

    def compute(self, plan: StepPlan, filled: Sequence[Filled]) -> StepWaits | None:
        """Move KV and compute logits; return the waits where two devices worked side by side.

        Raises StepTooLarge where memory ran out, and nothing is lost.
        """

    def sample(self, filled: Filled, row: int | None = None) -> None:
        """Choose the tokens of a batch that was computed, from logits which the host may change.

        row: of its request alone, by another random number, which holds for the step.
        """

    def rest(self) -> None:
        """There is nothing to compute for now."""

    def join(self) -> None:
        """Compute with the ranks of `group`, which has been started anew."""

    def record(self, record_span: RecordSpan | None) -> None:
        """Record what runs beside the engine's thread from now on, or no longer."""

    def close(self) -> None:
        """End threads and processes; safe to call twice."""


class DeviceWaits(msgspec.Struct, frozen=True, array_like=True):
    """Of steps that used CPU and accelerator together, seconds since the engine was opened.

    attention: the CPU's of decodes. bubbles: how long each device, as far as it is known, waited
    for the other.
    """

    attention: float = 0.0
    bubbles: dict[str, float] = msgspec.field(default_factory=dict)

    def add(self, step: StepWaits) -> DeviceWaits:
        """Return them with those of a step."""
        found = {
            device: self.bubbles.get(device, 0.0) + max(0.0, seconds)
            for device, seconds in (("gpu", step.gpu), ("cpu", step.cpu))
        }
        return DeviceWaits(self.attention + step.attention, found)


class Engine:
    """One model. Not thread-safe: one caller at a time."""

    def __init__(self, model: ModelSpec, scheduler: Scheduler, executor: Executor) -> None:
        self.spec, self.scheduler, self.executor = model, scheduler, executor
        self.grammars = Grammars(None, model.vocab_size, model.eos_token_ids)
        """With a tokenizer where the model has one: who opens the engine says so."""
        self.draft_model: Executor | None = None
        self.recorder: StepRecorder | None = None
        self.watch: StepWatch | None = None
        self.waits = DeviceWaits()
        drafts = scheduler.speculation is not None
        self._rules = Rules(model.eos_token_ids, self._fail, drafts=drafts)

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, priority: int = 0, beside: int = 0
    ) -> list[Request]:
        """Queue `params.n` samples of `prompt`; raises RequestError or CapacityError."""
        return self.scheduler.submit(list(prompt), params, priority, beside)

    def finish(self, request: Request, reason: str) -> None:
        """End an unfinished request."""
        self.scheduler.finish(request, reason)
        if self.recorder:
            self.recorder.end([request])

    def step(self) -> list[Request]:
        """Run one step; return the requests that got a token or ended in it.

        Requests that could not be computed have ended with an `error`: those of the step whose
        kernel failed or whose memory ran out, all that run when a process of the group died. The
        next step goes on with the others; the group is started anew.

        Raises RankError when the group cannot be started again.
        """
        with self._span("step"):
            touched = self._restart_group()
            if touched:
                return touched
            with self._span("schedule"):
                plan = self.scheduler.plan()
            watch, clock = self.watch, self.scheduler.clock
            work, began = watch and watch.begin(plan), clock()
            try:
                self._execute(plan, touched)
            except BaseException as error:
                lost = self._give_up(plan, error)
                touched = list(dict.fromkeys([*touched, *lost]))  # others had ended before
                if not isinstance(error, DovetailError | MemoryError):
                    raise
            else:
                if watch and work:
                    watch.end(work, clock() - began)
        if self.recorder:
            self.recorder.end(request for request in touched if request.finished)
        return touched

    def start_recording(self, recorder: StepRecorder) -> None:
        """Record the steps from now on; RequestError while another recorder does."""
        if self.recorder is not None:
            raise RequestError("a timeline is already being recorded; stop it first")
        self.recorder = recorder
        self.executor.record(recorder.beside)

    def stop_recording(self) -> None:
        """Record no longer; requests under way are drawn up to now."""
        assert self.recorder is not None
        self.executor.record(None)
        self.recorder.end(self.scheduler.requests.values())
        self.recorder = None

    def rest(self) -> None:
        """Have nothing to do until the next step."""
        self.executor.rest()

    def close(self) -> None:
        """End the threads and processes."""
        self.grammars.close()
        if self.scheduler.pool.file is not None:
            self.scheduler.pool.file.close()
        if self.draft_model is not None:
            self.draft_model.close()
        self.executor.close()

    # ---- the group ----

    def _restart_group(self) -> list[Request]:
        """Start a group that has ended anew; first return the requests whose KV died with it."""
        group = self.executor.group
        if group is None or group.alive:
            return []
        lost = self._lose_group(group, group.loss())
        if not lost:
            log.warning("restarting the processes of the group")
            if self.watch:
                self.watch.announce(START_SECONDS)
            group.start()
            self.executor.join()
        return lost

    def _lose_group(self, group: Group, why: str) -> list[Request]:
        """End the group and the requests that have KV in it; return these."""
        if group.running:
            log.warning("%s", why)
        group.fail()
        requests = list(self.scheduler.requests.values())
        lost = [request for request in requests if request.home is not None]
        for request in lost:
            self._fail(request, RankError(f"{why}; send the request again"))
        for pool in self.scheduler.pools.values():
            pool.forget()  # the new processes have new memory
        return lost

    # ---- failures ----

    def _give_up(self, plan: StepPlan, error: BaseException) -> list[Request]:
        """End what `error` makes impossible; return these requests."""
        group = self.executor.group
        if group is not None:  # the ranks stand at different entries of the tape
            known = isinstance(error, RankError)
            why = group.loss() if known else f"a step failed at rank 0 ({error})"
            return self._lose_group(group, why)
        found = [self.scheduler.requests.get(number) for number in plan.members]
        lost = [request for request in found if request is not None]
        log.warning("a step of %d requests failed: %s", len(lost), error)
        for request in lost:
            self._fail(request, _lost_with(error))
        return lost

    def _fail(self, request: Request, error: DovetailError) -> None:
        request.error = error
        self.scheduler.finish(request, FAILED)

    def _span(self, name: str, **args: int) -> AbstractContextManager[None]:
        return self.recorder.measure(name, **args) if self.recorder else _UNRECORDED

    # ---- one step ----

    def _execute(self, plan: StepPlan, touched: list[Request]) -> None:
        """Run `plan`; add the requests that got on, or that it failed for want of memory."""
        executor = self.executor
        for part in executor.begin(plan, self.scheduler):
            try:
                filled = self._compute(part)
            except StepTooLarge as error:
                filled = self._compute_less(part, error, touched)
            for one in filled:
                try:
                    self._take_results(one)
                finally:  # who has ended is told also where the rest fails
                    touched += one.shape.touched

    def _take_results(self, filled: Filled) -> None:
        """Choose the tokens of a batch that was computed, and hand them to their requests."""
        shape = filled.shape
        self.scheduler.complete(filled.batch)
        if shape.outputs or shape.scored:
            with self._span("sample", rows=shape.n_out):
                self._accept(shape, filled.buffers, self._sample(filled))

    def _sample(self, filled: Filled) -> Mapping[int, Logits]:
        """Choose tokens; return the model's logits of rows that options of requests changed."""
        sample = partial(self.executor.sample, filled)
        if any(request.ruled for request in filled.shape.outputs):
            return self._rules.choose(filled.shape, filled.buffers, self.grammars, sample)
        sample()
        return {}

    def _compute(self, plan: StepPlan) -> Sequence[Filled]:
        """Return the batches of a round, which have been computed."""
        with self._span("fill"):
            filled = self.executor.fill(plan, self.scheduler)
        if not (filled or plan.moves):
            return filled
        with self._record_forward(filled) if self.recorder else _UNRECORDED:
            waits = self.executor.compute(plan, filled)
        if waits is not None:
            self.scheduler.note_attention(waits.attention / self.spec.n_layers)
            self.waits = self.waits.add(waits)
        return filled

    def _compute_less(
        self, plan: StepPlan, error: StepTooLarge, touched: list[Request]
    ) -> Sequence[Filled]:
        """As `_compute`; the largest request of the step fails until there is memory for it."""
        while plan.batches:
            number = plan.largest
            request = self.scheduler.requests[number]
            self._fail(request, _no_memory(error))
            touched.append(request)
            plan = plan.without(number)
            try:
                return self._compute(plan)
            except StepTooLarge as again:
                error = again
        raise error

    @contextmanager
    def _record_forward(self, filled: Sequence[Filled]) -> Iterator[None]:
        assert self.recorder is not None
        prefill = sum(one.shape.prefill_tokens for one in filled)
        decode = sum(one.shape.n_decode for one in filled)
        with self.recorder.measure("forward", prefill=prefill, decode=decode):
            for one in filled:
                self.recorder.follow(one.batch, one.shape.outputs)
            yield

    def _accept(self, shape: StepShape, buffers: StepBuffers, raw: Mapping[int, Logits]) -> None:
        """Hand the tokens that were chosen to their requests.

        `raw`: the model's logits of changed rows; log probabilities are always those of raw ones.
        """
        if shape.scored:
            self._score(shape, buffers)
        now = self.scheduler.clock()
        wrong: Request | None = None  # whose draft is followed no further
        for row, request in enumerate(shape.outputs):
            if request is wrong or request.finished:  # it may be poisoned, its grammar too much
                continue
            token, logprob = buffers.chosen(row)
            if not math.isfinite(logprob):  # one such logit makes the sum one
                nothing_left = request.params.excludes
                error = _exhausted(request) if nothing_left else _poisoned(len(request.tokens))
                self._fail(request, error)
                continue
            if request.params.logprobs is not None:
                logits = raw.get(row, buffers.logits(row))
                # that of a row with rules is the same whether its mask was found in time or not
                total = log_sum(logits) if request.ruled else float(logits[token]) - logprob
                top = top_logprobs(logits, request.params.logprobs, total)
                chosen = float(logits[token]) - total
                request.logprobs.append(TokenLogprob(token, chosen, top))
            self.scheduler.append(request, token, now)
            if request.drafted and not self.scheduler.confirm(request, token):
                wrong = request

    def _score(self, shape: StepShape, buffers: StepBuffers) -> None:
        """Hand log probabilities of prompt tokens to their requests, a block of rows at a time."""
        now, first = self.scheduler.clock(), len(shape.outputs)
        ids, logprobs = (buffers.arrays[name] for name in ("out_ids", "out_logprobs"))
        for request, positions in shape.scored:
            found: list[TokenLogprob] = []
            for row, at in enumerate(positions, first):
                logits = buffers.logits(row)
                log_sum = float(logits[ids[row]]) - float(logprobs[row])
                if not math.isfinite(log_sum):
                    self._fail(request, _poisoned(at + 1))
                    break
                count = request.params.prompt_logprobs or 0
                found.append(score_token(logits, request.tokens[at + 1], count, log_sum))
            self.scheduler.score(request, found, now)
            first += len(positions)


def _exhausted(request: Request) -> RequestError:
    return RequestError(
        f"no token is left after token {len(request.tokens)} of the request: the answer's form, "
        "allowed_token_ids, bad_words and min_tokens exclude every token; relax one of them"
    )


def _poisoned(after: int) -> RequestError:
    return RequestError(
        f"the logits after token {after} of the request are not finite: a weight that it uses is "
        "damaged, or a value overflowed; `dovetail verify` checks the weights"
    )


def _lost_with(error: BaseException) -> DovetailError:
    """Return why a request ended whose step met `error`."""
    if isinstance(error, MemoryError | CapacityError):
        return DeviceError(f"memory ran out in a step ({error}); send fewer requests at once")
    return DeviceError(f"a step failed ({error}); send the request again")


def _no_memory(error: BaseException) -> DeviceError:
    return DeviceError(
        f"the device ran out of memory for a request ({error}); send shorter prompts, or load with "
        "less --gpu-memory-utilization"
    )
