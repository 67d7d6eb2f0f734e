"""How requests and apps end before their time: cancelled, interrupted, closed, forgotten."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading

import pytest

from dovetail.ir.errors import RequestError
from dovetail.runtime.app import App, load
from dovetail.runtime.hosting.generator import Job
from dovetail.runtime.hosting.loop import EngineLoop
from dovetail.runtime.hosting.wire import Ask
from dovetail.runtime.schedule.request import SamplingParams
from tests.runtime.test_app import LONG, Answer, MakeArtifact, is_idle
from tests.runtime.throttle import Throttle


def engine_thread(app: App) -> threading.Thread:
    """Return the thread of an app that has been asked for something."""
    thread = app.generator.host._thread
    assert thread is not None
    return thread


def test_a_cancelled_job_gives_its_blocks_back_at_once(
    make_artifact: MakeArtifact, answer: Answer
) -> None:
    with load(make_artifact()) as app:
        throttle = Throttle(app)
        first, second = app.submit([1] * 40, **LONG), app.submit([2] * 20, **LONG)
        throttle.run(4)
        chunks = iter(first)
        next(chunks)
        used = app.engine.scheduler.pool.n_blocks - app.engine.scheduler.pool.free_blocks
        app.cancel(first)
        assert (
            app.engine.scheduler.pool.n_blocks - app.engine.scheduler.pool.free_blocks == used - 3
        )
        assert first.result().finish_reason == "abort" == [*chunks][-1].finish_reason
        assert list(first.result().token_ids) == answer([1] * 40, 3, eos=False)
        app.cancel(first)
        throttle.allow(1000)
        assert list(second.result().token_ids) == answer([2] * 20, 200, eos=False)
        app.cancel(second)
        assert second.result().finish_reason == "length" and is_idle(app)


def test_a_task_cancels_a_job_while_others_go_on(
    make_artifact: MakeArtifact, answer: Answer
) -> None:
    async def run(app: App) -> None:
        dropped, other = app.submit([1] * 40, **LONG), app.submit([2] * 20, **LONG)
        async for _ in dropped:
            await app.acancel(dropped)
        assert (await dropped).finish_reason == "abort"
        await app.acancel(dropped)
        assert list((await other).token_ids) == answer([2] * 20, 200, eos=False)

    with load(make_artifact()) as app:
        asyncio.run(run(app))
        assert is_idle(app)


def test_a_waiting_job_can_be_cancelled(make_artifact: MakeArtifact) -> None:
    with load(make_artifact(max_sequences=1)) as app:
        throttle = Throttle(app)
        running = app.submit([1] * 40, **LONG)
        throttle.run(1)  # it runs, so that a shorter prompt cannot go first
        waiting = app.submit([2] * 20, **LONG)
        app.cancel(waiting)
        assert waiting.result().token_ids == () and waiting.result().finish_reason == "abort"
        app.cancel(running)
        assert is_idle(app)


def test_a_cancelled_task_ends_its_requests(make_artifact: MakeArtifact) -> None:
    async def batch(app: App, throttle: Throttle) -> None:
        task = asyncio.create_task(app.agenerate([[1] * 40, [2] * 9], **LONG))
        while not app.engine.scheduler.busy:
            await asyncio.sleep(0)
        throttle.run(2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert is_idle(app)

    async def stream(app: App, throttle: Throttle) -> None:
        chunks = app.astream([1] * 40, **LONG)
        throttle.allow(2)
        await anext(chunks)
        await chunks.aclose()  # type: ignore[attr-defined]
        assert is_idle(app)

    async def not_yet_accepted(app: App) -> None:
        gate = threading.Event()
        app.generator.host.call(gate.wait)
        task = asyncio.create_task(app.agenerate([1] * 40, **LONG))
        await asyncio.sleep(0)
        task.cancel()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert is_idle(app)

    async def cancelled_twice(app: App) -> None:
        """Also while it waits for that: the engine's thread is at something else."""
        job, gate = app.submit([1] * 40, **LONG), threading.Event()
        app.generator.host.call(gate.wait)
        task = asyncio.create_task(app.acancel(job))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
        assert (await job).finish_reason == "abort"

    with load(make_artifact()) as app:
        asyncio.run(not_yet_accepted(app))
        asyncio.run(cancelled_twice(app))
        throttle = Throttle(app)
        asyncio.run(batch(app, throttle))
        asyncio.run(stream(app, throttle))
        assert throttle.steps < 200


def test_ctrl_c_ends_the_requests_of_the_call(make_artifact: MakeArtifact, answer: Answer) -> None:
    with load(make_artifact()) as app:

        def interrupt(step: int) -> None:
            if step == 2:
                os.kill(os.getpid(), signal.SIGINT)

        throttle = Throttle(app, interrupt)
        throttle.allow(3)
        with pytest.raises(KeyboardInterrupt):
            app.generate([[1] * 40, [2] * 9], **LONG)
        assert is_idle(app) and throttle.steps <= 3
        throttle.allow(1000)
        assert list(app.generate([3, 3], max_tokens=9)[0].token_ids) == answer([3, 3], 9)


def test_closing_fails_what_runs(make_artifact: MakeArtifact) -> None:
    app = load(make_artifact())
    throttle = Throttle(app)
    errors: list[RequestError] = []

    def generate() -> None:
        with pytest.raises(RequestError, match="closed while") as caught:
            app.generate([1] * 9, **LONG)
        errors.append(caught.value)

    async def stream() -> None:
        chunks = app.astream([1] * 9, **LONG)
        first = asyncio.ensure_future(anext(chunks))
        while len(app.engine.scheduler.requests) < 3:
            await asyncio.sleep(0)
        throttle.allow(1)
        await first
        closing = threading.Thread(target=app.close)
        closing.start()
        with pytest.raises(RequestError, match="closed while"):
            await anext(chunks)
        closing.join()

    caller = threading.Thread(target=generate)
    job = app.submit([3] * 9, **LONG)
    caller.start()
    asyncio.run(stream())
    with pytest.raises(RequestError, match="closed while"):
        job.result()
    caller.join()
    assert len(errors) == 1 and not app.engine.scheduler.busy
    assert not engine_thread(app).is_alive()
    app.close()
    for refused in (lambda: app.submit([1]), lambda: list(app.stream([1]))):
        with pytest.raises(RequestError, match="closed; load"):
            refused()
    app.cancel(job)


def test_a_closed_app_refuses_new_forms_too(make_artifact: MakeArtifact) -> None:
    """The threads that read grammars have ended."""
    app = load(make_artifact())
    host = app.generator.host
    assert isinstance(host, EngineLoop)
    host.engine.grammars.read("start: /a/").exception()
    app.close()
    ask = Ask([[1]], SamplingParams(grammar="start: /b/"), 0)
    with pytest.raises(RequestError, match="closed; load"):
        host.begin(ask, [Job(None, chunks=False)])


def test_a_forgotten_app_ends_its_thread(make_artifact: MakeArtifact) -> None:
    app = load(make_artifact())
    app.generate([1, 2], max_tokens=2)
    thread = engine_thread(app)
    assert thread.is_alive()
    del app
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_program_may_end_without_closing(make_artifact: MakeArtifact) -> None:
    program = (
        "import sys; from dovetail.runtime.app import load; app = load(sys.argv[1]);"
        "job = app.submit([1] * 9, max_tokens=200, ignore_eos=True); print(app.generate([2]) != [])"
    )
    found = subprocess.run(
        [sys.executable, "-P", "-c", program, make_artifact()],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "True\n", "")
