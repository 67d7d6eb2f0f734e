"""How long parts of a step take: what schedulers ask."""

from __future__ import annotations

from collections.abc import Sequence


class Predictor:
    """Seconds on this machine for this model; this one is for who weighs no times, and says 0."""

    def look_up(self, table: str, x: float) -> float:
        """Return the seconds at `x` of a table with one coordinate; 0 of nothing."""
        return 0.0

    def linear(self, tokens: int) -> float:
        """All projections of one layer over `tokens` rows."""
        return self.look_up("linear", tokens)

    def prefill(self, lengths: Sequence[int]) -> float:
        """Prefill attention of one layer over prompts of `lengths`: they add up."""
        return sum(self.look_up("prefill", length) for length in lengths)

    def gpu_decode(self, tokens: int) -> float:
        """Accelerator decode attention of one layer over `tokens` stored tokens."""
        return self.look_up("gpu_decode", tokens)

    def cpu_decode(self, sequences: int, tokens: int) -> float:
        """CPU decode attention of one layer over `sequences` with `tokens` stored tokens in all."""
        return 0.0

    def swap(self, nbytes: int) -> float:
        """Move `nbytes` of KV between devices."""
        return self.look_up("swap", nbytes)

    def launch(self) -> float:
        """Fixed cost of starting one layer stage."""
        return 0.0

    def head(self, rows: int) -> float:
        """Logits of `rows` tokens: once a step, not once a layer."""
        return self.look_up("head", rows)
