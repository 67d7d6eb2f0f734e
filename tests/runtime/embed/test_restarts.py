"""Devices that die with nothing to do, are started again, or are given up."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dovetail.ir.errors import CapacityError, DeviceError, RequestError
from dovetail.runtime.child.watch import STARTS
from dovetail.runtime.embed.device_queue import QueueSpec
from dovetail.runtime.embed.encoder import EncoderSource
from dovetail.runtime.embed.line import Line
from dovetail.runtime.embed.process import ProcessInstance
from dovetail.runtime.embed.queue import QueueManager
from dovetail.runtime.embed.service import EmbeddingService, Models
from tests.runtime.embed.integrity import held
from tests.runtime.embed.test_service import ANY, LINE, WAIT, embed, ids, serve
from tests.runtime.embed.toy_encoders import DEADLY, Toy


@pytest.fixture
def given_up() -> Iterator[threading.Event]:
    """Is set when the service says that it has given up a device."""
    event, log = threading.Event(), logging.getLogger("dovetail")

    def note(record: logging.LogRecord) -> bool:
        if "no longer used" in record.getMessage():
            event.set()
        return True

    log.addFilter(note)
    yield event
    log.removeFilter(note)


def test_an_idle_device_that_cannot_be_started_again_gets_nothing_more(
    toy_source: Callable[..., EncoderSource], tmp_path: Path, given_up: threading.Event
) -> None:
    process = ProcessInstance(toy_source("once", path=str(tmp_path / "started")))
    with serve({"npu": 2, "cpu": 9}, {"npu": Toy(), "cpu": process}) as service:
        kill(process)
        assert given_up.wait(WAIT)
        assert held(service) == {"npu": 0, "cpu": 0}  # under the lock: it is given up by now
        assert service.manager.depths() == {"npu": (2,), "cpu": (0,)}
        assert len(embed(service, [ids(n) for n in range(50)])) == 50
        specs = [replace(service.manager.spec(name), depths=(4,)) for name in ("npu", "cpu")]
        service.use(QueueManager(specs, ANY, arrival="closed"))
        assert len(embed(service, [ids(n) for n in range(50)])) == 50


def test_calls_end_when_the_only_device_is_given_up(
    toy_source: Callable[..., EncoderSource], tmp_path: Path
) -> None:
    process = ProcessInstance(toy_source("once", path=str(tmp_path / "started")))
    with serve({"npu": 4}, {"npu": process}) as service:
        with pytest.raises(DeviceError, match="no other device has room"):
            service.submit([ids(DEADLY)] * 20, wait=True).result(WAIT)
        for _ in range(2):
            with pytest.raises(DeviceError, match="no device is left"):
                embed(service, [ids(1)] * 3)


@dataclass(frozen=True)
class Gated:
    """A process whose successors wait for a gate before they serve."""

    process: ProcessInstance
    gate: Path

    @contextmanager
    def killed(self) -> Iterator[None]:
        """Kill the process; the next one is being started, and serves after the end."""
        kill(self.process)
        with self.gate.open("w"):  # once it has been opened there, too
            yield


def kill(process: ProcessInstance) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)


@pytest.fixture
def gated(toy_source: Callable[..., EncoderSource], tmp_path: Path) -> Gated:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    source = toy_source("gated", path=str(tmp_path / "begun"), gate=str(gate))
    return Gated(ProcessInstance(source), gate)


def test_a_device_that_is_started_again_takes_nothing_meanwhile(gated: Gated) -> None:
    with (
        serve({"npu": 4, "cpu": 1}, {"npu": gated.process, "cpu": Toy()}) as service,
        gated.killed(),
    ):
        job = service.submit([ids(1)])
        assert [query.device for query in job.queries] == ["cpu"]
        job.result(WAIT)


def test_a_device_too_slow_for_the_slo_does_not_stand_in_for_one_that_died(gated: Gated) -> None:
    with serve({"npu": 4, "cpu": 0}, {"npu": gated.process, "cpu": Toy()}) as service:
        assert service.ready and service.failure == ""
        with gated.killed():
            assert not service.ready and "SIGKILL" in service.failure
            with pytest.raises(CapacityError):
                service.submit([ids(1)])
            service.slo = math.inf
            assert service.ready and service.failure == ""
            assert len(embed(service, [ids(1)])) == 1


def test_a_lone_device_that_is_started_again_is_busy_and_calls_without_an_slo_wait(
    gated: Gated,
) -> None:
    with serve({"npu": 4}, {"npu": gated.process}) as service:
        with gated.killed():
            with pytest.raises(CapacityError) as busy:
                service.submit([ids(1)])
            assert busy.value.retry_after
            waiting = service.submit([ids(n) for n in range(9)], wait=True)
            assert held(service) == {"npu": 0}
        assert len(waiting.result(WAIT)) == 9
        assert len(service.submit([ids(1)]).result(WAIT)) == 1


def test_a_device_whose_processes_die_with_nothing_to_do_is_given_up(
    toy_source: Callable[..., EncoderSource], given_up: threading.Event
) -> None:
    process, seen = ProcessInstance(toy_source("toy")), set[int]()
    with serve({"npu": 4}, {"npu": process}):
        while not given_up.is_set():
            if process.ready and (pid := process.pid) is not None and pid not in seen:
                seen.add(pid)
                os.kill(pid, signal.SIGKILL)
            os.sched_yield()
        assert len(seen) == STARTS


def test_a_batch_that_is_done_makes_up_for_deaths(
    toy_source: Callable[..., EncoderSource],
) -> None:
    process = ProcessInstance(toy_source("toy"))
    with serve({"npu": 4}, {"npu": process}) as service:
        for _ in range(STARTS + 1):
            kill(process)
            assert len(embed(service, [ids(1)])) == 1


def test_a_device_is_not_given_up_while_one_of_its_instances_is_started(
    gated: Gated, toy_source: Callable[..., EncoderSource], tmp_path: Path
) -> None:
    lost = ProcessInstance(toy_source("once", path=str(tmp_path / "started")))
    queue = QueueSpec("cpu", False, (4,), (LINE,), instances=2)
    both: list[Models] = [{"": lost}, {"": gated.process}]
    with EmbeddingService({"cpu": both}, QueueManager([queue], ANY), slo=30.0) as service:
        with gated.killed():
            kill(lost)
            while not lost.given_up:
                os.sched_yield()
        assert len(embed(service, [ids(1)])) == 1


@pytest.mark.parametrize("hangs", ["batch", "start"])
def test_closing_waits_neither_for_a_batch_nor_for_a_start(
    hangs: str,
    toy_source: Callable[..., EncoderSource],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dovetail.runtime.child.launch.END_SECONDS", 0.1)
    pipe = tmp_path / "begun"
    os.mkfifo(pipe)
    process = ProcessInstance(toy_source("stuck", pipe=str(pipe), started=str(tmp_path / "once")))
    unknown = QueueSpec("cpu", False, (4,), (Line(0.0, 0.0),))  # by which a batch may take long
    service = EmbeddingService({"cpu": [{"": process}]}, QueueManager([unknown], ANY))
    job = service.submit([ids(1)]) if hangs == "batch" else None
    if job is None:
        kill(process)
    assert pipe.read_text() == "begun"
    closer = threading.Thread(target=service.close, daemon=True)
    closer.start()
    closer.join(WAIT)
    assert not closer.is_alive()
    if job is not None:
        with pytest.raises(RequestError, match="closed"):
            job.result(WAIT)
