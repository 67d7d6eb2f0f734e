"""The latency line of a device, t = alpha * C + beta (WindVE Eq. 12), and the depth it allows.

In: seconds measured at a few concurrencies. Out: a `FittedLine`, robust to disturbed points, and
the margin by which batches may be slower.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Arrival = Literal["open", "closed"]
MAX_DEPTH = 4096
"""Where latency does not grow with concurrency, something else than the SLO ends it."""
OUTLIER = 4.0
"""Median deviations beyond which a point is left out."""
LEAST_DEVIATION = 0.02
"""Relative error that is never an outlier, however well the other points agree."""
ROUNDS = 3
LEAST_MARGIN = 0.1
"""Part by which batches may be slower than their line, at least: nobody else was served then."""
SHARE_QUANTILE, SURE_QUANTILE = 2.326, 1.645
"""Normal quantiles of 99 % of what comes, and of 95 % certainty that it is."""
LEAST_VALUES = 8
"""Fewer say too little of their spread."""
_ROUNDING = 1e-9


class Point(NamedTuple):
    """One measurement: `concurrency` queries that came together took `seconds`, the last one."""

    concurrency: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds that C concurrent queries take: alpha * C + beta, both >= 0."""

    alpha: float
    beta: float

    def seconds(self, concurrency: float) -> float:
        """Return the seconds that so many queries take together."""
        return self.alpha * concurrency + self.beta

    def depth(self, slo: float, arrival: Arrival = "open") -> int:
        """Return how many queries a device may hold so that all of them meet `slo` seconds.

        closed: they come together, none waits: (T - beta) / alpha (WindVE Eq. 7-10). open: one
        may wait for the batch in flight: (T - 2 beta) / alpha. 0 where a single query is too slow
        (Eq. 11).
        """
        if self.seconds(1) > slo:
            return 0
        room = slo - (self.beta if arrival == "closed" else 2 * self.beta)
        if self.alpha * MAX_DEPTH <= room:
            return MAX_DEPTH
        return max(1, math.floor(room / self.alpha + _ROUNDING)) if self.alpha else 1

    def scaled(self, factor: float) -> Line:
        """Return the line of a device that takes `factor` times as long."""
        return Line(self.alpha * factor, self.beta * factor)


@dataclass(frozen=True, slots=True)
class FittedLine:
    """A line and what it stands on: the points that count, those left out, the median error.

    margin: part by which 99 of 100 batches are slower at most, see `find_margin`.
    """

    line: Line
    points: tuple[Point, ...]
    outliers: tuple[Point, ...] = ()
    error: float = 0.0
    margin: float = LEAST_MARGIN


def fit_line(points: Sequence[Point]) -> FittedLine:
    """Fit alpha, beta >= 0 by least squares, without the points that lie far off.

    The first fit is of repeated medians, so that disturbed points do not bend the line by which
    they are judged.
    """
    line, kept = _repeated_medians(points), np.zeros(len(points), bool)
    for _ in range(ROUNDS):
        errors = np.abs(_errors(line, points))
        near = errors <= max(LEAST_DEVIATION, OUTLIER * float(np.median(errors)))
        if near.sum() == kept.sum():
            break
        kept = near
        line = _least_squares(list(compress(points, kept)))
    inside = tuple(compress(points, kept))
    return FittedLine(
        line=line,
        points=inside,
        outliers=tuple(compress(points, ~kept)),
        error=float(np.median(np.abs(_errors(line, inside)))),
        margin=find_margin(line, inside),
    )


def find_margin(line: Line, points: Sequence[Point]) -> float:
    """Return by how much batches are slower than a line, by the longer half of its points."""
    longer = sorted(points, key=lambda point: point.seconds)
    longer = longer[-max(LEAST_VALUES, len(longer) // 2) :]
    if len(longer) < LEAST_VALUES:
        return LEAST_MARGIN
    return max(LEAST_MARGIN, upper_bound(_errors(line, longer).tolist()))


def _repeated_medians(points: Sequence[Point]) -> Line:
    """Return the line of median slopes (Siegel), which nearly half of the points cannot bend."""
    counts, seconds = np.array(points, float).T
    slopes = [
        np.median((seconds[other] - seconds[i]) / (counts[other] - counts[i]))
        for i in range(len(points))
        if (other := counts != counts[i]).any()
    ]
    alpha = max(0.0, float(np.median(slopes))) if slopes else 0.0
    beta = float(np.median(seconds - alpha * counts))
    return Line(alpha, beta) if beta >= 0 else Line(float(np.median(seconds / counts)), 0.0)


def _errors(line: Line, points: Sequence[Point]) -> npt.NDArray[np.float64]:
    """Return by how much each point is slower than the line says, relative."""
    counts, seconds = np.array(points, float).T
    expected = line.alpha * counts + line.beta
    errors: npt.NDArray[np.float64] = (seconds - expected) / np.maximum(expected, _ROUNDING)
    return errors


def _least_squares(points: Sequence[Point]) -> Line:
    counts, seconds = zip(*points, strict=True)
    if len(set(counts)) > 1:
        line = Line(*statistics.linear_regression(counts, seconds))
        if line.alpha < 0:  # the least squares with alpha >= 0 have it at 0, and so has beta
            return Line(0.0, statistics.fmean(seconds))
        if line.beta >= 0:
            return line
    return Line(statistics.linear_regression(counts, seconds, proportional=True).slope, 0.0)


def upper_bound(values: Sequence[float]) -> float:
    """Return what 99 of 100 further values stay below with 95 % certainty.

    One-sided tolerance bound of a normal distribution, mean + k deviations with k by Natrella's
    formula, and the greatest value where that is more, as disturbances are not normal. Of fewer
    than `LEAST_VALUES` it is the greatest alone.
    """
    if len(values) < LEAST_VALUES:
        return max(values)
    n = len(values)
    a = 1 - SURE_QUANTILE**2 / (2 * (n - 1))
    b = SHARE_QUANTILE**2 - SURE_QUANTILE**2 / n
    k = (SHARE_QUANTILE + math.sqrt(SHARE_QUANTILE**2 - a * b)) / a
    return max(*values, statistics.fmean(values) + k * statistics.stdev(values))
