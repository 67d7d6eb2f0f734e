"""A queue played forward: its end against sums made by hand, and against the scheduler's own."""

from __future__ import annotations

import pytest

from dovetail.runtime.schedule.cost_tables import Predictor
from dovetail.runtime.schedule.pipeline import LayerTimes, MeanStep, play_queue
from dovetail.runtime.schedule.plan import Limits
from dovetail.runtime.sim.scenario import make_scenario, synthesize


class Made(Predictor):
    """A row takes 2 and a stored token on the CPU 1; the rest is free."""

    def linear(self, tokens: int) -> float:
        return 2.0 * tokens

    def cpu_decode(self, sequences: int, tokens: int) -> float:
        return float(tokens)


def play(
    on_gpu: int,
    waiting: int,
    left: tuple[int, ...],
    answer: float,
    most: int,
    step_tokens: int = 100,
    **ways: bool,
) -> float:
    return play_queue(
        MeanStep(LayerTimes(Made()), prompt=10, stored=12),
        Limits(step_tokens, 64, 4096, 100),
        waiting=waiting,
        left=left,
        parts=1.0,
        answer=answer,
        on_gpu=on_gpu,
        most=most,
        **ways,
    )


def test_prompts_come_first_and_then_a_step_for_each_token_of_the_last() -> None:
    assert play(9, 3, (), 1.0, 9) == 60  # one token each: prompts alone
    assert play(9, 3, (), 5.0, 9) == 60 + 4 * 6
    assert play(9, 0, (2, 4, 7), 5.0, 9) == 2 * 6 + 2 * 4 + 3 * 2


def test_no_more_run_than_may() -> None:
    assert play(1, 3, (), 5.0, 1) == 3 * (20 + 4 * 2)
    assert play(2, 3, (), 5.0, 2) == 40 + 4 * 4 + 20 + 4 * 2


def test_who_is_not_on_the_accelerator_decodes_on_the_cpu() -> None:
    alone, beside = (play(count, 0, (3,) * 4, 5.0, 4) for count in (4, 2))
    assert alone == 3 * 8
    assert beside == 3 * (12 + 12)  # one in each batch, beside fewer seconds of products


def test_prompts_can_be_spread_over_the_steps_whose_decodes_they_hide() -> None:
    """One prompt hides one decode (12 beside 20), two hide three, three hide five."""
    at_once, spread = (play(0, 6, (), 3.0, 9, spread=spread) for spread in (False, True))
    assert at_once == 120 + 2 * (36 + 36)
    # 1, then 1 beside 1, 2 beside 2, 2 beside 3 (of four one has ended), 4 are left, then 2
    assert spread == pytest.approx(20 + (20 + 2) + (40 + 4) + (40 + 6) + 48 + 24)


def test_nobody_follows_on_a_closed_accelerator() -> None:
    # it decodes its own beside a prompt, then the CPU the new one: a second pass costs as much
    assert play(1, 1, (1,), 2.0, 2, closed=True) == 22 + (2 + 12)
    assert play(1, 1, (1,), 2.0, 2) == 22 + 2


def test_what_hides_decodes_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    hides = MeanStep.hides

    def follow(self: MeanStep, on_gpu: int, on_cpu: int, chunks: int) -> bool:
        asked.append((on_gpu, on_cpu, chunks))
        return hides(self, on_gpu, on_cpu, chunks)

    monkeypatch.setattr(MeanStep, "hides", follow)
    play(2, 500, (), 8.0, 9, spread=True)
    assert asked and len(asked) == len(set(asked))


def test_a_long_queue_is_played_in_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    seconds = MeanStep.seconds

    def follow(step: MeanStep, on_gpu: int, on_cpu: int, chunks: int) -> float:
        asked.append((on_gpu + on_cpu, chunks))
        return seconds(step, on_gpu, on_cpu, chunks)

    monkeypatch.setattr(MeanStep, "seconds", follow)
    found = play(10**6, 40_000, (), 50.0, 10**6, 2000)
    assert len(asked) < 500
    assert found == pytest.approx(40_000 * (10 + 49) * 2, rel=0.1)


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
