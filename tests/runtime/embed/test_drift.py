"""A device that becomes slower or faster gets a line, and depths, of what it is now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from dovetail.runtime.embed import drift
from dovetail.runtime.embed.depths import ClassDepth, Depths
from dovetail.runtime.embed.device_queue import QueryBatch, QueueSpec
from dovetail.runtime.embed.devices import DevicePlan, EmbeddingPlan
from dovetail.runtime.embed.drift import LEAST_BATCHES, DriftKeeper, DriftWatch
from dovetail.runtime.embed.line import FittedLine, Line

OLD = Line(0.02, 0.1)


def depths(tested: int | None = None) -> Depths:
    classes = tuple(
        ClassDepth(n, FittedLine(OLD, ()), OLD.depth(1.0, "closed"), tested) for n in (75, 500)
    )
    return Depths(1.0, "closed", {"cpu": classes, "npu": classes}, True)


def feed(watch: DriftWatch, truth: Line, sizes: list[int], kind: int = 0) -> list[bool]:
    answers = []
    for number, size in enumerate(sizes):
        counts = tuple(size * (k == kind) for k in range(2))
        batch = QueryBatch(number, "cpu", (), counts, 0.0, OLD.seconds(size))
        answers.append(watch.observe(batch, truth.seconds(size)))
    return answers


def test_small_departures_and_few_batches_change_nothing() -> None:
    watch = DriftWatch()
    assert not any(feed(watch, OLD.scaled(1.1), [4] * 40))
    assert not any(feed(DriftWatch(), OLD.scaled(3), [4] * (LEAST_BATCHES - 1)))


def test_batches_of_several_sizes_give_a_new_line() -> None:
    watch, truth = DriftWatch(), Line(0.04, 0.05)
    assert feed(watch, truth, [2, 4, 8, 16, 10, 12] * 4)[-1]
    new = watch.refit("cpu", depths())
    short, long = new.devices["cpu"]
    assert (short.line.alpha, short.line.beta) == pytest.approx((0.04, 0.05))
    assert short.depth == truth.depth(1.0, "closed")
    assert long.line.alpha > OLD.alpha  # scaled: it was not seen
    assert new.devices["npu"] == depths().devices["npu"]
    assert not any(feed(watch, truth, [4] * (LEAST_BATCHES - 1)))


def test_batches_of_one_size_scale_the_line_and_tested_depths_follow() -> None:
    watch = DriftWatch()
    assert feed(watch, OLD.scaled(2), [10] * 20)[-1]
    (short, _) = watch.refit("cpu", depths(tested=40)).devices["cpu"]
    assert short.line.alpha == pytest.approx(0.04)
    assert short.predicted == 20 and short.tested == 40 * 20 // 45


def test_a_device_that_is_faster_again_gets_its_depth_back() -> None:
    watch = DriftWatch()
    feed(watch, OLD.scaled(0.5), [10] * 20)
    assert watch.refit("cpu", depths()).devices["cpu"][0].depth == 95


def test_a_device_that_is_too_slow_for_one_query_keeps_room_for_it() -> None:
    """Else it would embed nothing, and nobody would see that it is fast again."""
    watch, before = DriftWatch(), depths(tested=40)
    never = replace(before.devices["cpu"][1], predicted=0, tested=0)
    before = replace(before, devices={**before.devices, "cpu": (before.devices["cpu"][0], never)})
    feed(watch, OLD.scaled(60), [1] * 20)
    slow = watch.refit("cpu", before)
    assert [(each.predicted, each.tested) for each in slow.devices["cpu"]] == [(1, 1), (0, None)]


def test_sizes_that_say_nothing_of_the_slope_do_not_open_the_queue() -> None:
    watch = DriftWatch()
    for number, size in enumerate([4, 8, 12] * 8):  # each takes the same
        counts = (size, 0)
        watch.observe(QueryBatch(number, "cpu", (), counts, 0.0, OLD.seconds(size)), 0.5)
    (short, _) = watch.refit("cpu", depths()).devices["cpu"]
    assert short.line.alpha > OLD.alpha
    assert short.depth < 45


class AtOnce:
    """A thread whose work is over when it has been started."""

    def __init__(self, target: Callable[..., object], args: tuple[object, ...], daemon: bool):
        self.start = partial(target, *args)


class Refusing:
    """A service that takes no queue at first."""

    def __init__(self) -> None:
        self.queues: list[QueueSpec | None] = []

    def set_queue(self, spec: QueueSpec) -> None:
        self.queues.append(spec if self.queues else None)
        if self.queues == [None]:
            raise RuntimeError("a fault of the program")


def slow_down(service: Any, batches: int) -> None:
    """Have a device take twice its line for so many batches."""
    keeper = DriftKeeper()
    keeper.keep(service, EmbeddingPlan((DevicePlan("cpu", "cpu"),), True), depths())
    for number in range(batches):
        batch = QueryBatch(number, "cpu", (), (10, 0), 0.0, OLD.seconds(10))
        keeper(batch, OLD.scaled(2).seconds(10))


def test_a_fit_that_fails_is_not_the_last_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(drift.threading, "Thread", AtOnce)
    service: Any = Refusing()
    slow_down(service, 2 * LEAST_BATCHES)
    assert "cannot measure" in caplog.text
    assert service.queues[0] is None and service.queues[1].lines[0].alpha > OLD.alpha


def test_a_fit_that_no_thread_can_be_started_for_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service, started = Refusing(), list[tuple[object, ...]]()
    service.queues.append(None)  # it takes what comes

    class Late(AtOnce):
        def __init__(self, target: Callable[..., object], args: tuple[object, ...], daemon: bool):
            super().__init__(target, args, daemon)
            started.append(args)
            if len(started) == 1:
                self.start = self.fail

        def fail(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(drift.threading, "Thread", Late)
    slow_down(service, LEAST_BATCHES + 1)
    assert "cannot measure cpu again (can't start new thread); old queues stay" in caplog.text
    assert len(started) == len(service.queues) == 2
