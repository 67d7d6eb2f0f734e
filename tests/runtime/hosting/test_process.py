"""An engine in a process of its own: the same answers, and what is left when the process dies."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dovetail.ir.errors import ArtifactError, CapacityError, DeviceError, RequestError
from dovetail.runtime.app import App, load
from dovetail.runtime.child.framing import Outbox
from dovetail.runtime.child.watch import STARTS
from dovetail.runtime.engine.options import EngineOptions
from dovetail.runtime.hosting.generator import Job
from dovetail.runtime.hosting.process import EngineProcess
from dovetail.runtime.hosting.wire import StepReport
from dovetail.runtime.schedule.plan import SchedulerSettings
from tests.processes import running, stop
from tests.runtime.conftest import ROOT
from tests.runtime.engine.test_engine import random_prompts
from tests.runtime.hosting import looping_worker
from tests.runtime.text.test_tokenizer import toy_tokenizer
from tests.timelines import check_timeline

MakeArtifact = Callable[..., Path]
Answer = Callable[..., list[int]]
LONG: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}


def process(app: App) -> EngineProcess:
    host = app.generator.host
    assert isinstance(host, EngineProcess)
    return host


def pid(app: App) -> int:
    found = process(app).pid
    assert found is not None
    return found


def outcomes(jobs: list[Job]) -> list[str]:
    """Return the end of each job: its reason, or the class of its error."""
    found = []
    for job in jobs:
        try:
            found.append(job.result(timeout=300).finish_reason)
        except (DeviceError, RequestError) as error:
            found.append(type(error).__name__)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 30},
        {"max_tokens": 30, "n": 3, "temperature": 1.0, "seed": 7},
        {"max_tokens": 30, "logprobs": 2, "ignore_eos": True},
    ],
)
def test_answers_are_those_of_an_engine_in_this_process(
    make_artifact: MakeArtifact, options: dict[str, Any]
) -> None:
    artifact, prompts = make_artifact(), random_prompts(3, 6, 40)
    with load(artifact) as here, load(artifact, apart=True) as apart:
        wanted, found = here.generate(prompts, **options), apart.generate(prompts, **options)
        for one, other in zip(wanted, found, strict=True):
            assert one.token_ids == other.token_ids and one.logprobs == other.logprobs
            assert one.finish_reason == other.finish_reason
            times = other.metrics
            assert times.started and times.first_token and times.last_token
            assert times.arrival <= times.started <= times.first_token <= times.last_token
        chunks = list(apart.stream(prompts[0], max_tokens=30))
        assert [t for c in chunks for t in c.token_ids] == list(
            here.generate(prompts[0], max_tokens=30)[0].token_ids
        )
        with pytest.raises(RequestError, match="child process"):
            _ = apart.engine


def test_threads_and_event_loops_share_it(make_artifact: MakeArtifact, answer: Answer) -> None:
    prompts = random_prompts(5, 12, 40)
    wanted = [answer(prompt, 20) for prompt in prompts]
    with load(make_artifact(), apart=True) as app:
        found: dict[int, list[int]] = {}

        def ask(i: int) -> None:
            found[i] = list(app.generate(prompts[i], max_tokens=20)[0].token_ids)

        async def stream(i: int) -> list[int]:
            pieces = app.astream(prompts[i], max_tokens=20)
            return [t async for piece in pieces for t in piece.token_ids]

        async def stream_all() -> list[list[int]]:
            return await asyncio.gather(*map(stream, range(len(prompts))))

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        assert asyncio.run(stream_all()) == wanted
        for thread in threads:
            thread.join()
        assert [found[i] for i in range(len(prompts))] == wanted


def test_refusals_come_as_errors_of_their_kind(make_artifact: MakeArtifact) -> None:
    settings = SchedulerSettings(offload="off", max_waiting=2)
    with load(make_artifact(), apart=True, kv_blocks=4, settings=settings) as app:
        with pytest.raises(RequestError, match="outside"):
            app.generate([10_000])
        with pytest.raises(CapacityError, match="kv_blocks") as failed:
            app.generate([1] * 20, max_tokens=200)
        assert failed.value.retry_after is None
        assert len(app.generate([[1], [2], [3], [4]], max_tokens=2)) == 4  # as nothing waits


def test_what_no_message_can_hold_ends_as_in_this_process(
    make_artifact: MakeArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token of more than 64 bits, a stop text that is no UTF-8, and a call that is too long."""
    artifact = make_artifact(tokenizer=toy_tokenizer(tmp_path / "toy.json"))
    said = []
    with load(artifact) as here, load(artifact, apart=True) as apart:
        first = pid(apart)
        for app in (here, apart):
            with pytest.raises(RequestError, match="outside") as refused:
                app.submit_all([[4], [5, 1 << 70]], max_tokens=2)
            said.append(str(refused.value))
        assert said[0] == said[1]
        texts = [app.generate([4], stop=["\udc80"], max_tokens=2)[0].text for app in (here, apart)]
        assert texts[0] == texts[1]
        monkeypatch.setattr("dovetail.runtime.hosting.wire.MAX_ORDER", 1000)
        with pytest.raises(RequestError, match="fewer prompts"):
            apart.submit_all([[4] * 90] * 20, max_tokens=1)
        assert apart.generate([4], max_tokens=2) and pid(apart) == first


