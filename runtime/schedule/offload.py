"""Does sending requests to the CPU pay here, and what did steps teach that no table tells?

In: the known queue, cost tables, what the CPU's attention of past steps took. Out: an
`OffloadDecision` (when the queue ends with and without the CPU); `Pace` and `Lateness`, which mend
the tables. A step's own rate cannot tell: a prompt computed for the CPU is paid now and returns
later.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from dovetail.ir.model import KV_BLOCK
from dovetail.runtime.schedule.kv_pool import blocks_for
from dovetail.runtime.schedule.pipeline import NO_TIME, LayerTimes, MeanStep, Stages, play_queue
from dovetail.runtime.schedule.plan import Limits

# ---- what steps have taught ----

Sample = TypeVar("Sample")


class Recent(Generic[Sample]):
    """At most `most` samples, oldest first; `known` when at least `fewest` are there.

    Where no more of them come they fade: an answer that keeps steps of a kind from being made would
    keep itself from being learnt anew. Too few for an answer stay, and add up.
    """

    def __init__(self, most: int, fewest: int) -> None:
        self.samples: deque[Sample] = deque(maxlen=most)
        self.fewest = fewest
        self._learnt = False  # since the last `review`

    @property
    def known(self) -> bool:
        """Whether there are enough samples for an answer."""
        return len(self.samples) >= self.fewest

    def add(self, sample: Sample) -> None:
        """Take note of a sample."""
        self.samples.append(sample)
        self._learnt = True

    def review(self) -> bool:
        """Forget the oldest of known samples where none came since the last call; tell whether.

        When too few are left for an answer all are: the next answer is that of new ones.
        """
        fades = self.known and not self._learnt
        self._learnt = False
        if fades:
            self.samples.popleft()
            if not self.known:
                self.samples.clear()
        return fades


class Pace(Recent[float]):
    """`factor`: how much longer the CPU's attention takes than its table says.

    The table was measured on an idle machine; beside the accelerator's work memory is shared. The
    median of the last steps, so that one in which the machine stopped does not count; 1 if few are
    known.
    """

    def __init__(self) -> None:
        super().__init__(32, 4)

    @property
    def factor(self) -> float:
        """See there."""
        return statistics.median(self.samples) if self.known else 1.0

    def learn(self, predicted: float, measured: float) -> None:
        """Take note of a step's attention, in seconds by the table and as it was."""
        if predicted > 0.0 and measured > 0.0:
            self.add(measured / predicted)


LEARN_EVERY = 8
"""Steps between two answers of `Lateness`."""
LONGEST = 4.0
"""What a step took counts up to so many times its prediction: a stop of the machine is no cost."""
TOLERANCE = 0.01
"""Mean error of predictions that counts as none."""
HALVINGS = 24
"""Of the range in which the answer is looked for."""


class Lateness(Recent[tuple[Stages, float]]):
    """`seconds` to add to each stage of CPU attention so that recent steps are predicted right.

    Starting the attention, copies of queries and results: steps of more CPU requests pay it less
    often, so those who plan must know of it. It is the least such number: of attention that stays
    hidden nothing can be seen, and none is added. Errors are averaged in parts of a step's time, as
    is the noise of machines. Samples: stages as predicted and what the step took, of a layer.
    """

    def __init__(self, first: float = 0.0) -> None:
        """first: the answer until steps have told, and when what they told is forgotten."""
        super().__init__(64, 16)
        self.seconds = self.first = first
        self._seen = 0

    def learn(self, stages: Stages, seconds: float) -> None:
        """Take note of a step: its stages by the tables, and what it took, both for one layer."""
        predicted = sum(max(stage) for stage in stages)
        if predicted <= 0.0 or seconds <= 0.0:
            return
        self.add((stages, min(seconds, LONGEST * predicted)))
        self._seen += 1
        if self.known and self._seen % LEARN_EVERY == 0:
            self.seconds = self._solve()

    def review(self) -> bool:
        """See Recent; with the last step the answer is forgotten."""
        if (fades := super().review()) and not self.known:
            self.seconds = self.first
        return fades

    def _error(self, late: float) -> float:
        """Return by which part of their time steps were longer than predicted, on average."""
        total = 0.0
        for stages, seconds in self.samples:
            predicted = sum(max(gpu, cpu + late if cpu else 0.0) for gpu, cpu in stages)
            total += (seconds - predicted) / seconds
        return total / len(self.samples)

    def _solve(self) -> float:
        """Return the least lateness by which the steps are not longer than predicted."""
        if self._error(0.0) <= TOLERANCE:
            return 0.0
        low, high = 0.0, max(seconds for _, seconds in self.samples)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._error(middle) > 0.0 else (low, middle)
        return high


