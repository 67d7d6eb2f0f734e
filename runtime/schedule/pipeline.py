"""How long a step of two sub-batches takes, its stages hidden behind each other; so a whole queue.

In: sizes of both sub-batches. Out: seconds, and whether the CPU's attention is hidden (NEO §3.2).
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cache

from dovetail.runtime.schedule.cost_tables import Predictor
from dovetail.runtime.schedule.plan import Limits, PrefillChunk

NO_TIME = 1e-12
"""Seconds that stand for none, where a rate is asked for."""

Stages = tuple[tuple[float, float], ...]
"""Seconds of a layer's stages on the accelerator and on the CPU, 0 where that has no part."""


class LayerTimes:
    """Seconds of the parts of one layer; what was asked before is remembered.

    late: what each stage of CPU attention takes beside what the predictor says (`Lateness`).
    pace: what the predictor's seconds of that attention are multiplied by (`Pace`).
    """

    def __init__(self, predictor: Predictor, late: float = 0.0, pace: float = 1.0) -> None:
        self.predictor, self.late, self.pace = predictor, late, pace
        self.launch = predictor.launch()
        self._linear, self._cpu = cache(predictor.linear), cache(predictor.cpu_decode)

    def forget(self) -> None:
        """Forget what was asked of stored tokens: these are never the same for long."""
        self._cpu.cache_clear()

    def linear(self, rows: int) -> float:
        """Return the time of all projections over `rows`."""
        return self._linear(rows) if rows else 0.0

    def cpu_decode(self, sequences: int, tokens: int) -> float:
        """Return the time of the CPU's decode attention over `tokens` stored in all."""
        return self._cpu(sequences, tokens) * self.pace if sequences else 0.0

    def gpu_decode(self, tokens: int) -> float:
        """Return the time of the accelerator's decode attention."""
        return self.predictor.gpu_decode(tokens) if tokens else 0.0

    def swap(self, nbytes: int) -> float:
        """Return the time to move KV between the devices, all layers."""
        return self.predictor.swap(nbytes) if nbytes else 0.0

    def prefill(self, chunks: Sequence[PrefillChunk]) -> float:
        """Return the time of prefill attention; a later chunk costs what its end adds."""
        if not chunks:
            return 0.0
        ends = self.predictor.prefill([c.start + c.length for c in chunks])
        starts = [c.start for c in chunks if c.start]
        return ends - (self.predictor.prefill(starts) if starts else 0.0)


