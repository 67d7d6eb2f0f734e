"""What we ask of faiss: scans of some clusters of an index, and the lists of clusters as arrays.

In: a `faiss.IndexIVF`. Out: hits, ids and stored vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import faiss
import numpy as np
from numpy.typing import NDArray

from dovetail.runtime.retrieval.cursor import Hit

if TYPE_CHECKING:
    from dovetail.runtime.retrieval.ivf import Ids, Mask, Scan, Vectors


def scan_lists(
    index: faiss.IndexIVF, scans: Sequence[Scan], depth: int, allowed: Mask | None = None
) -> list[list[Hit]]:
    """Return of each scan the nearest `depth` vectors of a faiss index, equal distances by id.

    faiss keeps of equally near vectors those it met first, so one more than wanted is asked for;
    where that one is as near as the last, more are, until none is left out by chance. Short scans
    are filled up with no cluster (-1).
    """
    selector = (
        None if allowed is None else faiss.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))
    )
    width = max((len(scan.clusters) for scan in scans), default=0)
    if not width:
        return [[] for _ in scans]
    if all(len(scan.clusters) == width for scan in scans):
        clusters = np.array([scan.clusters for scan in scans], np.int64)
        centroids = np.array([scan.distances for scan in scans], np.float32)
    else:
        clusters = np.full((len(scans), width), -1, np.int64)
        centroids = np.zeros((len(scans), width), np.float32)
        for row, scan in enumerate(scans):
            clusters[row, : len(scan.clusters)] = scan.clusters
            centroids[row, : len(scan.clusters)] = scan.distances
    queries = np.stack([scan.query for scan in scans]).astype(np.float32, copy=False)
    wanted, asked = np.arange(len(scans)), depth + 1
    sign = -1.0 if index.metric_type == faiss.METRIC_INNER_PRODUCT else 1.0
    hits: list[list[Hit]] = [[] for _ in scans]
    while len(wanted):
        found, ids = _search(
            index, queries[wanted], clusters[wanted], centroids[wanted], asked, selector
        )
        open_ = (ids[:, -1] >= 0) & (found[:, depth - 1] == found[:, -1])
        closed = ~open_
        rows = _rows(sign * found[closed], ids[closed], depth)
        for number, near in zip(wanted[closed].tolist(), rows, strict=True):
            hits[number] = near
        wanted, asked = wanted[open_], 2 * asked
    return hits


def _search(
    index: faiss.IndexIVF,
    queries: Vectors,
    clusters: Ids,
    centroids: Vectors,
    count: int,
    selector: object,
) -> tuple[Vectors, Ids]:
    found = np.empty((len(queries), count), np.float32)
    ids = np.empty((len(queries), count), np.int64)
    options = faiss.SearchParametersIVF(nprobe=clusters.shape[1], sel=selector)
    index.search_preassigned_c(
        len(queries),
        faiss.swig_ptr(np.ascontiguousarray(queries)),
        count,
        faiss.swig_ptr(np.ascontiguousarray(clusters)),
        faiss.swig_ptr(np.ascontiguousarray(centroids)),
        faiss.swig_ptr(found),
        faiss.swig_ptr(ids),
        False,
        options,
    )
    return found, ids


def _rows(distances: Vectors, ids: Ids, depth: int) -> list[list[Hit]]:
    """Return the nearest `depth` of each row; faiss has them by distance, and fills up with -1."""
    if (distances[:, 1:] == distances[:, :-1]).any():
        order = np.lexsort((ids, np.where(ids < 0, np.inf, distances)), axis=1)
        distances = np.take_along_axis(distances, order, 1)
        ids = np.take_along_axis(ids, order, 1)
    counts = (ids >= 0).sum(axis=1).clip(max=depth).tolist()
    pairs = zip(distances.tolist(), ids.tolist(), counts, strict=True)
    return [list(zip(d[:count], i[:count], strict=True)) for d, i, count in pairs]


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


def clear(index: faiss.IndexIVF, cluster: int) -> int:
    """Take all vectors out of a cluster, and return how many there were."""
    count = int(index.invlists.list_size(cluster))
    index.invlists.resize(cluster, 0)
    index.ntotal -= count
    return count


def clone_empty(index: faiss.IndexIVF) -> faiss.IndexIVF:
    """Return another index of the same kind and training; neither has vectors."""
    return faiss.clone_index(index)
