"""How long parts of a step take: the Protocol schedulers ask, and one that knows nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Estimate:
    """Predicted `seconds`; `clamped` where the question lay outside the measured range."""

    seconds: float
    clamped: bool = False


class Predictor(Protocol):
    """Times of this machine for this model."""

    def linear(self, tokens: int) -> Estimate:
        """All projections of one layer over `tokens` rows."""

    def prefill(self, lengths: Sequence[int]) -> Estimate:
        """Prefill attention of one layer over prompts of `lengths`."""

    def gpu_decode(self, tokens: int) -> Estimate:
        """Accelerator decode attention of one layer over `tokens` stored tokens."""

    def cpu_decode(self, sequences: int, tokens: int) -> Estimate:
        """CPU decode attention of one layer over `sequences` with `tokens` stored tokens in all."""

    def swap(self, nbytes: int) -> Estimate:
        """Move `nbytes` of KV between devices."""

    def launch(self) -> Estimate:
        """Fixed cost of starting one layer stage."""

    def retrieve(self, vectors: int, threads: int) -> Estimate:
        """Scan `vectors` of an index."""

    def embed(self, tokens: int) -> Estimate:
        """Embed `tokens`."""


class ZeroPredictor:
    """Predicts 0 seconds for everything: schedulers that do not weigh times."""

    def linear(self, tokens: int) -> Estimate:
        """See Predictor."""
        return Estimate(0.0)

    def prefill(self, lengths: Sequence[int]) -> Estimate:
        """See Predictor."""
        return Estimate(0.0)

    def gpu_decode(self, tokens: int) -> Estimate:
        """See Predictor."""
        return Estimate(0.0)

    def cpu_decode(self, sequences: int, tokens: int) -> Estimate:
        """See Predictor."""
        return Estimate(0.0)

    def swap(self, nbytes: int) -> Estimate:
        """See Predictor."""
        return Estimate(0.0)

    def launch(self) -> Estimate:
        """See Predictor."""
        return Estimate(0.0)

    def retrieve(self, vectors: int, threads: int) -> Estimate:
        """See Predictor."""
        return Estimate(0.0)

    def embed(self, tokens: int) -> Estimate:
        """See Predictor."""
        return Estimate(0.0)
