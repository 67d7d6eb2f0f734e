"""The scripted engine: who is in which step, what it takes, and when replies are told of."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest

from dovetail.ir.workflow import Generation
from dovetail.runtime.flows.control.costs import StepCost
from dovetail.runtime.flows.control.messages import Finished, Generate, Progressed, Report, Source
from tests.repository import ROOT
from tests.runtime.flows.control.world import PlainCost

sys.path.insert(0, str(ROOT / "benchmarks"))

from scripted_engine import ScriptedEngine

NODE = Generation("answer", prompt="{input}", output="answer")


class Seen:
    """Steps of one second; keeps what was in each."""

    def __init__(self) -> None:
        self.steps: list[tuple[list[int], int, int]] = []

    def seconds(self, prefills: Sequence[int], decodes: int, stored: int) -> float:
        self.steps.append((list(prefills), decodes, stored))
        return 1.0


def engine(cost: Any, **limits: Any) -> ScriptedEngine:
    """Return an engine that replies with a token for each word of the prompt."""
    return ScriptedEngine(cost, lambda order: order.prompt.split(), **limits)


def order(job: int, prompt: str, steps: int = 0) -> Generate:
    return Generate(job, Source(1, "answer", 0), NODE, prompt, steps)


def run(made: ScriptedEngine) -> list[Report]:
    reports: list[Report] = []
    while made.begin_step() is not None:
        reports += made.end_step()
    return reports


def test_a_prompt_that_comes_later_joins_at_the_next_step() -> None:
    seen = Seen()
    made = engine(seen)
    made.add(order(1, "a b c"))
    assert made.begin_step() == 1.0
    made.add(order(2, "d e"))
    assert made.end_step() == []
    assert run(made) == [Finished(1, "abc"), Finished(2, "de")]
    assert seen.steps == [([5], 0, 0), ([3], 1, 6), ([], 2, 11)]


def test_progress_is_told_every_few_steps() -> None:
    made = engine(Seen())
    made.add(order(1, "a b c d e", steps=2))
    assert run(made) == [Progressed(1, "ab", 2), Progressed(1, "abcd", 4), Finished(1, "abcde")]


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        ({}, [[3, 3, 3]]),
        ({"most_sequences": 2}, [[3, 3], [], [3], []]),
        ({"most_tokens": 4}, [[3], [3], [3]]),
        ({"most_tokens": 1}, [[3], [3], [3]]),
    ],
)
def test_steps_keep_to_their_limits(limits: dict[str, int], wanted: list[list[int]]) -> None:
    seen = Seen()
    made = engine(seen, **limits)
    for job in range(3):
        made.add(order(job, "x y"))
    assert len(run(made)) == 3
    prefills = [prompts for prompts, _, _ in seen.steps]
    assert prefills[: len(wanted)] == wanted and not any(prefills[len(wanted) :])


def test_a_job_is_dropped_wherever_it_is_and_others_wait_for_the_device() -> None:
    cost = PlainCost(StepCost(fixed=1.0, per_sequence=0.5, prefill=0.25))
    made = engine(cost, most_sequences=2)
    for job in (1, 2, 3):
        made.add(order(job, "x y"))
    made.delay += 10.0
    assert made.begin_step() == 1.0 + 2 * 0.5 + 6 * 0.25 + 10.0
    made.cancel(1)
    made.cancel(3)
    assert made.end_step() == []
    assert run(made) == [Finished(2, "xy")]
