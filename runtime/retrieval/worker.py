"""The retrieval worker's process. In: requests (`wire.py`). Out: replies.

It alone of an app's processes loads faiss. Hot clusters are scanned, and copied, beside what the
CPU scans. It ends at once when the app hangs up, whatever it is doing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.ir.errors import ArtifactError, CapacityError, DeviceError, DovetailError, SpecError
from dovetail.ir.index_file import EmbedderEntry
from dovetail.runtime.child.framing import Channel, ErrorText
from dovetail.runtime.child.worker import read_beside
from dovetail.runtime.index.ivf import IvfIndex, Scanner
from dovetail.runtime.index.manifest import open_list_kernels
from dovetail.runtime.index.scanner import KernelScanner, choose_scanner
from dovetail.runtime.index.scans import Only, Part, Vectors, are_in
from dovetail.runtime.machine.seat import SEARCH_SLOT, Board, MovingSeat, take_seat
from dovetail.runtime.retrieval import wire
from dovetail.runtime.retrieval.budget import ScanCost
from dovetail.runtime.retrieval.collection import Collection
from dovetail.runtime.retrieval.device_lists import DeviceScanner
from dovetail.runtime.retrieval.folder import check_rest, is_still, open_index
from dovetail.topology.division import SEARCHES

if TYPE_CHECKING:
    from dovetail.runtime.accel.torch_lists import TorchLists


ALIKE = 0.8
"""Likeness of a passage's vector made here and the stored one at least, codes being lossy."""


