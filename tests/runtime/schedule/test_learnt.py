"""What is learnt from steps, with noise, behind products, with stops; what fades, and when."""

from __future__ import annotations

import random

import pytest

from dovetail.runtime.schedule.offload import Lateness, Pace, Recent
from dovetail.runtime.schedule.pipeline import Stages

STAGES: Stages = ((4e-4, 6e-4), (1e-4, 5e-4))
PACE_WINDOW, PACE_FEWEST = 32, 4
WINDOW, FEWEST = 64, 16


def test_the_last_ones_count_and_few_are_no_answer() -> None:
    recent: Recent[int] = Recent(4, 2)
    recent.add(1)
    assert not recent.known
    for sample in range(2, 7):
        recent.add(sample)
    assert recent.known and list(recent.samples) == [3, 4, 5, 6]


def test_one_is_forgotten_where_none_came_and_at_last_all_that_are_too_few() -> None:
    recent: Recent[int] = Recent(4, 2)
    assert not recent.review()  # there is nothing to forget
    for sample in range(3):
        recent.add(sample)
    assert not recent.review()  # some came
    assert recent.review() and list(recent.samples) == [1, 2] and recent.known
    recent.add(3)
    assert not recent.review()
    assert recent.review() and recent.review() and not recent.samples
    recent.add(4)
    assert not recent.known


def test_too_few_for_an_answer_stay_and_add_up() -> None:
    recent: Recent[int] = Recent(4, 3)
    for sample in range(2):
        recent.add(sample)
        assert not recent.review() and not recent.review()
    recent.add(2)
    assert list(recent.samples) == [0, 1, 2]
    assert not recent.review()
    assert recent.review() and not recent.samples


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.3])
def test_the_factor_is_found_among_noise_and_followed(factor: float) -> None:
    rng, pace = random.Random(1), Pace()
    for slower in (1.0, 2.0):
        for _ in range(PACE_WINDOW):
            told = rng.uniform(1e-4, 1e-2)
            pace.learn(told, told * factor * slower * rng.uniform(0.9, 1.1))
        assert pace.factor == pytest.approx(factor * slower, rel=0.05)


def test_few_steps_stops_of_the_machine_and_no_attention_say_nothing() -> None:
    pace = Pace()
    for _ in range(PACE_FEWEST - 1):
        pace.learn(1e-3, 2e-3)
    pace.learn(0.0, 1e-3)
    pace.learn(1e-3, 0.0)  # a clock that stands still
    assert pace.factor == 1.0
    for step in range(PACE_WINDOW):
        pace.learn(1e-3, 1e-3 if step % 3 else 10.0)
    assert pace.factor == 1.0


@pytest.mark.parametrize("steps", [PACE_FEWEST, PACE_WINDOW])
def test_a_factor_that_nothing_is_learnt_under_fades(steps: int) -> None:
    pace = Pace()
    for _ in range(steps):
        pace.review()
        pace.learn(1e-3, 3e-3)
    pace.review()
    assert pace.factor == 3.0 and len(pace.samples) == steps  # each time something was learnt
    for _ in range(steps - PACE_FEWEST + 1):
        assert pace.factor == 3.0
        pace.review()
    assert pace.factor == 1.0


def taken(stages: Stages, late: float, noise: float, rng: random.Random) -> float:
    """Return what a layer takes whose attention is late, with noise on every part."""

    def disturb(seconds: float) -> float:
        return seconds * rng.uniform(1 - noise, 1 + noise)

    return sum(max(disturb(gpu), disturb(cpu) + late if cpu else 0.0) for gpu, cpu in stages)


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("late", [2e-5, 1e-4, 1e-3])
def test_lateness_is_found_among_noise(late: float, noise: float) -> None:
    rng, found = random.Random(1), Lateness()
    for _ in range(3 * WINDOW):
        size = rng.uniform(0.5, 2.0)
        stages = tuple((gpu, cpu * size) for gpu, cpu in STAGES)
        found.learn(stages, taken(stages, late, noise, rng))
    assert found.seconds == pytest.approx(late, abs=1e-5 + noise * 2e-4)


def test_what_stays_hidden_is_not_seen_and_none_is_added() -> None:
    rng, found = random.Random(2), Lateness()
    hidden: Stages = ((4e-4, 1e-4), (4e-4, 1e-4))
    for _ in range(3 * WINDOW):
        found.learn(hidden, taken(hidden, 5e-5, 0.1, rng))
    assert found.seconds < 4e-4 - 1e-4  # less than would show
    for _ in range(3 * WINDOW):
        found.learn(hidden, taken(hidden, 5e-5, 0.0, rng))
    assert found.seconds == 0.0


def test_it_is_forgotten_when_steps_are_told_right_again() -> None:
    rng, found = random.Random(3), Lateness()
    for late in (1e-3, 0.0):
        for _ in range(WINDOW):
            found.learn(STAGES, taken(STAGES, late, 0.0, rng))
        assert found.seconds == pytest.approx(late, abs=1e-6)


def test_few_steps_and_one_stop_of_the_machine_say_nothing() -> None:
    found = Lateness(first=7e-5)
    told = sum(max(stage) for stage in STAGES)
    for _ in range(FEWEST - 1):
        found.learn(STAGES, 2 * told)
    assert found.seconds == 7e-5  # what was assumed
    stopped = Lateness()
    for step in range(WINDOW):
        stopped.learn(STAGES, told * (1.0 if step != 5 else 1e6))
    assert stopped.seconds < 1e-4
    stopped.learn(((0.0, 0.0),), 1.0)
    stopped.learn(STAGES, 0.0)  # a clock that stands still
    assert stopped.seconds < 1e-4


def test_what_nothing_is_learnt_under_fades_to_the_first_answer_and_is_learnt_anew() -> None:
    rng, found = random.Random(4), Lateness(first=7e-5)
    for _ in range(WINDOW):
        found.learn(STAGES, taken(STAGES, 1e-3, 0.0, rng))
    found.review()
    for _ in range(WINDOW - FEWEST):
        found.review()
        assert found.seconds == pytest.approx(1e-3, abs=1e-6)  # it is held as long as it is known
    found.review()
    assert found.seconds == 7e-5
    for _ in range(FEWEST):
        found.learn(STAGES, taken(STAGES, 0.0, 0.0, rng))
    assert found.seconds == pytest.approx(0.0, abs=1e-6)  # old steps no longer count


def test_bursts_of_few_steps_add_up() -> None:
    rng, found = random.Random(5), Lateness()
    for _ in range(20):
        for _ in range(FEWEST - 1):
            found.learn(STAGES, taken(STAGES, 1e-3, 0.0, rng))
        for _ in range(2):
            found.review()
    assert found.seconds == pytest.approx(1e-3, abs=1e-6)
    for _ in range(WINDOW):
        found.review()
    assert found.seconds == 0.0