class Pipeline:
    """Two sub-batches being filled: all GPU work is in batch 0, CPU decodes in either.

    Stage A of a layer runs the projections of batch 0 beside the CPU attention of batch 1;
    stage B the projections of batch 1 and the GPU attention beside the CPU attention of batch 0.
    """

    def __init__(
        self, times: LayerTimes, chunks: Sequence[PrefillChunk], lengths: Iterable[int]
    ) -> None:
        """`lengths`: stored tokens of each GPU decode."""
        self.times = times
        decodes = list(lengths)
        self.gpu_requests = len(chunks) + len(decodes)
        self.gpu_seconds = times.prefill(chunks) + times.gpu_decode(sum(decodes))
        self._gpu_rows = sum(c.length for c in chunks) + len(decodes)
        self.decode(0, 0, 0)

    @property
    def requests(self) -> int:
        """Requests in both batches."""
        return self.gpu_requests + sum(self.sequences)

    def decode(self, first: int, second: int, each: int) -> None:
        """Have so many CPU decodes in the batches, of `each` stored tokens, and no others."""
        self.rows = [self._gpu_rows + first, second]
        self.sequences = [first, second]
        self.tokens = [first * each, second * each]

    def add(self, batch: int, length: int, count: int = 1) -> None:
        """Put `count` CPU decodes into a batch, with `length` stored tokens in all.

        Negative numbers take them out.
        """
        self.rows[batch] += count
        self.sequences[batch] += count
        self.tokens[batch] += length

    def cpu(self, batch: int) -> float:
        """Return Tca of a batch, with the cost of starting it."""
        count, times = self.sequences[batch], self.times
        if not count:
            return 0.0
        return times.cpu_decode(count, self.tokens[batch]) + times.launch + times.late

    def gpu(self, batch: int) -> float:
        """Return what runs on the accelerator beside the CPU attention of `batch`."""
        linear = self.times.linear(self.rows[1 - batch])
        return linear if batch else linear + self.gpu_seconds

    def slack(self, batch: int) -> float:
        """Return how much longer the accelerator works than the CPU beside it: >= 0 is hidden."""
        return self.gpu(batch) - self.cpu(batch)

    @property
    def hidden(self) -> bool:
        """Tell whether Tca1 <= Tl0 and Tca0 <= Tl1 + Tga0."""
        return all(not self.sequences[b] or self.slack(b) >= 0.0 for b in (0, 1))

    @property
    def layer_seconds(self) -> float:
        """Return max(Tl0, Tca1) + max(Tl1 + Tga0, Tca0), and a launch for each batch."""
        return sum(max(self.gpu(batch), self.cpu(batch)) for batch in (0, 1)) + self.starts

    @property
    def attention(self) -> float:
        """Return what the CPU's attention takes in both batches, by its table alone."""
        paced = sum(map(self.times.cpu_decode, self.sequences, self.tokens))
        return paced / self.times.pace

    @property
    def starts(self) -> float:
        """Return what starting the batches takes."""
        return (2 if self.rows[1] else 1) * self.times.launch

    @property
    def stages(self) -> Stages:
        """Return what runs at once on the accelerator and on the CPU, for both stages."""
        return tuple((self.gpu(batch), self.cpu(batch)) for batch in (0, 1))

    @property
    def rate(self) -> float:
        """Return requests per second of a layer."""
        return self.requests / max(self.layer_seconds, NO_TIME)


class MeanStep:
    """Steps of requests that are all alike: chunks of `prompt` tokens, `stored` tokens each.

    Chunks are from the middle of prompts of `whole` tokens: so their attention comes to theirs.
    """

    def __init__(
        self, times: LayerTimes, prompt: int, stored: int, whole: int | None = None
    ) -> None:
        self.times, self.prompt, self.stored = times, prompt, stored
        self._start = max(0, (whole or prompt) - prompt) // 2
        self._known: dict[tuple[int, int, int], float] = {}
        self._alone: dict[tuple[int, int], Pipeline] = {}

    def hides(self, on_gpu: int, on_cpu: int, chunks: int) -> bool:
        """Tell whether the products of batch 0 hide all decodes on the CPU, as batch 1."""
        pipeline = self._pipeline(on_gpu, chunks)
        pipeline.decode(0, on_cpu, self.stored)
        return pipeline.slack(1) >= 0.0

    def fewest_hiding(self, on_gpu: int, on_cpu: int, most: int) -> int:
        """Return how few chunks of a step hide the CPU's decodes; `most` if no fewer do."""
        return bisect_left(range(most), True, key=lambda n: self.hides(on_gpu, on_cpu, n))

    def seconds(self, on_gpu: int, on_cpu: int, chunks: int) -> float:
        """Return the time of a layer, the CPU's decodes in one batch or split the best way."""
        key = (on_gpu, on_cpu, chunks)
        found = self._known.get(key)
        if found is None:
            pipeline = self._pipeline(on_gpu, chunks)
            even = _balance(pipeline, on_cpu)
            found = math.inf
            for first in {on_cpu, math.floor(even), math.ceil(even)}:
                pipeline.decode(first, on_cpu - first, self.stored)
                found = min(found, pipeline.layer_seconds)
            self._known[key] = found
        return found

    def _pipeline(self, on_gpu: int, chunks: int) -> Pipeline:
        """Return the step, which others share: who asks says what the CPU decodes."""
        found = self._alone.get((on_gpu, chunks))
        if found is None:
            work = [PrefillChunk(0, self._start, self.prompt)] * chunks
            found = Pipeline(self.times, work, [self.stored] * on_gpu)
            self._alone[on_gpu, chunks] = found
        return found


