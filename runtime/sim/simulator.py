"""Discrete-event simulator: the product's control plane on a virtual clock.

In: a scheduler, a trace of arrivals, the truth about steps. Out: throughput, latencies, how busy
the devices were, and a timeline. Nothing is computed and nothing sleeps.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dovetail.ir.errors import CapacityError
from dovetail.runtime.schedule.plan import StepPlan
from dovetail.runtime.schedule.request import Request, SamplingParams
from dovetail.runtime.schedule.scheduler import Scheduler
from dovetail.runtime.sim.simulated_step import StepTime, Truth
from dovetail.runtime.timeline import Timeline

LAYER_STEPS = 16
"""Steps at the start of a timeline that are drawn layer by layer."""
TOKEN = 1
"""What every request generates; its number decides nothing."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a trace: when it comes, in seconds, and its lengths in tokens."""

    at: float
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a trace came to.

    middle_rate: requests/s over the middle 40 % of completions (the measure of NEO Fig. 10a).
    tpot: seconds per token after the first; per_token: whole latency by output tokens (NEO §5.2).
    gpu, cpu, link: shares of the time in which each was busy; two_batch: share of the steps.
    scheduling: seconds of real time per step that the control plane took.
    """

    requests: int
    refused: int
    output_tokens: int
    steps: int
    seconds: float
    middle_rate: float
    ttft: Spread
    tpot: Spread
    per_token: Spread
    gpu: float
    cpu: float
    link: float
    two_batch: float
    preemptions: int
    scheduling: float

    @property
    def rate(self) -> float:
        """Requests per second from the first arrival to the last token."""
        return self.requests / self.seconds if self.seconds else 0.0

    @property
    def tokens_rate(self) -> float:
        """Generated tokens per second."""
        return self.output_tokens / self.seconds if self.seconds else 0.0


def simulate(
    make_scheduler: Callable[[Callable[[], float]], Scheduler],
    arrivals: Iterable[Arrival],
    truth: Truth,
    timeline: Timeline | None = None,
    *,
    in_flight: int | None = None,
) -> Simulation:
    """Serve `arrivals` and return what came of it; `make_scheduler` is given the clock.

    in_flight: with so many requests in the system, later ones come as these end.
    """
    run = _Run(make_scheduler, arrivals, in_flight)
    start, picture = run.now, _StepTimeline(timeline) if timeline else None
    while run.queue or run.scheduler.busy:
        run.admit()
        plan = run.plan()
        if plan is None:
            assert run.queue or not run.scheduler.busy, "nothing is planned though some are left"
            if run.queue:
                run.now = max(run.now, run.queue[0].at)
            continue
        taken = truth.step(plan, run.scheduler.requests)
        if picture:
            picture.draw(run.now, run.steps, plan, taken, run.scheduler.requests)
        run.finish(plan, taken)
    if picture:
        picture.draw_requests(run.done)
    return run.summarize(run.now - start)


class _Run:
    """A scheduler on a virtual clock: seconds pass only as steps end or requests come."""

    def __init__(
        self,
        make_scheduler: Callable[[Callable[[], float]], Scheduler],
        arrivals: Iterable[Arrival],
        in_flight: int | None,
    ) -> None:
        self.queue = deque(sorted(arrivals, key=lambda arrival: arrival.at))
        self.now = self.queue[0].at if self.queue else 0.0
        self.scheduler = make_scheduler(lambda: self.now)
        self.in_flight = in_flight
        self.steps = self.two_batch = self.refused = 0
        self.gpu = self.cpu = self.link = self.scheduling = 0.0
        self.done: list[Request] = []

    def admit(self) -> None:
        """Submit what has come by now, each with the time at which it came, or found room."""
        now, queue = self.now, self.queue
        most = math.inf if self.in_flight is None else self.in_flight
        while queue and queue[0].at <= now and len(self.scheduler.requests) < most:
            arrival = queue.popleft()
            self.now = arrival.at if self.in_flight is None else now
            params = SamplingParams(max_tokens=max(1, arrival.output), ignore_eos=True, seed=0)
            try:
                self.scheduler.submit(_make_prompt(len(queue), arrival.prompt), params)
            except CapacityError:
                self.refused += 1
        self.now = now

    def plan(self) -> StepPlan | None:
        """Return the next step, None where nothing can be computed now."""
        if not self.scheduler.busy:
            return None
        began = time.perf_counter()
        plan = self.scheduler.plan()
        self.scheduling += time.perf_counter() - began
        return plan if any(batch.tokens for batch in plan.batches) else None

    def finish(self, plan: StepPlan, taken: StepTime) -> None:
        """Let a step pass and report it."""
        self.now += taken.seconds
        self.steps += 1
        self.two_batch += len(plan.batches) > 1
        self.gpu += taken.gpu
        self.cpu += taken.cpu
        self.link += max(taken.link_out, taken.link_in)
        began = time.perf_counter()
        for batch in plan.batches:
            for request in self.scheduler.complete(batch):
                self.scheduler.append(request, TOKEN, self.now)
                if request.finished:
                    self.done.append(request)
        self.scheduling += time.perf_counter() - began

    def summarize(self, seconds: float) -> Simulation:
        """Return what came of it in so many seconds."""
        lives = [(r.metrics.arrival, *_ends(r), r.generated) for r in self.done]
        whole, steps = seconds or 1.0, max(1, self.steps)
        ends = sorted(end for _, _, end, _ in lives)
        low, high = int(0.3 * len(ends)), int(0.7 * len(ends))
        passed = ends[high] - ends[low] if ends else 0.0
        return Simulation(
            requests=len(self.done),
            refused=self.refused,
            output_tokens=sum(tokens for *_, tokens in lives),
            steps=self.steps,
            seconds=seconds,
            middle_rate=(high - low) / passed if passed else 0.0,
            ttft=_spread([first - arrival for arrival, first, _, _ in lives]),
            tpot=_spread([(end - first) / (n - 1) for _, first, end, n in lives if n > 1]),
            per_token=_spread([(end - arrival) / n for arrival, _, end, n in lives]),
            gpu=self.gpu / whole,
            cpu=self.cpu / whole,
            link=self.link / whole,
            two_batch=self.two_batch / steps,
            preemptions=sum(r.metrics.preemptions for r in self.done),
            scheduling=self.scheduling / steps,
        )


def _make_prompt(number: int, length: int) -> list[int]:
    """Return tokens that begin like no other prompt's, so that nothing is shared."""
    first = [2 + number % 997, 2 + number // 997 % 997]
    return (first + [TOKEN] * length)[: max(1, length)]


def _ends(request: Request) -> tuple[float, float]:
    """Return when its first and its last token came."""
    return request.metrics.first_token or 0.0, request.metrics.last_token or 0.0


def _spread(values: Sequence[float]) -> Spread:
    ordered = sorted(values)
    if not ordered:
        return Spread(0.0, 0.0, 0.0, 0.0)
    at = (ordered[min(len(ordered) - 1, int(p * len(ordered)))] for p in (0.5, 0.9, 0.99))
    return Spread(statistics.fmean(ordered), *at)


class _StepTimeline:
    """Draws steps: a track for each device and way of the link, and the life of each request."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        names = ("gpu", "cpu", "link out", "link in")
        self._tracks = {name: timeline.track("machine (simulated)", name) for name in names}
        self._steps = timeline.track("scheduler", "steps")
        self._counts = timeline.track("scheduler", "requests")

    def draw(
        self,
        start: float,
        number: int,
        plan: StepPlan,
        taken: StepTime,
        requests: Mapping[int, Request],
    ) -> None:
        """Draw one step that begins at `start`."""
        counts = {f"batch_{i}_rows": batch.tokens for i, batch in enumerate(plan.batches)}
        for name in ("swap_out", "swap_in", "preempt"):
            if moved := getattr(plan, name):
                counts[name] = len(moved)
        self.timeline.span(self._steps, f"step {number}", start, start + taken.seconds, **counts)
        running = sum(request.home is not None for request in requests.values())
        waiting = len(requests) - running
        self.timeline.count(self._counts, "requests", start, running=running, waiting=waiting)
        if number < LAYER_STEPS:
            self._draw_layers(start, taken)
        else:
            self._span("gpu", "layers", start, taken.gpu)
            self._span("cpu", "decode attention", start, taken.cpu)
        self._span("link out", "KV out", start, taken.link_out)
        self._span("link in", "KV in", start, taken.link_in)

    def _draw_layers(self, start: float, taken: StepTime) -> None:
        at = start
        for layer in range(taken.layers):
            for stage, (name, other) in zip(taken.stages, _STAGES, strict=True):
                self._span("gpu", f"{name} ({layer})", at, stage.gpu)
                self._span("cpu", f"{other} ({layer})", at, stage.cpu)
                at += max(stage)
        self._span("gpu", "logits", at, taken.head)

    def draw_requests(self, requests: Iterable[Request]) -> None:
        """Draw the life of every request that has finished: waiting, then running."""
        for request in requests:
            number, arrival, (first, end) = request.id, request.metrics.arrival, _ends(request)
            track = self.timeline.track("requests", "life")
            lengths = {"prompt": request.prompt_length, "output": request.generated}
            self.timeline.life(track, "to first token", number, arrival, first, **lengths)
            self.timeline.life(track, "decode", number, first, end)

    def _span(self, device: str, name: str, start: float, seconds: float) -> None:
        if seconds > 0:
            self.timeline.span(self._tracks[device], name, start, start + seconds)


_STAGES = (
    ("products of batch 0", "attention of batch 1"),
    ("products of batch 1, attention of batch 0", "attention of batch 0"),
)
