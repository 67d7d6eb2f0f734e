"""The executor: runs planned steps on a device and turns logits into tokens.

In: an opened artifact and requests. Out: requests with their tokens. Everything that decides lies
in the scheduler; everything that touches memory, threads and time lies here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import msgspec

from dovetail.ir.artifact import ServicePlan
from dovetail.ir.errors import (
    CapacityError,
    DeviceError,
    DovetailError,
    RankError,
    RequestError,
)
from dovetail.ir.model import KV_BLOCK, ModelSpec
from dovetail.runtime.adapt import adapt_service
from dovetail.runtime.artifact import Artifact, ModelPart
from dovetail.runtime.collective import SharedMemory
from dovetail.runtime.cpu_time import read_busy
from dovetail.runtime.device import Bytes, Device, Segment
from dovetail.runtime.device_limits import ANY, DeviceLimits, Wishes
from dovetail.runtime.forward import ForwardModel, Phase, find_tape, layer_block_bytes
from dovetail.runtime.kv_parts import count_parts
from dovetail.runtime.kv_pool import KvPool, blocks_for
from dovetail.runtime.library import KernelLibrary
from dovetail.runtime.logit_rules import LogitRules, Logits
from dovetail.runtime.memory import available_memory
from dovetail.runtime.plan import ON_CPU, Limits, SchedulerSettings, StepPlan
from dovetail.runtime.predictor import ZeroPredictor
from dovetail.runtime.ranks import (
    START_SECONDS,
    Group,
    RankGroup,
    RankSetup,
    make_setups,
    plan_ranks,
)
from dovetail.runtime.recorder import StepRecorder
from dovetail.runtime.request import FAILED, Request, SamplingParams, State, TokenLogprob
from dovetail.runtime.sampling import draw_uniform, logprob_of, score_token, top_logprobs
from dovetail.runtime.scheduler import Scheduler
from dovetail.runtime.step import StepBuffers, StepShape
from dovetail.runtime.step_times import StepTimes, StepWork
from dovetail.runtime.tally import Tally
from dovetail.runtime.tape import Operands
from dovetail.topology.hardware import HardwareSpec

MEMORY_SHARE = 0.5
"""Part of the free memory that a KV pool sized at load may take."""

STEP_TOKENS = (1, 8, *(2**e for e in range(4, 15)))
"""Bounds by which steps are counted by the tokens they compute: vLLM's."""

KEYS_PER_ROW = 6
"""Keys, for each value of a hidden state, whose attention takes as long as a row's products."""

_UNRECORDED = nullcontext()

log = logging.getLogger("dovetail")


class DeviceWaits(msgspec.Struct, frozen=True, array_like=True):
    """Of steps that used CPU and accelerator together, seconds since the engine was opened.

    attention: the CPU's of decodes. bubbles: how long each device, as far as it is known, waited
    for the other.
    """

    attention: float = 0.0
    bubbles: dict[str, float] = msgspec.field(default_factory=dict)


