"""The engine's process: orders are read at once, however many come; a busy one is no hang."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from dovetail.runtime.artifact import open_artifact
from dovetail.runtime.child.framing import Channel, pack_value
from dovetail.runtime.child.watch import PATIENCE, Progress, Watch
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.hosting.open_engine import open_engine
from dovetail.runtime.hosting.wire import Ask, Drop, Order, Record, StepReport, Submit
from dovetail.runtime.hosting.worker import GATHER, WARM_ANSWER, EngineWorker, take_order, warm_up
from dovetail.runtime.machine.kv_file import KvBlocks
from dovetail.runtime.schedule.request import SamplingParams
from dovetail.runtime.text import masks
from dovetail.topology.hardware import read_hardware


class Crowded(EngineWorker):
    """A worker at which requests wait, whatever comes; keeps the orders."""

    def __init__(self) -> None:
        self.taken: list[Order] = []

    crowded = True

    def take(self, order: Order) -> None:
        self.taken.append(order)


def test_all_that_has_come_is_taken_before_more_gathers() -> None:
    ours, theirs = socket.socketpair()
    opened: Future[EngineWorker] = Future()
    worker = Crowded()
    opened.set_result(worker)
    orders: list[Order] = [Drop((number,)) for number in range(200)]
    found: list[tuple[float, int]] = []

    def hang_up(seconds: float) -> None:
        found.append((seconds, len(worker.taken)))
        ours.close()

    with ours, theirs:
        for order in orders:
            ours.sendall(pack_value(order))
        channel, kind = Channel(theirs), Order
        for order in channel.messages(kind):  # type: ignore[arg-type]
            take_order(channel, opened, order, hang_up)
    assert worker.taken == orders
    assert found == [(GATHER, len(orders))], "(seconds, orders taken before) of each sleep"


def test_an_engine_is_warm_and_nothing_tells_of_it(make_artifact: Callable[..., Path]) -> None:
    hardware = read_hardware()
    artifact = open_artifact(make_artifact(), hardware)
    engine, cold = (open_engine(artifact, hardware, EngineOptions()) for _ in range(2))
    warm_up(engine)
    scheduler = engine.scheduler
    assert scheduler.plans >= WARM_ANSWER, "a prompt and an answer were computed"
    assert engine.executor.buffers.arrays["positions"][0] > 0
    assert (
        not scheduler.busy and engine.scheduler.pool.free_blocks == engine.scheduler.pool.n_blocks
    )
    assert scheduler.answer_tokens is None
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    answers = []
    for each in (engine, cold):
        (request,) = each.submit([0] * 30, params)
        while each.scheduler.busy:
            each.step()
        assert request.metrics.cached_tokens == 0, "no block of the warm-up is shared"
        answers.append(request.output)
        each.close()
    assert answers[0] == answers[1]


def test_the_warm_up_leaves_nothing_in_a_file(
    make_artifact: Callable[..., Path], tmp_path: Path
) -> None:
    options = EngineOptions(kv_file=str(tmp_path / "kv"), kv_file_bytes=1 << 16)
    hardware = read_hardware()
    engine = open_engine(open_artifact(make_artifact(), hardware), hardware, options)
    warm_up(engine)
    file = engine.scheduler.pool.file
    assert file is not None and len(file) == 0
    engine.close()


def test_kv_on_its_way_to_a_slow_disk_and_back_is_no_hang(
    make_artifact: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block counts as progress, however many a step keeps or finds."""
    seen: dict[str, list[float]] = {"read": [], "write": []}
    progress, hardware = Progress(), read_hardware()
    for name, turns in seen.items():
        copy = getattr(KvBlocks, name)

        def note(*given: Any, copy: Any = copy, turns: list[float] = turns) -> Any:
            turns.append(progress.read(busy=True).turns)
            return copy(*given)

        monkeypatch.setattr(KvBlocks, name, note)
    artifact = open_artifact(make_artifact(), hardware)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for _ in range(2):
            options = EngineOptions(kv_file=str(tmp_path / "kv"), kv_file_bytes=1 << 16)
            engine = open_engine(artifact, hardware, options)
            EngineWorker(Channel(theirs), engine, progress)
            engine.submit([3] * 100, SamplingParams(max_tokens=2))
            while engine.scheduler.busy:
                engine.step()
            engine.close()
    for turns in seen.values():
        assert len(turns) == len(set(turns)) == 6


def test_what_is_recorded_already_goes_on_and_what_is_not_stays_so(
    make_artifact: Callable[..., Path],
) -> None:
    """An app asks twice where its process was started just then."""
    hardware = read_hardware()
    engine = open_engine(open_artifact(make_artifact(), hardware), hardware, EngineOptions())
    ours, theirs = socket.socketpair()
    worker, told = EngineWorker(Channel(theirs), engine, Progress()), list[int]()
    with ours, theirs:
        for number, on in enumerate((True, True, False, False)):
            worker.take(Record(on=on, ticket=number))
            assert (engine.recorder is not None) == on
        for report in Channel(ours).messages(StepReport):
            told += report.tickets
            if len(told) == 4:
                break
        assert told == [0, 1, 2, 3]
        worker._loop.close()


def test_a_small_pool_is_warmed_with_what_fits(make_artifact: Callable[..., Path]) -> None:
    hardware = read_hardware()
    options = EngineOptions(kv_blocks=1)
    engine = open_engine(open_artifact(make_artifact(), hardware), hardware, options)
    warm_up(engine)  # as many tokens as one block takes
    assert engine.scheduler.pool.free_blocks == 1
    engine.close()


def test_a_grammar_that_takes_long_to_read_is_no_hang(
    make_artifact: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, compile_one = threading.Event(), masks.Grammars._compile

    def wait(self: masks.Grammars, grammar: str) -> object:
        gate.wait()
        return compile_one(self, grammar)

    monkeypatch.setattr(masks.Grammars, "_compile", wait)
    hardware = read_hardware()
    engine = open_engine(open_artifact(make_artifact(), hardware), hardware, EngineOptions())
    ours, theirs = socket.socketpair()
    progress = Progress()
    worker = EngineWorker(Channel(theirs), engine, progress)
    messages = Channel(ours).messages(StepReport)

    def ask(number: int, grammar: str = "") -> None:
        params = SamplingParams(max_tokens=2, grammar=grammar)
        worker.take(Submit((number,), Ask([[1, 2]], params, 0)))

    def await_end(number: int) -> None:
        assert any(u.number == number and u.end for report in messages for u in report.updates)

    def look() -> str:
        watch = Watch()
        return "".join(watch.look(n, progress.read(busy=True)) for n in range(4 * int(PATIENCE)))

    with ours, theirs:
        ask(0, 'start: "a"')
        assert look() == ""
        ask(1)
        await_end(1)
        assert look() == "", "other requests ended meanwhile"
        gate.set()
        await_end(0)
        worker._loop.close()
