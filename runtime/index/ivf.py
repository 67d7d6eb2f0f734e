"""A faiss IVF index that is searched in steps of clusters, on stock faiss.

In: queries. Out: their clusters, and the nearest documents of any of these. Any codes, L2 and inner
product. Ids are row numbers of the document table; `build.py` makes and reads indexes. Within a
faiss index a vector has a number, its place among the ids there: masks are as long as there are
vectors, however many ids there have been.

An `IvfIndex` never changes: adding and removing gives another one that shares what stayed the same,
so a search that began on the one before goes on as if nothing had happened.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import faiss
import numpy as np
from numpy.typing import NDArray

from dovetail.ir.errors import SpecError
from dovetail.runtime.index.cursor import Hit, merge_hits
from dovetail.runtime.index.faiss_lists import append, clone_empty, entries, scan_lists
from dovetail.runtime.index.scans import Ids, Mask, Only, Part, Vectors, are_in

CHANGED_LEAST, CHANGED_SHARE = 4096, 0.25
"""Changed vectors, and their share of all, from which a change rewrites the whole index."""
MERGED = 4
"""Times as many vectors as the next part that one may have to be merged with it."""


class Scanner(Protocol):
    """What scans lists of an index. Any number of threads may call it at once."""

    def scan(
        self, index: IvfIndex, scans: Sequence[Part], depth: int, allowed: Mask | None
    ) -> list[list[Hit]]:
        """Return of each scan the nearest `depth` vectors of the base that are allowed.

        Hits are by their numbers in the base's faiss index, equally near ones in the order of
        these; none that is farther than the scan's bound need be among them. Filters of the scans
        are in `allowed`, by number, too; None = all may be found.
        """


class FaissScanner:
    """faiss's own scanner, for any codes."""

    def scan(
        self, index: IvfIndex, scans: Sequence[Part], depth: int, allowed: Mask | None
    ) -> list[list[Hit]]:
        """See `Scanner`."""
        return scan_lists(index.base.index, scans, depth, allowed)


@dataclass(frozen=True, slots=True)
class IndexPart:
    """The vectors of one faiss index: by their numbers there their ids, clusters and places in it.

    ids: rising, so that the order of numbers is that of ids. gone: rising ids of those that were
    removed since. plain: numbers are ids.
    """

    index: faiss.IndexIVF
    ids: Ids
    homes: NDArray[np.int32]
    places: NDArray[np.int32]
    plain: bool
    gone: Ids = field(default_factory=lambda: np.empty(0, np.int64), repr=False)

    @classmethod
    def of(cls, index: faiss.IndexIVF, ids: Ids | None = None) -> IndexPart:
        """Return the vectors of a faiss index, which have `ids` by number, by default the numbers.

        Raises SpecError where numbers are not 0, 1 and so on.
        """
        sizes = [index.invlists.list_size(cluster) for cluster in range(index.nlist)]
        used = [cluster for cluster, size in enumerate(sizes) if size]
        numbers = np.concatenate([entries(index, c)[0] for c in used] or [np.empty(0, np.int64)])
        every = np.arange(len(numbers), dtype=np.int64)
        homes = np.repeat(np.arange(index.nlist, dtype=np.int32), sizes)
        places = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
        order = np.argsort(numbers, kind="stable")
        if not np.array_equal(numbers[order], every):
            raise SpecError("the vectors of an index must be numbered from 0 on")
        given = every if ids is None else ids
        return cls(index, given, homes[order], places[order], np.array_equal(given, every))

    def __len__(self) -> int:
        return len(self.ids) - len(self.gone)

    def find(self, id_: int) -> tuple[int, int] | None:
        """Return (cluster, place) of a document that is there."""
        at = _place(self.ids, id_)
        if at is None or _place(self.gone, id_) is not None:
            return None
        return int(self.homes[at]), int(self.places[at])

    def without(self, left: Ids) -> IndexPart:
        """Return the part after the documents `left` were removed; sorted, not all of them here."""
        removed = left[are_in(left, self.ids)]
        return replace(self, gone=np.union1d(self.gone, removed)) if len(removed) else self

    def allowed(self, only: Only | None) -> Mask | None:
        """Return which vectors are of `only` and there; None where all of them may be found."""
        mask = None if only is None else only.mark(self.ids)
        if not len(self.gone):
            return mask
        allowed = np.ones(len(self.ids), bool) if mask is None else mask.copy()
        allowed[np.searchsorted(self.ids, self.gone)] = False
        return allowed

    def named(self, rows: list[list[Hit]]) -> list[list[Hit]]:
        """Return hits by their ids; they come by their numbers."""
        if self.plain:
            return rows
        return [[(distance, int(self.ids[number])) for distance, number in row] for row in rows]


