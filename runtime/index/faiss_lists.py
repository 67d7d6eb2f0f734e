"""What we ask of faiss: scans of some clusters of an index, and the lists of clusters as arrays.

In: a `faiss.IndexIVF`. Out: hits, ids and stored vectors.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache

import faiss
import numpy as np
from numpy.typing import NDArray

from dovetail.runtime.index.cursor import Hit
from dovetail.runtime.index.scans import Ids, Mask, Part, Vectors

KEPT_SHAPES = 32
"""Shapes of searches for which a thread keeps arrays."""


def scan_lists(
    index: faiss.IndexIVF, scans: Sequence[Part], depth: int, allowed: Mask | None = None
) -> list[list[Hit]]:
    """Return of each scan the nearest `depth` vectors of a faiss index, equal distances by id.

    Those farther than a scan's bound are left out. faiss keeps of equally near vectors those it met
    first, so one more than wanted is asked for; where that one is as near as the last, more are,
    until none is left out by chance.
    """
    width = max((len(scan.clusters) for scan in scans), default=0)
    hits: list[list[Hit]] = [[] for _ in scans]
    wanted, asked = list(range(len(scans))) if width else [], depth + 1
    options = _options(width, allowed)
    while wanted:
        chosen = [scans[number] for number in wanted]
        found, ids = _search(index, chosen, width, asked, options)
        again = []
        for row, (number, first) in enumerate(zip(wanted, found[:, 0].tolist(), strict=True)):
            bound = scans[number].bound
            if first > bound:  # so it is of most in the later steps
                continue
            distances = found[row].tolist()
            near = bisect_right(distances, bound)
            nearest = _nearest(distances[:near], ids[row, :near].tolist())
            if len(nearest) == asked and nearest[depth - 1][0] == nearest[-1][0]:
                again.append(number)
            hits[number] = nearest[:depth]
        wanted, asked = again, 2 * asked
    return hits


def stack_queries(scans: Sequence[Part]) -> Vectors:
    """Return the queries of scans as rows [n, d]."""
    joined = np.frombuffer(bytearray().join([scan.vector for scan in scans]), np.float32)
    return joined.reshape(len(scans), -1)


class _Arrays:
    """What faiss reads and writes in searches of one shape, and where that lies."""

    def __init__(self, rows: int, width: int, count: int) -> None:
        self.clusters = np.empty((rows, width), np.int64)
        self.centroids = np.zeros((rows, width), np.float32)
        self.found = np.empty((rows, count), np.float32)
        self.ids = np.empty((rows, count), np.int64)
        self.given = faiss.swig_ptr(self.clusters), faiss.swig_ptr(self.centroids)
        self.taken = faiss.swig_ptr(self.found), faiss.swig_ptr(self.ids)


class _Kept(threading.local):
    """Arrays of a thread: the steps of searches have few shapes, and making arrays takes time."""

    def __init__(self) -> None:
        self.arrays = lru_cache(KEPT_SHAPES)(_Arrays)


_KEPT = _Kept()


def _search(
    index: faiss.IndexIVF, scans: Sequence[Part], width: int, count: int, options: object
) -> tuple[Vectors, Ids]:
    """Return distances and ids of the nearest `count` of each scan; the smaller the nearer.

    Where there are fewer, faiss fills rows up with the id -1, farther than all. Of use until the
    next search of the thread.
    """
    arrays, queries = _KEPT.arrays(len(scans), width, count), stack_queries(scans)
    # short ones are filled up with no cluster
    arrays.clusters[:] = [(*scan.clusters, *[-1] * (width - len(scan.clusters))) for scan in scans]
    if not isinstance(index, faiss.IndexIVFFlat):  # whose scans do not read them
        for row, scan in zip(arrays.centroids, scans, strict=True):
            row[: len(scan.clusters)] = scan.centroids
    index.search_preassigned_c(
        len(scans), faiss.swig_ptr(queries), count, *arrays.given, *arrays.taken, False, options
    )
    if index.metric_type == faiss.METRIC_INNER_PRODUCT:
        np.negative(arrays.found, out=arrays.found)
    return arrays.found, arrays.ids


def measure_pairs(
    metric: str, queries: Vectors, vectors: Vectors, rows: Ids, places: Ids
) -> Vectors:
    """Return the distance of each pair (row of queries, place in vectors) as scans have it."""
    found = np.empty(len(rows), np.float32)
    if not len(rows):
        return found
    measure = faiss.fvec_L2sqr_by_idx if metric == "l2" else faiss.fvec_inner_products_by_idx
    asked, among = np.ascontiguousarray(queries[rows]), np.ascontiguousarray(vectors)
    at = np.ascontiguousarray(places, np.int64)
    given = [faiss.swig_ptr(array) for array in (found, asked, among, at)]
    measure(*given, asked.shape[1], len(rows), 1)
    return found if metric == "l2" else -found


def _nearest(distances: list[float], ids: list[int]) -> list[Hit]:
    """Return the hits of a row that faiss has by distance, equal ones by id."""
    if -1 in ids:  # a row is filled up with it
        ids = ids[: ids.index(-1)]
    hits = list(zip(distances, ids, strict=False))
    if len(set(distances)) < len(distances):
        hits.sort()
    return hits


_probe_all = lru_cache(faiss.SearchParametersIVF)


def _options(nprobe: int, allowed: Mask | None) -> faiss.SearchParametersIVF:
    if allowed is None:
        return _probe_all(nprobe=nprobe)
    selector = faiss.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))
    return faiss.SearchParametersIVF(nprobe=nprobe, sel=selector)


def entries(index: faiss.IndexIVF, cluster: int) -> tuple[Ids, NDArray[np.uint8]]:
    """Return the ids [n] and stored vectors [n, code_size] of a cluster: views."""
    lists = index.invlists
    size = lists.list_size(cluster)
    if not size:
        return np.empty(0, np.int64), np.empty((0, index.code_size), np.uint8)
    ids = faiss.rev_swig_ptr(lists.get_ids(cluster), size)
    codes = faiss.rev_swig_ptr(lists.get_codes(cluster), size * index.code_size)
    return ids, codes.reshape(size, -1)


def append(index: faiss.IndexIVF, cluster: int, ids: Ids, codes: NDArray[np.uint8]) -> None:
    """Add stored vectors to a cluster as they are."""
    if not len(ids):
        return
    given, stored = np.ascontiguousarray(ids), np.ascontiguousarray(codes)
    index.invlists.add_entries(cluster, len(ids), faiss.swig_ptr(given), faiss.swig_ptr(stored))
    index.ntotal += len(ids)


def clone_empty(index: faiss.IndexIVF) -> faiss.IndexIVF:
    """Return another index of the same kind and training; neither has vectors.

    They share what finds clusters, but where there are product codes: it may be larger than the
    vectors of a few documents that are to be looked for with it.
    """
    given = index.quantizer, index.d, index.nlist
    if isinstance(index, faiss.IndexIVFFlat):
        twin = faiss.IndexIVFFlat(*given, index.metric_type)
    elif isinstance(index, faiss.IndexIVFScalarQuantizer):
        codes = index.sq.qtype, index.metric_type, index.by_residual
        twin = faiss.IndexIVFScalarQuantizer(*given, *codes)
        twin.sq = index.sq
    else:
        return faiss.clone_index(index)
    twin.is_trained = True
    twin.referenced_objects = [index]  # whose quantizer it is
    return twin
