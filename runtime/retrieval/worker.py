"""The retrieval worker: `python -P -m dovetail.runtime.retrieval.worker FD`.

In: an inherited socket, and requests on it (`wire.py`). Out: replies. It alone of an app's
processes loads faiss. It ends at once when the app hangs up, whatever it is doing.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from dovetail.ir.errors import DovetailError, SpecError
from dovetail.runtime.retrieval.collection import Collection
from dovetail.runtime.retrieval.folder import open_index
from dovetail.runtime.retrieval.ivf import IvfIndex, Scan, Scanner, Vectors
from dovetail.runtime.retrieval.list_kernels import open_list_kernels
from dovetail.runtime.retrieval.scanner import KernelScanner, choose_scanner
from dovetail.runtime.retrieval.wire import (
    Answer,
    Body,
    Opened,
    OpenIndex,
    ProbedQueries,
    ProbedQuery,
    ProbeQueries,
    Ready,
    Refused,
    Reply,
    Request,
    ScannedPiece,
    ScannedPieces,
    ScanPieces,
    receive_struct,
    send,
    unpack_vectors,
)


@dataclass(frozen=True, slots=True)
class _Served:
    """An index, its documents, and what scans its lists."""

    collection: Collection
    scanner: Scanner


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
        self._indexes[body.index] = _Served(found, scanner)
        return Opened(
            dim=index.dim,
            metric=index.metric,
            sizes=tuple(index.sizes),
            kernels=isinstance(scanner, KernelScanner),
            query_prompt="" if embedder is None else embedder.query_prompt,
        )

    def probe(self, body: ProbeQueries) -> ProbedQueries:
        """Find the clusters of queries; their filters are looked at here for the first time."""
        found = self._indexes[body.index].collection
        index = found.snapshot.index
        vectors = _read_vectors(index, [query.vector for query in body.queries])
        for query in body.queries:
            found.mask(query.filters)
        probes = index.probe(vectors, body.nprobe)
        return ProbedQueries(
            tuple(
                ProbedQuery(
                    probe.clusters,
                    tuple(probe.distances.tolist()),
                    index.distances(vector, query.known),
                )
                for query, vector, probe in zip(body.queries, vectors, probes, strict=True)
            )
        )

    def scan(self, body: ScanPieces) -> ScannedPieces:
        """Scan the clusters of all pieces as one batch, as deep as the deepest one is to go."""
        served = self._indexes[body.index]
        found, index = served.collection, served.collection.snapshot.index
        vectors = _read_vectors(index, [piece.vector for piece in body.pieces])
        scans = [
            Scan(
                vector,
                piece.clusters,
                np.array(piece.centroids, np.float32),
                found.mask(piece.filters),
            )
            for vector, piece in zip(vectors, body.pieces, strict=True)
        ]
        rows = index.scan(scans, max(piece.depth for piece in body.pieces), served.scanner)
        pieces = []
        for piece, hits in zip(body.pieces, rows, strict=True):
            kept = tuple(hits[: piece.depth])
            homes = tuple(home for _, id_ in kept if (home := index.home(id_)) is not None)
            pieces.append(ScannedPiece(kept, homes))
        return ScannedPieces(tuple(pieces))


def _choose_scanner(body: OpenIndex, index: IvfIndex) -> Scanner:
    library = None if body.kernels is False else open_list_kernels(Path(body.path))
    if body.kernels and library is not None:
        return KernelScanner(library, index, body.threads)
    return choose_scanner(library, index, queries=2 * body.threads, threads=body.threads).scanner


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
}


def serve(link: socket.socket) -> None:
    """Answer requests in order until the app hangs up."""
    send(link, Ready())
    requests: SimpleQueue[Request] = SimpleQueue()
    threading.Thread(target=_read, args=(link, requests), daemon=True).start()
    shelf = Shelf()
    while True:
        request = requests.get()
        began = time.perf_counter()
        body = shelf.answer(request.body)
        send(link, Reply(request.number, body, began, time.perf_counter() - began))


def _read(link: socket.socket, requests: SimpleQueue[Request]) -> None:
    """Take requests in while others are worked on: who sends them never waits for a search."""
    while (request := receive_struct(link, Request)) is not None:
        requests.put(request)
    os._exit(0)  # a search under way has nobody left who waits for it


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(ConnectionError):  # the app is gone
        serve(socket.socket(fileno=int(sys.argv[1])))
