"""The queue of a device: what it promises, how late it was, and when a batch is given up."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dovetail.ir.errors import CapacityError
from dovetail.runtime.embed.device_queue import (
    FIRST_BATCH,
    EmbedQuery,
    QueryBatch,
    QueueSpec,
    length_classes,
)
from dovetail.runtime.embed.line import LEAST_VALUES, Line
from dovetail.runtime.embed.queue import QueueManager
from tests.runtime.embed.integrity import check_integrity

SLO = 1.0
LINE = Line(0.01, 0.05)


def manager(line: Line = LINE, depth: int = 100, margin: float = 0.0) -> QueueManager:
    spec = QueueSpec("gpu", True, (depth,), (line,), margin=margin)
    return QueueManager([spec], length_classes([512]))


def queries(count: int, start: int = 0, *, target: float = SLO) -> list[EmbedQuery]:
    return [EmbedQuery(number, 75, target) for number in range(start, start + count)]


def taken(queues: QueueManager, now: float = 0.0) -> QueryBatch:
    batch = queues.take("gpu", now)
    assert batch is not None
    return batch


def room(queues: QueueManager, now: float, start: int = 10_000) -> int:
    """How many queries are taken one by one at `now`, with the whole SLO to go."""
    for count in range(1000):
        try:
            queues.submit(queries(1, start + count, target=now + SLO), now)
        except CapacityError:
            return count
    raise AssertionError


def keep_promises(queues: QueueManager, ratios: list[float]) -> float:
    """Serve batches of 40 that take so many times their promise; return the time after them."""
    now = 0.0
    for turn, ratio in enumerate(ratios):
        queues.submit(queries(40, 100 * turn, target=now + SLO), now)
        batch = taken(queues, now)
        now += LINE.seconds(40) * ratio
        queues.complete(batch)
        queues.note(batch, now)
    return now


def test_a_batch_is_predicted_as_late_as_batches_may_be() -> None:
    slow = manager(Line(0.1, 1.0), 20, margin=0.5)
    slow.submit(queries(10, target=math.inf), 0.0)
    assert taken(slow).predicted == pytest.approx(1.5 * (10 * 0.1 + 1.0))
    unknown = manager(Line(0.0, 0.0))
    unknown.submit(queries(1), 0.0)
    assert taken(unknown).predicted == FIRST_BATCH


def test_a_device_whose_batch_is_overdue_promises_less_the_longer_it_lasts() -> None:
    queues = manager(Line(0.1, 1.0), 20)
    queues.submit(queries(4, target=10.0), 0.0)  # to be done at 1.4
    batch = taken(queues)
    with pytest.raises(CapacityError) as busy:
        queues.submit(queries(1, 10, target=7.4 + 7.0), 7.4)  # six seconds late, maybe six more
    assert busy.value.retry_after == pytest.approx(6.0)
    queues.submit(queries(1, 20, target=7.4 + 7.2), 7.4)
    queues.complete(batch)
    check_integrity(queues)


def test_promises_that_were_exceeded_leave_room_for_as_much() -> None:
    """(1 - 0.05) / 0.01 = 95 fit by the line; a tenth later, (1 / 1.1 - 0.05) / 0.01 = 85."""
    assert room(manager(), 0.0) in {94, 95}  # just so, or not by a rounding
    assert room(manager(margin=0.1), 0.0) == 85
    late = manager(margin=0.1)
    assert room(late, keep_promises(late, [1.24] * LEAST_VALUES)) == 75
    kept = manager(margin=0.1)
    assert room(kept, keep_promises(kept, [1.0] * LEAST_VALUES)) in {94, 95}


def test_until_there_are_enough_promises_the_margin_counts() -> None:
    few = manager(margin=0.1)
    assert room(few, keep_promises(few, [1.0] * (LEAST_VALUES - 1))) == 85
    late = manager(margin=0.1)  # and beyond the greatest: (1 / (1.2 * 1.1) - 0.05) / 0.01 = 70
    assert room(late, keep_promises(late, [1.0, 1.2])) == 70


def test_promises_that_vary_leave_room_beyond_the_latest_of_them() -> None:
    varying = manager()
    now = keep_promises(varying, [1.0, 1.04] * 16)
    assert (1 / 1.1 - 0.05) / 0.01 < room(varying, now) < (1 / 1.04 - 0.05) / 0.01 - 1


def test_what_lies_between_two_batches_counts_as_a_caller_sees_it() -> None:
    """A device that takes 50 ms from one batch to the next breaks what it promised meanwhile."""
    queues, now, ends = manager(Line(0.01, 0.0)), 0.0, []
    queues.submit(queries(40, target=SLO), 0.0)
    for turn in range(1, 2 * LEAST_VALUES):
        batch = taken(queues, now)
        queues.submit(queries(40, 100 * turn, target=now + SLO), now)
        end = batch.expected + 0.05
        queues.complete(batch)
        queues.note(batch, end)
        ends.append(end - now)
        now = end
    assert queues._queues["gpu"].slack == pytest.approx((2 * 0.45) / (2 * 0.4), rel=0.01)


def test_short_promises_say_nothing_of_long_ones() -> None:
    queues, now = manager(Line(0.01, 0.0)), 0.0
    for number in range(2 * LEAST_VALUES):
        queues.submit(queries(1, number, target=now + SLO), now)
        batch = taken(queues, now)
        queues.complete(batch)
        queues.note(batch, now := now + 0.05)  # five times its line, but 0.04 s of 1 s
    assert room(queues, now) == 100


@pytest.mark.parametrize("scale", [2.0, 1.24, 0.8])
def test_a_new_line_forgets_nothing_of_how_promises_were_kept(scale: float) -> None:
    """Nor is the queue deeper at once when its device seems to be faster."""
    queues = manager(margin=0.1)
    now = keep_promises(queues, [1.24] * (LEAST_VALUES - 1) + [1.5])
    before = queues._queues["gpu"].slack
    queues.submit(queries(40, 5000, target=now + SLO), now)
    batch = taken(queues, now)
    queues.set_queue(replace(queues.spec("gpu"), lines=(LINE.scaled(scale),)))
    after = max(1.0, before / scale)
    assert queues._queues["gpu"].slack == pytest.approx(after)
    queues.complete(batch)
    queues.note(batch, now + 1.5 * LINE.seconds(40))  # by either line, as late as the last one
    assert list(queues._queues["gpu"].ratios)[-2:] == pytest.approx([1.5 / scale] * 2)


def test_failures_void_what_was_promised() -> None:
    failing = manager()
    failing.submit(queries(40, target=SLO), 0.0)
    failing.fail(taken(failing))
    for batch in iter(lambda: failing.take("gpu", 0.9), None):
        failing.complete(batch)
        failing.note(batch, 0.9 + 0.3)
    assert failing._queues["gpu"].slack == 1.0


def test_a_device_that_was_late_once_is_tried_again_when_it_is_idle() -> None:
    queues = manager(margin=0.1)
    now = keep_promises(queues, [50.0])  # a pause of the machine: no query would be in time
    assert queues._queues["gpu"].slack == pytest.approx(55.0)
    assert room(queues, now) == 1
    batch = taken(queues, now)
    queues.complete(batch)
    queues.note(batch, batch.expected)
    assert len(queues._alive) == 0
