"""The queue manager: Algorithm 1, what is admitted, and what becomes of batches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dovetail.ir.errors import CapacityError, RequestError, SpecError
from dovetail.runtime.embedding.line import Line
from dovetail.runtime.embedding.query import Query, QueueSpec, length_classes
from dovetail.runtime.embedding.queues import STARTING, QueueManager

CLASSES = (32, 128, 512)
ANY = length_classes([512])
FAST, SLOW = Line(0.01, 0.05), Line(0.05, 0.06)
SLO = 1.0


def spec(name: str, depth: int, line: Line = FAST, *, accelerator: bool = True) -> QueueSpec:
    return QueueSpec(name, accelerator, (depth,), (line,))


def pair(**options: object) -> QueueManager:
    specs = [spec("gpu", 3), spec("cpu", 2, SLOW, accelerator=False)]
    return QueueManager(specs, ANY, **options)  # type: ignore[arg-type]


def queries(count: int, start: int = 0, *, target: float = SLO, tokens: int = 75) -> list[Query]:
    return [Query(number, tokens, target) for number in range(start, start + count)]


def place(manager: QueueManager, count: int, now: float = 0.0) -> list[str]:
    """Submit one by one; the devices of those that were taken, `BUSY` for the others."""
    answers = []
    for query in queries(count, 1000, target=now + SLO):
        try:
            manager.submit([query], now)
            answers.append(query.device)
        except CapacityError:
            answers.append("BUSY")
        manager.check_integrity()
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
    assert manager.queries == 1


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
    assert manager.held("gpu") == 3


def test_all_or_none_of_a_call_is_taken() -> None:
    manager = pair(arrival="closed")
    with pytest.raises(CapacityError):
        manager.submit(queries(6), 0.0)
    manager.check_integrity()
    assert manager.queries == 0
    manager.submit(queries(5), 0.0)


def test_open_arrivals_are_admitted_by_when_all_that_waits_would_be_done() -> None:
    manager = QueueManager([spec("gpu", 100, Line(0.1, 0.2))], ANY)
    manager.submit(queries(2), 0.0)
    batch = manager.take("gpu", 0.0)
    assert batch is not None and batch.expected == pytest.approx(0.4)
    accepted = place(manager, 10, 0.15).count("gpu")
    assert accepted == 5  # a batch from 0.4 on, of 0.2 + 5 * 0.1 s, is done before 1.15
    late = Query(100, 75, target=0.15 + 5)
    with pytest.raises(CapacityError):  # would make the five that wait late
        manager.submit([late], 0.15)


def test_a_deadline_that_cannot_be_met_is_busy_at_once_and_one_that_passes_ends() -> None:
    manager = pair(arrival="closed")
    with pytest.raises(CapacityError, match="within the time") as never:
        manager.submit([Query(0, 75, SLO, deadline=0.055)], 0.0)
    assert never.value.retry_after is None
    manager.submit(queries(3, 1), 0.0)
    assert manager.take("gpu", 0.0) is not None
    waiting = Query(9, 75, SLO, deadline=0.3)
    manager.submit([waiting], 0.0)
    assert waiting.device in {"gpu", "cpu"}
    assert manager.next_deadline() == 0.3
    assert manager.expire(0.29) == ()
    assert manager.expire(0.31) == (waiting,)
    manager.check_integrity()


def test_priority_goes_ahead_but_not_for_ever() -> None:
    manager = QueueManager([replace(spec("gpu", 100), token_budget=75)], ANY, arrival="closed")
    manager.submit([Query(0, 75, 1.0), Query(1, 75, 1.0, priority=2)], 0.0)
    manager.submit([Query(2, 75, 1.0 + 0.6, priority=2)], 0.6)
    order = []
    while batch := manager.take("gpu", 1.0):
        order += [query.number for query in batch.queries]
        manager.complete(batch)
    assert order == [1, 0, 2]


def test_a_class_of_long_queries_fills_more_of_a_device() -> None:
    line = (FAST, FAST, FAST)
    manager = QueueManager(
        [QueueSpec("gpu", True, (6, 4, 0), line)], length_classes(CLASSES), arrival="closed"
    )
    manager.submit([Query(0, 20, SLO), Query(1, 100, SLO), Query(2, 100, SLO)], 0.0)
    manager.submit([Query(3, 20, SLO), Query(4, 20, SLO)], 0.0)  # 3/6 + 2/4: exactly full
    with pytest.raises(CapacityError):
        manager.submit([Query(5, 1, SLO)], 0.0)
    with pytest.raises(CapacityError) as never:  # depth 0
        manager.submit([Query(6, 300, SLO)], 0.0)
    assert never.value.retry_after is None
    with pytest.raises(RequestError, match="513 tokens"):
        manager.submit([Query(7, 513, SLO)], 0.0)


def test_bulk_work_leaves_room() -> None:
    manager = QueueManager([spec("gpu", 8)], ANY)
    manager.submit([Query(i, 75) for i in range(4)], 0.0)
    with pytest.raises(CapacityError):
        manager.submit([Query(4, 75)], 0.0)
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
        manager.check_integrity()
    assert failed == [11]
    assert sorted(done) == [n for n in range(16) if n != 11]
    assert manager.held("gpu") == 0
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
    assert manager.cancel(second) and manager.held("gpu") == 1
    assert manager.cancel(first) and manager.held("gpu") == 1
    assert manager.complete(batch) == ()
    assert not manager.cancel(first)
    assert manager.queries == manager.held("gpu") == 0


def test_depths_may_fall_below_what_is_held() -> None:
    manager = QueueManager([spec("gpu", 8)], ANY, arrival="closed")
    manager.submit(queries(8), 0.0)
    manager.set_queue(spec("gpu", 2))
    manager.check_integrity()
    with pytest.raises(CapacityError):
        manager.submit(queries(1, 10), 0.0)
    batch = manager.take("gpu", 0.0)
    assert batch is not None
    manager.complete(batch)
    manager.submit(queries(2, 20), 0.0)
    manager.check_integrity()


def test_a_closed_device_takes_nothing_and_gives_back_what_waits() -> None:
    manager = QueueManager([spec("gpu", 3), spec("npu", 2)], ANY, arrival="closed")
    manager.submit(queries(5), 0.0)
    manager.close_device("npu", 0.0)
    waiting = manager.drain_device("npu")
    assert len(waiting) == 2
    assert place(manager, 1) == ["BUSY"]
    manager.open_device("npu")
    manager.submit(waiting, 0.0)
    assert {query.device for query in waiting} == {"npu"}


def test_what_waits_on_a_device_that_is_closed_goes_where_there_is_room() -> None:
    manager = pair(arrival="closed")
    waiting = queries(3)
    manager.submit(waiting, 0.0)
    manager.close_device("gpu", 0.0)
    assert [query.device for query in waiting] == ["cpu", "cpu", "gpu"]  # the CPU holds two
    manager.check_integrity()
    manager.open_device("gpu")
    batch = manager.take("gpu", 0.0)
    assert batch is not None and batch.queries == (waiting[2],)
    assert manager.spilled() == {"cpu": 2}


def test_a_device_that_is_closed_is_worth_asking_for_again_but_not_one_that_is_gone() -> None:
    manager = QueueManager([spec("gpu", 3)], ANY)
    manager.submit(queries(2), 0.0)
    manager.close_device("gpu", 0.0)
    for target in (SLO, math.inf):
        with pytest.raises(CapacityError) as busy:
            manager.submit(queries(1, 10, target=target), 0.0)
        assert busy.value.retry_after == STARTING
    waiting = manager.abandon_device("gpu")
    assert len(waiting) == 2
    manager.set_queue(spec("gpu", 3))  # by who has not heard of it
    manager.open_device("gpu")
    for target in (SLO, math.inf):
        with pytest.raises(CapacityError, match="no device is left") as gone:
            manager.submit(queries(1, 10, target=target), 0.0)
        assert gone.value.retry_after is None
    manager.check_integrity()


def test_free_instances_share_what_waits() -> None:
    manager = QueueManager([replace(spec("gpu", 9), instances=3)], ANY, arrival="closed")
    manager.submit(queries(9), 0.0)
    batches = [manager.take("gpu", 0.0) for _ in range(4)]
    assert [len(b.queries) if b else None for b in batches] == [3, 3, 3, None]


@pytest.mark.parametrize(
    ("specs", "classes"),
    [([], ANY), ([spec("a", 1), spec("a", 1)], ANY), ([spec("a", 1)], length_classes([1, 2]))],
)
def test_queues_that_make_no_sense_are_refused(specs: list[QueueSpec], classes: tuple) -> None:
    with pytest.raises(SpecError):
        QueueManager(specs, classes)
