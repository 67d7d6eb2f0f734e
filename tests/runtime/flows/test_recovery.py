"""Workflows that are cancelled, refused for a while, or whose retrieval worker is killed."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest

from dovetail.compiler.write.index_build import IndexRequest, build_index_folder
from dovetail.ir.errors import CapacityError, WorkflowError
from dovetail.ir.index_file import EmbedderEntry, Passage
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.workflow import END, START, Generation
from dovetail.runtime.app import App
from dovetail.runtime.flows.control.messages import Generate, Source
from dovetail.runtime.flows.control.settings import WavefrontSettings
from dovetail.runtime.flows.driver import Session
from dovetail.runtime.flows.events import NodeText
from dovetail.runtime.flows.job import WorkflowJob
from dovetail.runtime.flows.service import FlowSettings
from dovetail.runtime.flows.workflow_run import WorkflowRun
from dovetail.runtime.schedule.plan import SchedulerSettings
from tests.runtime.flows.conftest import Encoder, PlainServices, embed
from tests.runtime.flows.test_service import GRAPHS, check_events, one_search, plain, question
from tests.runtime.throttle import Throttle

MANY = 20_000
ONE_CLUSTER = FlowSettings(wavefront=WavefrontSettings(fixed_clusters=1))


def kill_worker(app: App) -> None:
    while (pid := app.flows.worker.pid) is None:
        os.sched_yield()
    os.kill(pid, signal.SIGKILL)


def test_workflows_outlive_a_worker_that_is_killed_among_them(
    open_app: Callable[..., App], services: PlainServices
) -> None:
    """None is lost, and none runs twice visibly: each node starts and ends once in its round."""
    app = open_app(ONE_CLUSTER)
    cases = [(list(GRAPHS.values())[i % 5], question(i)) for i in range(64)]
    expected = [plain(services, *case) for case in cases]
    engine = throttled(app)
    jobs = [app.submit_workflow(*case) for case in cases]
    engine.allow(5)  # no workflow ends with so few
    kill_worker(app)
    engine.allow(MANY)
    jobs[10].result()
    kill_worker(app)
    for job, wanted in zip(jobs, expected, strict=True):
        assert job.result(timeout=300).outputs == wanted
        check_events(list(job), job.result())
    assert app.flows.worker.deaths >= 1


def test_an_index_that_was_built_again_in_its_place_is_told_of_by_the_next_worker(
    app: App, tmp_path: Path
) -> None:
    """Vectors of the one with documents of the other would be wrong answers; others are served."""
    folder, texts = tmp_path / "again", ["w1", "w2", "w3"]

    def build() -> None:
        passages = [Passage(key=text, text=text) for text in texts]
        entry = EmbedderEntry(name="toy", fingerprint="")
        build_index_folder(passages, Encoder(), entry, IndexRequest(output=folder), lambda *_: None)

    def find() -> str:
        found: str = app.run(one_search("again"), {"input": "w3"}).outputs["docs"][0].text
        return found

    build()
    app.add_index(folder, embed=embed)
    texts.insert(1, "w4")
    build()
    assert find() == "w3"  # the worker has the files of before
    kill_worker(app)
    while not app.flows.worker.deaths:
        assert app.run(one_search("idx"), question(1)).outputs["docs"]
    with pytest.raises(
        WorkflowError, match=r"'search' failed: .* is another one now; add it again"
    ):
        find()
    assert app.run(one_search("idx"), question(1)).outputs["docs"]
    app.add_index(folder, embed=embed)
    assert find() == "w3"


def endless() -> RAGraph:
    g = RAGraph("endless")
    g.add_generation("say", prompt="w1 {input}", max_tokens=200, ignore_eos=True)
    g.add_edge(START, "say")
    g.add_edge("say", END)
    return g


def throttled(app: App) -> Throttle:
    """Return what allows steps of the engine, which has been measured already."""
    app.run(endless(), {"input": "w1"})
    return Throttle(app)


def is_idle(app: App) -> bool:
    app.generator.host.call(lambda: None).result()
    return app.engine.scheduler.pool.free_blocks == app.engine.scheduler.pool.n_blocks and not (
        app.engine.scheduler.busy
    )


def test_a_cancelled_workflow_frees_what_it_held(app: App) -> None:
    engine = throttled(app)
    job = app.submit_workflow(endless(), {"input": "w2"})
    engine.allow(20)
    next(event for event in job if isinstance(event, NodeText))
    job.cancel()
    with pytest.raises(WorkflowError, match="'endless' was cancelled"):
        job.result()
    assert is_idle(app)
    job.cancel()
    engine.allow(MANY)
    assert len(app.run(endless(), {"input": "w2"}).outputs["answer"].split()) == 200


def test_a_task_that_is_cancelled_ends_its_workflow(app: App) -> None:
    engine = throttled(app)
    other = app.submit_workflow(endless(), {"input": "w3"})

    async def begin_and_leave() -> None:
        task = asyncio.create_task(app.arun(endless(), {"input": "w2"}))
        engine.allow(20)
        async for event in other:
            if isinstance(event, NodeText):
                break
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(begin_and_leave())
    other.cancel()  # is dealt with after all that came before
    with pytest.raises(WorkflowError, match="cancelled"):
        other.result()
    assert is_idle(app)


def test_generations_wait_for_room_in_a_full_queue(
    open_app: Callable[..., App], services: PlainServices
) -> None:
    app = open_app(settings=SchedulerSettings(max_waiting=1))
    graph = GRAPHS["hyde"]
    jobs = [app.submit_workflow(graph, question(i)) for i in range(24)]
    for i, job in enumerate(jobs):
        assert job.result().outputs == plain(services, graph, question(i))


def test_a_run_whose_guess_waits_in_the_queue_counts_once(app: App) -> None:
    """Of two that may wait; the engine takes no step, so what it is sent waits there."""
    executors, later = replace(app.flows._executors, max_waiting=2), SimpleQueue[object]()
    session = Session(executors, app.flows._make_control(), later.put)
    throttled(app)
    workflow = GRAPHS["one-shot"].workflow()
    (node,) = (n for n in workflow.nodes.values() if isinstance(n, Generation))

    def begin(number: int) -> WorkflowJob:
        job = WorkflowJob(workflow, lambda job: None, events=False)
        session.begin(WorkflowRun(workflow, question(number)), job)
        return job

    source = Source(begin(0).number, node.name, 0)
    session.generations.begin(Generate(MANY, source, node, "w1", provisional=True))
    app.generator.host.call(lambda: None).result()
    assert session.generations.waiting == 1
    begin(1)
    with pytest.raises(CapacityError, match="2 requests are waiting"):
        begin(2)
    session.end(RuntimeError("the test is over"))


def test_a_fault_of_the_program_fails_what_runs_and_later_ones_are_served(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(now: float) -> None:
        raise KeyError("fault")

    graph, engine = endless(), throttled(app)
    session = app.flows._driver._session
    assert session is not None
    running = app.submit_workflow(graph, {"input": "w2"})
    engine.allow(20)
    next(event for event in running if isinstance(event, NodeText))
    monkeypatch.setattr(session.control, "orders", fail)
    other = app.submit_workflow(graph, {"input": "w3"})
    for job in (running, other):
        with pytest.raises(KeyError, match="fault"):
            job.result()
    engine.allow(MANY)
    assert app.run(graph, {"input": "w2"}).outputs["answer"]
    assert is_idle(app)


PARENT = """
import sys
import numpy as np
from dovetail.ir.workflow import END, START
from dovetail.ir.ragraph import RAGraph
from dovetail.runtime.app import load

app = load(sys.argv[1])
app.add_index(sys.argv[2], embed=lambda texts: np.ones((len(texts), 16), np.float32))
g = RAGraph()
g.add_retrieval("search", query="input", output="docs")
g.add_edge(START, "search")
g.add_edge("search", END)
assert len(app.run(g, {"input": "w1"}).outputs["docs"]) == 5
assert "faiss" not in sys.modules
print(app.flows.worker.pid, flush=True)
if sys.argv[3] == "wait":
    sys.stdin.read()
"""


def parent(artifact: Path, folder: Path, ending: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-c", PARENT, str(artifact), str(folder), ending]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_an_app_that_is_killed_leaves_no_worker(
    make_artifact: Callable[..., Path], folder: Path
) -> None:
    with parent(make_artifact(), folder, "wait") as process:
        assert process.stdout is not None
        watched = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
    assert select.select([watched], [], [], 60)[0]
    os.close(watched)


def test_an_app_that_nobody_closes_leaves_no_worker(
    make_artifact: Callable[..., Path], folder: Path
) -> None:
    with parent(make_artifact(), folder, "exit") as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
    assert process.returncode == 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
