"""The retrieval worker: `python -P -m dovetail.runtime.retrieval.worker FD`.

In: an inherited socket, and requests on it (`wire.py`). Out: replies. It alone of an app's
processes loads faiss. Hot clusters are scanned, and copied, beside what the CPU scans. It ends at
once when the app hangs up, whatever it is doing.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from dovetail.ir.errors import ArtifactError, CapacityError, DeviceError, DovetailError, SpecError
from dovetail.runtime.leash import begin_child
from dovetail.runtime.retrieval.budget import ScanCost
from dovetail.runtime.retrieval.collection import Collection
from dovetail.runtime.retrieval.device_lists import (
    DeviceLists,
    DeviceScanner,
    EmulatedLists,
    measure_lists,
)
from dovetail.runtime.retrieval.folder import check_rest, open_index
from dovetail.runtime.retrieval.ivf import IvfIndex
from dovetail.runtime.retrieval.list_kernels import open_list_kernels
from dovetail.runtime.retrieval.scanner import KernelScanner, choose_scanner
from dovetail.runtime.retrieval.scans import Scan, Scanner, Vectors
from dovetail.runtime.retrieval.timed_lists import TimedLists
from dovetail.runtime.retrieval.wire import (
    Answer,
    Body,
    Changed,
    ChangeIndex,
    Copied,
    CopyClusters,
    EmulatedGpu,
    Opened,
    OpenIndex,
    Piece,
    ProbedQueries,
    ProbedQuery,
    ProbeQueries,
    Ready,
    Refused,
    Reply,
    Request,
    RestoreIndex,
    ScannedPiece,
    ScannedPieces,
    ScanPieces,
    receive_struct,
    send,
    unpack_vectors,
)


@dataclass(frozen=True, slots=True)
class _Served:
    """An index, its documents, what scans its lists, and its hot clusters on a GPU.

    faults: damage that was found after it had been opened.
    """

    collection: Collection
    scanner: Scanner
    hot: DeviceScanner | None = None
    faults: list[ArtifactError] = field(default_factory=list)

    def check(self, path: str) -> None:
        """Check what opening left unchecked; in a thread that gives way to all others."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            check_rest(path)
        except ArtifactError as error:
            self.faults.append(error)


