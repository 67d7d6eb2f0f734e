"""The queue manager: Algorithm 1, what is admitted, and what becomes of batches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dovetail.ir.errors import CapacityError, DeviceError, RequestError
from dovetail.runtime.embed.device_queue import REST, EmbedQuery, QueueSpec, length_classes
from dovetail.runtime.embed.line import Arrival, Line
from dovetail.runtime.embed.queue import STARTING, QueueManager
from dovetail.runtime.server.errors import to_api_error
from tests.runtime.embed.integrity import check_integrity

CLASSES = (32, 128, 512)
ANY = length_classes([512])
FAST, SLOW = Line(0.01, 0.05), Line(0.05, 0.06)
SLO = 1.0


def spec(name: str, depth: int, line: Line = FAST, *, accelerator: bool = True) -> QueueSpec:
    return QueueSpec(name, accelerator, (depth,), (line,))


def pair(**options: object) -> QueueManager:
    specs = [spec("gpu", 3), spec("cpu", 2, SLOW, accelerator=False)]
    return QueueManager(specs, ANY, **options)  # type: ignore[arg-type]


def queries(
    count: int, start: int = 0, *, target: float = SLO, tokens: int = 75
) -> list[EmbedQuery]:
    return [EmbedQuery(number, tokens, target) for number in range(start, start + count)]


def place(manager: QueueManager, count: int, now: float = 0.0) -> list[str]:
    """Submit one by one; the devices of those that were taken, `BUSY` for the others."""
    answers = []
    for query in queries(count, 1000, target=now + SLO):
        try:
            manager.submit([query], now)
            answers.append(query.device)
        except CapacityError:
            answers.append("BUSY")
        check_integrity(manager)
    return answers


def test_algorithm_1_fills_the_accelerator_then_the_cpu_then_is_busy() -> None:
    assert place(pair(arrival="closed"), 7) == ["gpu"] * 3 + ["cpu"] * 2 + ["BUSY"] * 2


def test_more_queries_than_all_queues_hold_are_told_so() -> None:
    manager = pair(arrival="closed")
    with pytest.raises(CapacityError, match="6 texts at once are more") as error:
        manager.submit(queries(6), 0.0)
    assert error.value.retry_after is None
    manager.submit(queries(1), 0.0)
    with pytest.raises(CapacityError) as busy:  # those that are there may end
        manager.submit(queries(5, 10), 0.0)
    assert busy.value.retry_after is not None
    assert len(manager._alive) == 1


def test_without_heterogeneous_mode_the_cpu_stays_empty() -> None:
    manager = pair(arrival="closed", heterogeneous=False)
    assert place(manager, 5) == ["gpu"] * 3 + ["BUSY"] * 2
    alone = QueueManager([spec("cpu", 2, accelerator=False)], ANY, heterogeneous=False)
    assert place(alone, 3) == ["cpu"] * 2 + ["BUSY"]


def test_several_accelerators_share_before_the_cpu_is_used() -> None:
    specs = [spec("a", 3), spec("b", 3), spec("cpu", 1, SLOW, accelerator=False)]
    placed = place(QueueManager(specs, ANY, arrival="closed"), 8)
    assert sorted(placed[:6]) == ["a"] * 3 + ["b"] * 3
    assert placed[:2] == ["a", "b"]  # the one that is done first
    assert placed[6:] == ["cpu", "BUSY"]


def test_queries_count_until_their_batch_has_run() -> None:
    manager = pair(arrival="closed", heterogeneous=False)
    manager.submit(queries(3), 0.0)
    batch = manager.take("gpu", 0.0)
    assert batch is not None and len(batch.queries) == 3
    assert manager.take("gpu", 0.0) is None
    with pytest.raises(CapacityError) as busy:
        manager.submit(queries(1, 10), 0.05)
    assert busy.value.retry_after == pytest.approx(batch.expected - 0.05)
    assert manager.complete(batch) == batch.queries
    manager.submit(queries(3, 20), 0.1)
    assert sum(manager._queues["gpu"].held) == 3


def test_all_or_none_of_a_call_is_taken() -> None:
    manager = pair(arrival="closed")
    with pytest.raises(CapacityError):
        manager.submit(queries(6), 0.0)
    check_integrity(manager)
    assert len(manager._alive) == 0
    manager.submit(queries(5), 0.0)


def test_open_arrivals_are_admitted_by_when_all_that_waits_would_be_done() -> None:
    manager = QueueManager([spec("gpu", 100, Line(0.1, 0.2))], ANY)
    manager.submit(queries(2), 0.0)
    batch = manager.take("gpu", 0.0)
    assert batch is not None and batch.expected == pytest.approx(0.4)
    accepted = place(manager, 10, 0.15).count("gpu")
    assert accepted == 5  # a batch from 0.4 on, of 0.2 + 5 * 0.1 s, is done before 1.15
    late = EmbedQuery(100, 75, target=0.15 + 5)
    with pytest.raises(CapacityError):  # would make the five that wait late
        manager.submit([late], 0.15)


def test_a_time_that_no_device_can_meet_is_refused_at_once() -> None:
    """Each takes longer for one query: depth 0."""
    manager = QueueManager([spec("gpu", 0), spec("cpu", 0, SLOW, accelerator=False)], ANY)
    with pytest.raises(CapacityError, match="within the time") as never:
        manager.submit(queries(1), 0.0)
    assert never.value.retry_after is None


@pytest.mark.parametrize("arrival", ["open", "closed"])
def test_a_device_that_has_become_too_slow_is_tried_when_it_has_rested(arrival: Arrival) -> None:
    """Else nobody would see that it is fast again; where all others are full."""
    slow = Line(0.0, 2.0)
    specs = [spec("gpu", 1, slow), spec("cpu", 1, SLOW, accelerator=False)]
    manager = QueueManager(specs, ANY, arrival=arrival)
    assert sorted(place(manager, 3)) == ["BUSY", "cpu", "gpu"]
    with pytest.raises(CapacityError) as busy:
        manager.submit(queries(1), 0.0)
    assert busy.value.retry_after is not None, "there will be room"


def test_a_device_that_is_too_slow_rests_between_two_queries() -> None:
    manager = QueueManager([spec("gpu", 1, Line(0.0, 2.0))], ANY)
    for turn in range(2):
        now = turn * (2.0 + REST)
        assert place(manager, 2, now) == ["gpu", "BUSY"]
        batch = manager.take("gpu", now)
        assert batch is not None
        manager.complete(batch)
        manager.note(batch, now + 2.0)
        assert place(manager, 1, now + 1.9 + REST) == ["BUSY"]


def test_what_is_due_first_runs_first() -> None:
    manager = QueueManager([replace(spec("gpu", 100), token_budget=75)], ANY, arrival="closed")
    manager.submit([EmbedQuery(0, 75, 1.0), EmbedQuery(1, 75), EmbedQuery(2, 75, 0.6)], 0.0)
    order = []
    while batch := manager.take("gpu", 0.0):
        order += [query.number for query in batch.queries]
        manager.complete(batch)
    assert order == [2, 0, 1]


def test_a_class_of_long_queries_fills_more_of_a_device() -> None:
    line = (FAST, FAST, FAST)
    manager = QueueManager(
        [QueueSpec("gpu", True, (6, 4, 0), line)], length_classes(CLASSES), arrival="closed"
    )
    manager.submit([EmbedQuery(0, 20, SLO), EmbedQuery(1, 100, SLO), EmbedQuery(2, 100, SLO)], 0.0)
    manager.submit([EmbedQuery(3, 20, SLO), EmbedQuery(4, 20, SLO)], 0.0)  # 3/6 + 2/4: exactly full
    with pytest.raises(CapacityError):
        manager.submit([EmbedQuery(5, 1, SLO)], 0.0)
    with pytest.raises(CapacityError) as never:  # depth 0
        manager.submit([EmbedQuery(6, 300, SLO)], 0.0)
    assert never.value.retry_after is None
    with pytest.raises(RequestError, match="513 tokens"):
        manager.submit([EmbedQuery(7, 513, SLO)], 0.0)


def test_bulk_work_leaves_room() -> None:
    manager = QueueManager([spec("gpu", 8)], ANY)
    manager.submit([EmbedQuery(i, 75) for i in range(4)], 0.0)
    with pytest.raises(CapacityError):
        manager.submit([EmbedQuery(4, 75)], 0.0)
    manager.submit(queries(4, 10), 0.0)


def test_a_failed_batch_is_halved_until_the_query_that_fails_is_alone() -> None:
    manager = QueueManager([spec("gpu", 16)], ANY, arrival="closed")
    all_of_them = queries(16)
    manager.submit(all_of_them, 0.0)
    done, failed, runs = [], [], 0
    while batch := manager.take("gpu", 0.0):
        runs += 1
        bad = any(query.number == 11 for query in batch.queries)
        ended = manager.fail(batch) if bad else manager.complete(batch)
        (failed if bad else done).extend(query.number for query in ended)
        check_integrity(manager)
    assert failed == [11]
    assert sorted(done) == [n for n in range(16) if n != 11]
    assert sum(manager._queues["gpu"].held) == 0
    assert runs <= 16


def test_an_instance_that_dies_loses_nothing_but_the_query_it_dies_of() -> None:
    manager = QueueManager([spec("cpu", 64, accelerator=False)], ANY, arrival="closed")
    manager.submit(queries(64), 0.0)
    done, failed, deaths = [], [], 0
    while batch := manager.take("cpu", 0.0):
        deadly = any(query.number == 40 for query in batch.queries)
        deaths += deadly
        ended = manager.lose(batch) if deadly else manager.complete(batch)
        (failed if deadly else done).extend(query.number for query in ended)
    assert failed == [40]
    assert deaths == 3
    assert len(done) == 63


def test_cancelled_queries_leave_at_once_or_stay_counted_until_their_batch_ends() -> None:
    manager = pair(arrival="closed")
    first, second = queries(2)
    manager.submit([first], 0.0)
    batch = manager.take("gpu", 0.0)
    manager.submit([second], 0.0)
    assert batch is not None
    assert manager.cancel(second) and sum(manager._queues["gpu"].held) == 1
    assert manager.cancel(first) and sum(manager._queues["gpu"].held) == 1
    assert manager.complete(batch) == ()
    assert not manager.cancel(first)
    assert len(manager._alive) == sum(manager._queues["gpu"].held) == 0


def test_depths_may_fall_below_what_is_held() -> None:
    manager = QueueManager([spec("gpu", 8)], ANY, arrival="closed")
    manager.submit(queries(8), 0.0)
    manager.set_queue(spec("gpu", 2))
    check_integrity(manager)
    with pytest.raises(CapacityError):
        manager.submit(queries(1, 10), 0.0)
    batch = manager.take("gpu", 0.0)
    assert batch is not None
    manager.complete(batch)
    manager.submit(queries(2, 20), 0.0)
    check_integrity(manager)


def test_a_closed_device_takes_nothing_until_it_is_opened() -> None:
    manager = QueueManager([spec("gpu", 3), spec("npu", 2)], ANY, arrival="closed")
    manager.submit(queries(2), 0.0)
    manager.close_device("npu", 0.0)
    assert place(manager, 2) == ["gpu", "BUSY"]
    manager.open_device("npu")
    late = queries(1, 10)
    manager.submit(late, 0.0)
    assert late[0].device == "npu"


def test_what_waits_on_a_device_that_is_closed_goes_where_there_is_room() -> None:
    manager = pair(arrival="closed")
    waiting = queries(3)
    manager.submit(waiting, 0.0)
    manager.close_device("gpu", 0.0)
    assert [query.device for query in waiting] == ["cpu", "cpu", "gpu"]  # the CPU holds two
    check_integrity(manager)
    manager.open_device("gpu")
    batch = manager.take("gpu", 0.0)
    assert batch is not None and batch.queries == (waiting[2],)
    assert manager.spilled == {"cpu": 2}


def test_a_device_that_is_closed_is_worth_asking_for_again_but_not_one_that_is_gone() -> None:
    manager = QueueManager([spec("gpu", 3)], ANY)
    manager.submit(queries(2), 0.0)
    manager.close_device("gpu", 0.0)
    for target in (SLO, math.inf):
        with pytest.raises(CapacityError) as busy:
            manager.submit(queries(1, 10, target=target), 0.0)
        assert busy.value.retry_after == STARTING
    waiting = manager.close_device("gpu", 0.0, gone=True)
    assert len(waiting) == 2
    manager.set_queue(spec("gpu", 3))  # by who has not heard of it
    manager.open_device("gpu")
    for target in (SLO, math.inf):
        with pytest.raises(DeviceError, match="no device is left"):
            manager.submit(queries(1, 10, target=target), 0.0)
    check_integrity(manager)


def test_free_instances_share_what_waits() -> None:
    manager = QueueManager([replace(spec("gpu", 9), instances=3)], ANY, arrival="closed")
    manager.submit(queries(9), 0.0)
    batches = [manager.take("gpu", 0.0) for _ in range(4)]
    assert [len(b.queries) if b else None for b in batches] == [3, 3, 3, None]


def serve_bulk(manager: QueueManager, device: str) -> list[int]:
    """Run what waits, and what there is room for then; return the numbers of what has run."""
    done = []
    while (batch := manager.take(device, 0.0)) is not None:
        done += [query.number for query in manager.complete(batch)]
        assert manager.refill(0.0) == []
    return done


def test_work_without_an_slo_waits_for_room_elsewhere_when_its_device_is_given_up() -> None:
    specs = [spec("npu", 2), spec("cpu", 9, SLOW, accelerator=False)]
    manager = QueueManager(specs, ANY, arrival="closed")
    manager.submit(queries(2, target=9.0), 0.0)  # so the accelerator is full
    manager.add_bulk(queries(7, 10, target=math.inf))
    assert manager.refill(0.0) == [] and sum(manager._queues["cpu"].held) > 1
    assert manager.close_device("cpu", 0.0, gone=True) == ()
    assert sum(manager._queues["cpu"].held) == 0
    assert sorted(serve_bulk(manager, "npu")) == [0, 1, *range(10, 17)]
    assert not manager.live()


def test_work_without_an_slo_ends_when_no_device_is_left() -> None:
    manager = QueueManager([spec("npu", 4)], ANY, arrival="closed")
    early, late = queries(9, target=math.inf), queries(1, 10, target=math.inf)
    manager.add_bulk(early)
    assert manager.refill(0.0) == []
    lost = manager.close_device("npu", 0.0, gone=True)
    refused = [query for query, _ in manager.refill(0.0)]
    assert {*lost, *refused} == set(early)
    manager.add_bulk(late)
    ((query, error),) = manager.refill(0.0)
    assert query is late[0] and "no device is left" in str(error)
    assert to_api_error(error, draining=False).status == 500, "of the request nothing is wrong"
    assert not manager.live()
