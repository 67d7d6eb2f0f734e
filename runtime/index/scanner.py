"""Scans of the lists of an index by generated kernels, in place of faiss's own scanner.

In: an index of plain vectors, the kernel library of its folder. Out: a `KernelScanner`, where it is
measured to be faster on this machine. A list is read once for all queries that share it.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dovetail.ir.errors import SpecError
from dovetail.runtime.index.cursor import Hit, merge_hits
from dovetail.runtime.index.faiss_lists import stack_queries
from dovetail.runtime.index.ivf import FaissScanner, IvfIndex, Scanner
from dovetail.runtime.index.scans import Ids, Mask, Part, Vectors
from dovetail.runtime.machine.library import KernelLibrary

MEASURED_CLUSTERS, MEASURED_ROUNDS = 8, 15
MEASURED_BYTES, LEAST_ROUNDS = 256 << 20, 3
"""Bytes of lists that each side reads at most, unless LEAST_ROUNDS take more."""
PARTS = 4
"""Parts of a row for each of the distances wanted of it, from whose least ones it is bounded."""
MOST_DISTANCES = 1 << 19
"""Distances among which the nearest are chosen at once."""
LEAST_GAIN = 0.95
"""Part of faiss's time that kernels take at most to be preferred."""
_I64, _PTR = ctypes.c_int64, ctypes.c_void_p
_SCAN = (_I64, _I64, _I64, _PTR, _I64, _PTR, _PTR, _I64, _I64, _I64)
"""ivf_scan(Q, n, d, queries, ldq, vectors, out, ldo, tid, nth)"""

Rows: TypeAlias = NDArray[np.intp]
"""Numbers of scans."""


class Best:
    """The nearest `depth` of each query, list after list. Equal distances go by id."""

    def __init__(self, bounds: Vectors, depth: int) -> None:
        """`bounds`: of each query, beyond which nothing is of use."""
        self._depth, self._bounds = depth, bounds
        self._near = np.full((len(bounds), depth), np.inf, np.float32)
        self._found: list[tuple[Rows, Vectors, Ids]] = []

    def take(self, rows: Rows, distances: Vectors, ids: Ids) -> None:
        """Take the distances [rows, n] of the queries `rows` to the vectors `ids` of one list."""
        if not len(ids):
            return
        bounds = np.minimum(self._near[rows].max(axis=1), self._bounds[rows])
        if len(ids) > self._depth and np.isinf(bounds).any():
            bounds = np.minimum(bounds, _bound(distances, self._depth))
        near = (distances <= bounds[:, None]) & np.isfinite(distances)
        at, column = np.nonzero(near)
        if not len(at):
            return
        values = distances[at, column]
        self._found.append((rows[at], values, ids[column]))
        counts = np.bincount(at, minlength=len(rows))
        padded = np.full((len(rows), int(counts.max())), np.inf, np.float32)
        padded[at, np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)] = values
        both = np.concatenate([self._near[rows], padded], axis=1)
        self._near[rows] = np.partition(both, self._depth - 1, axis=1)[:, : self._depth]

    def hits(self) -> list[list[Hit]]:
        """Return what was found for each query."""
        found: list[list[Hit]] = [[] for _ in self._near]
        bounds = np.minimum(self._near.max(axis=1, initial=-np.inf), self._bounds)
        for rows, values, ids in self._found:
            kept = values <= bounds[rows]
            columns = (each[kept].tolist() for each in (rows, values, ids))
            for row, value, id_ in zip(*columns, strict=True):
                found[row].append((value, id_))
        return [merge_hits([hits], self._depth) for hits in found]


def _bound(distances: Vectors, depth: int) -> Vectors:
    """Return of each row a bound with `depth` distances at least within it, and few more.

    Of long rows: that many of the least distances of equal parts are within it.
    """
    parts = PARTS * depth
    each = distances.shape[1] // parts
    if each > 1:
        distances = distances[:, : each * parts].reshape(len(distances), each, parts).min(axis=1)
    bounds: Vectors = np.partition(distances, depth - 1, axis=1)[:, depth - 1]
    return bounds


def share_lists(scans: Sequence[Part], clusters: Iterable[int]) -> dict[int, Rows]:
    """Return for each of `clusters` the numbers of the scans that want it; none is empty."""
    sharing: dict[int, list[int]] = {cluster: [] for cluster in clusters}
    for number, scan in enumerate(scans):
        for cluster in scan.clusters:
            if cluster in sharing:
                sharing[cluster].append(number)
    return {c: np.array(numbers, np.intp) for c, numbers in sharing.items() if numbers}


