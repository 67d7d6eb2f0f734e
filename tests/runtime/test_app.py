"""What callers hold: batches, streams and jobs, for threads and event loops, all at once."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.ir.errors import CapacityError, RequestError
from dovetail.runtime.app import App, load
from dovetail.runtime.schedule.plan import SchedulerSettings
from dovetail.runtime.schedule.request import Completion
from tests.runtime.engine.test_engine import random_prompts
from tests.runtime.schedule.integrity import check_integrity
from tests.runtime.throttle import Throttle
from tests.timelines import check_timeline

MakeArtifact = Callable[..., Path]
Answer = Callable[..., list[int]]
LONG: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}


def is_idle(app: App) -> bool:
    for _ in range(2):  # a message may lead to another one
        app.generator.host.call(lambda: None).result()
    check_integrity(app.engine.scheduler.pool)
    return app.engine.scheduler.pool.free_blocks == app.engine.scheduler.pool.n_blocks and not (
        app.engine.scheduler.busy
    )


def test_a_job_gives_its_result_and_its_chunks(make_artifact: MakeArtifact, answer: Answer) -> None:
    with load(make_artifact()) as app:
        job = app.submit([4, 4, 4], max_tokens=30)
        chunks = list(job)
        assert [t for c in chunks for t in c.token_ids] == answer([4, 4, 4], 30)
        assert [c.finish_reason is None for c in chunks] == [True] * (len(chunks) - 1) + [False]
        assert job.finished and list(job.result().token_ids) == answer([4, 4, 4], 30)
        assert job.result() is job.result(timeout=0)


def test_token_ids_may_be_arrays(make_artifact: MakeArtifact, answer: Answer) -> None:
    prompts = [np.array([4, 4, 4]), np.array([5, 6])]
    with load(make_artifact()) as app:
        for given in (prompts, tuple(prompts)):
            done = app.generate(given, max_tokens=3)
            assert [list(d.token_ids) for d in done] == [answer(list(p), 3) for p in prompts]
        (one,) = app.generate(prompts[0], max_tokens=3)
        assert list(one.token_ids) == answer([4, 4, 4], 3)


def test_threads_and_tasks_share_one_app(make_artifact: MakeArtifact, answer: Answer) -> None:
    prompts = random_prompts(8, 24, 60)
    expected = [answer(p, 30) for p in prompts]
    got: dict[int, list[int]] = {}

    def by_thread(app: App, i: int) -> None:
        if i % 2:
            got[i] = list(app.generate(prompts[i], max_tokens=30)[0].token_ids)
        else:
            got[i] = [t for c in app.stream(prompts[i], max_tokens=30) for t in c.token_ids]

    async def by_task(app: App, i: int) -> None:
        if i % 3 == 0:
            (done,) = await app.agenerate(prompts[i], max_tokens=30)
            got[i] = list(done.token_ids)
        elif i % 3 == 1:
            stream = app.astream(prompts[i], max_tokens=30)
            got[i] = [t async for c in stream for t in c.token_ids]
        else:
            got[i] = list((await app.submit(prompts[i], max_tokens=30)).token_ids)

    async def all_tasks(app: App) -> None:
        await asyncio.gather(*(by_task(app, i) for i in range(12, 24)))

    with load(make_artifact(kv_blocks=40)) as app:
        threads = [threading.Thread(target=by_thread, args=(app, i)) for i in range(12)]
        for thread in threads:
            thread.start()
        asyncio.run(all_tasks(app))
        for thread in threads:
            thread.join()
        assert is_idle(app)
    assert [got[i] for i in range(24)] == expected


def test_jobs_are_handed_over_while_a_step_runs(
    make_artifact: MakeArtifact, answer: Answer
) -> None:
    with load(make_artifact()) as app:
        gate = threading.Event()
        app.generator.host.call(gate.wait)  # a long step
        jobs = [app.submit([i, i], max_tokens=9) for i in range(5)]
        assert not app.engine.scheduler.busy
        gate.set()
        assert [list(job.result().token_ids) for job in jobs] == [
            answer([i, i], 9) for i in range(5)
        ]


def test_a_full_queue_says_when_to_come_back(make_artifact: MakeArtifact, answer: Answer) -> None:
    settings = SchedulerSettings(offload="off", max_waiting=2)
    with load(make_artifact(max_sequences=1), settings=settings) as app:
        throttle = Throttle(app)
        jobs = [app.submit([0] * 5, **LONG)]
        throttle.run(1)  # it runs, so that the queue is empty
        jobs += [app.submit([i] * 5, **LONG) for i in (1, 2)]
        throttle.run(3)
        for refused in (app.submit, app.generate, lambda p, **o: next(app.stream(p, **o))):
            with pytest.raises(CapacityError, match="later") as caught:
                refused([9, 9], max_tokens=3)
            assert (caught.value.retry_after or 0.0) > 0
        app.cancel(jobs[1])
        throttle.allow(1000)
        assert list(app.submit([9, 9], max_tokens=3).result().token_ids) == answer([9, 9], 3)
        assert list(jobs[2].result().token_ids) == answer([2] * 5, 200, eos=False)


def test_a_call_larger_than_the_queue_is_taken_where_nothing_waits(
    make_artifact: MakeArtifact, answer: Answer
) -> None:
    """It would be refused again whenever it came back. Beside others it is refused as a whole."""
    settings = SchedulerSettings(offload="off", max_waiting=2)
    prompts = random_prompts(4, 5, 15)
    with load(make_artifact(max_sequences=1), settings=settings) as app:
        gate = threading.Event()
        app.generator.host.call(gate.wait)
        jobs = app.submit_all(prompts, max_tokens=3)
        refused = app.submit_all(prompts[:3], max_tokens=3)
        gate.set()
        assert [list(j.result().token_ids) for j in jobs] == [answer(p, 3) for p in prompts]
        for job in refused:
            with pytest.raises(CapacityError, match="5 requests are waiting"):
                job.result()
        assert is_idle(app)


def test_a_lower_priority_goes_first(make_artifact: MakeArtifact, answer: Answer) -> None:
    prompts = random_prompts(4, 6, 15)
    with load(make_artifact(max_sequences=1)) as app:
        gate = threading.Event()
        app.generator.host.call(gate.wait)
        order = [0, 5, -5, 0, 100, -100]
        jobs = [
            app.submit(p, max_tokens=5, priority=priority)
            for p, priority in zip(prompts, order, strict=True)
        ]
        gate.set()
        done = [job.result() for job in jobs]
        assert [list(d.token_ids) for d in done] == [answer(p, 5) for p in prompts]
        ends = sorted(range(6), key=lambda i: done[i].metrics.last_token or 0.0)
        assert ends == sorted(range(6), key=lambda i: (order[i], i))
        for wrong in (101, -101, 0.5, True, "high"):
            with pytest.raises(RequestError, match="priority must be"):
                app.submit([1], priority=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        SchedulerSettings(offload="off", chunked=False),
        SchedulerSettings(offload="auto", keep_prefixes=False, patience=1, priority_span=1),
        SchedulerSettings(offload="full", max_waiting=100),
        SchedulerSettings(prompt_tokens=3, short_first=7),
    ],
)
def test_settings_change_no_token(
    make_artifact: MakeArtifact, answer: Answer, settings: SchedulerSettings
) -> None:
    prompts = random_prompts(3, 12, 100)
    with load(make_artifact(kv_blocks=20), settings=settings) as app:
        assert app.engine.scheduler.settings == settings
        done = app.generate(prompts, max_tokens=40)
        assert [list(d.token_ids) for d in done] == [answer(p, 40) for p in prompts]
        assert is_idle(app)


def test_unchunked_prompts_are_not_cut_where_they_fit_a_step(make_artifact: MakeArtifact) -> None:
    """Three prompts of 20 take steps of 32 one by one, or two thirds of the steps cut to fill."""
    steps = {}
    for chunked in (True, False):
        name, settings = f"{chunked}.dove", SchedulerSettings(chunked=chunked)
        with load(make_artifact(name=name), settings=settings) as app:
            throttle = Throttle(app)
            throttle.allow(100)
            app.generate([[i] * 20 for i in range(3)], max_tokens=1)
            steps[chunked] = throttle.steps
    assert steps == {True: 2, False: 3}


def test_a_job_fails_when_others_have_filled_the_queue_meanwhile(
    make_artifact: MakeArtifact, answer: Answer
) -> None:
    with load(make_artifact()) as app:
        app.engine.scheduler.settings = SchedulerSettings(offload="off", max_waiting=1)
        gate = threading.Event()
        app.generator.host.call(gate.wait)
        first, second = app.submit([1, 2], max_tokens=9), app.submit([3], max_tokens=9)
        gate.set()
        with pytest.raises(CapacityError, match="later"):
            second.result()
        with pytest.raises(CapacityError, match="later"):
            list(second)
        app.cancel(second)
        assert list(first.result().token_ids) == answer([1, 2], 9) and is_idle(app)


def test_a_forked_child_can_generate(make_artifact: MakeArtifact, answer: Answer) -> None:
    with load(make_artifact()) as app:
        app.generate([1, 2], max_tokens=2)
        child = os.fork()
        if child == 0:
            try:
                done = app.generate([4, 4, 4], max_tokens=9)
                os._exit(list(done[0].token_ids) != answer([4, 4, 4], 9))
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_wrong_requests_are_refused_by_every_door(make_artifact: MakeArtifact) -> None:
    async def refuse(app: App) -> None:
        with pytest.raises(RequestError, match="context"):
            await app.agenerate([1] * 256)
        with pytest.raises(CapacityError):
            await anext(app.astream([1] * 200, max_tokens=50))

    with load(make_artifact(kv_blocks=14)) as app:
        with pytest.raises(RequestError, match="empty"):
            app.submit([])
        with pytest.raises(RequestError, match="n must be 1"):
            app.submit([1], n=2)
        with pytest.raises(RequestError, match="n must be 1"):
            app.astream([1], n=2)
        asyncio.run(refuse(app))
        assert is_idle(app)


def test_times_count_from_the_call(make_artifact: MakeArtifact) -> None:
    """A request that comes while a step is under way has waited for that step too."""
    with load(make_artifact()) as app:
        gate = threading.Event()
        app.generator.host.call(gate.wait)
        caller = threading.Thread(target=lambda: done.extend(app.generate([1, 2], max_tokens=2)))
        done: list[Completion] = []
        caller.start()
        while app.generator.host._inbox.empty():
            pass
        mark = app.engine.scheduler.clock()
        gate.set()
        caller.join()
        assert done[0].metrics.arrival < mark < (done[0].metrics.first_token or 0)


def test_a_recording_holds_steps_and_requests(make_artifact: MakeArtifact, tmp_path: Path) -> None:
    with load(make_artifact()) as app:
        app.generate([1] * 9, max_tokens=2)
        with app.record(tmp_path / "t.json"):
            done = app.generate(random_prompts(2, 5, 100), max_tokens=20)
            with pytest.raises(RequestError, match="already being recorded"):
                with app.record(tmp_path / "u.json"):
                    pass
            left = app.submit([1] * 40, **LONG)
            next(iter(left))
        app.cancel(left)
        assert app.engine.recorder is None
    facts = check_timeline(tmp_path / "t.json")
    steps = max(len(d.token_ids) for d in done)
    assert facts.spans > 5 * steps and facts.arrows == 6 and facts.tracks == 3
    events = json.loads((tmp_path / "t.json").read_bytes())["traceEvents"]
    ended = [e["args"]["ended"] for e in events if "ended" in e.get("args", {})]
    assert len(ended) == 6 and set(ended[:5]) <= {"stop", "length"}, ended
    assert ended[5] in ("recording", "length")  # cut off with the recording, if it still ran
    assert not (tmp_path / "u.json").exists()


def test_a_recording_outlives_its_app(make_artifact: MakeArtifact, tmp_path: Path) -> None:
    app = load(make_artifact())
    with app.record(tmp_path / "t.json"):
        app.generate([1] * 9, max_tokens=4)
        app.close()
    assert check_timeline(tmp_path / "t.json").arrows == 1


def test_an_answer_without_a_bound_takes_what_the_pool_holds(
    make_artifact: MakeArtifact, answer: Answer
) -> None:
    prompt, blocks = [4, 4, 4], 4
    with load(make_artifact(kv_blocks=blocks)) as app:
        room = blocks * 16 + 1 - len(prompt)  # the last token is not stored
        (found,) = app.generate([prompt], max_tokens=1000, ignore_eos=True)
        assert list(found.token_ids) == answer(prompt, room, eos=False)
        with pytest.raises(CapacityError, match="lower max_tokens"):
            app.generate([prompt], max_tokens=room + 1)