# ---- the decision ----

GROWTH = 1.25
"""Ratio of the numbers of CPU requests that are tried."""
NEAR = 1.02
"""Ends of the queue that differ less count as equal: of these the one in the middle is taken.

Fewer requests on the CPU leave it idle whenever prompts come late, more are begun for nothing.
"""
FULL = 8
"""Played prompts come in pieces no larger than a step by this number: steps cut them to be full."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Unfinished requests with their mean lengths in tokens, and the tokens each pool holds.

    `left`: the tokens that each of those lacks which run already: their prompts are paid for.
    `on_gpu` of them are on the accelerator, which then holds at least so many.
    """

    requests: int
    prompt: float
    answer: float
    gpu_tokens: int
    cpu_tokens: int
    left: tuple[int, ...] = ()
    on_gpu: int = 0

    @property
    def started(self) -> int:
        """How many run already."""
        return len(self.left)


@dataclass(frozen=True, slots=True)
class OffloadDecision:
    """`gain`: how much sooner the known requests end than without the CPU (inf: they never do).

    It takes so many `cpu_requests`; with them so many times the requests are served per second as
    long as others wait (`steady`). `at_once`: all of them should start and decode in every step;
    `cpu_only`: on the CPU, which has time to spare where the accelerator has none. `doubted`: that
    end, played, is not sooner than the steady one of the GPU alone: the gain is over that one
    played, too, but one of the two is wrong.
    """

    gain: float
    cpu_requests: int
    steady: float = 1.0
    at_once: bool = False
    cpu_only: bool = False
    doubted: bool = False


