"""The service on threads and processes: order, BUSY, faults that disturb nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest

from dovetail.ir.errors import CapacityError, DeviceError, DovetailError, RequestError
from dovetail.runtime.embed.device_queue import QueryBatch, QueueSpec, length_classes
from dovetail.runtime.embed.encoder import EmbeddingModel, EncoderSource
from dovetail.runtime.embed.line import Line
from dovetail.runtime.embed.process import ProcessInstance
from dovetail.runtime.embed.queue import QueueManager
from dovetail.runtime.embed.service import EmbeddingService
from tests.processes import stop
from tests.runtime.embed.integrity import check_integrity, held
from tests.runtime.embed.toy_encoders import DEADLY, FATAL, HEAVY, WRONG, Small, Toy, vector

WAIT = 60.0
LINE = Line(1e-4, 1e-4)
ANY = length_classes([512])


class Gated(Toy):
    """Runs a batch only when the gate is open; says when it has begun one.

    firsts: the first id of each query that it has run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.begun = threading.Event(), threading.Event()
        self.firsts: list[int] = []

    def embed_tokens(
        self, ids: Sequence[np.ndarray], types: Sequence[np.ndarray] | None = None
    ) -> np.ndarray:
        self.begun.set()
        assert self.gate.wait(WAIT)
        self.firsts += [int(each[0]) for each in ids]
        return super().embed_tokens(ids, types)


def encode(texts: Sequence[str]) -> list[np.ndarray]:
    return [ids(*[1, *map(ord, text), 2][:512]) for text in texts]


def serve(
    depths: dict[str, int], instances: dict[str, EmbeddingModel], **options: object
) -> EmbeddingService:
    specs = [QueueSpec(n, n != "cpu", (depth,), (LINE,)) for n, depth in depths.items()]
    manager = QueueManager(specs, ANY, arrival="closed")
    return EmbeddingService(
        {name: [{"": each}] for name, each in instances.items()},
        manager,
        slo=30.0,
        **options,  # type: ignore[arg-type]
    )


def alone(encoder: Toy, depth: int = 64, **options: object) -> EmbeddingService:
    return serve({"cpu": depth}, {"cpu": encoder}, **options)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def embed(service: EmbeddingService, queries: Sequence[np.ndarray]) -> np.ndarray:
    return service.submit(queries, wait=True).result(WAIT)


def expected(texts: Sequence[str]) -> np.ndarray:
    return np.stack([vector(each) for each in encode(texts)])


def test_vectors_come_in_the_order_of_the_texts_from_both_devices() -> None:
    accelerator = Toy()
    devices = {"npu": accelerator, "cpu": Toy()}
    texts = [f"text {i * 7 % 100}" + "x" * (i % 50) for i in range(90)]
    with serve({"npu": 60, "cpu": 40}, devices) as service:
        job = service.submit(encode(texts))
        np.testing.assert_array_equal(job.result(WAIT), expected(texts))
        assert {query.device for query in job.queries} == {"npu", "cpu"}
        assert np.isfinite(job.seconds).all()
        assert held(service) == {"npu": 0, "cpu": 0}


def test_a_full_service_is_busy_at_once_and_waiting_calls_get_room() -> None:
    encoder = Gated()
    with alone(encoder, depth=2) as service:
        job = service.submit([ids(1), ids(2)])
        with pytest.raises(CapacityError) as busy:
            service.submit([ids(3)])
        assert busy.value.retry_after is not None
        later = service.submit([ids(4)] * 5, wait=True)
        encoder.gate.set()
        job.result(WAIT)
        assert len(later.result(WAIT)) == 5
        assert held(service) == {"cpu": 0}


def test_async_calls_run_beside_each_other_and_a_cancelled_one_leaves_the_queue() -> None:
    encoder = Gated()

    async def work() -> None:
        first = asyncio.wrap_future(service.submit(encode(["a", "b"])).future)
        while not held(service)["cpu"]:
            await asyncio.sleep(0)
        await asyncio.to_thread(encoder.begun.wait, WAIT)
        second = asyncio.wrap_future(service.submit(encode(["c"])).future)
        while held(service)["cpu"] < 3:
            await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        while held(service)["cpu"] > 2:
            await asyncio.sleep(0)
        encoder.gate.set()
        np.testing.assert_array_equal(await first, expected(["a", "b"]))

    with alone(encoder) as service:
        asyncio.run(work())
        assert encoder.calls == [2]


def test_a_cancelled_job_tells_who_waits_for_it() -> None:
    encoder = Gated()
    with alone(encoder) as service:
        job = service.submit([ids(1)])
        job.future.cancel()
        with pytest.raises(CancelledError):
            job.result(WAIT)
        encoder.gate.set()
        assert len(embed(service, [ids(2)])) == 1
        assert held(service) == {"cpu": 0}


