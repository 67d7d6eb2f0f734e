"""Hot clusters on an app's GPU: found out, copied, scanned there, lost and brought again."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, ItemsView
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest

from dovetail.codegen.catalog import retrieval_kernels
from dovetail.codegen.library import lower_request
from dovetail.codegen.targets import DEVICE_TARGETS
from dovetail.ir.artifact import FileEntry
from dovetail.ir.errors import SpecError
from dovetail.ir.index_file import DOCUMENTS, OFFSETS, Passage
from dovetail.ir.ragraph import RAGraph
from dovetail.ir.workflow import Retrieval
from dovetail.runtime import app as app_module
from dovetail.runtime.app import App
from dovetail.runtime.emulated import Emulation
from dovetail.runtime.flows.events import SubStage
from dovetail.runtime.flows.hot import HotIndexes, HotStatistics
from dovetail.runtime.flows.indexes import BoundIndex, Indexes
from dovetail.runtime.flows.retrievals import Retrievals
from dovetail.runtime.flows.service import FlowSettings
from dovetail.runtime.gpu_memory import GpuShare
from dovetail.runtime.plan import SchedulerSettings
from dovetail.runtime.request import Home
from dovetail.runtime.retrieval.budget import ScanCost
from dovetail.runtime.retrieval.documents import open_documents
from dovetail.runtime.retrieval.folder import read_manifest
from dovetail.runtime.retrieval.ivf import CHANGED_LEAST
from dovetail.runtime.retrieval.process import RetrievalProcess
from dovetail.runtime.retrieval.wire import (
    ChangeIndex,
    Copied,
    CopyClusters,
    CudaGpu,
    EmulatedGpu,
    Opened,
    Piece,
    Room,
    ScannedPieces,
    ScanPieces,
    pack_vector,
)
from dovetail.runtime.sim.machines import find_machine, kv_token_bytes
from dovetail.runtime.wavefront.messages import Part, Report, Scan, Scanned
from dovetail.runtime.wavefront.settings import SPLIT_DEVICES, TRANSFORMATIONS, WavefrontSettings
from dovetail.topology.parameters import Figure
from tests.emulated_gpu import build_driver, make_index
from tests.runtime.flows.conftest import COUNT, DIM, NPROBE, PlainServices, embed
from tests.runtime.flows.test_recovery import kill_worker
from tests.runtime.flows.test_service import GRAPHS, plain, question

VECTOR = 4 * DIM
ROOM = 200 * VECTOR
GPU = Emulation(
    replace(find_machine("h100"), gpu_blocks=64, cpu_blocks=256, stage=Figure(1e-9, "a test's")),
    SchedulerSettings(offload="off"),  # the toy model is no model of two pools
)
"""Nothing costs anything on it: what it has is scanned there."""


def settings(room: int = ROOM, **changes: Any) -> FlowSettings:
    wavefront = WavefrontSettings(**{"refresh": 3, "fixed_clusters": 6, **changes})
    return FlowSettings(wavefront=wavefront, cluster_bytes=room)


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
    open_app: Callable[..., App], services: PlainServices
) -> None:
    app = open_app(settings(), emulation=GPU)
    assert statistics(app) == HotStatistics(room_bytes=ROOM)
    steps = run_some(app, services)
    found = statistics(app)
    on_gpu = [step for step in steps if step.device == "gpu"]
    assert on_gpu and found.hits == sum(step.clusters for step in on_gpu)
    assert found.scanned == sum(step.clusters for step in steps) > found.hits
    assert found.copies and found.copied_bytes >= found.held_bytes
    assert 0 < found.held_bytes <= ROOM and found.held_bytes % VECTOR == 0
    assert found.absent == 0


def test_a_new_worker_has_no_clusters_until_they_are_copied_again(
    open_app: Callable[..., App], services: PlainServices
) -> None:
    app = open_app(settings(), emulation=GPU)
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
    open_app: Callable[..., App], services: PlainServices
) -> None:
    small = open_app(settings(VECTOR), emulation=GPU)  # no cluster is as small
    without = frozenset(TRANSFORMATIONS) - {SPLIT_DEVICES}
    unused = open_app(settings(transformations=without), emulation=GPU)
    for app in (small, open_app(settings()), unused):
        jobs = [app.submit_workflow(GRAPHS["irg"], question(i)) for i in range(3)]
        steps = [event for job in jobs for event in job if isinstance(event, SubStage)]
        assert {step.device for step in steps} == {"cpu"}
        assert not any(found.hits for found in app.flows.hot.values())
    assert not small.flows.hot and statistics(unused).scanned
    with pytest.raises(SpecError, match="-1 bytes"):
        FlowSettings(cluster_bytes=-1)


def test_indexes_share_the_room(open_app: Callable[..., App], folder: Path) -> None:
    whole = 300 * VECTOR
    app = open_app(settings(whole + 1000), emulation=GPU)
    app.add_index(folder, name="other")
    app.add_index(folder, name="third")
    rooms = {name: found.room_bytes for name, found in app.flows.hot.items()}
    assert rooms["idx"] == whole and rooms.get("other", 0) <= 1000 and len(rooms) <= 2
    app.add_index(folder, name="idx")  # in the place of the first
    assert app.flows.hot["idx"].room_bytes == whole


def test_load_divides_the_memory_between_kv_and_clusters(
    open_app: Callable[..., App], services: PlainServices, folder: Path
) -> None:
    """Whatever the division, KV and clusters have it, and answers stay the same."""
    share = GpuShare(index=folder, rate=1e6, nprobe=12, prompt=32, reply=32)
    app = open_app(replace(settings(0), share=share), emulation=GPU)
    plan, spec = app.gpu_memory, app.engine.spec
    block = 16 * spec.n_layers * kv_token_bytes(spec)
    assert plan is not None and plan.kv_bytes + plan.cluster_bytes == 64 * block
    assert plan.kv_bytes >= 4 * block and plan.cluster_bytes >= 0
    assert app.engine.scheduler.pools[Home.GPU].n_blocks == plan.kv_bytes // block
    held = min(plan.cluster_bytes, 300 * VECTOR)
    assert sum(found.room_bytes for found in app.flows.hot.values()) == held
    run_some(app, services)


@pytest.fixture(scope="module")
def on_cuda(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CudaGpu]:
    """The index with kernels for a GPU, and a driver that runs them on the CPU."""
    target = DEVICE_TARGETS["cuda"]
    kernels = [lower_request(request, target) for request in retrieval_kernels(target)]
    path = tmp_path_factory.mktemp("cuda") / "idx"
    shutil.copytree(folder, path)
    written = {"index.json": msgspec.json.encode(make_index(kernels)), "k.ptx": b"emulated"}
    (path / "kernels" / "cuda").mkdir(parents=True)
    manifest = read_manifest(path)
    files = dict(manifest.files)
    for name, data in written.items():
        (path / "kernels" / "cuda" / name).write_bytes(data)
        entry = FileEntry(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        files[f"kernels/cuda/{name}"] = entry
    changed = msgspec.structs.replace(manifest, files=files, targets=("cuda",))
    (path / "manifest.json").write_bytes(msgspec.json.encode(changed))
    return path, CudaGpu(driver=str(build_driver(kernels)))


def test_the_same_road_leads_to_an_nvidia_gpu(
    open_app: Callable[..., App],
    services: PlainServices,
    on_cuda: tuple[Path, CudaGpu],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path, gpu = on_cuda
    monkeypatch.setattr(app_module, "_gpu_of", lambda options: gpu)
    app = open_app(settings())
    assert "no hot clusters on the GPU" in caplog.text and "--target cuda" in caplog.text
    app.add_index(path, name="idx", nprobe=NPROBE, embed=embed)
    graph = GRAPHS["irg"]
    monkeypatch.setattr(app.flows, "_device", ScanCost(0.0, 0.0))  # it was measured as a CPU
    jobs = [app.submit_workflow(graph, question(i)) for i in range(8)]
    for i, job in enumerate(jobs):  # distances may differ in their last bits
        assert job.result().outputs["answer"] == plain(services, graph, question(i))["answer"]
    found = statistics(app)
    assert found.hits and found.absent == 0 and 0 < found.held_bytes <= ROOM


def bind(opened: Opened, folder: Path) -> tuple[Indexes, HotIndexes]:
    """Return an index `idx`, and what the app knows of its clusters on a GPU of ROOM bytes."""
    indexes = Indexes()
    hot = HotIndexes(CudaGpu(), ROOM, indexes)
    documents = open_documents(folder / DOCUMENTS, folder / OFFSETS)
    opened = msgspec.structs.replace(opened, hot=ScanCost(0.0, 0.0))
    index = BoundIndex("idx", opened, documents, NPROBE, embed, embed)
    indexes.add(index)
    hot.add(index, hot.room("idx"))
    return indexes, hot


def test_absent_clusters_count_as_often_as_searches_want_them(folder: Path) -> None:
    """Three searches share six clusters, of which the worker has none on a GPU."""
    worker, calls, told = RetrievalProcess(), SimpleQueue[Callable[[], None]](), list[Report]()
    indexes, hot = bind(worker.open("idx", folder), folder)
    retrievals = Retrievals(worker, indexes, hot, told.append, lambda *_: None, calls.put)
    vector, wanted = embed(["w1"])[0], tuple(range(6))
    node = Retrieval("search", "input", "docs")
    parts = tuple(Part(i, node, vector, wanted, (0.0,) * 6, 5) for i in range(3))
    retrievals.scan(Scan(1, "gpu", "idx", parts))
    calls.get()()
    assert [report.absent for report in told if isinstance(report, Scanned)] == [wanted]
    assert hot.statistics["idx"] == HotStatistics(scanned=18, absent=18, room_bytes=ROOM)
    worker.close()


def test_what_searches_before_a_change_lack_stays_hot(folder: Path) -> None:
    """The worker has the clusters as they are now; a search that began before scans older ones."""
    gpu = EmulatedGpu(0.0, 1e12, 1e10)
    worker, vector = RetrievalProcess(), embed(["w1"])[0]
    worker.open("idx", folder, room=Room(gpu, 10**6))
    texts = [f"w{1 + i % 96} w{1 + i % 89} w{1 + i % 83}" for i in range(CHANGED_LEAST)]
    passages = tuple(Passage(key=f"n{i}", text=text) for i, text in enumerate(texts))
    worker.ask(ChangeIndex("idx", COUNT, passages, embed(texts).tobytes(), ())).result()
    copied = worker.ask(CopyClusters("idx", (0, 1), (), 10**6)).result().body
    assert isinstance(copied, Copied) and copied.missing == ()
    query = pack_vector(vector), {}
    pieces = [
        Piece(*query, (0, 1), (0.0, 0.0), 5, version=0),
        Piece(*query, (0, 1, 2), (0.0,) * 3, 5, version=1),
    ]
    found = worker.ask(ScanPieces("idx", tuple(pieces), hot=True)).result().body
    assert isinstance(found, ScannedPieces)
    assert (found.missed, found.absent) == (3, (2,))
    worker.close()


def test_room_that_old_copies_hold_is_not_given_away(folder: Path) -> None:
    indexes, hot = bind(Opened(DIM, "l2", (50, 50, 50), code_bytes=VECTOR), folder)
    hot.copied("idx", [0, 1, 2], 150 * VECTOR)
    index = indexes.find("idx")
    half = msgspec.structs.replace(index.opened, sizes=(25, 25, 25))
    indexes.add(replace(index, opened=half))  # it is rewritten: the copies are of the old one
    hot.copied("idx", [0], 125 * VECTOR)
    assert hot.room("other") == Room(CudaGpu(), 75 * VECTOR)
    hot.copied("idx", [1, 2], 75 * VECTOR)
    assert hot.room("other") == Room(CudaGpu(), 125 * VECTOR)


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

    monkeypatch.setattr(hot, "_statistics", Watched(hot.statistics))
    assert hot.room("other") == Room(CudaGpu(), 50 * VECTOR)
    hot.renew()
    assert seen == [True, True]


def test_documents_that_come_later_have_room_where_there_is_some(
    open_app: Callable[..., App], services: PlainServices
) -> None:
    app = open_app(settings(10**6), emulation=GPU)
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


@pytest.mark.long  # it is given some seconds
@pytest.mark.parametrize("copies", [True, False])
def test_a_gpu_that_hangs_is_given_up(
    open_app: Callable[..., App],
    services: PlainServices,
    on_cuda: tuple[Path, CudaGpu],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    copies: bool,
) -> None:
    """It hangs before anything was copied to it, or when it is to scan what it has."""
    (path, gpu), hung, graph = on_cuda, tmp_path / "hung", GRAPHS["irg"]
    monkeypatch.setattr(app_module, "_gpu_of", lambda options: CudaGpu(0, gpu.driver, 4.0))
    monkeypatch.setenv("DT_HUNG_GPU", str(hung))
    app = open_app(settings())
    app.add_index(path, name="idx", nprobe=NPROBE, embed=embed)
    monkeypatch.setattr(app.flows, "_device", ScanCost(0.0, 0.0))

    def run_more() -> HotStatistics:
        return run_one(app, services, graph)

    while not copies and not run_more().hits:
        pass
    hung.touch()
    told = ""
    while "the GPU has not answered for 4 s" not in told:
        run_more()
        told += capfd.readouterr().err
    while run_more().held_bytes:
        pass
    before = run_more()
    assert bool(before.hits) == bool(before.absent) == (not copies)
    after = run_more()
    assert after.scanned > before.scanned and after == replace(before, scanned=after.scanned)


@pytest.mark.parametrize("killed", [False, True])
def test_a_gpu_that_is_lost_while_it_serves_is_done_without(
    open_app: Callable[..., App],
    services: PlainServices,
    on_cuda: tuple[Path, CudaGpu],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    killed: bool,
) -> None:
    """Its scans and copies fail, and where its worker dies with it the next one cannot open it."""
    (path, gpu), dead, graph = on_cuda, tmp_path / "dead", GRAPHS["irg"]
    monkeypatch.setattr(app_module, "_gpu_of", lambda options: gpu)
    monkeypatch.setenv("DT_DEAD_GPU", str(dead))
    app = open_app(settings())
    app.add_index(path, name="idx", nprobe=NPROBE, embed=embed)
    monkeypatch.setattr(app.flows, "_device", ScanCost(0.0, 0.0))

    def run_more() -> HotStatistics:
        return run_one(app, services, graph)

    while not run_more().hits:
        pass
    dead.touch()
    if killed:
        kill_worker(app)
    while not run_more().absent:
        pass
    before = run_more()
    assert run_more().hits == before.hits
    dead.unlink()
    while not killed and run_more().hits == before.hits:
        pass


def test_clusters_that_change_are_copied_again(
    open_app: Callable[..., App], services: PlainServices
) -> None:
    """So many documents come, and go, that the index is rewritten: the GPU's lists are old then."""
    app = open_app(settings(), emulation=GPU)
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