class KernelScanner:
    """Scans lists of plain vectors with the kernels of a library, on `threads` threads.

    A vector's distance does not depend on what else is scanned, so cut searches equal whole ones.
    """

    def __init__(self, library: KernelLibrary, index: IvfIndex, threads: int = 1) -> None:
        """Raises SpecError for an index that stores codes, ArtifactError without the kernel."""
        if index.codes != "flat":
            raise SpecError(f"kernels scan plain vectors, not {index.codes} codes; use faiss")
        name = f"ivf_scan_{index.metric}"
        library.entry(name)  # says so where there is none
        self._scan = getattr(library.c, name)
        self._scan.argtypes, self._scan.restype = _SCAN, None
        self._negate = index.metric == "ip"
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "scan") if threads > 1 else None

    def scan(
        self, index: IvfIndex, scans: Sequence[Part], depth: int, allowed: Mask | None
    ) -> list[list[Hit]]:
        """See `Scanner`; threads take clusters in turn."""
        queries = stack_queries(scans)
        bounds = np.array([scan.bound for scan in scans], np.float32)

        def scan_some(some: Sequence[int]) -> list[list[Hit]]:
            best = Best(bounds, depth)
            for chosen, rows in _group_lists(index, share_lists(scans, some)):
                distances = self._distances(index, chosen, queries[rows])
                ids = np.concatenate([index.lists(cluster)[0] for cluster in chosen])
                if allowed is not None:
                    distances[:, ~allowed[ids]] = np.inf
                best.take(rows, distances, ids)
            return best.hits()

        clusters = sorted({c for scan in scans for c in scan.clusters})
        if self._pool is None or len(clusters) < 2:
            return scan_some(clusters)
        dealt = (clusters[first :: self._threads] for first in range(self._threads))
        parts = self._pool.map(scan_some, dealt)
        return [merge_hits(found, depth) for found in zip(*parts, strict=True)]

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _distances(self, index: IvfIndex, clusters: Sequence[int], queries: Vectors) -> Vectors:
        """Return the distances [queries, vectors of the clusters]."""
        lists = [index.lists(cluster)[1] for cluster in clusters]
        out = np.empty((len(queries), sum(map(len, lists))), np.float32)
        dim, given, to, width = index.dim, queries.ctypes.data, out.ctypes.data, out.shape[1]
        for vectors in lists:
            operands = len(queries), len(vectors), dim, given, dim, vectors.ctypes.data
            self._scan(*operands, to, width, 0, 1)
            to += 4 * len(vectors)
        return np.negative(out, out=out) if self._negate else out


def _group_lists(
    index: IvfIndex, sharing: Mapping[int, Rows]
) -> Iterator[tuple[Sequence[int], Rows]]:
    """Return together the clusters that the same scans want, for MOST_DISTANCES at most.

    What is nearest is chosen once for each group: that costs as much as a list of few queries.
    """
    groups: dict[bytes, list[int]] = {}
    for cluster, rows in sharing.items():
        groups.setdefault(rows.tobytes(), []).append(cluster)
    for clusters in groups.values():
        rows = sharing[clusters[0]]
        first = held = 0
        for end, cluster in enumerate(clusters):
            size = len(rows) * len(index.lists(cluster)[0])
            if held and held + size > MOST_DISTANCES:
                yield clusters[first:end], rows
                first, held = end, 0
            held += size
        yield clusters[first:], rows


def choose_scanner(
    library: KernelLibrary | None, index: IvfIndex, *, queries: int, threads: int = 1
) -> Scanner:
    """Return what scans an index faster here when `queries` queries share a sub-stage.

    It is chosen once: a search of which one part were scanned so and another so might end with
    distances that differ in their last bits from those of a search in one.
    """
    if library is None or index.codes != "flat" or not len(index.base.ids):
        return FaissScanner()
    kernels = KernelScanner(library, index, threads)
    kernel, faiss = compare_scanners((kernels, FaissScanner()), index, queries)
    if kernel <= LEAST_GAIN * faiss:
        return kernels
    kernels.close()
    return FaissScanner()


def compare_scanners(
    rivals: tuple[Scanner, Scanner], index: IvfIndex, queries: int
) -> tuple[float, float]:
    """Return the seconds of both: the lower quartiles of scans of the same lists in turns."""
    sizes = np.bincount(index.base.homes, minlength=index.clusters)
    largest = np.argsort(-sizes, kind="stable")[: max(MEASURED_CLUSTERS, index.clusters // 2)]
    once = MEASURED_CLUSTERS * float(sizes[largest].mean()) * index.code_bytes
    rounds = int(min(MEASURED_ROUNDS, max(LEAST_ROUNDS, MEASURED_BYTES // once)))
    turns = cycle(largest.tolist())
    vector = index.lists(int(largest[0]))[1][0].tobytes()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for scanner, seconds in zip(rivals, times, strict=True):
            clusters = tuple(dict.fromkeys(islice(turns, MEASURED_CLUSTERS)))
            scans = [Part(vector, clusters, (0.0,) * len(clusters))] * queries
            start = time.perf_counter()
            scanner.scan(index, scans, 20, None)
            seconds.append(time.perf_counter() - start)
    first, second = np.quantile(times, 0.25, axis=1).tolist()
    return first, second
