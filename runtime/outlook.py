"""When does the known queue end, if requests are sent to the CPU in this way or that?

In: a `Demand`, and a `Course`: what each device may hold. Out: seconds of a layer, found by playing
the queue forward by tables alone, as `NeoScheduler` would serve it: its prompts in their order, its
decodes as so many requests of mean length.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from dovetail.ir.model import KV_BLOCK
from dovetail.runtime.pipeline import NO_TIME, LayerTimes
from dovetail.runtime.plan import Limits, PrefillChunk, SchedulerSettings

AGES = 16
"""Groups of about equal age that the requests which run already are taken for."""
SAMPLES = 48
"""Prompts that are played one by one; of a longer queue each stands for several."""
SPARE = 24
"""Tokens of blocks that a decode holds unused: one partly full, and one kept free."""
MOST = 512
"""Prompts that are played; a longer queue goes on as the second half of these did."""
COARSEST = 4
"""A prompt stands for no more than this part of what the GPU holds, or runs at all if it is few."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Unfinished requests, in tokens: `prompts` that wait, in order, and the pools' sizes.

    prompt, answer: mean lengths. on_gpu, on_cpu: what each running request lacks of its answer.
    growing: whether others keep coming.
    """

    prompts: tuple[int, ...]
    prompt: float
    answer: float
    gpu_tokens: int
    cpu_tokens: int
    on_gpu: tuple[int, ...] = ()
    on_cpu: tuple[int, ...] = ()
    growing: bool = False

    @property
    def requests(self) -> int:
        """How many are unfinished."""
        return len(self.prompts) + len(self.on_gpu) + len(self.on_cpu)

    @property
    def stored(self) -> int:
        """Mean tokens that a request has stored while it decodes."""
        return max(1, round(self.prompt + self.answer / 2))


@dataclass(frozen=True, slots=True)
class Course:
    """Tokens that may be on the GPU, and requests that may be on the CPU.

    at_once: all of these decode in every step with decodes, else as many as are hidden, or as
    raise the step's rate.
    """

    gpu_tokens: int
    on_cpu: int
    at_once: bool = False


class MeanStep:
    """Steps of decodes that are all alike, with `stored` tokens each, and of any prompts."""

    def __init__(self, times: LayerTimes, stored: int) -> None:
        self.times, self.stored = times, stored
        self._cpu: dict[int, float] = {0: 0.0}

    def seconds(self, on_gpu: int, on_cpu: int, rows: int, attention: float) -> float:
        """Return the time of a layer, the CPU's decodes in one batch or split the best way.

        rows: of prompts, whose attention takes so many seconds.
        """
        found = math.inf
        for first in {on_cpu, self._balance(on_gpu, on_cpu, rows, attention)}:
            parts = self._stages(on_gpu, on_cpu, first, rows, attention)
            starts = self.times.launch * (2 if first < on_cpu else 1)
            found = min(found, starts + sum(max(stage) for stage in parts))
        return found

    def hides(self, on_gpu: int, on_cpu: int, rows: int, attention: float) -> bool:
        """Tell whether the accelerator works as long as the CPU in both stages."""
        first = self._balance(on_gpu, on_cpu, rows, attention)
        return all(
            gpu >= cpu for gpu, cpu in self._stages(on_gpu, on_cpu, first, rows, attention) if cpu
        )

    def _stages(
        self, on_gpu: int, on_cpu: int, first: int, rows: int, attention: float
    ) -> tuple[tuple[float, float], tuple[float, float]]:
        linear, second = self.times.linear, on_cpu - first
        attention += self.times.gpu_decode(on_gpu * self.stored)
        return (
            (linear(rows + on_gpu + first), self._attend(second)),
            (linear(second) + attention, self._attend(first)),
        )

    def _balance(self, on_gpu: int, on_cpu: int, rows: int, attention: float) -> int:
        """Return how many CPU decodes go to batch 0, by the time each batch can hide."""
        first = self.times.linear(1) + attention + self.times.gpu_decode(on_gpu * self.stored)
        second = self.times.linear(max(1, rows + on_gpu))
        return round(on_cpu * first / max(first + second, NO_TIME))

    def _attend(self, count: int) -> float:
        found = self._cpu.get(count)
        if found is None:
            times = self.times
            found = times.cpu_decode(count, count * self.stored) + times.launch + times.late
            self._cpu[count] = found
        return found


class Outlook:
    """Plays one queue forward under several courses."""

    def __init__(
        self, demand: Demand, limits: Limits, settings: SchedulerSettings, times: LayerTimes
    ) -> None:
        """times: with lateness, by which no step is chosen."""
        self.demand, self.limits, self.settings = demand, limits, settings
        self.step = MeanStep(times, demand.stored)
        self.told = MeanStep(times.punctual(), demand.stored) if times.late else self.step
        self.attention = times.prefill([PrefillChunk(0, 0, max(1, round(demand.prompt)))])
        self.sent = times.swap(limits.block_bytes) / limits.n_layers  # a block to the CPU
        self._decodes: dict[tuple[int, int, int, bool], int] = {}

    def finish(self, course: Course) -> float:
        """Return the seconds of a layer until all requests have ended."""
        return _Play(self, course).run()

    def prefill(self, prompt: int, rows: int) -> float:
        """Return the time of attention of so many rows of a prompt: even, on the whole of it."""
        return self.attention * rows * prompt / max(1.0, self.demand.prompt) ** 2

    def count_decodes(
        self, on_gpu: int, on_cpu: int, rows: int, attention: float, *, at_once: bool
    ) -> int:
        """Return how many of the CPU's decodes a step takes: what makes its rate the highest."""
        key = (on_gpu, on_cpu, rows, at_once)
        found = self._decodes.get(key)
        if found is None:
            options = {0, on_cpu}
            if not at_once:
                options.add(self.count_hidden(on_gpu, on_cpu, rows, attention))
            fixed = on_gpu + rows / max(1.0, self.demand.prompt)

            def rate(count: int) -> float:
                taken = self.told.seconds(on_gpu, count, rows, attention)
                return (fixed + count) / max(taken, NO_TIME)

            found = self._decodes[key] = max(sorted(options), key=rate)
        return found

    def count_hidden(self, on_gpu: int, on_cpu: int, rows: int, attention: float) -> int:
        """Return how many of the CPU's decodes the accelerator hides."""
        low, high = 0, on_cpu
        while low < high:
            middle = (low + high + 1) // 2
            hidden = self.told.hides(on_gpu, middle, rows, attention)
            low, high = (middle, high) if hidden else (low, middle - 1)
        return low