@pytest.mark.parametrize(
    ("token", "error", "says"),
    [
        (HEAVY, DeviceError, "out of memory"),
        (WRONG, RequestError, "not finite"),
        (FATAL, DeviceError, "encoder failed"),
    ],
)
def test_a_fault_is_the_one_query_s_that_causes_it(
    token: int, error: type[DovetailError], says: str
) -> None:
    encoder = Gated()
    with alone(encoder) as service:
        first = service.submit([ids(1)])
        assert encoder.begun.wait(WAIT)  # so that all others share a batch
        bad = service.submit([ids(5, token)])
        others = [service.submit([ids(10, n)]) for n in range(20)]
        encoder.gate.set()
        with pytest.raises(error, match=says):
            bad.result(WAIT)
        for n, job in enumerate([first, *others]):
            wanted = vector([10, n - 1]) if n else vector([1])
            np.testing.assert_array_equal(job.result(WAIT)[0], wanted)
        assert held(service) == {"cpu": 0}


def test_an_accelerator_out_of_memory_runs_the_batch_in_parts() -> None:
    small = Small(100)
    with serve({"npu": 64, "cpu": 2}, {"npu": small, "cpu": Toy()}) as service:
        batch = [ids(*range(30))] * 16
        np.testing.assert_array_equal(embed(service, batch), np.stack([vector(range(30))] * 16))
        with pytest.raises(DeviceError, match="out of memory"):
            embed(service, [ids(*range(200))])


def test_a_killed_cpu_process_is_started_again_and_loses_no_query(
    toy_source: Callable[..., EncoderSource],
) -> None:
    process = ProcessInstance(toy_source("toy"))
    with serve({"cpu": 60}, {"cpu": process}) as service:
        old = process.pid
        os.kill(old, signal.SIGKILL)
        queries = [ids(3, n) for n in range(40)]
        rows = embed(service, queries)
        np.testing.assert_array_equal(rows, np.stack([vector(each) for each in queries]))
        assert process.pid != old
        with pytest.raises(DeviceError, match="as others before it"):
            service.submit([ids(DEADLY)]).result(WAIT)
        assert len(embed(service, queries)) == 40
        assert held(service) == {"cpu": 0}


def test_an_idle_process_that_dies_is_started_again_at_once(
    toy_source: Callable[..., EncoderSource],
) -> None:
    process = ProcessInstance(toy_source("toy"))
    with serve({"cpu": 60}, {"cpu": process}) as service:
        for _ in range(2):  # its successor, too
            old = process.pid
            os.kill(old, signal.SIGKILL)
            while process.pid == old or not service.ready:
                os.sched_yield()  # nobody asks for anything
        assert len(embed(service, [ids(1)])) == 1


def test_a_process_that_hangs_is_started_again_and_loses_no_query(
    toy_source: Callable[..., EncoderSource],
) -> None:
    process = ProcessInstance(toy_source("toy"))
    with serve({"cpu": 60}, {"cpu": process}) as service:
        old = process.pid
        stop(old)
        queries = [ids(3, n) for n in range(40)]
        np.testing.assert_array_equal(
            embed(service, queries), np.stack([vector(each) for each in queries])
        )
        assert process.pid != old
        with pytest.raises(ProcessLookupError):
            os.kill(old, 0)


def test_a_call_beyond_all_queues_is_told_that_waiting_does_not_help() -> None:
    with alone(Toy(), depth=4) as service:
        with pytest.raises(CapacityError, match="9 texts at once are more") as error:
            service.submit([ids(1)] * 9)
        assert error.value.retry_after is None
        assert held(service) == {"cpu": 0}
        assert len(embed(service, [ids(1)] * 9)) == 9


def test_calls_without_an_slo_take_turns() -> None:
    encoder = Gated()
    with alone(encoder, depth=8) as service:
        long = service.submit([ids(1)] * 400, wait=True)
        assert encoder.begun.wait(WAIT)
        short = service.submit([ids(2)], wait=True)
        encoder.gate.set()
        assert len(short.result(WAIT)) == 1
        assert len(long.result(WAIT)) == 400
    assert encoder.firsts.index(2) < 100


def test_a_device_that_cannot_be_started_again_is_given_up(
    toy_source: Callable[..., EncoderSource], tmp_path: Path
) -> None:
    process = ProcessInstance(toy_source("once", path=str(tmp_path / "started")))
    gated = Gated()
    with serve({"npu": 2, "cpu": 9}, {"npu": gated, "cpu": process}) as service:
        service.submit([ids(1)] * 2)
        with pytest.raises(DeviceError, match="no other device has room"):
            service.submit([ids(DEADLY)]).result(WAIT)
        assert service.manager.depths() == {"npu": (2,), "cpu": (0,)}
        assert service.ready  # the other one serves
        gated.gate.set()
        assert len(embed(service, [ids(n) for n in range(50)])) == 50


