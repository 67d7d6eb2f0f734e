"""What hangs is told from what is busy, on a virtual clock; and steps are predicted."""

from __future__ import annotations

import math
import mmap
import os

import pytest

from dovetail.runtime.child.watch import (
    LOOKS,
    PATIENCE,
    PAUSE,
    SLACK,
    STARTS,
    STEADY,
    Progress,
    Reading,
    Restarts,
    Watch,
)
from dovetail.runtime.engine.step_watch import FEW, FIRST, StepTimes, StepWork
from dovetail.runtime.machine.memory import SharedMemory
from dovetail.runtime.schedule.plan import Batch, PrefillChunk, StepPlan


class Clock:
    """Looks at a worker every so often."""

    def __init__(self) -> None:
        self.watch, self.now, self.said = Watch(), 0.0, ""

    def wait(self, seconds: float, reading: Reading) -> float | None:
        """Return after how many seconds with that reading the worker was found to hang."""
        end = self.now + seconds
        begun = self.now
        while self.now < end:
            self.now += self.watch.step
            self.said = self.watch.look(self.now, reading)
            if self.said:
                return self.now - begun
        return None


def test_work_without_progress_is_a_hang() -> None:
    clock = Clock()
    assert clock.wait(1000, Reading(busy=False, turns=0)) is None
    found = clock.wait(1000, Reading(busy=True, turns=0))
    assert found is not None and PATIENCE < found <= PATIENCE * (1 + 3 / LOOKS)
    assert "no step within 5 s" in clock.said


def test_progress_and_rest_begin_the_time_anew() -> None:
    clock = Clock()
    for turn in range(50):
        assert clock.wait(0.9 * PATIENCE, Reading(busy=True, turns=turn)) is None
    for _ in range(50):
        assert clock.wait(0.9 * PATIENCE, Reading(busy=True, turns=50)) is None
        assert clock.wait(clock.watch.step, Reading(busy=False, turns=50)) is None


@pytest.mark.parametrize("predicted", [0.1, 1.0, 70.0, 1e4])
def test_a_step_that_is_predicted_to_be_long_has_its_time(predicted: float) -> None:
    clock = Clock()
    bound = max(PATIENCE, SLACK * predicted)
    reading = Reading(busy=True, turns=3, predicted=predicted)
    assert clock.wait(bound, reading) is None
    assert clock.wait(PATIENCE, reading) is not None


def test_what_nobody_can_predict_never_hangs() -> None:
    assert Clock().wait(1e4, Reading(busy=True, turns=3, predicted=math.inf)) is None


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_clock_that_jumps_says_nothing_of_the_worker(jump: float) -> None:
    """The machine slept, or the server was stopped together with its workers."""
    clock, reading = Clock(), Reading(busy=True, turns=0)
    assert clock.wait(PATIENCE / 2, reading) is None
    clock.now += jump
    assert clock.wait(PATIENCE / 4, reading) is None
    assert clock.wait(PATIENCE, reading) is not None


def test_the_long_step_of_one_turn_is_no_excuse_for_the_next() -> None:
    clock = Clock()
    assert clock.wait(50, Reading(busy=True, turns=1, predicted=60.0)) is None
    assert clock.wait(50, Reading(busy=True, turns=2)) is not None


def test_progress_is_read_where_it_was_written() -> None:
    written = Progress()
    read = Progress(SharedMemory(os.dup(written.memory.fd), mmap.PAGESIZE))
    assert read.read(busy=True) == Reading(busy=True, turns=0)
    written.begin(2.5)
    assert read.read(busy=True) == Reading(busy=True, turns=0, predicted=2.5)
    written.end()
    assert read.read(busy=False) == Reading(busy=False, turns=1)


def work(rows: int, keys: int = 0) -> StepWork:
    return StepWork(rows, keys)


def test_the_work_of_a_plan() -> None:
    batch = Batch((PrefillChunk(0, 100, 10), PrefillChunk(1, 0, 5)), (2, 3), (4,))
    assert StepWork.of(StepPlan((batch,))) == StepWork(18, 10 * 110 + 5 * 5, 15)
    assert StepWork.of(StepPlan(())) == StepWork(0, 0)


def test_steps_are_predicted_by_those_before() -> None:
    times = StepTimes(keys_per_row=1000)
    assert times.predict(work(512)) == FIRST
    times.learn(work(1), 0.5)
    assert times.predict(work(1)) == times.predict(work(0)) == 0.5
    assert times.predict(work(512)) == 256.0, "at most that: rows share the weights"
    times.learn(work(100), 2.0)
    assert times.predict(work(512)) == pytest.approx(10.24)
    assert times.predict(work(512, keys=512 * 1000)) == pytest.approx(20.48)
    assert times.predict(work(1)) == pytest.approx(FEW * 0.02)
    for _ in range(100):
        times.learn(work(100), 1.0)
        times.learn(work(4), 3.0)
    assert times.predict(work(100)) == times.predict(work(1)) == pytest.approx(3.0)
    assert times.predict(work(1000)) == pytest.approx(10.0)
    times.learn(work(0), 1e6)  # nothing was computed
    assert times.predict(work(1000)) == pytest.approx(10.0)


def test_workers_that_are_of_no_use_are_followed_later_and_later_and_then_by_none() -> None:
    restarts = Restarts()
    pauses = [restarts.end() for _ in range(STARTS)]
    assert pauses == [PAUSE * n for n in range(1, STARTS)] + [None]
    assert restarts.end() == PAUSE, "who is asked for anew begins anew"


def test_a_worker_that_was_of_use_is_followed_at_once() -> None:
    restarts = Restarts()
    for seconds, worked in ((0.0, True), (STEADY, False)):
        assert restarts.end(STEADY / 2) == PAUSE
        assert restarts.end(seconds, worked=worked) == 0.0
