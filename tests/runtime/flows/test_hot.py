"""Hot clusters on an app's GPU: found out, copied, scanned there, lost and brought again."""

from __future__ import annotations

from collections.abc import Callable, ItemsView
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest

from dovetail.ir.errors import SpecError
from dovetail.ir.index_file import DOCUMENTS, OFFSETS, Passage
from dovetail.ir.ragraph import RAGraph
from dovetail.runtime import app as app_module
from dovetail.runtime.app import App
from dovetail.runtime.flows import service as service_module
from dovetail.runtime.flows.control.costs import StepCost
from dovetail.runtime.flows.control.messages import Report, ScanClusters, Scanned, Source
from dovetail.runtime.flows.control.settings import WavefrontSettings
from dovetail.runtime.flows.control.transformation import REGISTRY
from dovetail.runtime.flows.costs import UNKNOWN_SCAN
from dovetail.runtime.flows.events import SubStage
from dovetail.runtime.flows.indexes import BoundIndex, Indexes
from dovetail.runtime.flows.retrievals import Retrievals
from dovetail.runtime.flows.service import FlowSettings
from dovetail.runtime.index.documents import open_documents
from dovetail.runtime.index.ivf import CHANGED_LEAST
from dovetail.runtime.retrieval.budget import ScanCost
from dovetail.runtime.retrieval.hot import HotSets, HotStatistics
from dovetail.runtime.retrieval.process import RetrievalProcess
from dovetail.runtime.retrieval.wire import (
    ChangeIndex,
    Copied,
    CopyClusters,
    Opened,
    Room,
    ScannedParts,
    ScanParts,
)
from tests.runtime.flows.conftest import COUNT, DIM, NPROBE, PlainServices, embed
from tests.runtime.flows.test_recovery import kill_worker
from tests.runtime.flows.test_service import GRAPHS, plain, question
from tests.runtime.index.parts import part_of

VECTOR = 4 * DIM
ROOM = 200 * VECTOR
TORCH = "torch:cpu"


@pytest.fixture
def open_hot(
    open_app: Callable[..., App], monkeypatch: pytest.MonkeyPatch, accelerator: str
) -> Callable[[FlowSettings], App]:
    """Return what opens an app whose clusters may lie on a device, as if scans were free.

    The toy model runs on no device: the app is loaded for the CPU. What else is predicted is given,
    too: measured of so few vectors and tokens, it would say what else the machine does.
    """

    def open_(workflows: FlowSettings) -> App:
        with monkeypatch.context() as here:
            here.setattr(app_module, "_gpu_of", lambda options: accelerator)
            app = open_app(workflows)
        monkeypatch.setattr(service_module, "measure_step", lambda generator: StepCost(fixed=1.0))
        costs = replace(app.flows._costs, scan=UNKNOWN_SCAN, device=ScanCost(0.0, 0.0))
        monkeypatch.setattr(app.flows, "_costs", costs)
        return app

    return open_


def settings(room: int = ROOM, **changes: Any) -> FlowSettings:
    wavefront = WavefrontSettings(**{"refresh": 3, "fixed_clusters": 6, **changes})
    return FlowSettings(wavefront=wavefront, cluster_bytes=room)


def without(name: str) -> FlowSettings:
    """Return settings by which one transformation is never applied."""
    return settings(transformations=frozenset(REGISTRY) - {name})


def statistics(app: App) -> HotStatistics:
    return app.flows.hot["idx"]


def run_some(app: App, services: PlainServices, first: int = 0) -> list[SubStage]:
    """Run workflows, and check their answers; return what was scanned."""
    cases = [(graph, question(first + i)) for i in range(3) for graph in GRAPHS.values()]
    jobs = [app.submit_workflow(*case) for case in cases]
    for job, case in zip(jobs, cases, strict=True):
        assert job.result().outputs == plain(services, *case)
    return [event for job in jobs for event in job if isinstance(event, SubStage)]


def run_one(app: App, services: PlainServices, graph: RAGraph) -> HotStatistics:
    """Run one workflow three times at once, and check its answers; return what is counted then."""
    jobs = [app.submit_workflow(graph, question(i)) for i in range(3)]
    for i, job in enumerate(jobs):
        assert job.result().outputs["answer"] == plain(services, graph, question(i))["answer"]
    return statistics(app)