def test_queries_of_no_or_too_many_tokens_are_refused_with_their_call() -> None:
    with alone(Toy()) as service:
        assert embed(service, []).shape == (0, Toy.dim)
        for wrong in ([], [1] * 513):
            with pytest.raises(RequestError, match="tokens"):
                service.submit([ids(1), ids(*wrong)])
            with pytest.raises(RequestError, match="tokens"):
                service.submit([ids(*wrong)], wait=True)
        assert held(service) == {"cpu": 0}


def test_segments_go_with_their_queries(toy_source: Callable[..., EncoderSource]) -> None:
    queries = [ids(5, 6, 7), ids(8), ids(9, 1)]
    types = [ids(0, 1, 1), ids(1), ids(0, 0)]
    wanted = np.stack([vector(q + t) for q, t in zip(queries, types, strict=True)])
    devices: dict[str, EmbeddingModel] = {
        "npu": Toy(),
        "cpu": ProcessInstance(toy_source("toy")),
    }
    with serve({"npu": 1, "cpu": 9}, devices) as service:
        job = service.submit(queries, types)
        np.testing.assert_array_equal(job.result(WAIT), wanted)
        assert {query.device for query in job.queries} == {"npu", "cpu"}
        np.testing.assert_array_equal(embed(service, queries[:1]), [vector(queries[0])])


def test_more_texts_than_fit_run_in_turns_and_leave_room_for_others() -> None:
    with alone(Toy(), depth=500) as service:
        texts = [f"{i}" for i in range(5_000)]
        job = service.submit(encode(texts), wait=True)
        assert len(service.submit([ids(7)]).result(WAIT)) == 1
        rows = job.result(WAIT)
        np.testing.assert_array_equal(rows[::997], expected(texts[::997]))
        assert held(service) == {"cpu": 0}


@pytest.mark.long
def test_a_hundred_thousand_texts_in_one_call() -> None:
    texts = [f"{i % 5000}" for i in range(100_000)]
    with alone(Toy(), depth=500) as service:
        np.testing.assert_array_equal(embed(service, encode(texts)), expected(texts))


def test_an_observer_that_fails_ends_no_device(caplog: pytest.LogCaptureFixture) -> None:
    def observe(batch: QueryBatch, seconds: float) -> None:
        raise ZeroDivisionError

    with alone(Toy(), observe=observe) as service:
        for _ in range(2):
            assert len(embed(service, [ids(1)])) == 1
    assert "observer of its batches failed" in caplog.text


def test_closing_fails_what_is_queued() -> None:
    encoder = Gated()
    service = alone(encoder, depth=4)
    running, bulk = service.submit([ids(1)]), service.submit([ids(2)] * 9, wait=True)
    assert encoder.begun.wait(WAIT)
    closer = threading.Thread(target=service.close)
    closer.start()
    for job in (running, bulk):
        with pytest.raises(RequestError, match="closed"):
            job.result(WAIT)
    encoder.gate.set()
    closer.join(WAIT)
    assert not closer.is_alive()
    with pytest.raises(RequestError, match="closed"):
        embed(service, [ids(1)])
    service.close()


def test_many_callers_at_once_end_with_depths_of_zero() -> None:
    """Submits, cancels, faults and BUSY from 8 threads; every call ends, nothing stays counted."""
    devices: dict[str, EmbeddingModel] = {
        "npu": Toy(),
        "cpu": Toy(),
    }
    outcomes: list[str] = []

    def call(seed: int) -> None:
        draw = np.random.default_rng(seed)
        for turn in range(60):
            tokens = [int(draw.choice([1, 2, 3, HEAVY], p=[0.4, 0.3, 0.28, 0.02])), seed, turn]
            batch = [ids(*tokens)] * int(draw.integers(1, 6))
            try:
                job = service.submit(batch)
                if draw.random() < 0.2:
                    job.future.cancel()
                rows = job.result(WAIT)
                assert all((row == vector(tokens)).all() for row in rows)
                outcomes.append("done")
            except (CapacityError, DeviceError, CancelledError) as error:
                outcomes.append(type(error).__name__)

    with serve({"npu": 12, "cpu": 6}, devices) as service:
        threads = [threading.Thread(target=call, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        assert len(outcomes) == 8 * 60
        assert outcomes.count("done") > 100
        embed(service, [ids(1)])  # what was cancelled while it ran has ended by now
        check_integrity(service.manager)
    assert held(service) == {"npu": 0, "cpu": 0}