class Engine:
    """One model on one device. Not thread-safe: one caller at a time."""

    own_logits: ClassVar[bool] = False

    def __init__(
        self,
        artifact: Artifact,
        part: ModelPart,
        hardware: HardwareSpec,
        *,
        plan: ServicePlan | None = None,
        threads: int | None = None,
        kv_blocks: int | None = None,
        deterministic: bool = False,
        activations: str = "integer",
        settings: SchedulerSettings | None = None,
        wishes: Wishes = ANY,
    ) -> None:
        """Map weights, start threads and processes, size the KV pool and bind the tapes.

        `plan` stands for the artifact's own, which is fitted to what this machine has free;
        `threads` count for each process. `deterministic`, `activations`: what `load` says of them.
        `wishes` bound a step and a request below what the tapes hold.

        Raises:
            ArtifactError: the artifact's parts do not fit each other.
            CapacityError: the KV pool does not fit into memory, or threads cannot be started.
            SpecError: the model cannot be shared by so many processes, or the artifact holds less
                than is wished.
            RankError: a process could not be started.
        """
        self.spec: ModelSpec = part.file.spec
        self.service = service = fit_service(artifact.service, hardware) if plan is None else plan
        self.threshold = service.prefill_token_threshold
        forward, sample = find_tape(part, "forward"), find_tape(part, "sample")
        sequences = min(forward.max_sequences, sample.max_sequences)
        bounds = wishes.bound(forward.max_tokens, sequences, self.spec.max_context)
        tokens, sequences = bounds.step_tokens, bounds.sequences
        settings = settings or ON_CPU
        blocks = _count_blocks(self.spec, hardware, kv_blocks, service, bounds)
        self.pool = KvPool(blocks, keep=settings.keep_prefixes)
        modes = {"deterministic": deterministic, "own_logits": self.own_logits}
        floats = activations == "float"
        plans = plan_ranks(service, hardware, threads, blocks, floats=floats, **modes)
        library = artifact.open_kernels()
        self.model = ForwardModel(artifact, part, library, plans[0])
        self.device: Device = self.model.device
        alloc: Callable[[int], Bytes] = self.device.alloc
        self.group: Group | None = None
        self._ranks: RankGroup | None = None
        if len(plans) > 1:
            setups = make_setups(artifact, part, plans, tokens, sequences)
            alloc = self._form_group(library, setups)
        self.part_tokens = [self.model.part_tokens(prefill=prefill) for prefill in (False, True)]
        decode = self.model.decode.plan
        operands = Operands(self.model.weights, self.device.alloc(sample.arena_bytes))
        self.sampler = Phase(self.model.bind(sample, operands, "decode", decode), decode)
        self.buffers = StepBuffers(alloc, self.spec, tokens, sequences)
        ends = frozenset(self.spec.eos_token_ids)
        limits = Limits(tokens, sequences, bounds.context, self.spec.vocab_size, ends)
        self.recorder: StepRecorder | None = None
        self.waits = DeviceWaits()
        self.step_tokens = Tally(STEP_TOKENS)
        self.announce: Callable[[float], object] = lambda predicted: None
        """Told when a step begins of the seconds that it should take."""
        self._times = StepTimes(KEYS_PER_ROW * self.spec.hidden_size)
        self.scheduler: Scheduler = Scheduler(
            limits, self.pool, ZeroPredictor(), self.device.now, settings=settings
        )

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, priority: int = 0
    ) -> list[Request]:
        """Queue `params.n` samples of `prompt`; raises RequestError or CapacityError."""
        return self.scheduler.submit(list(prompt), params, priority)

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
            touched = self._mend_group()
            if touched:
                return touched
            with self._span("schedule"):
                plan = self.scheduler.plan()
            work, began = StepWork.of(plan), self.device.now()
            self.announce(max(plan.predicted_seconds, self._times.predict(work)))
            try:
                touched += self._execute(plan)
            except BaseException as error:
                touched += self._give_up(plan, error)
                if not isinstance(error, DovetailError | MemoryError):
                    raise
            else:
                if work.rows:
                    self.step_tokens.add(work.rows)
                    self._times.learn(work, self.device.now() - began)
        if self.recorder:
            self.recorder.end(request for request in touched if request.state is State.FINISHED)
        return touched

    def start_recording(self, recorder: StepRecorder) -> None:
        """Record the steps from now on; RequestError while another recorder does."""
        if self.recorder is not None:
            raise RequestError("the app is being recorded already; end that recording first")
        self.recorder = recorder

    def stop_recording(self) -> None:
        """Record no longer; requests under way are drawn up to now."""
        assert self.recorder is not None
        self.recorder.end(self.scheduler.requests.values())
        self.recorder = None

    def note_waits(self, attention: float, **bubbles: float) -> None:
        """Count a step in which CPU and accelerator worked side by side; see DeviceWaits."""
        before = self.waits
        found = {
            device: before.bubbles.get(device, 0.0) + max(0.0, seconds)
            for device, seconds in bubbles.items()
        }
        self.waits = DeviceWaits(before.attention + attention, before.bubbles | found)

    def close(self) -> None:
        """End the threads and processes."""
        if self.group is not None:
            self.group.close()
        self.model.close()

    # ---- the group ----

    def _form_group(
        self, library: KernelLibrary, setups: Sequence[RankSetup]
    ) -> Callable[[int], Bytes]:
        """Start ranks 1 and up; return what gives memory for a step's arrays."""
        steps = SharedMemory.create(setups[0].step_bytes)
        self.group = self._ranks = RankGroup(library, steps, setups)
        self._join_group()
        return steps.take

    def _join_group(self) -> None:
        """Compute with the ranks of a group that has just been started."""
        if self._ranks is not None:
            self.model.join(self._ranks.comm)

    def _mend_group(self) -> list[Request]:
        """Start a group that has ended anew; first return the requests whose KV died with it."""
        if self.group is None or self.group.alive:
            return []
        lost = self._lose_group(self.group, self.group.loss())
        if not lost:
            log.warning("starting the processes of the group anew")
            self.announce(START_SECONDS)
            self.group.start()
            self._join_group()
        return lost

    def _lose_group(self, group: Group, why: str) -> list[Request]:
        """End the group and the requests that have KV in it; return these."""
        if group.running:
            log.warning("%s", why)
        group.fail()
        requests = list(self.scheduler.requests.values())
        lost = [request for request in requests if request.state is State.RUNNING]
        for request in lost:
            self._fail(request, RankError(f"{why}; send the request again"))
        for pool in self.scheduler.pools.values():
            pool.forget()  # the new processes have new memory
        return lost

    # ---- failures ----

    def _give_up(self, plan: StepPlan, error: BaseException) -> list[Request]:
        """End what `error` makes impossible; return these requests."""
        if self.group is not None:  # the ranks stand at different entries of the tape
            known = isinstance(error, RankError)
            why = self.group.loss() if known else f"a step failed at rank 0 ({error})"
            return self._lose_group(self.group, why)
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

    def _execute(self, plan: StepPlan) -> tuple[Request, ...]:
        """Compute `plan`, which has one batch on one device; return the requests that got on."""
        (batch,) = plan.batches
        requests = self.scheduler.requests
        with self._span("fill"):
            shape = self.buffers.fill(batch, requests, self.pool.table)
        if shape.n_tokens == 0:
            return ()
        with self._span("forward", prefill=shape.prefill_tokens, decode=shape.n_decode):
            if self.recorder:
                self.recorder.follow(batch, shape.outputs)
            self.forward(shape)
        self.scheduler.complete(batch)
        if shape.outputs or shape.scored:
            with self._span("sample", rows=shape.n_out):
                self._sample(shape, self.buffers)
        return shape.touched

    def forward(self, shape: StepShape) -> None:
        """Run the forward tape over a filled step, under the plan its prefill tokens call for."""
        prefill = shape.prefill_tokens >= self.threshold
        threads = self.model.phase(prefill).plan.threads
        splits = self.kv_splits(shape, threads, self.part_tokens[prefill])
        args = self.buffers.forward_args(shape, splits)
        if self._ranks is not None:
            self._ranks.step(args, prefill=prefill)
        self.model.run(args, prefill=prefill)

    def kv_splits(self, shape: StepShape, threads: int, least: int) -> int:
        """Return into how many parts a step's decodes cut their keys; arguments: `count_parts`."""
        n_kv = self.model.spec.n_kv_heads  # of this rank
        return count_parts(shape.n_decode, n_kv, shape.longest_decode, threads, least)

    def _sample(self, shape: StepShape, buffers: StepBuffers) -> None:
        raw = self._apply_rules(shape, buffers)
        args = buffers.sample_args(shape, draw_uniform)
        rows = max(1, shape.n_out)  # each is sampled by one thread
        self.device.run(Segment(self.sampler.tape, self.sampler.plan, args, most=rows))
        self._accept(shape, buffers, raw)

    def _apply_rules(self, shape: StepShape, buffers: StepBuffers) -> dict[int, Logits]:
        """Change logits as their requests ask for; return the raw ones of rows that show them."""
        raw: dict[int, Logits] = {}
        for row, request in enumerate(shape.outputs):
            if not request.ruled:
                continue
            if request.rules is None:
                prompt = request.tokens[: request.prompt_length]
                request.rules = LogitRules(request.params, prompt, self.spec.eos_token_ids)
            logits = buffers.logits(row)
            if request.params.logprobs is not None:
                raw[row] = logits.copy()
            request.rules.apply(logits, request.tokens)
        return raw

    def _accept(self, shape: StepShape, buffers: StepBuffers, raw: Mapping[int, Logits]) -> None:
        """Hand the tokens that were chosen to their requests.

        `raw`: the model's logits of rows that were changed; log probabilities are always theirs.
        """
        self._score(shape, buffers)
        now = self.device.now()
        for row, request in enumerate(shape.outputs):
            if request.state is State.FINISHED:  # its prompt was poisoned
                continue
            token, logprob = buffers.chosen(row)
            if not math.isfinite(logprob):  # one such logit makes the sum one
                nothing_left = request.params.excludes
                error = _exhausted(request) if nothing_left else _poisoned(len(request.tokens))
                self._fail(request, error)
                continue
            if request.params.logprobs is not None:
                logits = raw.get(row, buffers.logits(row))
                top = top_logprobs(logits, request.params.logprobs)
                chosen = logprob_of(logits, token) if row in raw else logprob
                request.logprobs.append(TokenLogprob(token, chosen, top))
            self.scheduler.append(request, token, now)

    def _score(self, shape: StepShape, buffers: StepBuffers) -> None:
        """Hand log probabilities of prompt tokens to their requests, a block of rows at a time."""
        now, first = self.device.now(), len(shape.outputs)
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
        f"no token is left after token {len(request.tokens)} of the request: "
        "allowed_token_ids, bad_words and min_tokens exclude all that there are"
    )