def weigh_offload(
    demand: Demand, limits: Limits, times: LayerTimes, min_gain: float
) -> OffloadDecision:
    """Return how much sooner the requests end with decodes on the CPU.

    A doubted gain up to `min_gain` gives way to that of a steady state, where there is one.
    """
    stored = max(1, round(demand.prompt + demand.answer / 2))
    held = (blocks_for(stored) + 1) * KV_BLOCK  # admission keeps a block free for each one running
    room = max(demand.gpu_tokens // held, demand.on_gpu)
    on_gpu = min(demand.requests, room, limits.max_step_sequences)
    left = min(demand.requests, limits.max_step_sequences) - on_gpu
    most = min(left, demand.cpu_tokens // held)
    steady = _Steady(demand, limits, times, stored, on_gpu)
    alone = steady.finish(0, 0)
    counts = _spread(most)
    plans = [
        min((steady.finish(count, other), count, other) for other in counts if other <= count)
        for count in counts
    ]
    least = min(end for end, _, _ in plans)
    near = [plan for plan in plans if plan[0] <= least * NEAR]
    end, count, other = near[len(near) // 2]
    pays = least < alone
    if most:
        fit = min(limits.max_step_sequences, demand.cpu_tokens // held + demand.on_gpu)
        mixed = steady.finish_at_once(on_gpu + most)
        pure = steady.finish_at_once(min(demand.requests, fit), closed=True)
        whole = min(mixed, pure)
        spread = {n: steady.finish_at_once(on_gpu + n, spread=True) for n in {count, most}}
        count = min(spread, key=spread.__getitem__)
        margin = 1.0 if demand.started else NEAR  # what has begun goes on
        if alone < min_gain * end or whole < spread[count] * margin:
            gain = steady.finish_at_once(on_gpu) / max(whole, NO_TIME)
            doubted = whole >= alone
            if gain > (max(1.0, min_gain) if doubted and pays else 1.0):
                spared = pure < mixed * NEAR
                return OffloadDecision(gain, most, gain, True, spared, doubted)
    if not pays:
        return OffloadDecision(1.0, 0)
    served = steady.rate(count, other) / max(steady.rate(0, 0), NO_TIME)
    return OffloadDecision(alone / max(end, NO_TIME), count, served)


def _spread(most: int) -> list[int]:
    """Return 0, 1, ... most, ever farther apart."""
    counts = [0]
    while counts[-1] < most:
        counts.append(min(most, int(counts[-1] * GROWTH) + 1))
    return counts


class _Steady:
    """Steps with a prompt in them, and between these steps of decodes alone.

    A prompt hides many decodes on the CPU, decodes of the GPU hide few: so each kind of step has
    its own number of them.
    """

    def __init__(
        self, demand: Demand, limits: Limits, times: LayerTimes, stored: int, on_gpu: int
    ) -> None:
        self.demand, self.limits, self.times = demand, limits, times
        self.on_gpu = on_gpu
        self.answer = max(1.0, demand.answer)
        whole = max(1, round(demand.prompt))
        self.prompt = min(whole, limits.max_step_tokens)
        self.parts = max(1.0, demand.prompt / self.prompt)  # chunks of a prompt
        self._seconds = partial(MeanStep(times, self.prompt, stored, whole).seconds, on_gpu)
        """The time of a layer by the CPU's decodes, split the best way, and chunks of prompts."""
        self.pieces = math.ceil(whole * FULL / limits.max_step_tokens)
        self.piecewise = MeanStep(times, math.ceil(whole / self.pieces), stored, whole)

    def rate(self, beside: int, between: int) -> float:
        """Return prompts served per second of a layer.

        `beside` of the CPU's requests decode in each step with prompts, `between` in others.
        """
        if not self.on_gpu + beside:
            return 0.0
        most = max(1, self.limits.max_step_tokens // self.prompt)
        ideal = (self.on_gpu + beside) * self.parts / self.answer
        # Steps of either whole number are made: rounding alone would tell a gain where it jumps
        counts = {min(most, max(1, n)) for n in (math.floor(ideal), math.ceil(ideal))}
        return max(self._rate_of(chunks, beside, between) for chunks in counts)

    def _rate_of(self, chunks: int, beside: int, between: int) -> float:
        """Return the same with so many chunks in each step that has any."""
        prompts = chunks / self.parts
        needed = max(0.0, prompts * self.answer - self.on_gpu - beside)
        others = self.on_gpu + between
        steps = needed / others if others else 0.0
        if needed and not others:
            return 0.0
        seconds = self._seconds(beside, chunks) + steps * self._seconds(between, 0)
        sent = (beside + steps * between) / max(1.0, prompts * self.answer)
        nbytes = blocks_for(round(self.demand.prompt)) * self.limits.block_bytes
        link = prompts * min(1.0, sent) * self.times.swap(nbytes) / self.limits.n_layers
        return prompts / max(seconds, link, NO_TIME)

    def finish(self, beside: int, between: int) -> float:
        """Return the seconds of a layer until all requests known now have ended.

        Those in flight at once cost more than the steady rate says: half of what they lack is
        begun with no decodes beside the prompts, half ends with no prompts beside the decodes.
        """
        rate, demand = self.rate(beside, between), self.demand
        if rate <= 0.0:
            return math.inf
        flight = min(demand.requests, self.on_gpu + beside)
        begun = max(0, flight - demand.started) / 2
        beyond = max(0, demand.started - flight) / 2  # run already, but do not fit in
        left = demand.requests - demand.started - begun
        steps = self.answer * beyond / max(1, self.on_gpu + between)
        extra = begun * self._prompt_seconds() + steps * self._seconds(between, 0)
        return left / rate + extra + self._drain(flight, {0, between, beside // 2})

    def finish_at_once(self, most: int, *, closed: bool = False, spread: bool = False) -> float:
        """Return the same, played forward: `most` run at once, and all of them in every step.

        closed: who lives on the accelerator stays there, but it takes nobody else.
        spread: with no more prompts in a step than hide them.
        """
        demand = self.demand
        return play_queue(
            self.piecewise,
            self.limits,
            waiting=demand.requests - demand.started,
            left=demand.left,
            parts=self.pieces,
            answer=self.answer,
            on_gpu=demand.on_gpu if closed else self.on_gpu,
            most=most,
            closed=closed,
            spread=spread,
        )

    def _prompt_seconds(self) -> float:
        """Return the time of a layer that a prompt adds to a step which is full of them."""
        most = max(1, self.limits.max_step_tokens // self.prompt)
        return (self._seconds(0, most) - self._seconds(0, 0)) * self.parts / most

    def _drain(self, flight: int, on_cpu: Iterable[int]) -> float:
        """Return the time to end `flight` requests of all ages, the CPU decoding the best number.

        The youngest needs a step for each of its tokens at least.
        """
        tokens = flight * self.answer / 2
        return min(
            max(self.answer, tokens / max(1, self.on_gpu + count)) * self._seconds(count, 0)
            for count in on_cpu
        )