def test_a_cancelled_job_leaves_nothing(make_artifact: MakeArtifact) -> None:
    with load(make_artifact(), apart=True) as app:
        jobs = [app.submit([4, 4], **LONG) for _ in range(8)]
        for job in jobs:
            app.cancel(job)
        assert {job.result().finish_reason for job in jobs} <= {"abort", "length"}
        load_now = app.generator.host.load
        assert (load_now.running, load_now.waiting, load_now.kv_usage) == (0, 0, 0.0)


def test_who_stops_waiting_for_a_cancelled_job_harms_nobody(make_artifact: MakeArtifact) -> None:
    async def cancel(app: App, job: Job) -> None:
        task = asyncio.create_task(app.acancel(job))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with load(make_artifact(), apart=True) as app:
        stop(pid(app))
        job = app.submit([4, 4], **LONG)
        asyncio.run(cancel(app, job))
        os.kill(pid(app), signal.SIGCONT)
        assert job.result(timeout=300).finish_reason == "abort"
        assert app.submit([4], max_tokens=2).result(timeout=300).token_ids and app.ready


def test_a_form_that_the_engine_cannot_follow_fails_its_request(
    make_artifact: MakeArtifact, tmp_path: Path
) -> None:
    """It is known there alone that this tokenizer follows none; the engine is idle then."""
    artifact = make_artifact(tokenizer=toy_tokenizer(tmp_path / "toy.json"))
    with load(artifact, apart=True) as app:
        first = pid(app)
        job = app.submit([4], structured_outputs={"choice": ["a"]})
        with pytest.raises(RequestError, match="structured output is not available"):
            job.result(timeout=300)
        assert pid(app) == first


def test_what_cannot_be_opened_is_told_when_loading(
    make_artifact: MakeArtifact, tmp_path: Path
) -> None:
    with pytest.raises(ArtifactError):
        EngineProcess(tmp_path / "none", EngineOptions()).wait()
    with pytest.raises(CapacityError, match="kv_blocks"):
        load(make_artifact(), apart=True, kv_blocks=1 << 40)


def test_a_killed_process_fails_what_it_had_and_the_next_one_serves(
    make_artifact: MakeArtifact, answer: Answer
) -> None:
    """The process is stopped first, so that it is killed with all of it under way."""
    with load(make_artifact(), apart=True) as app:
        assert app.ready
        first = pid(app)
        stop(first)
        lost = [app.submit([3, 3], **LONG) for _ in range(4)]
        os.kill(first, signal.SIGKILL)
        for job in lost:
            with pytest.raises(DeviceError, match=r"signal 9 .*send the request again"):
                job.result(timeout=300)
        # Its successor may be on its way or there: a request is served either way
        assert list(app.generate([4, 4, 4], max_tokens=30)[0].token_ids) == answer([4, 4, 4], 30)
        assert app.ready and pid(app) != first


@contextmanager
def starting_later(app: App) -> Iterator[threading.Event]:
    """Processes of the app start from now on once the event is set, or the body has ended."""
    held, host = threading.Event(), process(app)
    launch = host._launch

    def start_later() -> Any:
        held.wait()
        return launch()

    host._launch = start_later  # type: ignore[method-assign]
    try:
        yield held
    finally:
        held.set()