def _balance(pipeline: Pipeline, on_cpu: int) -> float:
    """Return how many CPU decodes go to batch 0, by the time each batch can hide.

    That depends on the rows of both, which are asked for with half of the decodes in each.
    """
    pipeline.decode(on_cpu // 2, on_cpu - on_cpu // 2, 0)
    hides = (pipeline.gpu(0), pipeline.gpu(1))
    return on_cpu * hides[0] / max(sum(hides), NO_TIME)


# ---- the queue played forward ----

AGES = 16
"""Groups of about equal age that the requests which run already are taken for."""
MOST_STEPS = 64
"""Steps with prompts that are looked at one by one; in a longer queue one stands for several."""


class _Crowd:
    """Requests that run, in groups that began together: these end in that order."""

    def __init__(self, left: Sequence[int]) -> None:
        """left: tokens that each of them lacks, no more than any that begins later."""
        self.count = self.settled = float(len(left))  # settled: those of `left` that still run
        self._steps = 0
        size = max(1, math.ceil(len(left) / AGES))
        ages = [sorted(left)[i : i + size] for i in range(0, len(left), size)]
        ends = [(round(statistics.fmean(age)), len(age)) for age in ages]
        self._ends: deque[tuple[int, float, bool]] = deque((*end, True) for end in ends)

    @property
    def unchanged(self) -> int:
        """Steps until the first group ends, 0 if there is none."""
        return self._ends[0][0] - self._steps if self._ends else 0

    def pass_steps(self, steps: int) -> None:
        """Let all decode so often; who lacks nothing more goes."""
        self._steps += steps
        while self._ends and self._ends[0][0] <= self._steps:
            _, count, settled = self._ends.popleft()
            self.count -= count
            self.settled -= count * settled

    def join(self, count: float, left: int) -> None:
        """Take in so many that lack `left` tokens."""
        if count and left:
            self._ends.append((self._steps + left, count, False))
            self.count += count


def play_queue(
    step: MeanStep,
    limits: Limits,
    *,
    waiting: int,
    left: Sequence[int],
    parts: float,
    answer: float,
    on_gpu: int,
    most: int,
    closed: bool = False,
    spread: bool = False,
) -> float:
    """Return the time of a layer until all have ended, where prompts fill the steps.

    A short queue has no steady state: its end is what its prompts take, and then a step for each
    token of the last one.

    Args:
        step: what steps take.
        limits: of a step.
        waiting: prompts that are to come, of `parts` chunks each.
        left: tokens that those who run lack, each no more than `answer`.
        parts: see there.
        answer: tokens of each answer.
        on_gpu: requests the GPU holds at most.
        most: run at once; with `on_gpu` it is the end without the CPU.
        closed: the GPU takes none but those that run already.
        spread: a step takes no more prompts than hide the CPU's decodes, if any number does.
    """
    length, chunks, seconds = max(1, round(answer)), round(waiting * parts), 0.0
    fitting = limits.max_step_tokens // step.prompt
    stride = max(1, chunks * step.prompt // limits.max_step_tokens // MOST_STEPS)
    crowd = _Crowd(left)
    enough = cache(lambda on_gpu, on_cpu: step.fewest_hiding(on_gpu, on_cpu, fitting))
    while chunks or crowd.unchanged:
        running = round(crowd.count)
        there = min(running, on_gpu)
        if closed:
            there = min(there, round(crowd.settled))
        room = (limits.max_step_tokens - running) // step.prompt
        room = min(chunks, room, math.floor((most - running) * parts))
        if spread:
            room = min(room, max(math.ceil(parts), enough(there, running - there)))
        taken = min(chunks, max(room, 0 if running else 1))
        steps = crowd.unchanged or 1
        if taken:
            steps = max(1, min(stride, steps, chunks // taken))
        seconds += steps * step.seconds(there, running - there, taken)
        crowd.pass_steps(steps)
        crowd.join(taken * steps / parts, length - 1)
        chunks -= taken * steps
    return seconds
