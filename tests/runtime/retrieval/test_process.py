"""The retrieval worker: the same hits as the index itself, whatever happens to the process."""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("faiss")

from dovetail.codegen.targets import host_target
from dovetail.compiler.write.index_build import IndexRequest, build_index_folder
from dovetail.ir.errors import (
    ArtifactError,
    DeviceError,
    RequestError,
    SpecError,
)
from dovetail.ir.index_file import EmbedderEntry, Passage
from dovetail.runtime.child.child import Child
from dovetail.runtime.index.ivf import IvfIndex
from dovetail.runtime.retrieval import process
from dovetail.runtime.retrieval.change_log import ChangeLog
from dovetail.runtime.retrieval.folder import open_index
from dovetail.runtime.retrieval.process import FIRST_SEARCH, RetrievalProcess
from dovetail.runtime.retrieval.wire import (
    Changed,
    ChangeIndex,
    ProbedQueries,
    ProbeQueries,
    RestoreIndex,
    ScannedParts,
    ScanParts,
    SearchQuery,
    WorkerRequest,
)
from tests.processes import stop
from tests.runtime.index.parts import part_of

DIM, CLUSTERS, DEPTH = 16, 8, 20
DEADLY = 1  # the first request after that which opens the index


VECTORS = np.random.default_rng(3).standard_normal((400, DIM)).astype(np.float32)


class Given:
    """An encoder of the numbers of vectors."""

    def embed(self, texts: Sequence[str], /, *, prompt: str | None = None) -> np.ndarray:
        return VECTORS[[int(text) for text in texts]]


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    return VECTORS


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("index") / "idx"
    passages = [
        Passage(key=f"p{i}", text=str(i), metadata={"odd": i % 2}) for i in range(len(VECTORS))
    ]
    request = IndexRequest(output=path, clusters=CLUSTERS)
    entry = EmbedderEntry(name="given", fingerprint="", query_prompt="query: ")
    build_index_folder(passages, Given(), entry, request, lambda *_: None)
    return path


@pytest.fixture(scope="module")
def index(path: Path) -> IvfIndex:
    return open_index(path).index


@pytest.fixture
def worker(path: Path) -> Iterator[RetrievalProcess]:
    worker = RetrievalProcess()
    opened = worker.open("a", path)
    assert (opened.dim, opened.query_prompt, sum(opened.sizes)) == (DIM, "query: ", len(VECTORS))
    yield worker
    worker.close()


def scan(query: np.ndarray, clusters: tuple[int, ...], depth: int = DEPTH) -> ScanParts:
    """Centroids' distances matter to product quantisation alone."""
    return ScanParts("a", (part_of(query, clusters, depth=depth),))


@pytest.mark.parametrize("value", [object(), 1 << 70])
def test_what_no_message_can_hold_is_refused_and_nobody_waits_for_it(
    worker: RetrievalProcess, vectors: np.ndarray, value: object
) -> None:
    """Else the worker would seem to hang with it, and die of it once it is sent again."""
    query = vectors[0].tobytes()
    with pytest.raises((TypeError, OverflowError)):
        worker.ask(ProbeQueries("a", (SearchQuery(query, {"odd": value}),), 1))
    assert not worker._look().busy
    assert worker.ask(ProbeQueries("a", (SearchQuery(query),), 1)).result().body


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_finds_what_the_index_finds(
    worker: RetrievalProcess, index: IvfIndex, vectors: np.ndarray
) -> None:
    queries = vectors[:5] + np.float32(0.1)
    asked = tuple(SearchQuery(q.tobytes(), known=(1, 2, 1000)) for q in queries)
    probed = worker.ask(ProbeQueries("a", asked, 3)).result().body
    assert isinstance(probed, ProbedQueries)
    pieces = tuple(
        part_of(q, p.clusters, p.centroids, depth=depth)
        for q, p, depth in zip(queries, probed.queries, (1, 20, 5, 7, 40), strict=True)
    )
    reply = worker.ask(ScanParts("a", pieces)).result()
    assert isinstance(reply.body, ScannedParts) and reply.seconds > 0
    for query, probe, piece, got in zip(
        queries, probed.queries, pieces, reply.body.parts, strict=True
    ):
        (wanted,) = index.find(query[None], piece.depth, 3)
        assert list(got.hits) == wanted
        assert list(got.homes) == [index.home(id_) for _, id_ in wanted]
        assert probe.known == index.distances(query, (1, 2, 1000)) and 1000 not in probe.known


