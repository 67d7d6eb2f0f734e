"""Watches whether batches still take what their line says, and fits the line anew when not.

In: every batch that has run, and its seconds. Out: depths for the line as it is now.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dovetail.runtime.embedding.depths import ClassDepth, Depths
from dovetail.runtime.embedding.line import Line, Point, fit_line
from dovetail.runtime.embedding.query import Batch

WINDOW = 32
"""Batches of a device that are looked at, the latest."""
LEAST_BATCHES = 12
LIMIT = 0.15
"""Relative departure of the median batch from its line at which the line is fitted anew."""
LEAST_POINTS, LEAST_RANGE = 8, 2.0
"""Batches of one length class, and the range of their sizes, that make a line by themselves."""

SLOPE_CHANGE = 2.0
"""Most that a slope fitted to batches as they came may differ from the median departure."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A batch that has run: queries of each class, its seconds, and those it was expected to."""

    counts: tuple[int, ...]
    seconds: float
    expected: float


@dataclass(slots=True)
class DriftWatch:
    """The latest batches of each device and model."""

    seen: dict[tuple[str, str], deque[Seen]] = field(default_factory=dict)

    def observe(self, batch: Batch, seconds: float) -> bool:
        """Note a batch; return whether its device has drifted from its model's line."""
        window = self.seen.setdefault((batch.device, batch.model), deque(maxlen=WINDOW))
        window.append(Seen(batch.counts, seconds, batch.expected - batch.started))
        return self.drifted(batch.device, batch.model)

    def drifted(self, device: str, model: str = "") -> bool:
        """Return whether the median batch takes other than its line's seconds."""
        window = self.seen.get((device, model), ())
        if len(window) < LEAST_BATCHES:
            return False
        return abs(_ratio(window) - 1) > LIMIT

    def refit(self, device: str, depths: Depths, model: str = "") -> Depths:
        """Return depths with the model's lines there as observed; what was observed is forgotten.

        A class whose batches are many and of several sizes gets a line of its own; the others are
        scaled by the median departure. Tested depths follow in proportion.
        """
        window = self.seen.pop((device, model))
        ratio = _ratio(window)
        classes = tuple(
            _follow(each, _line(window, index, each.line, ratio), depths)
            if each.model == model
            else each
            for index, each in enumerate(depths.devices[device])
        )
        return replace(depths, devices={**depths.devices, device: classes})


def _ratio(window: Sequence[Seen] | deque[Seen]) -> float:
    return statistics.median(each.seconds / max(each.expected, 1e-9) for each in window)


def _line(window: deque[Seen], index: int, old: Line, ratio: float) -> Line:
    points = [
        Point(each.counts[index], each.seconds)
        for each in window
        if each.counts[index] and each.counts[index] == sum(each.counts)
    ]
    sizes = [point.concurrency for point in points]
    scaled = old.scaled(ratio)
    if len(points) < LEAST_POINTS or max(sizes) < LEAST_RANGE * min(sizes):
        return scaled
    line = fit_line(points).line
    # A slope from noise alone, near zero say, would open the queue without end
    sound = scaled.alpha / SLOPE_CHANGE <= line.alpha <= scaled.alpha * SLOPE_CHANGE
    return line if sound else scaled


def _follow(old: ClassDepth, line: Line, depths: Depths) -> ClassDepth:
    predicted = line.depth(depths.slo, depths.arrival)
    if old.tested is None or not old.predicted:
        return replace(old, line=line, predicted=predicted, tested=None)
    tested = math.floor(old.tested * predicted / old.predicted)
    return replace(old, line=line, predicted=predicted, tested=tested)
