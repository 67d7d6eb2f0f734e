"""Does offloading pay here? Steady rates with and without the CPU, by the cost tables alone.

In: mean lengths, capacities, a predictor. Out: the gain, and how many requests the CPU should hold.
A step's own rate cannot tell: a prompt computed for the CPU is paid now and returns later.
"""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.runtime.kv_pool import blocks_for
from dovetail.runtime.pipeline import NO_TIME, LayerTimes, Pipeline
from dovetail.runtime.plan import Limits, PrefillChunk
from dovetail.runtime.predictor import Predictor

GROWTH = 1.5
"""Ratio of the numbers of CPU requests that are tried."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Unfinished requests with their mean lengths in tokens, and the tokens each pool holds."""

    requests: int
    prompt: float
    answer: float
    gpu_tokens: int
    cpu_tokens: int


@dataclass(frozen=True, slots=True)
class OffloadVerdict:
    """`gain`: best steady rate over the accelerator's own; reached by so many `cpu_requests`."""

    gain: float
    cpu_requests: int


def weigh_offload(demand: Demand, limits: Limits, predictor: Predictor) -> OffloadVerdict:
    """Return how much faster requests of this kind are served with decodes on the CPU."""
    stored = max(1, round(demand.prompt + demand.answer / 2))
    on_gpu = min(demand.requests, demand.gpu_tokens // stored, limits.max_step_sequences)
    left = min(demand.requests, limits.max_step_sequences) - on_gpu
    most = min(left, demand.cpu_tokens // stored)
    steady = _Steady(demand, limits, LayerTimes(predictor), stored, on_gpu)
    alone = steady.rate(0)
    best = OffloadVerdict(1.0, 0)
    count = 1
    while count <= most:
        gain = steady.rate(count) / max(alone, NO_TIME)
        if gain > best.gain:
            best = OffloadVerdict(gain, count)
        count = most if count < most < count * GROWTH else int(count * GROWTH) + 1
    return best


@dataclass(frozen=True, slots=True)
class _Steady:
    demand: Demand
    limits: Limits
    times: LayerTimes
    stored: int
    on_gpu: int

    def rate(self, on_cpu: int) -> float:
        """Return decodes per second of a layer; each answer's worth of them needs a prompt."""
        answer = max(1.0, self.demand.answer)
        prompt = max(1, min(round(self.demand.prompt), self.limits.max_step_tokens))
        parts = max(1.0, self.demand.prompt / prompt)  # chunks of a prompt
        fitting = max(1, self.limits.max_step_tokens // prompt)
        decodes = min(self.on_gpu + on_cpu, fitting * answer / parts)
        if not decodes:
            return 0.0
        chunks = decodes / answer * parts  # in a step, on average
        whole = max(1, round(chunks))
        busy = self._seconds(on_cpu, whole, prompt)
        share = min(1.0, chunks / whole)
        seconds = share * busy + (1 - share) * self._seconds(on_cpu, 0, prompt)
        return decodes / max(seconds, self._link(chunks / parts, on_cpu), NO_TIME)

    def _seconds(self, on_cpu: int, chunks: int, prompt: int) -> float:
        """Return the time of a layer with `chunks` prompts, the CPU's share split the best way."""
        work = [PrefillChunk(0, 0, prompt)] * chunks
        splits = []
        for first in {on_cpu, self._balance(on_cpu, work)}:
            pipeline = Pipeline(self.times, work, [self.stored] * self.on_gpu)
            pipeline.add(0, first * self.stored, first)
            pipeline.add(1, (on_cpu - first) * self.stored, on_cpu - first)
            splits.append(pipeline.layer_seconds)
        return min(splits)

    def _balance(self, on_cpu: int, work: list[PrefillChunk]) -> int:
        """Return how many CPU decodes go to batch 0, by the time each batch can hide."""
        pipeline = Pipeline(self.times, work, [self.stored] * self.on_gpu)
        pipeline.add(1, 0, 1)
        hides = (pipeline.gpu(0), pipeline.gpu(1))
        return round(on_cpu * hides[0] / max(sum(hides), NO_TIME))

    def _link(self, prompts: float, on_cpu: int) -> float:
        """Return the time of a layer that KV of prompts bound for the CPU takes on its way."""
        share = on_cpu / max(1, self.on_gpu + on_cpu)
        nbytes = blocks_for(round(self.demand.prompt)) * self.limits.block_bytes
        return prompts * share * self.times.swap(nbytes) / self.limits.n_layers
