"""Generated kernels in place of faiss's scanner: the same documents, however a search is cut."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("faiss")

from msgspec.structs import replace

from dovetail.codegen.catalog import retrieval_kernels
from dovetail.codegen.library import LibrarySpec, build_library
from dovetail.codegen.targets import host_target
from dovetail.ir.errors import SpecError
from dovetail.runtime.index import scanner as scanning
from dovetail.runtime.index.build import METRICS, build_index
from dovetail.runtime.index.cursor import Hit, begin_search
from dovetail.runtime.index.ivf import FaissScanner, IvfIndex
from dovetail.runtime.index.scanner import (
    Best,
    KernelScanner,
    choose_scanner,
)
from dovetail.runtime.index.scans import Only
from dovetail.runtime.machine.library import KernelLibrary
from tests.runtime.index.parts import part_of

DIM, COUNT, LISTS = 24, 600, 15
RNG = np.random.default_rng(11)
VECTORS = RNG.standard_normal((COUNT, DIM)).astype(np.float32)
VECTORS[400:] = VECTORS[RNG.integers(20, size=200)]  # many are equally near
QUERIES = RNG.standard_normal((7, DIM)).astype(np.float32)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def library() -> KernelLibrary:
    target = host_target()
    built = build_library(LibrarySpec(target=target, kernels=retrieval_kernels(target)))
    return KernelLibrary(Path(built.path), built.index)


@pytest.fixture(scope="module")
def indexes(one_thread: None) -> dict[str, IvfIndex]:
    return {metric: build_index(VECTORS, clusters=LISTS, metric=metric) for metric in METRICS}


def check_alike(ours: list[list[Hit]], wanted: list[list[Hit]], depth: int) -> None:
    """Distances are those of faiss up to rounding, and so are ids but for nearly equal ones."""
    for row, expected in zip(ours, wanted, strict=True):
        assert row == sorted(set(row)) and len(row) == len(expected) <= depth
        told = np.array([d for d, _ in row]), np.array([d for d, _ in expected])
        np.testing.assert_allclose(*told, rtol=1e-5, atol=1e-5)
        odd = {i for _, i in row} ^ {i for _, i in expected}
        edge = told[0][-1] if len(row) else 0.0
        assert all(abs(d - edge) < 1e-4 for d, i in (*row, *expected) if i in odd)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    metric=st.sampled_from(sorted(METRICS)),
    depth=st.sampled_from([1, 5, 20, 90, 700]),
    threads=st.sampled_from([1, 3]),
)
def test_kernels_find_what_faiss_finds(
    indexes: dict[str, IvfIndex],
    library: KernelLibrary,
    seed: int,
    metric: str,
    depth: int,
    threads: int,
) -> None:
    rng, index = random.Random(seed), indexes[metric]
    if rng.random() < 0.5:
        index = index.change(QUERIES[:3], [COUNT, COUNT + 1, COUNT + 2], remove=range(0, 300, 7))
    mask = None if rng.random() < 0.5 else Only(np.arange(0, COUNT, 3))
    scanner = KernelScanner(library, index, threads)
    scans = [part_of(query, rng.sample(range(LISTS), rng.randint(0, LISTS))) for query in QUERIES]
    whole = index.scan(scans, depth, scanner, mask)
    check_alike(whole, index.scan(scans, depth, only=mask), depth)
    # cut in steps, beside other searches: the same to the last bit
    cursors = [begin_search(scan.clusters, depth) for scan in scans]
    while not all(cursor.done for cursor in cursors):
        open_ = [n for n, c in enumerate(cursors) if not c.done and rng.random() < 0.7]
        takes = [rng.randint(1, len(cursors[n].left)) for n in open_]
        parts = [
            replace(scans[n], clusters=c.left[:t], centroids=(0.0,) * t, bound=c.bound)
            for n, t in zip(open_, takes, strict=True)
            for c in [cursors[n]]
        ]
        found = index.scan(parts, cursors[0].depth, scanner, mask)
        for n, take, hits in zip(open_, takes, found, strict=True):
            cursors[n].advance(take, hits)
    assert [cursor.best[:depth] for cursor in cursors] == whole
    scanner.close()


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), depth=st.integers(1, 12))
def test_the_best_of_lists_are_the_best_of_all(seed: int, depth: int) -> None:
    rng = np.random.default_rng(seed)
    bounds = rng.choice([2.0, np.inf], 4).astype(np.float32)
    best, every = Best(bounds, depth), [[] for _ in range(4)]
    for first in range(0, 60, 10):
        rows = np.flatnonzero(rng.random(4) < 0.7)
        distances = rng.integers(0, 6, (len(rows), 10)).astype(np.float32)
        distances[rng.random(distances.shape) < 0.2] = np.inf  # not allowed
        ids = np.arange(first, first + 10)
        if len(rows):
            best.take(rows, distances, ids)
        for row, values in zip(rows, distances.tolist(), strict=True):
            near = min(bounds[row], 9)
            every[row] += [(d, i) for d, i in zip(values, ids.tolist(), strict=True) if d <= near]
    assert best.hits() == [sorted(hits)[:depth] for hits in every]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 3),
    columns=st.sampled_from([1, 7, 79, 81, 640, 1000]),
    depth=st.sampled_from([1, 2, 20]),
)
def test_long_lists_are_bounded_by_parts_and_short_ones_as_they_are(
    seed: int, rows: int, columns: int, depth: int
) -> None:
    rng = np.random.default_rng(seed)
    distances = rng.integers(0, 50, (rows, columns)).astype(np.float32)
    distances[rng.random(distances.shape) < 0.5] = np.inf
    best = Best(np.full(rows, np.inf, np.float32), depth)
    best.take(np.arange(rows), distances.copy(), np.arange(columns))
    wanted = [
        sorted((d, i) for i, d in enumerate(row) if d < 99)[:depth] for row in distances.tolist()
    ]
    assert best.hits() == wanted


def test_lists_that_the_same_queries_want_are_scanned_together_within_bounds(
    indexes: dict[str, IvfIndex], library: KernelLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = indexes["l2"]
    kernels = KernelScanner(library, index)
    scans = [part_of(query, range(LISTS)) for query in QUERIES]
    whole = index.scan(scans, 20, kernels)
    monkeypatch.setattr(scanning, "MOST_DISTANCES", 3 * len(QUERIES) * COUNT // LISTS)
    assert index.scan(scans, 20, kernels) == whole


def test_the_choice_is_measured_and_codes_are_left_to_faiss(
    indexes: dict[str, IvfIndex], library: KernelLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = indexes["ip"]
    rivals = KernelScanner(library, index), FaissScanner()
    assert min(scanning.compare_scanners(rivals, index, 6)) > 0
    for kernel, chosen in ((0.94, KernelScanner), (0.96, FaissScanner)):
        monkeypatch.setattr(scanning, "compare_scanners", lambda *_, k=kernel: (k, 1.0))
        assert isinstance(choose_scanner(library, index, queries=6), chosen)
    coded = build_index(VECTORS, clusters=4, codes="sq8")
    assert isinstance(choose_scanner(library, coded, queries=6), FaissScanner)
    assert isinstance(choose_scanner(None, index, queries=6), FaissScanner)
    with pytest.raises(SpecError, match="sq8"):
        KernelScanner(library, coded)
