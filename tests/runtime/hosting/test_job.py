"""A job's end reaches all who wait for it: threads and event loops, before it and at its moment."""

from __future__ import annotations

import asyncio
from concurrent.futures import InvalidStateError, ThreadPoolExecutor
from threading import Barrier

import pytest

from dovetail.ir.errors import DeviceError
from dovetail.runtime.hosting.generator import Job
from dovetail.runtime.schedule.request import Completion, Metrics, Request, SamplingParams

WAIT = 60.0
THREADS = 3


def begun() -> Job:
    job = Job(None, chunks=True)
    params = SamplingParams(max_tokens=2)
    job.begin(
        Request(
            id=1,
            tokens=[5, 6, 7],
            prompt_length=1,
            max_tokens=2,
            params=params,
            metrics=Metrics(0.0),
        )
    )
    return job


def end(job: Job) -> None:
    job.request.finish("length")
    job.end()


def test_all_threads_are_told_of_the_end_whenever_they_come() -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in range(200):
            job, together = begun(), Barrier(THREADS + 1)

            def wait(job: Job = job, together: Barrier = together) -> Completion:
                together.wait(WAIT)
                return job.result(WAIT)

            found = [pool.submit(wait) for _ in range(THREADS)]
            together.wait(WAIT)
            end(job)
            assert {each.result(WAIT).token_ids for each in found} == {(6, 7)}
            assert job.finished


def test_tasks_and_late_comers_get_the_same_end() -> None:
    job = begun()

    async def wait_twice() -> list[Completion]:
        async def wait() -> Completion:
            return await job

        tasks = [asyncio.ensure_future(wait()) for _ in range(2)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait(), 0.01)  # who leaves takes nothing from the others
        end(job)
        return await asyncio.gather(*tasks)

    first, second = asyncio.run(wait_twice())
    assert first is second is job.result()


def test_an_error_is_raised_wherever_somebody_waits() -> None:
    job = begun()
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(job.result, WAIT)
        job.fail(DeviceError("lost"))
        for late in (early.result, job.result):
            with pytest.raises(DeviceError, match="lost"):
                late(WAIT)
    with pytest.raises(DeviceError, match="lost"):
        list(job)


def test_who_stops_waiting_changes_nothing() -> None:
    job = begun()

    async def wait() -> Completion:
        return await job

    for _ in range(3):
        with pytest.raises(TimeoutError):
            job.result(0.001)
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(wait(), 0.001))
    end(job)
    assert job.result().token_ids == (6, 7)


def test_pieces_come_where_they_are_wanted_alone() -> None:
    """Who reads from the middle on gets all that came before with the first piece."""
    job, calls = begun(), list[int]()
    wanted = False
    job.watch(lambda: calls.append(1), lambda: wanted)
    job.show()
    assert len(calls) == 1
    wanted = True
    job.request.tokens.append(8)
    job.show()
    assert len(calls) == 2 and (piece := job.take()) is not None and piece.token_ids == (6, 7, 8)
    wanted = False
    end(job)
    assert len(calls) == 3 and (last := job.take()) is not None and last.finish_reason == "length"


def test_without_pieces_the_end_is_all_that_is_told() -> None:
    job, calls = Job(None, chunks=False), list[int]()
    job.begin(begun().request)
    job.watch(lambda: calls.append(1))
    job.show()
    assert len(calls) == 1 and job.take() is None
    end(job)
    assert len(calls) == 2 and (whole := job.take()) is not None and whole.token_ids == (6, 7)


def test_a_job_ends_once() -> None:
    job = begun()
    end(job)
    with pytest.raises(InvalidStateError):
        job.fail(DeviceError("lost"))
    with pytest.raises(InvalidStateError):
        job.end()
    assert job.result().token_ids == (6, 7)