def test_hot_clusters_are_copied_and_scanned_on_the_gpu(
    open_hot: Callable[..., App], services: PlainServices
) -> None:
    app = open_hot(without("speculate_retrieval"))  # no job hears of scouts that outlive it
    assert statistics(app) == HotStatistics(room_bytes=ROOM)
    steps = run_some(app, services)
    while not statistics(app).hits:  # until the first copies have come
        steps += run_some(app, services, 20)
    found = statistics(app)
    on_gpu = [step for step in steps if step.device == "gpu"]
    assert on_gpu and found.hits == sum(step.clusters for step in on_gpu)
    assert found.scanned == sum(step.clusters for step in steps) > found.hits
    assert found.copies and found.copied_bytes >= found.held_bytes
    assert 0 < found.held_bytes <= ROOM and found.held_bytes % VECTOR == 0
    assert found.absent == 0


def test_a_new_worker_has_no_clusters_until_they_are_copied_again(
    open_hot: Callable[..., App], services: PlainServices
) -> None:
    app = open_hot(settings())
    run_some(app, services)
    before = statistics(app)
    kill_worker(app)
    while statistics(app).copies == before.copies or statistics(app).absent == 0:
        run_some(app, services, 40)
    last, found = before, statistics(app)
    while found.absent > last.absent or found.hits == last.hits:  # till nothing is missed any more
        run_some(app, services, 60)
        last, found = found, statistics(app)
    assert found.copies > before.copies and found.absent == last.absent
    assert found.scanned >= found.hits + found.absent


def test_nothing_is_scanned_there_without_room_device_or_leave(
    open_app: Callable[..., App], open_hot: Callable[..., App], services: PlainServices
) -> None:
    small = open_hot(settings(VECTOR))  # no cluster is as small
    unused = open_hot(without("put"))
    for app in (small, open_app(settings()), unused):
        jobs = [app.submit_workflow(GRAPHS["irg"], question(i)) for i in range(3)]
        steps = [event for job in jobs for event in job if isinstance(event, SubStage)]
        assert {step.device for step in steps} == {"cpu"}
        assert not any(found.hits for found in app.flows.hot.values())
    assert not small.flows.hot and statistics(unused).scanned
    for name, least in (("threads", 1), ("cluster_bytes", 0), ("max_waiting", 1)):
        with pytest.raises(SpecError, match=f"{name} must be at least {least}, not {least - 1}"):
            FlowSettings(**{name: least - 1})  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="cluster_bytes must be at least 0"):
        FlowSettings(cluster_bytes=-1)


def test_indexes_share_the_room(open_hot: Callable[..., App], folder: Path) -> None:
    whole = 300 * VECTOR
    app = open_hot(settings(whole + 1000))
    app.add_index(folder, name="other", embed=embed)
    app.add_index(folder, name="third", embed=embed)
    rooms = {name: found.room_bytes for name, found in app.flows.hot.items()}
    assert rooms["idx"] == whole and rooms.get("other", 0) <= 1000 and len(rooms) <= 2
    app.add_index(folder, name="idx", embed=embed)  # in the place of the first
    assert app.flows.hot["idx"].room_bytes == whole


