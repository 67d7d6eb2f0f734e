"""What is learnt from attention that takes longer than its table says, and what is not."""

from __future__ import annotations

import random

import pytest

from dovetail.runtime.pace import FEWEST, WINDOW, Pace


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.3])
def test_the_factor_is_found_among_noise_and_followed(factor: float) -> None:
    rng, pace = random.Random(1), Pace()
    for slower in (1.0, 2.0):
        for _ in range(WINDOW):
            told = rng.uniform(1e-4, 1e-2)
            pace.learn(told, told * factor * slower * rng.uniform(0.9, 1.1))
        assert pace.factor == pytest.approx(factor * slower, rel=0.05)


def test_few_steps_stops_of_the_machine_and_no_attention_say_nothing() -> None:
    pace = Pace()
    for _ in range(FEWEST - 1):
        pace.learn(1e-3, 2e-3)
    pace.learn(0.0, 1e-3)
    pace.learn(1e-3, 0.0)  # a clock that stands still
    assert pace.factor == 1.0
    for step in range(WINDOW):
        pace.learn(1e-3, 1e-3 if step % 3 else 10.0)
    assert pace.factor == 1.0


@pytest.mark.parametrize("steps", [FEWEST, WINDOW])
def test_a_factor_that_nothing_is_learnt_under_fades(steps: int) -> None:
    pace = Pace()
    for _ in range(steps):
        pace.review()
        pace.learn(1e-3, 3e-3)
    pace.review()
    assert (
        pace.factor == 3.0 and len(pace._ratios.samples) == steps
    )  # each time something was learnt
    for _ in range(steps - FEWEST + 1):
        assert pace.factor == 3.0
        pace.review()
    assert pace.factor == 1.0
