"""The latency line of a device, t = alpha * C + beta (WindVE Eq. 12), and the depth it allows.

In: seconds measured at a few concurrencies. Out: a `FittedLine`, robust to disturbed points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from dovetail.ir.errors import SpecError
from dovetail.runtime.embedding.margin import LEAST_VALUES, upper_bound

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
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Point:
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
        return replace(self, alpha=self.alpha * factor, beta=self.beta * factor)


def batch_seconds(lines: Sequence[Line], counts: Sequence[int]) -> float:
    """Return the seconds of one batch with so many queries of each class; 0 of none."""
    present = [(n, line) for n, line in zip(counts, lines, strict=True) if n]
    alphas = sum(n * line.alpha for n, line in present)
    return alphas + max((line.beta for _, line in present), default=0.0)


@dataclass(frozen=True, slots=True)
class FittedLine:
    """A line and what it stands on: the points that count, those left out, the median error."""

    line: Line
    points: tuple[Point, ...]
    outliers: tuple[Point, ...] = ()
    error: float = 0.0

    @property
    def all_points(self) -> tuple[Point, ...]:
        """What was measured, left out or not."""
        return self.points + self.outliers

    @property
    def margin(self) -> float:
        """Part by which 99 of 100 batches are slower at most, by the longer half of the points."""
        longer = sorted(self.points, key=lambda point: point.seconds)
        longer = longer[-max(LEAST_VALUES, len(longer) // 2) :]
        if len(longer) < LEAST_VALUES:
            return LEAST_MARGIN
        bound = upper_bound([1 + _error(self.line, point) for point in longer])
        return max(LEAST_MARGIN, bound - 1)


def fit_line(points: Sequence[Point]) -> FittedLine:
    """Fit alpha, beta >= 0 by least squares, without the points that lie far off.

    The first fit is of repeated medians, so that disturbed points do not bend the line by which
    they are judged.

    Raises:
        SpecError: there are no points, or one has no positive concurrency and finite time.
    """
    if not points or not all(p.concurrency > 0 and 0 <= p.seconds < math.inf for p in points):
        raise SpecError("a latency line needs points of positive concurrency and finite seconds")
    line, kept = _repeated_medians(points), list[Point]()
    for _ in range(ROUNDS):
        errors = np.array([_error(line, point) for point in points])
        limit = max(LEAST_DEVIATION, OUTLIER * float(np.median(np.abs(errors))))
        inside = [p for p, error in zip(points, errors, strict=True) if abs(error) <= limit]
        if len(inside) == len(kept):
            break
        kept = inside
        line = _least_squares(kept)
    chosen = set(map(id, kept))
    return FittedLine(
        line=line,
        points=tuple(kept),
        outliers=tuple(p for p in points if id(p) not in chosen),
        error=float(np.median([abs(_error(line, point)) for point in kept])),
    )


def _repeated_medians(points: Sequence[Point]) -> Line:
    """Return the line of median slopes (Siegel), which nearly half of the points cannot bend."""
    counts = np.array([float(point.concurrency) for point in points])
    seconds = np.array([point.seconds for point in points])
    slopes = [
        float(np.median((seconds[other] - seconds[i]) / (counts[other] - counts[i])))
        for i in range(len(points))
        if (other := counts != counts[i]).any()
    ]
    alpha = max(0.0, float(np.median(slopes))) if slopes else 0.0
    beta = float(np.median(seconds - alpha * counts))
    return Line(alpha, beta) if beta >= 0 else Line(float(np.median(seconds / counts)), 0.0)


def _error(line: Line, point: Point) -> float:
    expected = line.seconds(point.concurrency)
    return (point.seconds - expected) / max(expected, _ROUNDING)


def _least_squares(points: Sequence[Point]) -> Line:
    from sklearn.linear_model import LinearRegression  # noqa: PLC0415  (a second to import)

    columns: npt.NDArray[np.float64] = np.array([[p.concurrency, 1.0] for p in points])
    seconds = np.array([p.seconds for p in points])
    model = LinearRegression(fit_intercept=False, positive=True).fit(columns, seconds)
    return Line(alpha=float(model.coef_[0]), beta=float(model.coef_[1]))
