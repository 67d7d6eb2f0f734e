"""Replays a sampled trace on the simulator: what a pair of plans takes for the requests of a day.

In: prompt and output lengths. Out: seconds of prefill and of decode for each configuration, and of
pairs of them, the price of a switch between phases included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean

from dovetail.topology.configuration import Configuration
from dovetail.topology.contention import Simulator

SAMPLES = 8
MAX_STEP_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Trace:
    """(prompt, output) tokens of each request, and how many sequences are decoded together.

    Each of `batches` gets an equal part of the output tokens: lengths do not say how many meet.
    """

    source: str
    requests: tuple[tuple[int, int], ...]
    batches: tuple[int, ...] = (1,)

    @property
    def mean_prompt(self) -> float:
        """Tokens of a prompt."""
        return fmean(prompt for prompt, _ in self.requests)

    @property
    def mean_output(self) -> float:
        """Tokens of an answer."""
        return fmean(output for _, output in self.requests)

    @property
    def mean_context(self) -> float:
        """Tokens that a sequence has before it when one of its output tokens is decoded."""
        tokens = sum(output for _, output in self.requests)
        stored = sum(output * (prompt + output / 2) for prompt, output in self.requests)
        return stored / tokens if tokens else self.mean_prompt

    def sample(self, count: int = SAMPLES) -> Trace:
        """Return `count` requests at even quantiles of length; all where there are no more."""
        if len(self.requests) <= count:
            return self
        ranked = sorted(self.requests, key=sum)
        picked = (ranked[(2 * i + 1) * len(ranked) // (2 * count)] for i in range(count))
        return replace(self, requests=tuple(picked))


DEFAULT_TRACE = Trace(
    "assumed: interactive use", ((128, 128), (512, 128), (1024, 256), (2048, 256))
)


@dataclass(frozen=True, slots=True)
class PairScore:
    """Seconds per request of one pair of plans."""

    prefill: float
    decode: float
    switch: float

    @property
    def total(self) -> float:
        """Seconds per request."""
        return self.prefill + self.decode + self.switch


def step_rows(trace: Trace) -> tuple[int, ...]:
    """Return the rows that the products of a replayed trace's steps have, in order."""
    rows = set(trace.batches)
    for prompt, _ in trace.sample().requests:
        rows |= {tokens for tokens, _ in _chunks(prompt)}
    return tuple(sorted(rows))


def _chunks(prompt: int) -> list[tuple[int, int]]:
    """Return the tokens of the steps that a prompt takes, and how many steps of each."""
    whole, rest = divmod(max(1, prompt), MAX_STEP_TOKENS)
    return [
        (tokens, times) for tokens, times in ((MAX_STEP_TOKENS, whole), (rest, 1)) if tokens * times
    ]


class Replay:
    """Scores configurations by seconds per request of a trace."""

    def __init__(self, simulator: Simulator, trace: Trace) -> None:
        self._simulator = simulator
        self._trace = trace.sample()

    def prefill(self, configuration: Configuration) -> float:
        """Return the mean seconds of a prompt, long ones in chunks."""
        total = sum(
            times * self._simulator.prefill(configuration, tokens=tokens).total
            for prompt, _ in self._trace.requests
            for tokens, times in _chunks(prompt)
        )
        return total / len(self._trace.requests)

    def decode(self, configuration: Configuration) -> float:
        """Return the mean seconds of a request's output; a step's time is shared by its batch.

        Sequences that meet are of all lengths, so that a step reads as much KV as mean ones do.
        """
        context = self._trace.mean_context
        per_token = fmean(
            self._simulator.decode(configuration, batch=batch, context=context).total / batch
            for batch in self._trace.batches
        )
        return self._trace.mean_output * per_token

    def pair(self, prefill: Configuration, decode: Configuration) -> PairScore:
        """Return the score of two plans served one after the other.

        Where processes or their memory nodes differ, weights and KV are shared memory that prefill
        sees through views of head ranges: what its processes do not have on nodes of their own
        passes over a link, weights once per step and KV once per token.
        """
        switch = 0.0
        if prefill.family != decode.family:
            away = _share_away(prefill, decode)
            simulator = self._simulator
            moved = away * (simulator.weights + self._trace.mean_prompt * simulator.kv_row)
            switch = moved / simulator.parameters.package_link.value
        return PairScore(self.prefill(prefill), self.decode(decode), switch)


def _share_away(prefill: Configuration, decode: Configuration) -> float:
    """Return the share of head ranges that lies on nodes the reading process does not use.

    Both cut the heads evenly and in order; ranges are compared at 256 points.
    """
    points = 256
    away = 0.0
    for point in range(points):
        reader = prefill.processes[point * len(prefill.processes) // points]
        owner = decode.processes[point * len(decode.processes) // points]
        near = len(set(owner.nodes) & set(reader.nodes)) / len(owner.nodes)
        away += (1 - near) / points
    return away
