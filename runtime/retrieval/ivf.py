"""A faiss IVF index that is searched in steps of clusters, on stock faiss (extra `rag`).

In: queries. Out: their clusters, and the nearest documents of any of these. Any codes, L2 and inner
product. Ids are row numbers of the document table. `build.py` makes and reads indexes.

An `IvfIndex` never changes: adding and removing gives another one that shares what stayed the same,
so a search that began on the one before goes on as if nothing had happened.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import faiss
import numpy as np
from numpy.typing import NDArray

from dovetail.ir.errors import SpecError
from dovetail.runtime.retrieval.cursor import Hit, merge_hits
from dovetail.runtime.retrieval.faiss_lists import append, clone_empty, entries, scan_lists
from dovetail.runtime.retrieval.scans import Ids, Mask, Probe, Scan, Scanner, Vectors

CHANGED_LEAST, CHANGED_SHARE = 4096, 0.25
"""Changed vectors, and their share of all, from which a change rewrites the whole index."""


class FaissScanner:
    """faiss's own scanner, for any codes."""

    def scan(
        self, index: IvfIndex, scans: Sequence[Scan], depth: int, allowed: Mask | None
    ) -> list[list[Hit]]:
        """See `Scanner`."""
        return scan_lists(index.base.index, scans, depth, allowed)


@dataclass(frozen=True, slots=True)
class Part:
    """The vectors of one faiss index, and of each, by sorted id, its cluster and place there."""

    index: faiss.IndexIVF
    ids: Ids
    homes: NDArray[np.int32]
    places: NDArray[np.int32]

    @classmethod
    def of(cls, index: faiss.IndexIVF) -> Part:
        """Return the vectors of a faiss index."""
        sizes = [index.invlists.list_size(cluster) for cluster in range(index.nlist)]
        ids = np.concatenate([entries(index, c)[0] for c in range(index.nlist)])
        homes = np.repeat(np.arange(index.nlist, dtype=np.int32), sizes)
        places = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
        order = np.argsort(ids, kind="stable")
        return cls(index, ids[order], homes[order], places[order])

    def find(self, id_: int) -> tuple[int, int] | None:
        """Return (cluster, place) of a document."""
        at = int(np.searchsorted(self.ids, id_))
        if at == len(self.ids) or self.ids[at] != id_:
            return None
        return int(self.homes[at]), int(self.places[at])


