"""Counts by size: how many of the seconds, say, that were noted lay below each bound.

In: values as they come. Out: a frozen histogram, which grows only. For one thread that writes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec


class Histogram(msgspec.Struct, frozen=True, array_like=True):
    """How many values there were, by size, and their sum.

    counts: of those at or below each bound and above the one before, at last of those above all.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Tally:
    """A histogram under way."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: in rising order."""
        self._bounds, self._counts, self._total = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Note a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def read(self) -> Histogram:
        """Return what has been noted; for any thread."""
        return Histogram(self._bounds, tuple(self._counts), self._total)
