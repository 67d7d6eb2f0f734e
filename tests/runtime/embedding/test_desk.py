"""Calls over the queue manager: what becomes of work without an SLO when a device goes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dovetail.ir.errors import CapacityError, DeviceError
from dovetail.runtime.embedding.desk import Desk
from dovetail.runtime.embedding.job import EmbedJob, Terms, make_queries, settle
from dovetail.runtime.embedding.line import Line
from dovetail.runtime.embedding.query import QueueSpec, length_classes
from dovetail.runtime.embedding.queues import QueueManager

NUMBERS = itertools.count()


def desk_of(**depths: int) -> Desk:
    specs = [QueueSpec(n, n != "cpu", (depth,), (Line(0.1, 0.1),)) for n, depth in depths.items()]
    return Desk(QueueManager(specs, length_classes([512]), arrival="closed"))


def call(count: int, target: float = float("inf")) -> EmbedJob:
    job = EmbedJob(count, 1, 0.0)
    texts = [np.ones(8, np.int32)] * count
    job.queries = make_queries(job, texts, None, Terms("", target), NUMBERS)
    return job


def test_work_without_an_slo_waits_for_room_elsewhere_when_its_device_is_given_up() -> None:
    desk = desk_of(npu=2, cpu=9)
    desk.manager.submit(call(2, target=9.0).queries, 0.0)  # so the accelerator is full
    bulk = call(7)
    assert desk.add_bulk(bulk.queries, 0.0) == []
    assert desk.manager.held("cpu") > 1
    assert desk.give_up("cpu", 0.0) == []
    assert desk.manager.held("cpu") == 0 and not bulk.failed
    done: list[EmbedJob] = []
    while (batch := desk.manager.take("npu", 0.0)) is not None:
        done += desk.complete(batch, {}, 0.0)
    assert bulk in done and not bulk.failed and desk.idle


def test_work_without_an_slo_ends_when_no_device_is_left() -> None:
    desk = desk_of(npu=4)
    early, late = call(9), call(1)
    assert desk.add_bulk(early.queries, 0.0) == []
    settle(desk.give_up("npu", 0.0))
    with pytest.raises(DeviceError, match="no other device has room"):
        early.result(0)
    settle(desk.add_bulk(late.queries, 0.0))
    with pytest.raises(CapacityError, match="no device is left"):
        late.result(0)
    assert desk.idle