def _poisoned(after: int) -> RequestError:
    return RequestError(
        f"the logits after token {after} of the request are not finite: a weight "
        "that it meets is damaged or a value overflowed; `dovetail verify` checks the weights"
    )


def _lost_with(error: BaseException) -> DovetailError:
    """Return why a request ended whose step met `error`."""
    if isinstance(error, MemoryError | CapacityError):
        return DeviceError(f"memory ran out in a step ({error}); send fewer requests at once")
    return DeviceError(f"a step failed ({error}); send the request again")


def fit_service(service: ServicePlan, hardware: HardwareSpec) -> ServicePlan:
    """Return the artifact's plan as this machine can run it now; the log says what is different."""
    fitted, said = adapt_service(service, hardware, read_busy())
    for text in said:
        log.warning("%s", text)
    return fitted


def _count_blocks(
    spec: ModelSpec,
    hardware: HardwareSpec,
    asked: int | None,
    service: ServicePlan,
    bounds: DeviceLimits,
) -> int:
    """Return the blocks asked for, else those of the plan or of a full step of full contexts.

    Without `asked`, as many of these as free memory allows; CapacityError where that is not enough.
    """
    copies = max(1, service.processes // spec.n_kv_heads)  # of each KV head
    block = 2 * spec.n_layers * layer_block_bytes(spec) * copies
    free = available_memory(hardware)
    if asked is not None and asked * block > free:
        raise CapacityError(
            f"{asked} KV blocks take {asked * block} bytes, but {free} bytes of memory are free; "
            f"load with at most {free // block} kv_blocks"
        )
    fitting = int(free * MEMORY_SHARE) // block
    if asked is None and fitting < 1:
        raise CapacityError(f"no memory for KV: one block of {KV_BLOCK} tokens takes {block} bytes")
    wanted = service.kv_blocks or bounds.sequences * blocks_for(bounds.context)
    return asked or min(wanted, fitting)
