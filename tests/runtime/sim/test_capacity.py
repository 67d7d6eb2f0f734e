"""What a CPU adds to an accelerator: judged fairly on a machine whose speed changes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.runtime.embed.fit_latency import Calibrator, stress_depths
from dovetail.runtime.embed.line import Line
from dovetail.runtime.sim.capacity import measure_capacity, pair_plan, reach, stress_in_turns

SLO = 1.0
LINES = {"npu": Line(0.0016, 0.0), "cpu": Line(0.008, 0.0)}
DEPTHS = {name: line.depth(SLO, "closed") for name, line in LINES.items()}


class Drifting:
    """Devices whose CPU becomes steadily slower or faster, and does not run evenly."""

    def __init__(self, drift: float, seed: int, *, stolen: float = 0.0) -> None:
        self.drift, self.stolen, self.now = drift, stolen, 0.0
        self.draw = random.Random(seed)

    def run(self, counts: Mapping[str, int]) -> dict[str, float]:
        pace = 1 + self.drift * self.now / 60 + self.draw.uniform(-0.01, 0.01)
        pace *= 1 + self.stolen * (len(counts) > 1)
        taken = {
            name: LINES[name].seconds(count) * (pace if name == "cpu" else 1.0)
            for name, count in counts.items()
        }
        self.now += max(taken.values())
        return taken


@settings(max_examples=40, deadline=None)
@given(drift=st.floats(-0.12, 0.12), seed=st.integers(0, 1000))
def test_a_machine_that_changes_speed_gives_the_cpu_no_other_share(drift: float, seed: int) -> None:
    """A minute makes it up to 12 % slower or faster; what it adds stays what it holds alone."""
    together, alone = stress_in_turns(DEPTHS, LINES, SLO, Drifting(drift, seed).run, 3)
    assert together["npu"] == alone["npu"] == DEPTHS["npu"]
    assert together["cpu"] / alone["cpu"] == pytest.approx(1.0, abs=0.03)


def test_what_the_accelerator_takes_of_the_cpu_is_seen() -> None:
    """The share is measured, not assumed: a fifth that is taken is a fifth that is missing."""
    together, alone = stress_in_turns(DEPTHS, LINES, SLO, Drifting(0.05, 1, stolen=0.25).run, 3)
    assert together["cpu"] / alone["cpu"] == pytest.approx(0.8, abs=0.03)


def test_a_device_that_is_too_slow_is_left_out() -> None:
    together, alone = stress_in_turns({"npu": 625, "cpu": 0}, LINES, SLO, Drifting(0, 0).run, 1)
    assert together == alone == {"npu": 625, "cpu": 0}


class Simulated(Calibrator):
    """Measures devices that are formulas."""

    def __init__(self, machine: Drifting) -> None:
        self.plan, self._machine = pair_plan(), machine

    def run(self, counts: Mapping[str, int], length: int) -> dict[str, float]:
        return self._machine.run(counts)


@pytest.mark.parametrize("drift", [-0.15, 0.15])
def test_depths_are_predicted_for_the_time_in_which_they_are_tested(drift: float) -> None:
    """By what was measured before the stress test alone they would be a tenth off, and more."""
    calibrator = Simulated(Drifting(drift, seed=1))
    found = measure_capacity(calibrator, 75, SLO)
    assert found.depth_error <= 0.06
    assert abs(found.at_start["cpu"] / found.together["cpu"] - 1) > 0.08
    assert found.predicted["npu"] == DEPTHS["npu"]


def test_what_all_runs_near_the_slo_say_outlives_a_machine_that_changes() -> None:
    """Runs take 8 % more or less by turns: the last two trials alone would be that far off."""
    line, turns = Line(0.01, 0.0), itertools.count()

    def run(counts: Mapping[str, int]) -> dict[str, float]:
        return {"cpu": line.seconds(counts["cpu"])}

    def trial(counts: Mapping[str, int]) -> dict[str, float]:
        pace = 1.08 if next(turns) % 2 else 0.92
        return {name: pace * seconds for name, seconds in run(counts).items()}

    found = stress_depths({"cpu": 90}, {"cpu": line}, SLO, trial)
    assert abs(reach(found, "cpu", line, SLO) - 100) <= 3
    far = stress_depths({"cpu": 20}, {"cpu": line}, SLO, run, trials=1)
    assert reach(far, "cpu", line, SLO) == 100