def test_filters_leave_documents_out(
    worker: RetrievalProcess, index: IvfIndex, vectors: np.ndarray
) -> None:
    everywhere = tuple(range(CLUSTERS))
    pieces = tuple(
        part_of(vectors[0], everywhere, depth=DEPTH, filters=filters)
        for filters in ({"odd": 1}, {}, {"odd": [0, 1]})
    )
    reply = worker.ask(ScanParts("a", pieces)).result().body
    assert isinstance(reply, ScannedParts)
    odd, whole, both = ([id_ for _, id_ in piece.hits] for piece in reply.parts)
    assert whole == both == [id_ for _, id_ in index.find(vectors[:1], DEPTH, CLUSTERS)[0]]
    assert all(id_ % 2 for id_ in odd) and set(odd) >= {id_ for id_ in whole if id_ % 2}


def test_kernels_scan_as_faiss_does_and_later_workers_go_on_with_them(
    tmp_path: Path, index: IvfIndex
) -> None:
    path = tmp_path / "idx"
    passages = [Passage(key=f"p{i}", text=str(i)) for i in range(len(VECTORS))]
    request = IndexRequest(output=path, clusters=CLUSTERS, target=host_target())
    entry = EmbedderEntry(name="given", fingerprint="")
    build_index_folder(passages, Given(), entry, request, lambda *_: None)
    worker = RetrievalProcess(2)
    try:
        assert worker.open("a", path, kernels=True).kernels
        found = []
        for _ in range(2):
            body = worker.ask(scan(VECTORS[0], tuple(range(CLUSTERS)))).result().body
            assert isinstance(body, ScannedParts)
            found.append(body.parts[0].hits)
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
        (wanted,) = index.find(VECTORS[:1], DEPTH, CLUSTERS)
        assert found[0] == found[1] and [i for _, i in found[0]] == [i for _, i in wanted]
        assert not worker.open("b", path, kernels=False).kernels
    finally:
        worker.close()


def test_bad_input_is_an_error_and_the_worker_goes_on(
    worker: RetrievalProcess, vectors: np.ndarray, tmp_path: Path
) -> None:
    pid = worker.pid
    short = vectors[0][:8]
    with pytest.raises(SpecError, match="a query has 8 values, the index has 16"):
        worker.ask(ProbeQueries("a", (SearchQuery(short.tobytes()),), 3)).result()
    with pytest.raises(SpecError, match="queries must have 16 values each"):
        worker.ask(scan(short, (1,))).result()
    with pytest.raises(ArtifactError, match="is not an index"):
        worker.open("b", tmp_path / "none")
    with pytest.raises(RequestError, match="no document has the metadata field 'colour'"):
        worker.ask(
            ProbeQueries("a", (SearchQuery(vectors[0].tobytes(), {"colour": 1}),), 3)
        ).result()
    with pytest.raises(DeviceError, match="the search failed"):
        worker.ask(ScanParts("b", ())).result()
    assert worker.ask(scan(vectors[0], (1,))).result() and worker.pid == pid


def test_requests_outlive_workers_that_are_killed(
    worker: RetrievalProcess, index: IvfIndex, vectors: np.ndarray
) -> None:
    futures = []
    for i in range(300):
        futures.append(worker.ask(scan(vectors[i], tuple(range(CLUSTERS)))))
        if i in (50, 200) and (pid := worker.pid) is not None:
            os.kill(pid, signal.SIGKILL)
    wanted = index.find(vectors[:300], DEPTH, CLUSTERS)
    for future, hits in zip(futures, wanted, strict=True):
        body = future.result().body
        assert isinstance(body, ScannedParts) and list(body.parts[0].hits) == hits
    assert worker.deaths >= 1


def test_a_worker_that_was_idle_is_replaced(worker: RetrievalProcess, vectors: np.ndarray) -> None:
    old = worker.pid
    assert old is not None
    os.kill(old, signal.SIGKILL)
    while not worker.deaths:  # the kill may still be on its way
        assert worker.ask(scan(vectors[0], (1,))).result()
    assert worker.pid != old and not alive(old)