class Shelf:
    """The indexes that a worker has open."""

    def __init__(self) -> None:
        self._indexes: dict[str, _Served] = {}

    def answer(self, body: Body) -> Answer:
        """Do what is asked for; what goes wrong is an answer, too."""
        try:
            return _DO[type(body)](self, body)
        except DovetailError as error:
            return Refused(type(error).__name__, str(error))
        except Exception as error:  # one request is lost, not the worker
            return Refused("DeviceError", f"the search failed ({type(error).__name__}: {error})")

    def open(self, body: OpenIndex) -> Opened:
        """Map an index from its files."""
        found = open_index(body.path)
        index, embedder = found.snapshot.index, found.embedder
        scanner = _choose_scanner(body, index)
        self.close(body.index)
        hot, cost, why_cold = _open_hot(body, index, scanner)
        self._indexes[body.index] = served = _Served(found, scanner, hot)
        threading.Thread(target=served.check, args=(body.path,), daemon=True).start()
        return Opened(
            dim=index.dim,
            metric=index.metric,
            sizes=tuple(index.sizes),
            kernels=isinstance(scanner, KernelScanner),
            query_prompt="" if embedder is None else embedder.query_prompt,
            passage_prompt="" if embedder is None else embedder.passage_prompt,
            code_bytes=index.code_bytes,
            hot=cost,
            why_cold=why_cold,
        )

    def close(self, name: str) -> None:
        """Give back what an index of that name has on a GPU."""
        served = self._indexes.get(name)
        if served is not None and served.hot is not None:
            served.hot.close()

    def probe(self, body: ProbeQueries) -> ProbedQueries:
        """Find the clusters of queries; their filters are looked at here for the first time."""
        served = self._indexes[body.index]
        for fault in served.faults:  # each search begins here
            raise fault
        found = served.collection
        seen = found.snapshot
        index = seen.index
        vectors = _read_vectors(index, [query.vector for query in body.queries])
        for query in body.queries:
            found.only(query.filters)
        probes = index.probe(vectors, body.nprobe)
        return ProbedQueries(
            tuple(
                ProbedQuery(
                    probe.clusters,
                    tuple(probe.distances.tolist()),
                    index.distances(vector, query.known),
                )
                for query, vector, probe in zip(body.queries, vectors, probes, strict=True)
            ),
            seen.version,
        )

    def scan(self, body: ScanPieces) -> ScannedPieces:
        """Scan the clusters of all pieces, each as the documents were when its search began."""
        served = self._indexes[body.index]
        hot = served.hot if body.hot else None
        start = _seconds(hot)
        if hot is not None:
            hot.take_absent()  # of a request that failed
        scanned: dict[int, ScannedPiece] = {}
        for version in {piece.version for piece in body.pieces}:
            of_version = {n: p for n, p in enumerate(body.pieces) if p.version == version}
            rows = _scan_alike(served, hot, version, tuple(of_version.values()))
            scanned |= zip(of_version, rows, strict=True)
        pieces = tuple(scanned[number] for number in range(len(body.pieces)))
        missed, absent = 0, set[int]()
        if hot is not None:
            found = hot.take_absent()
            missed, absent = found.times, found.of(served.collection.snapshot.index)
        elif body.hot:  # this worker could not open the GPU
            wanted = [cluster for piece in body.pieces for cluster in piece.clusters]
            missed, absent = len(wanted), set(wanted)
        return ScannedPieces(pieces, _seconds(hot) - start, missed, tuple(sorted(absent)))

    def change(self, body: ChangeIndex) -> Changed:
        """Add and remove documents."""
        found = self._indexes[body.index].collection
        if len(found) != body.first:
            raise DeviceError(f"index {body.index!r} has other documents than the app knows of")
        made = found.change(body.passages, _read_rows(found, body.vectors), remove=body.remove)
        return Changed(tuple(made.snapshot.index.sizes), made.removed, made.forgotten)

    def restore(self, body: RestoreIndex) -> Changed:
        """Make changes again that another worker made."""
        found = self._indexes[body.index].collection
        rows, state = _read_rows(found, body.vectors), (body.version, body.count)
        found.restore(body.passages, rows, body.ids, body.remove, *state)
        return Changed(tuple(found.snapshot.index.sizes))

    def copy(self, body: CopyClusters) -> Copied:
        """Swap hot clusters."""
        served = self._indexes[body.index]
        if served.hot is None:
            raise SpecError(f"index {body.index!r} has no room for hot clusters")
        index = served.collection.snapshot.index
        missing = served.hot.swap(index, body.load, body.keep, body.room)
        return Copied(served.hot.device.used, tuple(sorted(missing)))


def _scan_alike(
    served: _Served, hot: DeviceScanner | None, version: int, pieces: Sequence[Piece]
) -> list[ScannedPiece]:
    """Scan for pieces that see the same documents, as deep as the deepest one is to go."""
    found, index = served.collection, served.collection.at(version).index
    vectors = _read_vectors(index, [piece.vector for piece in pieces])
    scans = [
        Scan(
            vector,
            piece.clusters,
            np.array(piece.centroids, np.float32),
            found.only(piece.filters),
            piece.bound,
        )
        for vector, piece in zip(vectors, pieces, strict=True)
    ]
    depth = max(piece.depth for piece in pieces)
    rows = index.scan(scans, depth, served.scanner if hot is None else hot)
    scanned = []
    for piece, hits in zip(pieces, rows, strict=True):
        kept = tuple(hits[: piece.depth])
        homes = tuple(home for _, id_ in kept if (home := index.home(id_)) is not None)
        scanned.append(ScannedPiece(kept, homes))
    return scanned


def _choose_scanner(body: OpenIndex, index: IvfIndex) -> Scanner:
    library = None if body.kernels is False else open_list_kernels(Path(body.path))
    if body.kernels and library is not None:
        return KernelScanner(library, index, body.threads)
    return choose_scanner(library, index, queries=2 * body.threads, threads=body.threads).scanner


