"""Loads and figures of `serve.py`: arrivals of requests, latencies, and goodput under an SLO.

In: a trace and a rate, or times that were measured. Out: requests with their arrivals; the largest
rate that keeps P90 TTFT and P90 TPOT within their bounds (Sandwich §8.1, §8.3).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

ATTAINMENT = 0.9


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: seconds after the start, its prompt, and how many tokens it asks for."""

    at: float
    prompt: list[int]
    answer: int


@dataclass(frozen=True, slots=True)
class Served:
    """Times of one request in seconds. `tpot` None: it had one token only."""

    ttft: float
    tpot: float | None


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds in seconds, both multiplied by a scale."""

    ttft: float
    tpot: float


@dataclass(frozen=True, slots=True)
class Level:
    """What was measured at one rate: P90 of TTFT and TPOT in seconds."""

    rate: float
    ttft: float
    tpot: float

    def strain(self, slo: Slo, scale: float) -> float:
        """Return how many times the worse of both figures is what the SLO allows."""
        return max(self.ttft / slo.ttft, self.tpot / slo.tpot) / scale


def read_trace(path: Path) -> list[tuple[float, int, int]]:
    """Return (seconds after the first, prompt tokens, answer tokens) of an Azure trace in order."""
    from dovetail.compiler.rules.workload import read_times, read_workload

    lengths, times = read_workload(path), read_times(path)
    pairs = zip(lengths.prompt_lengths, lengths.output_lengths, strict=True)
    return [(at - times[0], *pair) for at, pair in zip(times, pairs, strict=True)]


def make_arrivals(
    trace: Sequence[tuple[float, int, int]],
    kind: str,
    rate: float,
    count: int,
    *,
    prompt_scale: float,
    answer_scale: float,
    longest: int,
    vocabulary: int,
    seed: int,
) -> list[Arrival]:
    """Return `count` requests with lengths of a stretch of the trace, at `rate` per second.

    `kind` poisson draws the gaps; azure keeps those of the trace, made longer or shorter by one
    factor. Prompts have `prompt_scale` times their tokens, at least 1, and answers `answer_scale`
    times theirs, at least 2; both together at most `longest`.
    """
    draw = random.Random(f"{seed} {kind}")
    start = draw.randrange(max(1, len(trace) - count))
    part = trace[start : start + count]
    if kind == "poisson":
        gaps = [draw.expovariate(1.0) for _ in part]
    else:
        gaps = [0.0, *(later[0] - earlier[0] for earlier, later in pairwise(part))]
    total = sum(gaps) or 1.0
    times = np.cumsum(gaps) * (len(part) / rate / total)
    found = []
    for at, (_, prompt, wanted) in zip(times.tolist(), part, strict=True):
        answer = max(2, min(round(wanted * answer_scale), longest // 2))
        length = max(1, min(round(prompt * prompt_scale), longest - answer))
        found.append(Arrival(at, [draw.randrange(3, vocabulary) for _ in range(length)], answer))
    return found


def percentile(values: Sequence[float], share: float = ATTAINMENT) -> float:
    """Return the smallest of `values` that `share` of them do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def measure_level(rate: float, served: Sequence[Served]) -> Level:
    """Return the P90 figures of a run."""
    return Level(
        rate,
        percentile([s.ttft for s in served]),
        percentile([s.tpot for s in served if s.tpot is not None]),
    )


def find_goodput(levels: Sequence[Level], slo: Slo, scale: float) -> float:
    """Return the rate at which the SLO just holds; 0 where it holds at none that was measured.

    Between the last rate that holds and the next one the strain is taken as growing evenly in
    its logarithm; rates above the highest measured one are not guessed.
    """
    ordered = sorted(levels, key=lambda level: level.rate)
    best: Level | None = None
    for level in ordered:
        strain = level.strain(slo, scale)
        if strain > 1.0:
            if best is None:
                return 0.0
            low, high = math.log(max(best.strain(slo, scale), 1e-9)), math.log(strain)
            return best.rate + (level.rate - best.rate) * (-low / (high - low))
        best = level
    return best.rate if best else 0.0
