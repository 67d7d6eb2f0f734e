"""The bound on lateness: it holds for 99 of 100 that come later, and for what was seen."""

from __future__ import annotations

import random

import pytest

from dovetail.runtime.embedding.line import LEAST_MARGIN, Line, Point, fit_line
from dovetail.runtime.embedding.margin import LEAST_VALUES, upper_bound


@pytest.mark.parametrize("count", [LEAST_VALUES, 32, 128])
def test_99_of_100_further_values_stay_below_nearly_always(count: int) -> None:
    """The 99 % quantile of a normal distribution is exceeded in 95 of 100 samples at least."""
    draw, held = random.Random(1), 0
    for _ in range(200):
        values = [draw.gauss(1.0, 0.05) for _ in range(count)]
        held += upper_bound(values) >= 1.0 + 2.3263 * 0.05
    assert held >= 0.92 * 200


def test_the_greatest_that_was_seen_is_within_the_bound() -> None:
    assert upper_bound([1.0] * 40 + [3.0]) == 3.0
    assert upper_bound([1.0, 1.5]) == 1.5
    assert upper_bound([1.0] * 20) == pytest.approx(1.0)


def test_a_line_has_the_margin_of_its_points() -> None:
    draw, line = random.Random(2), Line(0.01, 0.02)
    noisy = [Point(c, line.seconds(c) * draw.gauss(1, 0.08)) for c in (25, 50, 75, 100) * 4]
    assert 0.15 < fit_line(noisy).margin < 0.5
    exact = [Point(c, line.seconds(c)) for c in (25, 50, 75, 100) * 4]
    assert fit_line(exact).margin == fit_line(exact[:3]).margin == LEAST_MARGIN