def _open_hot(
    body: OpenIndex, index: IvfIndex, host: Scanner
) -> tuple[DeviceScanner | None, ScanCost | None, str]:
    """Return what scans hot clusters, its costs, and why there is none where that can be mended."""
    if body.room is None:
        return None, None, ""
    try:
        lists = _open_lists(body, index)
        cost = measure_lists(lists, index, body.room.bytes)
    except (SpecError, DeviceError, CapacityError) as error:
        return None, None, str(error)
    if cost is None:
        lists.close()
        return None, None, ""
    return DeviceScanner(lists, host), cost, ""


def _open_lists(body: OpenIndex, index: IvfIndex) -> DeviceLists:
    assert body.room is not None
    gpu, room = body.room.gpu, body.room.bytes
    if isinstance(gpu, EmulatedGpu):
        return EmulatedLists(index, room, gpu)

    def open_lists() -> DeviceLists:
        from dovetail.runtime.accelerator.device import TorchDevice  # noqa: PLC0415 - torch
        from dovetail.runtime.accelerator.lists import TorchLists  # noqa: PLC0415 - torch

        return TorchLists(TorchDevice(gpu.name), index, room)

    return TimedLists(open_lists, gpu.patience, gpu.opening_patience)


def _seconds(hot: DeviceScanner | None) -> float:
    return time.perf_counter() if hot is None else hot.device.seconds


def _read_rows(found: Collection, vectors: bytes) -> Vectors:
    return np.frombuffer(vectors, np.float32).reshape(-1, found.snapshot.index.dim)


def _read_vectors(index: IvfIndex, packed: Sequence[bytes]) -> Vectors:
    for data in packed:
        if len(data) != 4 * index.dim:
            raise SpecError(
                f"a query has {len(data) // 4} values, the index has {index.dim}; "
                "embed queries with the model that the index was built with"
            )
    vectors = unpack_vectors(packed)
    if not np.isfinite(vectors).all():
        raise SpecError("a query has values that are not finite")
    return vectors


_DO: dict[type, Callable[[Shelf, Any], Answer]] = {
    OpenIndex: Shelf.open,
    ProbeQueries: Shelf.probe,
    ScanPieces: Shelf.scan,
    CopyClusters: Shelf.copy,
    ChangeIndex: Shelf.change,
    RestoreIndex: Shelf.restore,
}


def serve(link: socket.socket) -> None:
    """Answer requests until the app hangs up, those of each lane in order."""
    send(link, Ready())
    shelf, sending = Shelf(), threading.Lock()
    lanes: dict[str, SimpleQueue[Request]] = {name: SimpleQueue() for name in ("gpu", "copy")}
    for requests in lanes.values():
        threading.Thread(target=_work, args=(link, shelf, requests, sending), daemon=True).start()
    lanes["cpu"] = SimpleQueue()
    threading.Thread(target=_read, args=(link, lanes), daemon=True).start()
    _work(link, shelf, lanes["cpu"], sending)


def _work(
    link: socket.socket, shelf: Shelf, requests: SimpleQueue[Request], sending: threading.Lock
) -> None:
    while True:
        request = requests.get()
        began = time.perf_counter()
        body = shelf.answer(request.body)
        reply = Reply(request.number, body, began, time.perf_counter() - began)
        with sending, suppress(ConnectionError):  # `_read` ends the process then
            send(link, reply)


def _read(link: socket.socket, lanes: Mapping[str, SimpleQueue[Request]]) -> None:
    """Take requests in while others are worked on: who sends them never waits for a search."""
    while (request := receive_struct(link, Request)) is not None:
        lanes[_lane(request.body)].put(request)
    os._exit(0)  # a search under way has nobody left who waits for it


def _lane(body: Body) -> str:
    """Return what works on a request: the CPU, the GPU with its hot clusters, or its link."""
    if isinstance(body, CopyClusters):
        return "copy"
    return "gpu" if isinstance(body, ScanPieces) and body.hot else "cpu"


if __name__ == "__main__":
    begin_child()
    with suppress(ConnectionError):  # the app is gone
        serve(socket.socket(fileno=int(sys.argv[1])))