def test_changes_are_made_again_one_message_at_a_time(
    worker: RetrievalProcess, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one is made when the worker has taken the last: all at once may be gigabytes."""
    told: list[str] = []
    replay, ask = ChangeLog.replay, Child.ask

    def make(log: ChangeLog) -> Iterator[RestoreIndex | ChangeIndex]:
        for body in replay(log):
            told.append("made")
            yield body

    def tell(child: Child, request: Any, *others: Any) -> Any:
        if isinstance(request, WorkerRequest):
            told.append(type(request.body).__name__)
        return ask(child, request, *others)

    monkeypatch.setattr(ChangeLog, "replay", make)
    monkeypatch.setattr(Child, "ask", tell)
    for i in range(2):
        change = ChangeIndex("a", len(vectors), (), b"", (f"p{i}",))
        assert isinstance(worker.ask(change).result().body, Changed)
    old = worker.pid
    assert old is not None and not told
    os.kill(old, signal.SIGKILL)
    while not worker.deaths:  # the kill may still be on its way
        worker.ask(scan(vectors[0], (1,))).result()
    worker.ask(scan(vectors[0], (1,))).result()  # by the next one
    assert told == ["OpenIndex", *["made", "ChangeIndex"] * 2]


def test_a_request_that_kills_workers_fails_alone(
    worker: RetrievalProcess, vectors: np.ndarray
) -> None:
    """A signal stands for what a search may die of: it comes whenever the long one is in hand."""
    pieces = scan(vectors[0], tuple(range(CLUSTERS)), 100).parts * 20_000
    deadly = worker.ask(ScanParts("a", pieces))
    others = [worker.ask(scan(vector, (1,))) for vector in vectors[:20]]
    killed: set[int] = set()
    while not wait([deadly], timeout=0.005).done:
        pid = worker.pid
        if pid is not None and pid not in killed and list(worker._sent)[:1] == [DEADLY]:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
    with pytest.raises(DeviceError, match=r"killed by signal 9.*in this search"):
        deadly.result()
    assert all(other.result() for other in others)
    assert worker.deaths == len(killed) == 4  # the first took all, the others only this one


def test_a_worker_that_reads_no_more_is_replaced(
    path: Path, vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "SEND_SECONDS", 1)
    for module in ("supervisor", "launch"):  # a stopped process does not end by itself
        monkeypatch.setattr(f"dovetail.runtime.child.{module}.END_SECONDS", 0.1)
    worker = RetrievalProcess()
    worker.open("a", path)
    assert worker.pid is not None
    stop(worker.pid)
    (piece,) = scan(vectors[0], (1,)).parts
    large = worker.ask(ScanParts("a", (piece,) * 20_000))  # more than a socket holds
    body = large.result().body
    assert (
        isinstance(body, ScannedParts)
        and len({part.hits for part in body.parts}) == 1
        and worker.deaths == 1
    )
    worker.close()


def predicted(worker: RetrievalProcess, *filters: dict[str, Any]) -> list[float]:
    """Return how long searches with each of these filters should take, which it does then."""
    found, query = [], VECTORS[0]
    for each in filters:
        probe = ProbeQueries("a", (SearchQuery(query.tobytes(), each),), 1)
        piece = part_of(query, (1,), depth=DEPTH, filters=each)
        for body in (probe, ScanParts("a", (piece,))):
            assert worker.pid is not None
            stop(worker.pid)
            asked = worker.ask(body)
            found.append(worker._look().predicted)
            os.kill(worker.pid, signal.SIGCONT)
            assert asked.result().body
    return found


def test_the_first_search_with_filters_may_take_as_long_as_it_takes(
    worker: RetrievalProcess, path: Path
) -> None:
    """It reads all documents, of which each worker and each index has none in memory at first."""
    assert predicted(worker, {})[0] == FIRST_SEARCH
    first, *others = predicted(worker, {"odd": 1}, {"odd": 0}, {})
    assert first == math.inf and math.inf not in others
    worker.open("a", path)
    first, *others = predicted(worker, {"odd": 1}, {"odd": 0})
    assert first == math.inf and math.inf not in others
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    while not worker.deaths:  # the kill may still be on its way
        worker.ask(scan(VECTORS[0], (1,))).result()
    worker.ask(scan(VECTORS[0], (1,))).result()  # by the next one
    first, *others = predicted(worker, {"odd": 1}, {"odd": 0})
    assert first == math.inf and math.inf not in others


def test_closing_ends_the_worker_and_fails_what_waits(path: Path, vectors: np.ndarray) -> None:
    worker = RetrievalProcess()
    worker.open("a", path)
    pid = worker.pid
    assert pid is not None
    stop(pid)
    left = worker.ask(scan(vectors[0], (1,)))
    worker.close()
    worker.close()
    assert not alive(pid)
    with pytest.raises(RequestError, match="closed"):
        left.result()
    with pytest.raises(RequestError, match="closed"):
        worker.ask(scan(vectors[0], (1,)))


PARENT = """
import sys
from dovetail.runtime.retrieval.process import FIRST_SEARCH, RetrievalProcess
worker = RetrievalProcess()
worker.open("a", sys.argv[1])
assert "faiss" not in sys.modules
print(worker.pid, flush=True)
sys.stdin.read()
"""


def test_a_parent_that_is_killed_leaves_no_worker(path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", PARENT, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        watched = os.pidfd_open(pid)  # it is no child of this process
        parent.kill()
    assert select.select([watched], [], [], 60)[0]
    os.close(watched)