@dataclass(slots=True)
class _ServedIndex:
    """An index, its documents, what scans its lists, and its hot clusters on a GPU.

    fault: damage that was found after it had been opened.
    """

    collection: Collection
    scanner: Scanner
    hot: DeviceScanner | None
    fault: ArtifactError | None = None

    def check(self, body: wire.OpenIndex) -> None:
        """Check what opening left unchecked; in a thread that gives way to all others."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            check_rest(body.path, body.manifest)
        except ArtifactError as error:
            self.fault = error


class Shelf:
    """The indexes that a worker has open."""

    def __init__(self) -> None:
        self._indexes: dict[str, _ServedIndex] = {}
        self._lost: dict[str, ErrorText] = {}  # why an index that an app knows is not there

    def answer(self, body: wire.Body) -> wire.Answer | ErrorText:
        """Do what is asked for; what goes wrong is an answer, too."""
        try:
            return _DO[type(body)](self, body)
        except DovetailError as error:
            found = ErrorText.of(error)
        except Exception as error:  # one request is lost, not the worker
            found = ErrorText("DeviceError", f"the search failed ({type(error).__name__}: {error})")
        if isinstance(body, wire.OpenIndex):
            self._lost[body.index] = found
        return found

    def _find(self, index: str) -> _ServedIndex:
        """Return an index; raises what kept it from being opened."""
        if index not in self._indexes and index in self._lost:
            raise self._lost[index].make()
        return self._indexes[index]

    def open(self, body: wire.OpenIndex) -> wire.Opened:
        """Map an index from its files."""
        found = open_index(body.path)
        index, prompts = found.index, found.embedder or EmbedderEntry(name="", fingerprint="")
        scanner = _choose_scanner(body, index)
        if not is_still(body.path, body.manifest):  # after all that was read of it
            raise ArtifactError(
                f"the index at {body.path} is another one now; add it again (app.add_index), or "
                "load the artifact again"
            )
        _check_encoder(body, index)
        before = self._indexes.get(body.index)
        if before is not None and before.hot is not None:  # it has room on the GPU
            before.hot.close()
        hot, cost, why_cold = _open_hot(body.room, index, scanner)
        self._indexes[body.index] = served = _ServedIndex(found, scanner, hot)
        threading.Thread(target=served.check, args=(body,), daemon=True).start()
        return wire.Opened(
            dim=index.dim,
            metric=index.metric,
            sizes=tuple(index.sizes),
            kernels=isinstance(scanner, KernelScanner),
            query_prompt=prompts.query_prompt,
            passage_prompt=prompts.passage_prompt,
            code_bytes=index.code_bytes,
            hot=cost,
            why_cold=why_cold,
        )

    def probe(self, body: wire.ProbeQueries) -> wire.ProbedQueries:
        """Find the clusters of queries; their filters are looked at here for the first time."""
        served = self._find(body.index)
        if served.fault is not None:  # each search begins here
            raise served.fault
        found = served.collection
        version, index = found.now
        filters = [found.only(query.filters) for query in body.queries]
        vectors = _read_vectors(index, [query.vector for query in body.queries])
        probes = index.probe(vectors, body.nprobe)
        probed = []
        for query, vector, near, only in zip(body.queries, vectors, probes, filters, strict=True):
            probe, known = near, np.array(query.known, np.int64)
            if only is not None:
                probe = index.probe_only(vector, body.nprobe, query.topk, only)
                known = known[are_in(known, only.ids)]
            distances = index.distances(vector, known.tolist())
            probed.append(wire.ProbedQuery(probe.clusters, probe.centroids, distances))
        return wire.ProbedQueries(tuple(probed), version)

    def scan(self, body: wire.ScanParts) -> wire.ScannedParts:
        """Scan the clusters of all parts, each as the documents were when its search began."""
        served = self._find(body.index)
        hot = served.hot if body.hot else None
        if hot is not None:
            hot.take_absent(served.collection.index)  # of a request that failed
        alike: dict[tuple[int, Only | None], list[int]] = {}
        for number, part in enumerate(body.parts):
            key = part.version, served.collection.only(part.filters)
            alike.setdefault(key, []).append(number)
        found: dict[int, Part] = {}
        for key, numbers in alike.items():
            rows = _scan_alike(served, hot, *key, [body.parts[n] for n in numbers])
            found |= zip(numbers, rows, strict=True)
        parts = tuple(found[number] for number in range(len(body.parts)))
        if not body.hot:
            return wire.ScannedParts(parts)
        wanted = [cluster for part in body.parts for cluster in part.clusters]
        missed, absent = len(wanted), set(wanted)
        if hot is not None:  # else this worker could not open the GPU
            missed, absent = hot.take_absent(served.collection.index)
        return wire.ScannedParts(parts, missed, tuple(sorted(absent)))

    def change(self, body: wire.ChangeIndex) -> wire.Changed:
        """Add and remove documents."""
        found = self._find(body.index).collection
        if len(found) != body.first:
            raise DeviceError(f"index {body.index!r} has other documents than the app knows of")
        rows = np.frombuffer(body.vectors, np.float32).reshape(-1, found.index.dim)
        return found.change(body.passages, rows, remove=body.remove, known=body.known)

    def restore(self, body: wire.RestoreIndex) -> wire.Changed:
        """Make changes again that another worker made."""
        found = self._find(body.index).collection
        found.restore(body)
        return wire.Changed(tuple(found.index.sizes))

    def copy(self, body: wire.CopyClusters) -> wire.Copied:
        """Swap hot clusters."""
        served = self._find(body.index)
        if served.hot is None:
            raise SpecError(f"index {body.index!r} has no room for hot clusters")
        index = served.collection.index
        missing = served.hot.swap(index, body.load, body.keep, body.room)
        return wire.Copied(served.hot.used, tuple(sorted(missing)))


def _scan_alike(
    served: _ServedIndex,
    hot: DeviceScanner | None,
    version: int,
    only: Only | None,
    parts: Sequence[Part],
) -> list[Part]:
    """Scan for parts that may find the same documents, as deep as the deepest one is to go."""
    index, depth = served.collection.at(version), max(part.depth for part in parts)
    scanned = []
    rows = index.scan(parts, depth, served.scanner if hot is None else hot, only)
    for part, hits in zip(parts, rows, strict=True):
        kept = tuple(hits[: part.depth])
        homes = tuple(home for _, id_ in kept if (home := index.home(id_)) is not None)
        scanned.append(Part(clusters=part.clusters, hits=kept, homes=homes))
    return scanned


def _check_encoder(body: wire.OpenIndex, index: IvfIndex) -> None:
    """Raise SpecError where what embeds is not what the vectors of an index were made with."""
    if not body.first:
        return
    vector = np.frombuffer(body.first, np.float32)
    if len(vector) != index.dim:
        raise SpecError(
            f"index {body.index!r} has vectors of {index.dim} values; its encoder here makes some "
            f"of {len(vector)}; {wire.ADVICE}"
        )
    for far in index.distances(vector, (0,)).values() if body.same else ():
        own = float(vector @ vector)
        like = -far / own if index.metric == "ip" else 1 - far / (2 * own)
        if not ALIKE <= like <= 1 / ALIKE:
            raise SpecError(
                f"index {body.index!r} was made with another encoder than this one, which makes "
                f"other vectors of its passages; {wire.ADVICE}"
            )


def _choose_scanner(body: wire.OpenIndex, index: IvfIndex) -> Scanner:
    library = None if body.kernels is False else open_list_kernels(Path(body.path))
    if body.kernels and library is not None:
        return KernelScanner(library, index, body.threads)
    return choose_scanner(library, index, queries=2 * body.threads, threads=body.threads)


def _open_hot(
    room: wire.Room | None, index: IvfIndex, host: Scanner
) -> tuple[DeviceScanner | None, ScanCost | None, str]:
    """Return what scans hot clusters, its costs, and why there is none where that can be mended."""
    if room is None:
        return None, None, ""

    def open_lists() -> TorchLists:
        from dovetail.runtime.accel.device import TorchDevice  # noqa: PLC0415 - torch
        from dovetail.runtime.accel.torch_lists import TorchLists  # noqa: PLC0415 - torch

        return TorchLists(TorchDevice(room.gpu), index, room.bytes)

    try:
        hot = DeviceScanner(open_lists, host)
        cost = hot.measure(index, room.bytes)
    except (SpecError, DeviceError, CapacityError) as error:
        return None, None, str(error)
    if cost is None:
        hot.close()
        return None, None, ""
    return hot, cost, ""


def _read_vectors(index: IvfIndex, packed: Sequence[bytes]) -> Vectors:
    for data in packed:
        if len(data) != 4 * index.dim:
            raise SpecError(
                f"a query has {len(data) // 4} values, the index has {index.dim}; "
                "embed queries with the model that the index was built with"
            )
    vectors = np.frombuffer(b"".join(packed), np.float32).reshape(len(packed), -1)
    if not np.isfinite(vectors).all():
        raise SpecError("a query has values that are not finite")
    return vectors


_DO: dict[type, Callable[[Shelf, Any], wire.Answer]] = {
    wire.OpenIndex: Shelf.open,
    wire.ProbeQueries: Shelf.probe,
    wire.ScanParts: Shelf.scan,
    wire.CopyClusters: Shelf.copy,
    wire.ChangeIndex: Shelf.change,
    wire.RestoreIndex: Shelf.restore,
}


def serve(channel: Channel, board: int = -1) -> None:
    """Answer requests until the app hangs up, those of each queue in order.

    board: the descriptor of a `Board`, which tells what is searched on.

    They are taken in while others are worked on: the CPU, the GPU with its hot clusters, and its
    link work beside each other.
    """
    channel.send(wire.WorkerReady())
    shelf, sending = Shelf(), threading.Lock()
    cpu, gpu, link = (ThreadPoolExecutor(1) for _ in range(3))
    shared = Board.join(board)
    seat = MovingSeat(shared, SEARCH_SLOT) if shared else None

    def work_on_cpu(request: wire.WorkerRequest) -> None:
        with take_seat(seat, SEARCHES):
            work(request)

    def work(request: wire.WorkerRequest) -> None:
        began = time.perf_counter()
        found = shelf.answer(request.body)
        body, error = (None, found) if isinstance(found, ErrorText) else (found, None)
        reply = wire.WorkerReply(request.number, body, began, time.perf_counter() - began, error)
        with sending, suppress(ConnectionError):  # the process ends then
            channel.send(reply)

    def put(request: wire.WorkerRequest) -> None:
        if isinstance(request.body, wire.CopyClusters):
            link.submit(work, request)
        else:
            hot = isinstance(request.body, wire.ScanParts) and request.body.hot
            gpu.submit(work, request) if hot else cpu.submit(work_on_cpu, request)

    read_beside(channel, wire.WorkerRequest, put).join()
