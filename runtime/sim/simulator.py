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
from dataclasses import dataclass, field
from typing import Protocol

from dovetail.ir.errors import CapacityError
from dovetail.runtime.plan import Batch, StepPlan
from dovetail.runtime.request import Metrics, Request, SamplingParams
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


class ControlPlane(Protocol):
    """What the simulator needs of a scheduler."""

    @property
    def requests(self) -> Mapping[int, Request]:
        """The requests that have not finished."""

    @property
    def busy(self) -> bool:
        """Whether there are any."""

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> list[Request]:
        """Queue a request."""

    def plan(self) -> StepPlan:
        """Return the next step."""

    def complete(self, batch: Batch) -> tuple[Request, ...]:
        """Note that a batch has run; return the requests that get a token."""

    def append(self, request: Request, token: int, now: float) -> None:
        """Add a token to a request."""


@dataclass(slots=True)
class VirtualClock:
    """Seconds that pass only when the simulator says so."""

    seconds: float = 0.0

    def now(self) -> float:
        """Return the time."""
        return self.seconds


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


@dataclass(slots=True)
class _Totals:
    steps: int = 0
    two_batch: int = 0
    gpu: float = 0.0
    cpu: float = 0.0
    link: float = 0.0
    scheduling: float = 0.0
    refused: int = 0
    done: list[Request] = field(default_factory=list)


def simulate(
    make_scheduler: Callable[[Callable[[], float]], ControlPlane],
    arrivals: Iterable[Arrival],
    truth: Truth,
    timeline: Timeline | None = None,
    *,
    in_flight: int | None = None,
) -> Simulation:
    """Serve `arrivals` and return what came of it; `make_scheduler` is given the clock.

    in_flight: with so many requests in the system, later ones come as these end.
    """
    clock = VirtualClock()
    scheduler = make_scheduler(clock.now)
    queue = deque(sorted(arrivals, key=lambda arrival: arrival.at))
    totals = _Totals()
    picture = _Picture(timeline) if timeline else None
    start = clock.seconds = queue[0].at if queue else 0.0
    while queue or scheduler.busy:
        _admit(scheduler, queue, clock, totals, in_flight)
        if not scheduler.busy:
            if queue:
                clock.seconds = max(clock.seconds, queue[0].at)
            continue
        began = time.perf_counter()
        plan = scheduler.plan()
        totals.scheduling += time.perf_counter() - began
        if not any(batch.tokens for batch in plan.batches):
            assert queue, "the scheduler plans nothing though requests are left"
            clock.seconds = max(clock.seconds, queue[0].at)
            continue
        taken = truth.step(plan, scheduler.requests)
        if picture:
            picture.draw(clock.seconds, totals.steps, plan, taken, scheduler.requests)
        clock.seconds += taken.seconds
        _count(totals, plan, taken)
        began = time.perf_counter()
        _finish_step(scheduler, plan, clock.seconds, totals)
        totals.scheduling += time.perf_counter() - began
    if picture:
        picture.draw_requests(totals.done)
    return _summarize(totals, clock.seconds - start)


def _admit(
    scheduler: ControlPlane,
    queue: deque[Arrival],
    clock: VirtualClock,
    totals: _Totals,
    in_flight: int | None,
) -> None:
    """Submit what has come by now, each with the time at which it came, or found room."""
    now = clock.seconds
    most = math.inf if in_flight is None else in_flight
    while queue and queue[0].at <= now and len(scheduler.requests) < most:
        arrival = queue.popleft()
        clock.seconds = arrival.at if in_flight is None else now
        params = SamplingParams(max_tokens=max(1, arrival.output), ignore_eos=True, seed=0)
        try:
            scheduler.submit(_make_prompt(len(queue), arrival.prompt), params)
        except CapacityError:
            totals.refused += 1
    clock.seconds = now


