"""A queue played forward: its end against sums made by hand, and against the scheduler's own."""

from __future__ import annotations

import pytest

from dovetail.runtime.outlook import Course, Demand, MeanStep, Outlook
from dovetail.runtime.pipeline import LayerTimes
from dovetail.runtime.plan import Limits, SchedulerSettings
from dovetail.runtime.predictor import Estimate, ZeroPredictor
from dovetail.runtime.scenario import make_scenario, synthesize


class Made(ZeroPredictor):
    """A row takes 2 and a stored token on the CPU 1; the rest is free."""

    def linear(self, tokens: int) -> Estimate:
        return Estimate(2.0 * tokens)

    def cpu_decode(self, sequences: int, tokens: int) -> Estimate:
        return Estimate(float(tokens))


def play(
    prompts: tuple[int, ...],
    answer: float,
    course: Course,
    *,
    on_gpu: tuple[int, ...] = (),
    step_tokens: int = 100,
) -> float:
    demand = Demand(prompts, 10.0, answer, course.gpu_tokens, 10**6, on_gpu)
    limits = Limits(step_tokens, 64, 4096, 100)
    return Outlook(demand, limits, SchedulerSettings(), LayerTimes(Made())).finish(course)


def hold(count: int, answer: float) -> Course:
    """Return the course with a GPU that holds so many requests of 10 and `answer` tokens."""
    return Course(round(count * (10 + answer / 2 + 24) + 1), 0)


def test_prompts_come_first_and_then_a_step_for_each_token_of_the_last() -> None:
    assert play((10,) * 3, 1.0, hold(9, 1)) == 60  # one token each: prompts alone
    assert play((10,) * 3, 5.0, hold(9, 5)) == 60 + 4 * 6
    assert play((), 5.0, hold(9, 5), on_gpu=(2, 4, 7)) == 2 * 6 + 2 * 4 + 3 * 2


def test_no_more_run_than_fit() -> None:
    assert play((10,) * 3, 5.0, hold(1, 5)) == 3 * (20 + 4 * 2)
    assert play((10,) * 3, 5.0, hold(2, 5)) == 40 + 4 * 4 + 20 + 4 * 2


def test_prompts_longer_than_a_step_come_in_parts() -> None:
    assert play((10,) * 2, 1.0, hold(9, 1), step_tokens=8) == 16 + 16 + 8


def test_prompts_have_lengths_of_their_own() -> None:
    assert play((2, 18, 4), 1.0, hold(9, 1), step_tokens=20) == 2 * 24


def test_who_is_not_on_the_accelerator_decodes_on_the_cpu() -> None:
    """Of 12 stored tokens each, in two batches of two, where that raises the step's rate."""
    assert play((10,) * 4, 5.0, Course(0, 4, at_once=True)) == 80 + 4 * (24 + 24)
    beside = Course(hold(2, 5).gpu_tokens, 2, at_once=True)
    assert play((10,) * 4, 5.0, beside) == 80 + 4 * 4 + 4 * 4  # it does not: they come back


def test_a_long_queue_takes_as_long_as_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    seconds = MeanStep.seconds

    def follow(step: MeanStep, on_gpu: int, on_cpu: int, rows: int, attention: float) -> float:
        asked.append(rows)
        return seconds(step, on_gpu, on_cpu, rows, attention)

    monkeypatch.setattr(MeanStep, "seconds", follow)
    found = play((10,) * 4000, 5.0, hold(20, 5), step_tokens=1000)
    assert len(asked) < 4000
    assert found == pytest.approx(4000 * (20 + 4 * 2), rel=0.02)


@pytest.mark.parametrize(
    ("machine", "prompt", "output", "count", "cpu"),
    [("t4", 162, 34, 87, 1.0), ("h100", 805, 202, 60, 4.0), ("a10g", 410, 324, 50, 4.0)],
)
def test_short_queues_end_as_soon_as_by_the_better_policy(
    machine: str, prompt: int, output: int, count: int, cpu: float
) -> None:
    arrivals = synthesize(prompt, output, count, seed=3)
    rates = {
        policy: make_scenario(
            machine,
            None,
            policy,
            cpu=cpu,
            gpu_blocks=400 if machine != "t4" else 21,
            noise=0.0,
            hidden=False,
        )
        .run(arrivals)
        .rate
        for policy in ("auto", "off", "full")
    }
    assert rates["auto"] > 0.99 * max(rates["off"], rates["full"])
