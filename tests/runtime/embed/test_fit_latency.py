"""Lines from a few measurements, and depths by stress tests, on devices that are formulas."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.runtime.embed.fit_latency import TRIALS, profile_lines, stress_depths
from dovetail.runtime.embed.line import FittedLine, Line

SLO = 1.0


def profile_line(measure: Callable[[int], float], slo: float) -> FittedLine:
    """The line of one device."""
    return profile_lines(lambda counts: {"": measure(counts[""])}, [""], slo)[""]


LINES = st.builds(Line, st.floats(2e-3, 0.2), st.floats(0.0, 0.4))


def test_a_few_measurements_give_the_line() -> None:
    truth, asked = Line(0.018, 0.27), []

    def measure(concurrency: int) -> float:
        asked.append(concurrency)
        return truth.seconds(concurrency)

    line = profile_line(measure, SLO).line
    assert (line.alpha, line.beta) == pytest.approx((0.018, 0.27), rel=1e-6)
    assert len(set(asked)) <= 5
    assert max(asked) == truth.depth(SLO, "closed")
    assert sum(map(truth.seconds, asked)) < 10 * SLO


def test_a_device_that_is_too_slow_is_measured_no_further() -> None:
    asked: list[int] = []
    line = profile_line(lambda c: asked.append(c) or 1.5 * c, SLO).line  # type: ignore[func-returns-value]
    assert set(asked) == {1}
    assert line.depth(SLO, "closed") == 0


@settings(max_examples=60, deadline=None)
@given(line=LINES, seed=st.integers(0, 2**31))
def test_fitted_depths_are_those_of_a_noisy_device(line: Line, seed: int) -> None:
    draw, turns = random.Random(seed), list[int]()

    def measure(concurrency: int) -> float:
        turns.append(concurrency)
        # one repetition of three beside a busy neighbour
        disturbed = draw.uniform(1.5, 4) if turns.count(concurrency) == 2 else 1
        return line.seconds(concurrency) * draw.uniform(0.985, 1.015) * disturbed

    true = line.depth(SLO, "closed")
    found = profile_line(measure, SLO).line.depth(SLO, "closed")
    assert abs(found - true) <= max(1, 0.1 * true)


class Uneven:
    """A device whose seconds bend away from a line, on a machine that has slow stretches."""

    def __init__(self, line: Line, bend: float = 0.0, slow: tuple[float, float] = (0, 0)) -> None:
        self.line, self.bend, self.slow, self.now = line, bend, slow, 0.0

    def seconds(self, concurrency: int) -> float:
        depth = self.line.depth(SLO, "closed")
        return self.line.seconds(concurrency) * (1 + self.bend * concurrency / depth)

    def measure(self, concurrency: int) -> float:
        seconds = self.seconds(concurrency)
        seconds *= 1.3 if self.slow[0] <= self.now < self.slow[1] else 1.0
        self.now += seconds
        return seconds

    def depth(self) -> int:
        return next(c for c in range(1, 1000) if self.seconds(c + 1) > SLO)


@pytest.mark.parametrize("bend", [-0.15, 0.3, 0.6])
def test_depths_hold_where_latency_is_no_line(bend: float) -> None:
    """What is measured lies around the depth, so nothing is drawn out beyond it."""
    device = Uneven(Line(0.01, 0.0), bend)
    found = profile_line(device.measure, SLO).line.depth(SLO, "closed")
    assert found == pytest.approx(device.depth(), rel=0.07)


@pytest.mark.parametrize("start", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0])
def test_a_slow_stretch_of_the_machine_is_not_taken_for_the_line(start: float) -> None:
    """Two seconds at 1.3 times the seconds: some of every concurrency, not all of one."""
    device = Uneven(Line(0.01, 0.01), slow=(start, start + 2.0))
    found = profile_line(device.measure, SLO).line.depth(SLO, "closed")
    assert found == pytest.approx(device.depth(), rel=0.1)


def test_lines_are_measured_side_by_side() -> None:
    """What the accelerator takes of the CPU is in the CPU's line, not only in a stress test."""
    lines = {"npu": Line(0.002, 0.01), "cpu": Line(0.01, 0.01)}

    def shared(counts: Mapping[str, int]) -> dict[str, float]:
        seconds = run(lines, counts)
        if len(counts) > 1:
            seconds["cpu"] *= 1.2
        return seconds

    found = profile_lines(shared, lines, SLO)
    assert found["npu"].line.depth(SLO, "closed") == pytest.approx(495, abs=1)
    assert found["cpu"].line.depth(SLO, "closed") == pytest.approx(0.99 / 0.012, rel=0.05)


def test_a_device_that_is_too_slow_leaves_the_others_to_be_measured() -> None:
    lines = {"npu": Line(0.02, 0.1), "cpu": Line(0.5, 0.8)}
    found = profile_lines(lambda counts: run(lines, counts), lines, SLO)
    assert found["npu"].line.depth(SLO, "closed") == 45
    assert {point.concurrency for point in found["cpu"].points} == {1}


@settings(max_examples=80, deadline=None)
@given(
    truths=st.lists(LINES, min_size=1, max_size=3),
    errors=st.lists(st.floats(0.6, 1.6), min_size=3, max_size=3),
)
def test_a_stress_test_finds_the_depths_whatever_was_predicted(
    truths: list[Line], errors: list[float]
) -> None:
    lines = {f"d{i}": line for i, line in enumerate(truths)}
    predicted = {
        name: max(1, round(line.depth(SLO, "closed") * errors[i]))
        for i, (name, line) in enumerate(lines.items())
    }
    found = stress_depths(predicted, lines, SLO, lambda counts: run(lines, counts))
    assert len(found.trials) <= TRIALS
    for name, line in lines.items():
        true = line.depth(SLO, "closed")
        assert true * 0.97 - 1 <= found.depths[name] <= true


def run(lines: Mapping[str, Line], counts: Mapping[str, int]) -> dict[str, float]:
    return {name: lines[name].seconds(count) for name, count in counts.items()}


def test_a_good_prediction_needs_few_trials_and_what_disturbs_the_other_is_seen() -> None:
    lines = {"npu": Line(0.018, 0.27), "cpu": Line(0.085, 0.32)}
    alone = {name: line.depth(SLO, "closed") for name, line in lines.items()}
    found = stress_depths(alone, lines, SLO, lambda counts: run(lines, counts))
    assert found.depths == alone and len(found.trials) <= 3

    def shared(counts: Mapping[str, int]) -> dict[str, float]:
        seconds = run(lines, counts)
        seconds["cpu"] *= 1 + counts["npu"] / 200  # the host side of the accelerator
        return seconds

    together = stress_depths(alone, lines, SLO, shared)
    assert together.depths["npu"] == alone["npu"]
    assert 1 <= together.depths["cpu"] < alone["cpu"]


def test_a_device_of_depth_0_stays_out() -> None:
    lines = {"npu": Line(0.018, 0.27), "cpu": Line(0.3, 0.9)}
    found = stress_depths({"npu": 40, "cpu": 0}, lines, SLO, lambda counts: run(lines, counts))
    assert found.depths["cpu"] == 0
    assert all("cpu" not in counts for counts, _ in found.trials)