def test_a_device_that_is_not_there_is_done_without(
    open_app: Callable[..., App],
    services: PlainServices,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(app_module, "_gpu_of", lambda options: "xpu:7")
    app = open_app(settings())
    assert "no hot clusters on the GPU" in caplog.text and "no device xpu:7" in caplog.text
    run_some(app, services)
    assert not app.flows.hot


def bind(opened: Opened, folder: Path) -> tuple[Indexes, HotSets]:
    """Return an index `idx`, and what the app knows of its clusters on a GPU of ROOM bytes."""
    indexes = Indexes()
    hot = HotSets(TORCH, ROOM)
    documents = open_documents(folder / DOCUMENTS, folder / OFFSETS)
    opened = msgspec.structs.replace(opened, hot=ScanCost(0.0, 0.0))
    index = BoundIndex("idx", opened, documents, NPROBE, embed, embed)
    indexes.add(index)
    hot.add("idx", index.bytes)
    return indexes, hot


def test_absent_clusters_count_as_often_as_searches_want_them(folder: Path) -> None:
    """Three searches share six clusters, of which the worker has none on a GPU."""
    worker, calls, told = RetrievalProcess(), SimpleQueue[Callable[[], None]](), list[Report]()
    indexes, hot = bind(worker.open("idx", folder), folder)
    retrievals = Retrievals(worker, indexes, hot, told.append, lambda *_: None, calls.put)
    vector, wanted = embed(["w1"])[0], tuple(range(6))
    parts = (part_of(vector, wanted, depth=5),) * 3
    sources = tuple(Source(i, "search", 0) for i in range(3))
    retrievals.scan(ScanClusters(1, "gpu", "idx", parts, sources))
    calls.get()()
    assert [report.absent for report in told if isinstance(report, Scanned)] == [wanted]
    assert hot.statistics["idx"] == HotStatistics(scanned=18, absent=18, room_bytes=ROOM)
    worker.close()


def test_what_searches_before_a_change_lack_stays_hot(folder: Path) -> None:
    """The worker has the clusters as they are now; a search that began before scans older ones."""
    worker, vector = RetrievalProcess(), embed(["w1"])[0]
    worker.open("idx", folder, room=Room(TORCH, 10**6))
    texts = [f"w{1 + i % 96} w{1 + i % 89} w{1 + i % 83}" for i in range(CHANGED_LEAST)]
    passages = tuple(Passage(key=f"n{i}", text=text) for i, text in enumerate(texts))
    worker.ask(ChangeIndex("idx", COUNT, passages, embed(texts).tobytes(), ())).result()
    copied = worker.ask(CopyClusters("idx", (0, 1), (), 10**6)).result().body
    assert isinstance(copied, Copied) and copied.missing == ()
    parts = [part_of(vector, range(2 + n), depth=5, version=n) for n in (0, 1)]
    found = worker.ask(ScanParts("idx", tuple(parts), hot=True)).result().body
    assert isinstance(found, ScannedParts)
    assert (found.missed, found.absent) == (3, (2,))
    worker.close()


def test_room_that_old_copies_hold_is_not_given_away(folder: Path) -> None:
    indexes, hot = bind(Opened(DIM, "l2", (50, 50, 50), code_bytes=VECTOR), folder)
    whole = indexes.find("idx").bytes
    half = [size // 2 for size in whole]  # it is rewritten: the copies are of the old one
    hot.copied("idx", [0, 1, 2], 150 * VECTOR, whole)
    hot.copied("idx", [0], 125 * VECTOR, half)
    assert hot.room("other") == Room(TORCH, 75 * VECTOR)
    hot.copied("idx", [1, 2], 75 * VECTOR, half)
    assert hot.room("other") == Room(TORCH, 125 * VECTOR)


def test_indexes_may_be_added_while_others_are_looked_at(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever goes through the indexes keeps others from adding any meanwhile."""
    _, hot = bind(Opened(DIM, "l2", (50, 50, 50), code_bytes=VECTOR), folder)
    seen: list[bool] = []

    class Watched(dict[str, HotStatistics]):
        def items(self) -> ItemsView[str, HotStatistics]:  # type: ignore[override]
            seen.append(hot._lock.locked())
            return super().items()

    monkeypatch.setattr(hot, "statistics", Watched(hot.statistics))
    assert hot.room("other") == Room(TORCH, 50 * VECTOR)
    assert seen == [True]


def test_documents_that_come_later_have_room_where_there_is_some(
    open_hot: Callable[..., App], services: PlainServices
) -> None:
    app = open_hot(settings(10**6))
    run_some(app, services)
    before = statistics(app)
    assert before.room_bytes == 300 * VECTOR
    texts = [f"w{1 + i % 96} w{1 + i % 89} w{1 + i % 83}" for i in range(CHANGED_LEAST)]
    passages = [Passage(key=f"n{i}", text=text) for i, text in enumerate(texts)]
    services.collection.change(passages, embed(texts))
    app.index("idx").change(passages, embed(texts))
    while statistics(app).held_bytes <= before.room_bytes:
        run_some(app, services, 30)
    after = statistics(app)
    assert after.room_bytes == (300 + CHANGED_LEAST) * VECTOR >= after.held_bytes
    while statistics(app).hits == after.hits:
        run_some(app, services, 60)


def test_clusters_that_change_are_copied_again(
    open_hot: Callable[..., App], services: PlainServices
) -> None:
    """So many documents come, and go, that the index is rewritten: the GPU's lists are old then."""
    app = open_hot(settings())
    run_some(app, services)
    before = statistics(app)
    texts = [f"w{1 + i % 96} w{1 + i % 89} w{1 + i % 83}" for i in range(CHANGED_LEAST)]
    added = [{"key": f"n{i}", "text": text} for i, text in enumerate(texts)]
    app.index("idx").add(added, embed(texts))
    app.index("idx").remove(document["key"] for document in added)
    while statistics(app).absent == 0 or statistics(app).copies == before.copies:
        run_some(app, services, 20)
    lost = statistics(app)
    while statistics(app).hits == lost.hits:
        run_some(app, services, 40)
    now = statistics(app)
    assert now.copies > before.copies and now.hits > lost.hits
