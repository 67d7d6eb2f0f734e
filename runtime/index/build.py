"""Indexes made of vectors, or read from files.

In: vectors [n, d], or a file. Out: an `IvfIndex`, IVF-Flat, IVF-SQ8 or IVF-PQ.
"""

from __future__ import annotations

import os

import faiss
import numpy as np

from dovetail.ir.errors import SpecError
from dovetail.runtime.index.ivf import IndexPart, IvfIndex
from dovetail.runtime.index.scans import Vectors

METRICS = {"l2": faiss.METRIC_L2, "ip": faiss.METRIC_INNER_PRODUCT}
CODES = {"flat": "Flat", "sq8": "SQ8", "pq": "PQ{d4}x8"}
"""Codes of the vectors, in the language of faiss's index factory; d4: a quarter of d."""
PQ_LEAST = 256
"""Vectors that product codes need to be trained: one for each code of a byte."""
FLAT_LIMIT = 2000
"""Documents up to which one cluster is scanned whole: a flat index, exact."""


def choose_clusters(count: int) -> int:
    """Return how many clusters `count` vectors make: one (a flat index), or 4 times their root.

    Training takes about 39 vectors of each cluster, so there are never more than count / 39.
    """
    return 1 if count <= FLAT_LIMIT else max(1, min(int(4 * count**0.5), count // 39))


def check_wish(count: int, clusters: int | None, codes: str, metric: str, d: int = 4) -> None:
    """Raise SpecError where `count` vectors, of `d` values where that is known, make no index."""
    for name, given, known in (("codes", codes, CODES), ("metric", metric, METRICS)):
        if given not in known:
            raise SpecError(f"{name} {given!r} is unknown; choose one of {', '.join(known)}")
    if clusters is not None and not 1 <= clusters <= count:
        raise SpecError(f"{count} vectors cannot make {clusters} clusters; ask for 1 to {count}")
    if codes == "pq" and (count < PQ_LEAST or d % 4):
        few = f"at least {PQ_LEAST} vectors, not {count}"
        what = few if count < PQ_LEAST else f"vectors of a multiple of 4 values, not of {d}"
        raise SpecError(f"product codes need {what}; use `flat` or `sq8`")


def build_index(
    vectors: Vectors,
    *,
    clusters: int | None = None,
    codes: str = "flat",
    metric: str = "l2",
    seed: int = 0,
) -> IvfIndex:
    """Return an index over `vectors` [n, d]; their ids are their rows.

    Args:
        vectors: what is searched; unit vectors where the metric is to be the cosine.
        clusters: lists of the index, default by `choose_clusters`. One is a flat index.
        codes: `flat` (exact), `sq8` (a byte a component) or `pq` (a byte for four).
        metric: `l2` or `ip` (inner product).
        seed: of the clustering.

    Raises SpecError: codes or metric are unknown, or there are fewer vectors than clusters.
    """
    count, d = vectors.shape
    check_wish(count, clusters, codes, metric, d)
    lists = choose_clusters(count) if clusters is None else clusters
    name = f"IVF{lists},{CODES[codes].format(d4=d // 4)}"
    index = faiss.index_factory(d, name, METRICS[metric])
    index.cp.seed = seed
    index.cp.min_points_per_centroid = 1  # it would print a warning
    given = np.ascontiguousarray(vectors, np.float32)
    index.train(given)
    return fill_index(index, given)


def fill_index(index: faiss.IndexIVF, vectors: Vectors) -> IvfIndex:
    """Return a trained faiss index, which nobody else uses, with `vectors`; ids are their rows."""
    empty = faiss.clone_index(index)
    index.add(vectors)
    return IvfIndex(IndexPart.of(index), empty)


def read_index(path: str | os.PathLike[str]) -> IvfIndex:
    """Return the index in a file, its lists mapped from it; SpecError where it is none."""
    index, twin = _read(path), _read(path)
    lists = faiss.ArrayInvertedLists(twin.nlist, twin.code_size)
    twin.replace_invlists(lists, True)
    lists.this.disown()
    twin.ntotal = 0
    return IvfIndex(IndexPart.of(index), twin)


def _read(path: str | os.PathLike[str]) -> faiss.IndexIVF:
    try:
        index = faiss.read_index(os.fspath(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
    except RuntimeError as error:
        raise SpecError(f"{os.fspath(path)} is not an index that faiss can read: {error}") from None
    if not isinstance(index, faiss.IndexIVF):
        raise SpecError(f"{os.fspath(path)} holds a {type(index).__name__}, not an IVF index")
    return index