@dataclass(frozen=True, slots=True)
class IvfIndex:
    """Vectors in clusters. Any number of threads may search at once.

    base: what was built or read. fresh: what was added since. gone: by id, what of `base` was
    removed. empty: a trained index without vectors, from which others are made.
    """

    base: Part
    empty: faiss.IndexIVF
    fresh: Part | None = None
    gone: Mask | None = field(default=None, repr=False)

    @property
    def metric(self) -> str:
        """`l2` or `ip`."""
        return "ip" if self.empty.metric_type == faiss.METRIC_INNER_PRODUCT else "l2"

    @property
    def dim(self) -> int:
        """Values of a vector."""
        return int(self.empty.d)

    @property
    def clusters(self) -> int:
        """Number of clusters."""
        return int(self.empty.nlist)

    @property
    def codes(self) -> str:
        """How vectors are stored: `flat`, `sq8` or `pq`."""
        kinds = {"IndexIVFFlat": "flat", "IndexIVFScalarQuantizer": "sq8", "IndexIVFPQ": "pq"}
        return kinds[type(self.empty).__name__]

    @property
    def code_bytes(self) -> int:
        """Bytes of a stored vector."""
        return int(self.empty.code_size)

    @property
    def sizes(self) -> list[int]:
        """Vectors that a scan of each cluster looks at, those removed since the base included."""
        counts = np.zeros(self.clusters, np.int64)
        for part in self._parts():
            counts += np.bincount(part.homes, minlength=self.clusters)
        return [int(count) for count in counts]

    def __len__(self) -> int:
        return sum(len(part.ids) for part in self._parts()) - self._gone_count()

    def probe(self, queries: Vectors, nprobe: int) -> list[Probe]:
        """Return the `nprobe` clusters whose centroids are nearest to each query [n, d].

        Raises SpecError for queries of another length than the index's vectors.
        """
        if queries.ndim != 2 or queries.shape[1] != self.dim:
            raise SpecError(f"queries must have {self.dim} values each, not {queries.shape[1:]}")
        distances, clusters = self.empty.quantizer.search(
            np.ascontiguousarray(queries, np.float32), min(nprobe, self.clusters)
        )
        return [Probe(tuple(c.tolist()), d) for c, d in zip(clusters, distances, strict=True)]

    def scan(
        self, scans: Sequence[Scan], depth: int, scanner: Scanner | None = None
    ) -> list[list[Hit]]:
        """Return of each scan the nearest `depth` documents in its clusters, nearest first.

        Scans of different lengths run together. `scanner` scans the base, faiss by default; what
        was added since is always scanned by faiss. SpecError for queries of another length.
        """
        if not {scan.query.size for scan in scans} <= {self.dim}:  # faiss would read beyond
            raise SpecError(f"queries must have {self.dim} values each")
        used = scanner or FaissScanner()
        masks = {id(scan.only): scan.only for scan in scans}
        if len(masks) == 1:
            return self._scan_alike(scans, depth, used)
        found: list[list[Hit]] = [[] for _ in scans]
        for mask in masks:
            numbers = [n for n, scan in enumerate(scans) if id(scan.only) == mask]
            rows = self._scan_alike([scans[n] for n in numbers], depth, used)
            for number, hits in zip(numbers, rows, strict=True):
                found[number] = hits
        return found

    def _scan_alike(self, scans: Sequence[Scan], depth: int, scanner: Scanner) -> list[list[Hit]]:
        """Scan for queries that share one filter."""
        only = scans[0].only
        found = scanner.scan(self, scans, depth, _allowed(only, self.gone, self.base.ids))
        if self.fresh is None:
            return found
        fresh = scan_lists(self.fresh.index, scans, depth, only)
        return [merge_hits(parts, depth) for parts in zip(found, fresh, strict=True)]

    def find(
        self, queries: Vectors, depth: int, nprobe: int, only: Mask | None = None
    ) -> list[list[Hit]]:
        """Return the nearest `depth` documents of each query in one scan of all its clusters."""
        probes = self.probe(queries, nprobe)
        scans = [
            Scan(query, probe.clusters, probe.distances, only)
            for query, probe in zip(queries, probes, strict=True)
        ]
        return self.scan(scans, depth)

    def distances(self, query: Vectors, ids: Iterable[int]) -> dict[int, float]:
        """Return the distance from `query` to each document that is still there."""
        found = {i: located for i in ids if (located := self._locate(i)) is not None}
        if not found:
            return {}
        vectors = np.empty((len(found), self.dim), np.float32)
        for row, (part, cluster, place) in zip(vectors, found.values(), strict=True):
            part.index.reconstruct_from_offset(cluster, place, faiss.swig_ptr(row))
        values = ((vectors - query) ** 2).sum(axis=1) if self.metric == "l2" else -(vectors @ query)
        return dict(zip(found, map(float, values), strict=True))

    def home(self, id_: int) -> int | None:
        """Return the cluster of a document, None where there is no such document."""
        located = self._locate(id_)
        return None if located is None else located[1]

    def change(
        self, vectors: Vectors | None = None, ids: Sequence[int] = (), *, remove: Iterable[int] = ()
    ) -> IvfIndex:
        """Return the index after `remove` was taken out and `vectors` [n, d] put in under `ids`.

        What is to be removed and is not there is passed over. It costs as much as all that
        changed since the last rewrite, and one rewrite for CHANGED_SHARE of the vectors.

        Raises:
            SpecError: the vectors have another length, or an id is there already.
        """
        added = np.empty((0, self.dim), np.float32) if vectors is None else vectors
        numbers, left = np.asarray(ids, np.int64), np.unique(np.fromiter(remove, np.int64))
        if added.shape != (len(numbers), self.dim):
            raise SpecError(
                f"{len(numbers)} vectors of {self.dim} values expected, not {added.shape}"
            )
        if len(np.unique(numbers)) < len(numbers) or any(
            self.home(int(i)) is not None for i in np.setdiff1d(numbers, left)
        ):
            raise SpecError("a document with one of these ids is there already; remove it first")
        fresh = self._rebuild_fresh(added, numbers, left)
        gone = self._mark_gone(left)
        changed = IvfIndex(self.base, self.empty, fresh, gone)
        count = changed._gone_count() + (0 if fresh is None else len(fresh.ids))
        if count < max(CHANGED_LEAST, CHANGED_SHARE * len(self.base.ids)):
            return changed
        return changed.rewrite()

    def rewrite(self) -> IvfIndex:
        """Return the same documents as one base, without what was removed."""
        return IvfIndex(Part.of(self._collect(self._parts(), self.gone)), self.empty)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the index to a file."""
        whole = self if self.fresh is None and self.gone is None else self.rewrite()
        faiss.write_index(whole.base.index, os.fspath(path))

    def lists(self, cluster: int) -> tuple[Ids, NDArray[np.uint8]]:
        """Return the ids [n] and stored vectors [n, code_bytes] of a cluster of the base: views."""
        return entries(self.base.index, cluster)

    def _parts(self) -> Iterator[Part]:
        yield self.base
        if self.fresh is not None:
            yield self.fresh

    def _gone_count(self) -> int:
        return 0 if self.gone is None else int(self.gone.sum())

    def _locate(self, id_: int) -> tuple[Part, int, int] | None:
        if self.fresh is not None and (place := self.fresh.find(id_)):
            return self.fresh, *place
        removed = self.gone is not None and 0 <= id_ < len(self.gone) and self.gone[id_]
        if removed or (place := self.base.find(id_)) is None:
            return None
        return self.base, *place

    def _rebuild_fresh(self, vectors: Vectors, ids: Ids, left: Ids) -> Part | None:
        if self.fresh is None and not len(ids):
            return None
        parts, removed = [], np.zeros(0, bool)
        if self.fresh is not None:
            parts.append(self.fresh)
            removed = np.zeros(int(self.fresh.ids.max(initial=0)) + 1, bool)
            removed[left[(left >= 0) & (left < len(removed))]] = True
        index = self._collect(iter(parts), removed)
        index.add_with_ids(np.ascontiguousarray(vectors, np.float32), ids)
        return Part.of(index) if index.ntotal else None

    def _mark_gone(self, left: Ids) -> Mask | None:
        marked = np.intersect1d(left, self.base.ids, assume_unique=True)
        if not len(marked):
            return self.gone
        if self.gone is None:
            gone = np.zeros(int(self.base.ids[-1]) + 1, bool)
        else:
            gone = self.gone.copy()
        gone[marked] = True
        return gone

    def _collect(self, parts: Iterator[Part], gone: Mask | None) -> faiss.IndexIVF:
        """Return a new index of all vectors of `parts`, but those of the first that are gone."""
        index = clone_empty(self.empty)
        for part in parts:
            for cluster in range(self.clusters):
                ids, codes = entries(part.index, cluster)
                if gone is not None and len(gone) and len(ids):
                    kept = ~gone[ids]
                    ids, codes = ids[kept], codes[kept]
                append(index, cluster, ids, codes)
            gone = None
        return index


def _allowed(only: Mask | None, gone: Mask | None, ids: Ids) -> Mask | None:
    """Return which ids of the base count; None where all do."""
    if gone is None:
        return only
    allowed = np.ones(int(ids[-1]) + 1, bool) if only is None else only.copy()
    shared = min(len(allowed), len(gone))
    allowed[:shared] &= ~gone[:shared]
    return allowed