def _make_prompt(number: int, length: int) -> list[int]:
    """Return tokens that begin like no other prompt's, so that nothing is shared."""
    first = [2 + number % 997, 2 + number // 997 % 997]
    return (first + [TOKEN] * length)[: max(1, length)]


def _finish_step(scheduler: ControlPlane, plan: StepPlan, now: float, totals: _Totals) -> None:
    for batch in plan.batches:
        for request in scheduler.complete(batch):
            scheduler.append(request, TOKEN, now)
            if request.finish_reason is not None:
                totals.done.append(request)


def _count(totals: _Totals, plan: StepPlan, taken: StepTime) -> None:
    totals.steps += 1
    totals.two_batch += len(plan.batches) > 1
    totals.gpu += taken.gpu
    totals.cpu += taken.cpu
    totals.link += max(taken.link_out, taken.link_in)


def _summarize(totals: _Totals, seconds: float) -> Simulation:
    metrics = [(r.metrics, r.generated) for r in totals.done]
    whole = seconds or 1.0
    ends = sorted(m.last_token or 0.0 for m, _ in metrics)
    low, high = int(0.3 * len(ends)), int(0.7 * len(ends))
    passed = ends[high] - ends[low] if ends else 0.0
    return Simulation(
        requests=len(totals.done),
        refused=totals.refused,
        output_tokens=sum(tokens for _, tokens in metrics),
        steps=totals.steps,
        seconds=seconds,
        middle_rate=(high - low) / passed if passed else 0.0,
        ttft=_spread([m.ttft or 0.0 for m, _ in metrics]),
        tpot=_spread([(_last(m) - _first(m)) / (n - 1) for m, n in metrics if n > 1]),
        per_token=_spread([(_last(m) - m.arrival) / n for m, n in metrics]),
        gpu=totals.gpu / whole,
        cpu=totals.cpu / whole,
        link=totals.link / whole,
        two_batch=totals.two_batch / max(1, totals.steps),
        preemptions=sum(m.preemptions for m, _ in metrics),
        scheduling=totals.scheduling / max(1, totals.steps),
    )


def _first(metrics: Metrics) -> float:
    assert metrics.first_token is not None
    return metrics.first_token


def _last(metrics: Metrics) -> float:
    assert metrics.last_token is not None
    return metrics.last_token


def _spread(values: Sequence[float]) -> Spread:
    ordered = sorted(values)
    if not ordered:
        return Spread(0.0, 0.0, 0.0, 0.0)
    at = (ordered[min(len(ordered) - 1, int(p * len(ordered)))] for p in (0.5, 0.9, 0.99))
    return Spread(statistics.fmean(ordered), *at)


class _Picture:
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
        rows = {f"batch_{i}_rows": batch.tokens for i, batch in enumerate(plan.batches)}
        end = start + taken.seconds
        self.timeline.span(self._steps, f"step {number}", start, end, **rows, **_moves(plan))
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
                at += stage.seconds
        self._span("gpu", "logits", at, taken.head)

    def draw_requests(self, requests: Iterable[Request]) -> None:
        """Draw the life of every request that has finished: waiting, then running."""
        for request in requests:
            metrics, number = request.metrics, request.id
            track = self.timeline.track("requests", "life")
            lengths = {"prompt": request.prompt_length, "output": request.generated}
            self.timeline.life(
                track, "to first token", number, metrics.arrival, _first(metrics), **lengths
            )
            self.timeline.life(track, "decode", number, _first(metrics), _last(metrics))

    def _span(self, device: str, name: str, start: float, seconds: float) -> None:
        if seconds > 0:
            self.timeline.span(self._tracks[device], name, start, start + seconds)


_STAGES = (
    ("products of batch 0", "attention of batch 1"),
    ("products of batch 1, attention of batch 0", "attention of batch 0"),
)


def _moves(plan: StepPlan) -> dict[str, int]:
    """Return how many requests change their place."""
    counts = {
        "swap_out": len(plan.swap_out),
        "swap_in": len(plan.swap_in),
        "preempt": len(plan.preempt),
    }
    return {name: count for name, count in counts.items() if count}