@dataclass(slots=True)
class _Group:
    """Requests that began together: how many, what each lacks, and the tokens all have stored."""

    count: float
    left: float
    tokens: float


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows of a prompt in a step; of those it stands for, so many stay on the GPU."""

    prompt: int
    rows: int
    on_gpu: int


class _Play:
    """A queue on its way."""

    def __init__(self, outlook: Outlook, course: Course) -> None:
        self.outlook, self.course = outlook, course
        demand = outlook.demand
        self.size = demand.answer / 2 + SPARE
        self.gpu, self.cpu = self._group(demand.on_gpu), self._group(demand.on_cpu)
        self.begun = 0  # rows of the first prompt that have been computed
        fit, waiting = int(course.gpu_tokens / (demand.prompt + self.size)), len(demand.prompts)
        some = fit if fit >= COARSEST else fit + course.on_cpu
        unit = min(math.ceil(waiting / SAMPLES), some // COARSEST)
        self.unit = max(1, unit) if course.on_cpu else 1
        played = demand.prompts[: MOST * self.unit]
        self.queue = deque(_sample(played, self.unit))
        self.beyond = sum(demand.prompts[len(played) :])  # tokens of those that are not played

    def run(self) -> float:
        """Return the seconds until the end."""
        prompts, seconds = list(self.queue), 0.0
        starts: list[float] = []  # of each prompt's decodes
        while self.queue or self.gpu or self.cpu:
            if not self.queue or not self.course.on_cpu:
                self._bring_back()
            seconds += self._step()
            starts += [seconds] * (len(prompts) - len(self.queue) - len(starts))
        if self.beyond:
            half = len(prompts) // 2
            tokens = self.unit * sum(prompts[half:])
            seconds += self.beyond / tokens * (starts[-1] - starts[half - 1])
        return seconds

    def _step(self) -> float:
        """Play the steps up to the next change; return their seconds."""
        outlook, chunks = self.outlook, self._admit()
        on_gpu, on_cpu = _count(self.gpu), _count(self.cpu)
        rows = sum(chunk.rows for chunk in chunks)
        attention = sum(outlook.prefill(chunk.prompt, chunk.rows) for chunk in chunks)
        at_once = self.course.at_once
        taken = outlook.count_decodes(on_gpu, on_cpu, rows, attention, at_once=at_once)
        if not (chunks or on_gpu):
            taken = max(1, taken)
        share = taken / on_cpu if on_cpu else 0.0
        steps = float(self.unit)
        if not chunks:
            left = [group.left for group in self.gpu]
            left += [group.left / share for group in self.cpu if share]
            steps = min(left)
        sent = sum(chunk.rows * (1 - chunk.on_gpu / self.unit) for chunk in chunks)
        link = sent * outlook.sent / KV_BLOCK
        self._age(steps, share)
        self._begin(chunks)
        return steps * max(link, outlook.step.seconds(on_gpu, taken, rows, attention))

    def _admit(self) -> list[_Chunk]:
        """Return the prompts of the next step in order, the GPU's first."""
        course, outlook = self.course, self.outlook
        on_gpu, on_cpu = _count(self.gpu), _count(self.cpu)
        room = outlook.limits.max_step_tokens - on_gpu
        room -= min(on_cpu, room // 2)
        free = course.gpu_tokens - sum(group.tokens for group in self.gpu)
        spare = outlook.demand.cpu_tokens - sum(group.tokens for group in self.cpu)
        more = course.on_cpu - on_cpu
        chunks: list[_Chunk] = []
        for prompt in islice(self.queue, max(1, room)):
            rows = min(room, prompt - (0 if chunks else self.begun))
            if rows < 1:
                break
            each = prompt + self.size
            sent = bool(chunks) and chunks[-1].on_gpu < self.unit  # nobody is overtaken
            fit = 0 if sent else min(self.unit, max(0, int(free // each)))
            rest = self.unit - fit
            if rest > more or rest * each > spare:
                if chunks or on_gpu or on_cpu:
                    break
                fit, rest = self.unit, 0
            free, more, spare = free - fit * each, more - rest, spare - rest * each
            chunks.append(_Chunk(prompt, rows, fit))
            room -= rows
        return chunks if course.at_once else self._reduce(chunks, on_gpu, on_cpu)

    def _reduce(self, chunks: list[_Chunk], on_gpu: int, on_cpu: int) -> list[_Chunk]:
        """Take back prompts bound for the CPU while its decodes stay hidden without them."""
        outlook, rows = self.outlook, sum(chunk.rows for chunk in chunks)
        attention = sum(outlook.prefill(chunk.prompt, chunk.rows) for chunk in chunks)
        taken = None
        while chunks and not chunks[-1].on_gpu:
            rows -= chunks[-1].rows
            if rows + on_gpu < outlook.settings.min_tokens:
                break
            if taken is None:
                whole = rows + chunks[-1].rows
                taken = outlook.count_hidden(on_gpu, on_cpu, whole, attention)
            attention -= outlook.prefill(chunks[-1].prompt, chunks[-1].rows)
            if not outlook.told.hides(on_gpu, taken, rows, attention):
                break
            chunks.pop()
        return chunks

    def _age(self, steps: float, share: float) -> None:
        """Let decodes get their tokens; who has all ends."""
        for groups, part in ((self.gpu, 1.0), (self.cpu, share)):
            for group in groups:
                group.left -= steps * part
            groups[:] = [group for group in groups if group.left > 1e-6]

    def _begin(self, chunks: Sequence[_Chunk]) -> None:
        """Let requests whose prompts are done decode."""
        for chunk in chunks:
            if self.begun + chunk.rows < chunk.prompt:
                self.begun += chunk.rows
                continue
            self.begun = 0
            self.queue.popleft()
            left = self.outlook.demand.answer - 1
            homes = ((self.gpu, chunk.on_gpu), (self.cpu, self.unit - chunk.on_gpu))
            for home, count in homes if left > 0 else ():
                if count:
                    home.append(_Group(count, left, count * (chunk.prompt + self.size)))

    def _bring_back(self) -> None:
        """Move the CPU's first requests to the GPU while it has ample space for whole ones."""
        free = self.outlook.settings.swap_in_share * self.course.gpu_tokens
        free -= sum(group.tokens for group in self.gpu)
        while self.cpu:
            group = self.cpu[0]
            each = group.tokens / group.count
            count = min(group.count, free // (each + self.outlook.demand.answer / 2))
            if count < min(1, group.count):
                return
            free -= count * each
            self.gpu.append(_Group(count, group.left, count * each))
            group.count, group.tokens = group.count - count, group.tokens - count * each
            if group.count <= 0:
                self.cpu.pop(0)

    def _group(self, left: Sequence[int]) -> list[_Group]:
        size, ordered = max(1, math.ceil(len(left) / AGES)), sorted(left)
        ages = [ordered[i : i + size] for i in range(0, len(left), size)]
        each = self.outlook.demand.prompt + self.size
        return [_Group(len(age), max(1.0, statistics.fmean(age)), len(age) * each) for age in ages]


def _count(groups: Sequence[_Group]) -> int:
    """Return the whole requests in groups: at least one where there is a group."""
    return max(round(sum(group.count for group in groups)), min(1, len(groups)))


def _sample(prompts: Sequence[int], unit: int) -> list[int]:
    """Return each `unit`th prompt, made longer or shorter so that all have the same mean."""
    picked = prompts[unit // 2 :: unit][: max(1, len(prompts) // unit)]
    scale = sum(prompts) / max(1, unit * sum(picked))
    return [max(1, round(prompt * scale)) for prompt in picked]
