"""A faiss IVF index that is searched in steps of clusters, on stock faiss (extra `rag`).

In: vectors, or a file. Out: the clusters of a query, and the nearest documents of any of them.
IVF-Flat, IVF-SQ8 and IVF-PQ; L2 and inner product. Ids are row numbers of the document table.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import faiss
import numpy as np
from numpy.typing import NDArray

from dovetail.ir.errors import SpecError
from dovetail.runtime.retrieval.cursor import Hit, merge_hits

METRICS = {"l2": faiss.METRIC_L2, "ip": faiss.METRIC_INNER_PRODUCT}
CODES = {"flat": "Flat", "sq8": "SQ8", "pq": "PQ{d4}x8"}
"""Codes of the vectors, in the language of faiss's index factory; d4: a quarter of d."""

Vectors = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Probe:
    """The clusters of one query, nearest centroid first, and faiss's distances to them."""

    clusters: tuple[int, ...]
    distances: Vectors


@dataclass(frozen=True, slots=True)
class Scan:
    """A piece of a search: some clusters of a query, with the centroid distances of these."""

    query: Vectors
    clusters: Sequence[int]
    distances: Vectors


class IvfIndex:
    """An index and the direct map that tells of a document where it lies."""

    def __init__(self, index: faiss.IndexIVF) -> None:
        """Take a trained index over; its ids must be its own."""
        self._index = index
        self._sign = -1.0 if index.metric_type == faiss.METRIC_INNER_PRODUCT else 1.0
        index.set_direct_map_type(faiss.DirectMap.Hashtable)

    @property
    def clusters(self) -> int:
        """Number of clusters."""
        return int(self._index.nlist)

    @property
    def sizes(self) -> list[int]:
        """Documents in each cluster."""
        lists = self._index.invlists
        return [lists.list_size(i) for i in range(self.clusters)]

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def probe(self, queries: Vectors, nprobe: int) -> list[Probe]:
        """Return the `nprobe` clusters whose centroids are nearest to each query [n, d]."""
        distances, clusters = self._index.quantizer.search(
            np.ascontiguousarray(queries), min(nprobe, self.clusters)
        )
        return [Probe(tuple(c.tolist()), d) for c, d in zip(clusters, distances, strict=True)]

    def scan(self, scans: Sequence[Scan], depth: int) -> list[list[Hit]]:
        """Return of each scan the nearest `depth` documents in its clusters, nearest first.

        Scans of different lengths run together; short ones are filled up with no cluster (-1).
        One call at a time.
        """
        width = max((len(scan.clusters) for scan in scans), default=0)
        if not width:
            return [[] for _ in scans]
        clusters = np.full((len(scans), width), -1, np.int64)
        centroids = np.zeros((len(scans), width), np.float32)
        for row, scan in enumerate(scans):
            clusters[row, : len(scan.clusters)] = scan.clusters
            centroids[row, : len(scan.clusters)] = scan.distances
        self._index.nprobe = width  # what faiss takes the width of `clusters` to be
        queries = np.stack([scan.query for scan in scans])
        found, ids = self._index.search_preassigned(queries, depth, clusters, centroids)
        return [self._hits(*row) for row in zip(found, ids, strict=True)]

    def find(self, queries: Vectors, depth: int, nprobe: int) -> list[list[Hit]]:
        """Return the nearest `depth` documents of each query in one scan of all its clusters."""
        probes = self.probe(queries, nprobe)
        scans = [
            Scan(query, probe.clusters, probe.distances)
            for query, probe in zip(queries, probes, strict=True)
        ]
        return self.scan(scans, depth)

    def distances(self, query: Vectors, ids: Sequence[int]) -> dict[int, float]:
        """Return the distance from `query` to each document that is still there."""
        kept = [i for i in ids if self.home(i) is not None]
        if not kept:
            return {}
        vectors = np.stack([self._index.reconstruct(i) for i in kept])
        if self._sign < 0:
            values = -(vectors @ query)
        else:
            values = ((vectors - query) ** 2).sum(axis=1)
        return dict(zip(kept, map(float, values), strict=True))

    def home(self, id_: int) -> int | None:
        """Return the cluster of a document, None where there is no such document."""
        try:
            place: int = self._index.direct_map.get(id_)
        except RuntimeError:
            return None
        return place >> 32

    def add(self, vectors: Vectors, ids: Sequence[int]) -> None:
        """Add documents. Not while a scan runs."""
        self._index.add_with_ids(np.ascontiguousarray(vectors), np.asarray(ids, np.int64))

    def remove(self, ids: Sequence[int]) -> int:
        """Remove documents, and return how many there were. Not while a scan runs."""
        selector = faiss.IDSelectorArray(np.asarray(ids, np.int64))
        return int(self._index.remove_ids(selector))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the index to a file."""
        faiss.write_index(self._index, os.fspath(path))

    def _hits(self, distances: Vectors, ids: NDArray[np.int64]) -> list[Hit]:
        found = (
            (self._sign * float(distance), int(id_))
            for distance, id_ in zip(distances, ids, strict=True)
            if id_ >= 0
        )
        return merge_hits([found], len(ids))


def build_index(
    vectors: Vectors,
    *,
    clusters: int,
    codes: str = "flat",
    metric: str = "l2",
    seed: int = 0,
) -> IvfIndex:
    """Return an index over `vectors` [n, d]; their ids are their rows.

    Args:
        vectors: what is searched; unit vectors where the metric is to be the cosine.
        clusters: lists of the index; four times the root of n is usual.
        codes: `flat` (exact), `sq8` (a byte a component) or `pq` (a byte for four).
        metric: `l2` or `ip` (inner product).
        seed: of the clustering.

    Raises:
        SpecError: codes or metric are unknown, or there are fewer vectors than clusters.
    """
    if codes not in CODES or metric not in METRICS:
        known = ", ".join((*CODES, *METRICS))
        raise SpecError(f"codes {codes!r} with metric {metric!r} are not known; there are {known}")
    count, d = vectors.shape
    if not 1 <= clusters <= count:
        raise SpecError(f"{count} vectors cannot make {clusters} clusters; ask for fewer")
    name = f"IVF{clusters},{CODES[codes].format(d4=max(1, d // 4))}"
    index = faiss.index_factory(d, name, METRICS[metric])
    index.cp.seed = seed
    index.train(np.ascontiguousarray(vectors))
    made = IvfIndex(index)
    made.add(vectors, range(count))
    return made


def read_index(path: str | os.PathLike[str]) -> IvfIndex:
    """Return the index in a file, its lists mapped from it; SpecError where it is none."""
    try:
        index = faiss.read_index(os.fspath(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
    except RuntimeError as error:
        raise SpecError(f"{os.fspath(path)} is no index that faiss reads: {error}") from None
    if not isinstance(index, faiss.IndexIVF):
        raise SpecError(f"{os.fspath(path)} holds a {type(index).__name__}, which is no IVF index")
    return IvfIndex(index)
