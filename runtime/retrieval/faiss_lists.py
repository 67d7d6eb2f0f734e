"""What we ask of faiss: scans of some clusters of an index, and the lists of clusters as arrays.

In: a `faiss.IndexIVF`. Out: hits, ids and stored vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
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
    hits: list[list[Hit]] = [[] for _ in scans]
    wanted, asked = list(range(len(scans))), depth + 1
    while wanted:
        rows = _search(index, queries, clusters, centroids, asked, selector)
        again = []
        for place, (number, distances, ids) in enumerate(zip(wanted, *rows, strict=True)):
            if ids[-1] >= 0 and distances[depth - 1] == distances[-1]:
                again.append(place)
            else:
                hits[number] = _nearest(distances, ids, depth)
        wanted, asked = [wanted[place] for place in again], 2 * asked
        queries, clusters, centroids = queries[again], clusters[again], centroids[again]
    return hits


def _search(
    index: faiss.IndexIVF,
    queries: Vectors,
    clusters: Ids,
    centroids: Vectors,
    count: int,
    selector: object,
) -> tuple[list[list[float]], list[list[int]]]:
    """Return distances and ids of the nearest `count` of each query; the smaller the nearer."""
    found = np.empty((len(queries), count), np.float32)
    ids = np.empty((len(queries), count), np.int64)
    width = clusters.shape[1]
    options = (
        _probe_all(width)
        if selector is None
        else faiss.SearchParametersIVF(nprobe=width, sel=selector)
    )
    index.search_preassigned_c(
        len(queries),
        faiss.swig_ptr(queries),
        count,
        faiss.swig_ptr(clusters),
        faiss.swig_ptr(centroids),
        faiss.swig_ptr(found),
        faiss.swig_ptr(ids),
        False,
        options,
    )
    if index.metric_type == faiss.METRIC_INNER_PRODUCT:
        np.negative(found, out=found)
    return found.tolist(), ids.tolist()


def _nearest(distances: list[float], ids: list[int], depth: int) -> list[Hit]:
    """Return the nearest `depth` of a row; faiss has it by distance, and fills it up with -1."""
    hits = [hit for hit in zip(distances, ids, strict=True) if hit[1] >= 0]
    if len(set(distances)) < len(distances):
        hits.sort()
    return hits[:depth]


@lru_cache
def _probe_all(nprobe: int) -> faiss.SearchParametersIVF:
    return faiss.SearchParametersIVF(nprobe=nprobe)


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
