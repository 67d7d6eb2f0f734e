"""The latency line: recovered exactly, under noise and outliers; depths at their edges."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.runtime.embed.line import (
    LEAST_MARGIN,
    LEAST_VALUES,
    MAX_DEPTH,
    Line,
    Point,
    fit_line,
    upper_bound,
)

LINES = st.builds(Line, st.floats(1e-4, 0.2), st.floats(0.0, 0.5))


@settings(max_examples=40, deadline=None)
@given(line=LINES, seed=st.integers(0, 2**31))
def test_a_line_is_recovered_from_noise_with_a_quarter_of_outliers(line: Line, seed: int) -> None:
    draw = random.Random(seed)
    points = []
    for concurrency in (1, 8, 16, 32):
        exact = line.seconds(concurrency)
        points += [Point(concurrency, exact * draw.uniform(0.99, 1.01)) for _ in range(3)]
        points.append(Point(concurrency, exact * draw.uniform(2, 20)))
    fitted = fit_line(points)
    assert {p.seconds for p in fitted.outliers} >= {points[i].seconds for i in (3, 7, 11, 15)}
    for concurrency in (1, 8, 32):
        exact = line.seconds(concurrency)
        tolerance = max(0.03 * exact, 0.02 * line.seconds(32))
        assert fitted.line.seconds(concurrency) == pytest.approx(exact, abs=tolerance)
    assert fitted.error <= 0.02


def test_neither_value_is_ever_negative() -> None:
    falling = fit_line([Point(1, 1.0), Point(10, 0.5), Point(20, 0.1)]).line
    assert falling.alpha == 0
    below = fit_line([Point(10, 0.1), Point(20, 1.1), Point(30, 2.1)]).line
    assert below.beta == 0
    assert below.alpha > 0


@settings(max_examples=200, deadline=None)
@given(line=LINES, slo=st.floats(0.05, 5.0))
def test_the_depth_is_the_largest_that_meets_the_slo(line: Line, slo: float) -> None:
    closed, opened = line.depth(slo, "closed"), line.depth(slo, "open")
    assert opened <= closed
    if closed == 0:
        assert line.seconds(1) > slo
        return
    assert line.seconds(closed) <= slo * (1 + 1e-6)
    if closed < MAX_DEPTH:
        assert line.seconds(closed + 1) > slo * (1 - 1e-6)
    if opened > 1:
        assert line.seconds(opened) + line.beta <= slo * (1 + 1e-6)


def test_a_device_that_misses_the_slo_alone_gets_nothing() -> None:
    assert Line(0.2, 0.85).depth(1.0, "closed") == 0
    assert Line(0.1, 0.85).depth(1.0, "open") == 1  # alone on an idle device it is in time
    assert Line(0.0, 0.5).depth(1.0, "closed") == MAX_DEPTH


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