def test_a_stopped_process_is_found_to_hang_and_the_next_one_serves(
    make_artifact: MakeArtifact, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail.runtime.hosting.process.PATIENCE", 0.5)
    with load(make_artifact(), apart=True) as app, starting_later(app) as held:
        first = pid(app)
        stop(first)
        assert app.ready and app.failure == "", "it has no work"
        lost = [app.submit([3, 3], **LONG) for _ in range(4)]
        for job in lost:
            with pytest.raises(DeviceError, match=r"hung: .*0\.5 s; send the request again"):
                job.result(timeout=300)
        assert not app.ready and f"process {first} hung" in app.failure
        kept = app.submit([4, 4, 4], max_tokens=30)
        process(app)._patience = 300.0  # the next one may be slow
        held.set()
        assert list(kept.result(timeout=300).token_ids) == answer([4, 4, 4], 30)
        assert app.ready and app.failure == "" and pid(app) != first


def test_a_step_that_never_ends_is_found_out(
    make_artifact: MakeArtifact, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others of the process had their turn before; what the next one is asked is answered."""
    monkeypatch.setattr("dovetail.runtime.hosting.process.PATIENCE", 1.0)
    monkeypatch.setattr("dovetail.runtime.hosting.process.MODULE", looping_worker.__name__)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    with load(make_artifact(), apart=True) as app:
        first = pid(app)
        assert list(app.generate([4, 4, 4], max_tokens=30)[0].token_ids) == answer([4, 4, 4], 30)
        with pytest.raises(DeviceError, match=f"process {first} hung"):
            app.generate([looping_worker.LOOP, 3], **LONG)
        assert list(app.generate([4, 4, 4], max_tokens=30)[0].token_ids) == answer([4, 4, 4], 30)
        assert pid(app) != first


def test_whatever_a_request_is_doing_it_ends_with_its_process(
    make_artifact: MakeArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One writes, one reads its prompt, one waits: tried until the process was killed just then."""
    monkeypatch.setattr("dovetail.runtime.hosting.process.MODULE", looping_worker.__name__)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setenv(looping_worker.STEP_SECONDS, "0.02")
    settings = SchedulerSettings(offload="off", prompt_tokens=2)
    with load(make_artifact(max_sequences=2), apart=True, settings=settings) as app:
        killed = False
        while not killed:
            jobs = [app.submit(prompt, **LONG) for prompt in ([4, 4], [3] * 50, [5, 5])]
            next(iter(jobs[0]))
            while not (jobs[0].finished or killed):
                now = app.generator.host.load
                if now.running == 2 and now.waiting == 1 and not jobs[1].request.output:
                    os.kill(pid(app), signal.SIGKILL)
                    killed = True
                time.sleep(0.001)
            found = outcomes(jobs)
        assert found == ["DeviceError"] * 3
        assert app.generate([4], max_tokens=2)


def test_results_alone_cross_once(
    make_artifact: MakeArtifact, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load is told as it changes all the same."""
    heard, hear = list[StepReport](), EngineProcess._hear

    def note(host: EngineProcess, report: StepReport) -> None:
        heard.append(report)
        hear(host, report)

    monkeypatch.setattr(EngineProcess, "_hear", note)
    with load(make_artifact(), apart=True) as app:
        jobs = app.submit_all([[4, 4, 4], [5, 4]], chunks=False, **LONG)
        assert list(jobs[0].result().token_ids) == answer([4, 4, 4], 200)
        assert outcomes(jobs) == ["length"] * 2
    assert [len(u.tokens) for report in heard for u in report.updates] == [200, 200]
    assert any(told.load.running + told.load.waiting == 2 for told in heard)


def test_requests_wait_for_a_process_that_is_being_started(
    make_artifact: MakeArtifact, answer: Answer
) -> None:
    with load(make_artifact(), apart=True) as app, starting_later(app) as held:
        os.kill(pid(app), signal.SIGKILL)
        while app.ready:
            os.sched_yield()
        kept, dropped, (one, two) = (
            app.submit([4, 4, 4], max_tokens=30),
            app.submit([5, 4], max_tokens=30),
            app.submit_all([4, 4, 4], max_tokens=30, n=2),
        )
        with pytest.raises(RequestError, match="outside"):
            app.submit([-1 << 70])
        for job in (dropped, two):
            app.cancel(job)
            assert job.result().finish_reason == "abort"
        held.set()
        for job in (kept, one):
            assert list(job.result().token_ids) == answer([4, 4, 4], 30)
        assert app.ready


def test_what_waits_outlives_a_process_that_it_could_not_be_sent_to(
    make_artifact: MakeArtifact, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, send = [1], Outbox._send

    def sends(outbox: Outbox) -> None:
        if left:
            left.pop()
            raise MemoryError
        send(outbox)

    with load(make_artifact(), apart=True) as app, starting_later(app) as held:
        os.kill(pid(app), signal.SIGKILL)
        while app.ready:
            os.sched_yield()
        job = app.submit([4, 4, 4], max_tokens=30)
        monkeypatch.setattr(Outbox, "_send", sends)
        held.set()
        assert list(job.result(timeout=300).token_ids) == answer([4, 4, 4], 30) and not left


def test_what_waits_fails_where_no_process_can_be_started(
    make_artifact: MakeArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request tries again; the app is well once processes start."""
    with load(make_artifact(), apart=True) as app:
        monkeypatch.setattr("dovetail.runtime.hosting.process.MODULE", "dovetail.runtime.nothing")
        os.kill(pid(app), signal.SIGKILL)
        while app.ready:
            os.sched_yield()
        with pytest.raises(DeviceError, match="on its start"):
            app.generate([4], max_tokens=2)
        assert STARTS > 1 and not app.ready
        monkeypatch.undo()
        assert app.generate([4], max_tokens=2) and app.ready


def test_closing_ends_the_process_and_fails_what_runs(make_artifact: MakeArtifact) -> None:
    app = load(make_artifact(), apart=True)
    child = process(app)._child
    assert child is not None
    jobs = [app.submit([4, 4], **LONG) for _ in range(8)]
    app.close()
    app.close()
    assert set(outcomes(jobs)) <= {"RequestError", "length"}
    assert child.member.wait(0) is not None and process(app).pid is None
    with pytest.raises(RequestError, match="closed"):
        app.generate([4])


PARENT = """
import sys
from dovetail.runtime.app import load
app = load(sys.argv[1], apart=True)
job = app.submit([4, 4], max_tokens=200, ignore_eos=True)
print(app.generator.host.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_no_process_outlives_its_app(
    make_artifact: MakeArtifact, number: int, stopped: bool
) -> None:
    """Not even one that is stopped, and so does not see that its app is gone."""
    app = subprocess.Popen(
        [sys.executable, "-P", "-c", PARENT, str(make_artifact())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert app.stdout is not None and app.stdin is not None
    with app.stdin, app.stdout:
        pid = int(app.stdout.readline())
        child = os.pidfd_open(pid)
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        app.send_signal(number)
        select.select([child], [], [])  # readable once it has ended
        os.close(child)
        app.wait(60)


def test_an_app_that_is_never_closed_ends_silently(make_artifact: MakeArtifact) -> None:
    """With a request under way."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", PARENT, str(make_artifact())],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert running([int(done.stdout)]) == []


def test_steps_are_drawn_across_the_death_of_a_process(
    make_artifact: MakeArtifact, tmp_path: Path
) -> None:
    brief: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True}
    with load(make_artifact(), apart=True) as app:
        with app.record(tmp_path / "trace.json") as timeline:
            app.generate([4, 4], **brief)
            with (
                pytest.raises(RequestError, match="already being recorded"),
                app.record(tmp_path / "b"),
            ):
                pass
            os.kill(pid(app), signal.SIGKILL)
            while app.ready:
                os.sched_yield()
            app.generate([[4, 4], [5, 5]], **brief)
            assert timeline.dropped == 0
        facts = check_timeline(tmp_path / "trace.json")
        assert facts.arrows == 3 and facts.tracks == 3
        app.generate([4, 4], **brief)  # and nobody draws any more


def test_nobody_waits_for_a_process_that_takes_no_orders(
    make_artifact: MakeArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is stopped; what it is sent meanwhile is more than its socket holds."""
    monkeypatch.setattr("dovetail.runtime.hosting.process.SEND_SECONDS", 300)
    with load(make_artifact(), apart=True) as app:
        wanted = app.generate([4] * 90, max_tokens=1)[0].token_ids
        stop(pid(app))
        jobs = [job for _ in range(4) for job in app.submit_all([[4] * 90] * 800, max_tokens=1)]
        assert not any(job.finished for job in jobs)
        os.kill(pid(app), signal.SIGCONT)
        assert {job.result(timeout=300).token_ids for job in jobs} == {wanted}