@dataclass(frozen=True, slots=True)
class IvfIndex:
    """Vectors in clusters. Any number of threads may search at once.

    base: what was built or read. fresh: what was added since, the oldest and largest part first.
    empty: a trained index without vectors, from which others are made.
    """

    base: IndexPart
    empty: faiss.IndexIVF
    fresh: tuple[IndexPart, ...] = ()

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
        """Vectors that a scan of each cluster looks at, removed ones that are still held too."""
        counts = [np.bincount(part.homes, minlength=self.clusters) for part in self._parts]
        return [int(count) for count in np.sum(counts, axis=0)]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def probe(self, queries: Vectors, nprobe: int) -> list[Part]:
        """Return of each query [n, d] the `nprobe` clusters whose centroids are nearest.

        The nearest is first. Raises SpecError for queries of another length than the vectors.
        """
        if queries.ndim != 2 or queries.shape[1] != self.dim:
            raise SpecError(f"queries must have {self.dim} values each, not {queries.shape[1:]}")
        given = np.ascontiguousarray(queries, np.float32)
        distances, clusters = self.empty.quantizer.search(given, min(nprobe, self.clusters))
        found = zip(given, clusters.tolist(), distances.tolist(), strict=True)
        return [Part(query.tobytes(), tuple(near), tuple(far)) for query, near, far in found]

    def probe_only(self, query: Vectors, nprobe: int, topk: int, only: Only) -> Part:
        """Return of a query [d] the clusters to scan for what `only` lets through.

        Of the nearest `nprobe`, and of as many more as hold `topk` documents, those that hold some.
        """
        (part,) = self.probe(query[None], self.clusters)
        counts = np.zeros(self.clusters, np.int64)
        for piece in self._parts:
            if (allowed := piece.allowed(only)) is not None:
                counts += np.bincount(piece.homes[allowed], minlength=self.clusters)
        held = np.cumsum(counts[list(part.clusters)])
        end = max(nprobe, 1 + int(np.searchsorted(held, min(topk, int(held[-1])))))
        near = zip(part.clusters[:end], part.centroids[:end], strict=True)
        kept = [(cluster, far) for cluster, far in near if counts[cluster]]
        clusters, centroids = zip(*kept, strict=True) if kept else ((), ())
        return Part(part.vector, clusters, centroids)

    def scan(
        self,
        scans: Sequence[Part],
        depth: int,
        scanner: Scanner | None = None,
        only: Only | None = None,
    ) -> list[list[Hit]]:
        """Return of each part the nearest `depth` documents in its clusters, nearest first.

        Those that `only` lets through; filters of parts are not looked at. Parts of different
        lengths run together. `scanner` scans the base, faiss by default; what was added since is
        always scanned by faiss. SpecError for queries of another length.
        """
        if not {len(scan.vector) for scan in scans} <= {4 * self.dim}:  # faiss would read beyond
            raise SpecError(f"queries must have {self.dim} values each")
        if not scans:
            return []
        depth = max(1, min(depth, sum(len(part.ids) for part in self._parts)))  # faiss takes room
        used, base = scanner or FaissScanner(), self.base
        found = [base.named(used.scan(self, scans, depth, base.allowed(only)))]
        for part in self.fresh:
            rows = scan_lists(part.index, scans, depth, part.allowed(only))
            found.append(part.named(rows))
        if len(found) == 1:
            return found[0]
        return [merge_hits(parts, depth) for parts in zip(*found, strict=True)]

    def find(
        self, queries: Vectors, depth: int, nprobe: int, only: Only | None = None
    ) -> list[list[Hit]]:
        """Return the nearest `depth` documents of each query in one scan of all its clusters."""
        if only is None:
            return self.scan(self.probe(queries, nprobe), depth)
        probes = [self.probe_only(query, nprobe, depth, only) for query in queries]
        return self.scan(probes, depth, only=only)

    def vectors(self, ids: Iterable[int]) -> tuple[tuple[int, ...], Vectors]:
        """Return those of some documents that are there, and their vectors as they are stored."""
        found = {i: located for i in ids if (located := self._locate(i)) is not None}
        vectors = np.empty((len(found), self.dim), np.float32)
        for row, (part, cluster, place) in zip(vectors, found.values(), strict=True):
            part.index.reconstruct_from_offset(cluster, place, faiss.swig_ptr(row))
        return tuple(found), vectors

    def distances(self, query: Vectors, ids: Iterable[int]) -> dict[int, float]:
        """Return the distance from `query` to each document that is still there."""
        found, vectors = self.vectors(ids)
        values = ((vectors - query) ** 2).sum(axis=1) if self.metric == "l2" else -(vectors @ query)
        return dict(zip(found, values.tolist(), strict=True))

    def home(self, id_: int) -> int | None:
        """Return the cluster of a document, None where there is no such document."""
        return located[1] if (located := self._locate(id_)) else None

    def change(
        self, vectors: Vectors | None = None, ids: Sequence[int] = (), *, remove: Iterable[int] = ()
    ) -> IvfIndex:
        """Return the index after `remove` was taken out and `vectors` [n, d] put in under `ids`.

        What is to be removed and is not there is passed over. What is added is a part of its own;
        parts that are not several times as large as the next one are merged, so that each vector
        is copied a few times and there are few parts, which the indexes before share. All is
        rewritten once for CHANGED_SHARE of the vectors. Raises SpecError where the vectors have
        another length, or an id is there already.
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
        base, *rest = (part.without(left) for part in self._parts)
        fresh = [part for part in rest if len(part)]
        if len(numbers):
            index, order = clone_empty(self.empty), np.argsort(numbers)
            index.add(np.ascontiguousarray(added[order], np.float32))
            fresh.append(IndexPart.of(index, numbers[order]))
        while len(fresh) > 1 and len(fresh[-2]) <= MERGED * len(fresh[-1]):
            fresh[-2:] = [self._merge(fresh[-2:])]
        changed = IvfIndex(base, self.empty, tuple(fresh))
        count = len(base.gone) + sum(len(part.ids) for part in fresh)
        few = count < max(CHANGED_LEAST, CHANGED_SHARE * len(base.ids))
        return changed if few else changed.rewrite()

    def rewrite(self) -> IvfIndex:
        """Return the same documents as one base, without what was removed."""
        return IvfIndex(self._merge(self._parts), self.empty)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the index to a file; documents have the numbers 0, 1 and so on there."""
        whole = self if not self.fresh and not len(self.base.gone) else self.rewrite()
        faiss.write_index(whole.base.index, os.fspath(path))

    def lists(self, cluster: int) -> tuple[Ids, NDArray[np.uint8]]:
        """Return the numbers [n] and stored vectors [n, code_bytes] of a base's cluster: views."""
        return entries(self.base.index, cluster)

    @property
    def _parts(self) -> tuple[IndexPart, ...]:
        return self.base, *self.fresh

    def _locate(self, id_: int) -> tuple[IndexPart, int, int] | None:
        return next(((p, *place) for p in self._parts if (place := p.find(id_))), None)

    def _merge(self, parts: Sequence[IndexPart]) -> IndexPart:
        """Return one part of all that is left of some."""
        index = clone_empty(self.empty)
        ids = np.sort(np.concatenate([np.setdiff1d(p.ids, p.gone) for p in parts]))
        for part in parts:
            left = ~are_in(part.ids, part.gone)
            after = np.searchsorted(ids, part.ids)  # numbers by the ones before
            for cluster in np.unique(part.homes).tolist():
                numbers, codes = entries(part.index, cluster)
                kept = left[numbers]
                append(index, cluster, after[numbers[kept]], codes[kept])
        return IndexPart.of(index, ids)


def _place(ids: Ids, id_: int) -> int | None:
    """Return where an id is among sorted ones, None where it is not."""
    at = int(np.searchsorted(ids, id_))
    return at if at < len(ids) and ids[at] == id_ else None
