"""How long a step of two sub-batches takes: stages of one layer, each hidden behind the other.

In: sizes of both sub-batches. Out: seconds, and whether the CPU's attention is hidden (NEO §3.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from dovetail.runtime.lateness import Stages
from dovetail.runtime.plan import PrefillChunk
from dovetail.runtime.predictor import Predictor

NO_TIME = 1e-12
"""Seconds that stand for none, where a rate is asked for."""


class LayerTimes:
    """Seconds of the parts of one layer; what was asked before is remembered.

    late: what each stage of CPU attention takes beside what the predictor says (`Lateness`).
    pace: what the predictor's seconds of that attention are multiplied by (`Pace`).
    """

    def __init__(self, predictor: Predictor, late: float = 0.0, pace: float = 1.0) -> None:
        self.predictor, self.late, self.pace = predictor, late, pace
        self.launch = predictor.launch().seconds
        self._linear: dict[int, float] = {0: 0.0}
        self.forget()

    def forget(self) -> None:
        """Forget what was asked of stored tokens: these are never the same for long."""
        self._cpu: dict[tuple[int, int], float] = {(0, 0): 0.0}

    def linear(self, rows: int) -> float:
        """Return the time of all projections over `rows`."""
        found = self._linear.get(rows)
        if found is None:
            found = self._linear[rows] = self.predictor.linear(rows).seconds
        return found

    def cpu_decode(self, sequences: int, tokens: int) -> float:
        """Return the time of the CPU's decode attention over `tokens` stored in all."""
        key = (sequences, tokens)
        found = self._cpu.get(key)
        if found is None:
            found = self._cpu[key] = self.predictor.cpu_decode(sequences, tokens).seconds
        return found * self.pace

    def gpu_decode(self, tokens: int) -> float:
        """Return the time of the accelerator's decode attention."""
        return self.predictor.gpu_decode(tokens).seconds if tokens else 0.0

    def swap(self, nbytes: int) -> float:
        """Return the time to move KV between the devices, all layers."""
        return self.predictor.swap(nbytes).seconds if nbytes else 0.0

    def prefill(self, chunks: Sequence[PrefillChunk]) -> float:
        """Return the time of prefill attention; a later chunk costs what its end adds."""
        if not chunks:
            return 0.0
        ends = self.predictor.prefill([c.start + c.length for c in chunks]).seconds
        starts = [c.start for c in chunks if c.start]
        return ends - (self.predictor.prefill(starts).seconds if starts else 0.0)


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
        self.rows = [sum(c.length for c in chunks) + len(decodes), 0]
        self.sequences = [0, 0]  # CPU decodes of each batch
        self.tokens = [0, 0]  # what they have stored

    @property
    def requests(self) -> int:
        """Requests in both batches."""
        return self.gpu_requests + sum(self.sequences)

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
        pipeline.add(1, on_cpu * self.stored, on_cpu)
        found = pipeline.slack(1) >= 0.0
        pipeline.add(1, -on_cpu * self.stored, -on_cpu)
        return found

    def seconds(self, on_gpu: int, on_cpu: int, chunks: int) -> float:
        """Return the time of a layer, the CPU's decodes in one batch or split the best way."""
        key = (on_gpu, on_cpu, chunks)
        found = self._known.get(key)
        if found is None:
            pipeline = self._pipeline(on_gpu, chunks)
            even = _balance(pipeline, on_cpu)
            firsts = {on_cpu, math.floor(even), math.ceil(even)}
            found = min(self._split(pipeline, on_cpu, first) for first in firsts)
            self._known[key] = found
        return found

    def _pipeline(self, on_gpu: int, chunks: int) -> Pipeline:
        """Return the step without the CPU, which others share: what is added is taken out again."""
        found = self._alone.get((on_gpu, chunks))
        if found is None:
            work = [PrefillChunk(0, self._start, self.prompt)] * chunks
            found = Pipeline(self.times, work, [self.stored] * on_gpu)
            self._alone[on_gpu, chunks] = found
        return found

    def _split(self, pipeline: Pipeline, on_cpu: int, first: int) -> float:
        counts = (first, on_cpu - first)
        for batch, count in enumerate(counts):
            pipeline.add(batch, count * self.stored, count)
        found = pipeline.layer_seconds
        for batch, count in enumerate(counts):
            pipeline.add(batch, -count * self.stored, -count)
        return found


def _balance(pipeline: Pipeline, on_cpu: int) -> float:
    """Return how many CPU decodes go to batch 0, by the time each batch can hide.

    That depends on the rows of both, which are asked for with half of the decodes in each.
    """
    halves = (on_cpu // 2, on_cpu - on_cpu // 2)
    for batch, count in enumerate(halves):
        pipeline.add(batch, 0, count)
    hides = (pipeline.gpu(0), pipeline.gpu(1))
    for batch, count in enumerate(halves):
        pipeline.add(batch, 0, -count)
    return on_cpu * hides[0] / max(sum(hides), NO_TIME)
