"""The stepwise index against faiss's own search, for all codes and metrics."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

faiss = pytest.importorskip("faiss")

from dovetail.ir.errors import SpecError  # noqa: E402
from dovetail.runtime.index.build import METRICS, build_index, fill_index, read_index  # noqa: E402
from dovetail.runtime.index.cursor import begin_search, reorder_probes  # noqa: E402
from dovetail.runtime.index.ivf import IvfIndex  # noqa: E402
from dovetail.runtime.index.scans import Only, Part  # noqa: E402
from tests.runtime.index.parts import part_of  # noqa: E402

DIM, COUNT, LISTS = 16, 1500, 24
RNG = np.random.default_rng(3)
CENTRES = RNG.standard_normal((20, DIM)).astype(np.float32)
VECTORS = (CENTRES[RNG.integers(20, size=COUNT)] + 0.4 * RNG.standard_normal((COUNT, DIM))).astype(
    np.float32
)
QUERIES = (VECTORS[::150] + 0.2 * RNG.standard_normal((10, DIM))).astype(np.float32)
KINDS = list(product(("flat", "sq8", "pq"), ("l2", "ip")))
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def indexes(one_thread: None) -> dict[tuple[str, str], IvfIndex]:
    return {(codes, metric): make_index(codes, metric) for codes, metric in KINDS}


def make_index(codes: str, metric: str) -> IvfIndex:
    if codes != "pq":
        return build_index(VECTORS, clusters=LISTS, codes=codes, metric=metric)
    # half the bits of a code: faiss takes seconds to train the product's
    plain = faiss.index_factory(DIM, f"IVF{LISTS},PQ4x4", METRICS[metric])
    plain.train(VECTORS)
    return fill_index(plain, VECTORS)


@pytest.mark.long
@pytest.mark.parametrize("metric", METRICS)
def test_product_codes_find_most_of_what_is_near(metric: str) -> None:
    index = build_index(VECTORS, clusters=LISTS, codes="pq", metric=metric)
    exact = build_index(VECTORS, clusters=LISTS, metric=metric).find(QUERIES, 10, LISTS)
    found = index.find(QUERIES, 10, LISTS)
    shared = [len({i for _, i in a} & {i for _, i in b}) for a, b in zip(found, exact, strict=True)]
    assert sum(shared) >= 5 * len(QUERIES)


def stepwise(index: IvfIndex, depth: int, nprobe: int, steps: Any) -> list[list[tuple[float, int]]]:
    probes = index.probe(QUERIES, nprobe)
    cursors = [begin_search(probe.clusters, depth) for probe in probes]
    while not all(cursor.done for cursor in cursors):
        takes = [min(steps(), len(cursor.left)) for cursor in cursors]
        scans = [
            Part(p.vector, c.left[:n], p.centroids[c.position : c.position + n], bound=c.bound)
            for c, p, n in zip(cursors, probes, takes, strict=True)
        ]
        for cursor, n, found in zip(cursors, takes, index.scan(scans, 20), strict=True):
            cursor.advance(n, found)
    return [cursor.best[:depth] for cursor in cursors]


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("depth", [1, 5, 20])
def test_a6_1_ids_and_distances_are_those_of_faiss(
    kind: tuple[str, str], depth: int, indexes: dict[tuple[str, str], IvfIndex]
) -> None:
    index = indexes[kind]
    index.base.index.nprobe = 12
    distances, ids = index.base.index.search(QUERIES, depth)
    sign = -1 if kind[1] == "ip" else 1
    for found in (index.find(QUERIES, depth, 12), stepwise(index, depth, 12, lambda: 5)):
        np.testing.assert_allclose([[d for d, _ in row] for row in found], sign * distances)
        # equal distances (codes collide) may come in another order
        unique = [len(set(row)) == len(row) for row in distances.tolist()]
        for row, wanted, plain in zip(found, ids.tolist(), unique, strict=True):
            assert not plain or [i for _, i in row] == wanted


@settings(max_examples=20)
@given(seed=st.integers(0, 99), kind=st.sampled_from(KINDS))
def test_a6_1_uneven_steps_find_what_one_scan_finds(
    indexes: dict[tuple[str, str], IvfIndex], seed: int, kind: tuple[str, str]
) -> None:
    index, rng = indexes[kind], random.Random(seed)
    wanted = index.find(QUERIES, 20, 12)
    assert stepwise(index, 20, 12, lambda: rng.randint(0, 7)) == wanted


def test_a6_1_empty_clusters_are_passed_over() -> None:
    index = build_index(VECTORS, clusters=LISTS)
    emptied = [i for i in range(COUNT) if index.home(i) in (3, 4)]
    index = index.change(remove=emptied).rewrite()
    assert len(index) == COUNT - len(emptied) and index.sizes[3] == index.sizes[4] == 0
    scans = [part_of(QUERIES[0], (3, 4)), part_of(QUERIES[1], ())]
    assert index.scan(scans, 5) == [[], []]
    everything = index.find(QUERIES, 5, LISTS)
    assert stepwise(index, 5, LISTS, lambda: 1) == everything


def test_every_document_is_found_at_full_nprobe_and_knows_its_cluster(
    indexes: dict[tuple[str, str], IvfIndex],
) -> None:
    index = indexes["flat", "l2"]
    exact = ((QUERIES[:, None] - VECTORS[None]) ** 2).sum(-1)
    for row, distances in zip(index.find(QUERIES, 10, LISTS), exact, strict=True):
        assert [i for _, i in row] == np.argsort(distances, kind="stable")[:10].tolist()
    homes = np.array([index.home(i) for i in range(COUNT)])
    assert np.bincount(homes, minlength=LISTS).tolist() == index.sizes


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_distances_to_documents_are_those_that_a_scan_finds(
    kind: tuple[str, str], indexes: dict[tuple[str, str], IvfIndex]
) -> None:
    index = indexes[kind]
    found = index.find(QUERIES[:1], 20, LISTS)[0]
    told = index.distances(QUERIES[0], [i for _, i in found])
    np.testing.assert_allclose([told[i] for _, i in found], [d for d, _ in found], rtol=2e-4)
    assert index.distances(QUERIES[0], [COUNT + 5]) == {}


def test_documents_come_and_go() -> None:
    index = build_index(VECTORS, clusters=LISTS).change(QUERIES[:2], [10_000, 10_001])
    assert len(index) == COUNT + 2
    assert [row[0][1] for row in index.find(QUERIES[:2], 1, 4)] == [10_000, 10_001]
    index = index.change(remove=[10_000, 77_777])
    assert len(index) == COUNT + 1 and index.home(10_000) is None
    assert index.find(QUERIES[:1], 1, LISTS)[0][0][1] != 10_000


def test_a_file_gives_the_same_index_and_others_are_refused(tmp_path: Path) -> None:
    index = build_index(VECTORS, clusters=LISTS, metric="ip")
    index.write(tmp_path / "vectors.faiss")
    again = read_index(tmp_path / "vectors.faiss")
    assert again.find(QUERIES, 5, 9) == index.find(QUERIES, 5, 9) and again.sizes == index.sizes
    assert str(tmp_path / "vectors.faiss") in Path("/proc/self/maps").read_text()
    changed = again.change(QUERIES[:1], [COUNT], remove=[5])  # the file stays as it is
    assert changed.find(QUERIES, 5, 9) == changed.rewrite().find(QUERIES, 5, 9)
    assert len(changed) == COUNT == len(read_index(tmp_path / "vectors.faiss"))
    (tmp_path / "text").write_text("no index")
    faiss.write_index(faiss.IndexFlatL2(4), str(tmp_path / "flat"))
    for name, said in (
        ("text", "not an index"),
        ("none", "not an index"),
        ("flat", "not an IVF index"),
    ):
        with pytest.raises(SpecError, match=said):
            read_index(tmp_path / name)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"clusters": COUNT + 1}, "cannot make"),
        ({"clusters": 0}, "cannot make"),
        ({"clusters": 4, "codes": "gzip"}, "is unknown; choose one of"),
        ({"clusters": 4, "metric": "cosine"}, "is unknown; choose one of"),
    ],
)
def test_wrong_indexes_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        build_index(VECTORS, **options)


def test_a6_4_history_lets_a_drifted_query_reach_its_nearest_sooner() -> None:
    index = build_index(VECTORS, clusters=LISTS)
    drifted = (QUERIES + 0.15 * RNG.standard_normal(QUERIES.shape)).astype(np.float32)
    plain, ordered = [], []
    for query, moved in zip(QUERIES, drifted, strict=True):
        (probe,) = index.probe(query[None], 16)
        first = begin_search(probe.clusters, 1)
        first.advance(16, index.scan([probe], 20)[0])
        history = first.history({i: index.home(i) or 0 for _, i in first.best})
        (next_probe,) = index.probe(moved[None], 16)
        (wanted,) = index.find(moved[None], 1, 16)
        for known, steps in ((None, plain), (history, ordered)):
            told = index.distances(moved, list(known.homes)) if known else None
            order = reorder_probes(next_probe.clusters, known, 1)
            cursor = begin_search(order, 1, known, told)
            steps.append(0)
            while list(cursor.partial) != wanted:
                (found,) = index.scan([part_of(moved, cursor.left[:1])], 20)
                cursor.advance(1, found)
                steps[-1] += 1
    assert sum(ordered) <= sum(plain)


@pytest.mark.parametrize("metric", METRICS)
def test_what_is_beyond_the_bound_of_a_scan_is_left_out(
    indexes: dict[tuple[str, str], IvfIndex], metric: str
) -> None:
    index = indexes["flat", metric]
    probes = index.probe(QUERIES, LISTS)
    wanted = index.find(QUERIES, 50, LISTS)
    for depth, last in ((50, 30), (50, 0), (5, 30)):
        scans = [
            replace(probe, bound=row[last][0]) for probe, row in zip(probes, wanted, strict=True)
        ]
        near = [[hit for hit in row if hit[0] <= row[last][0]] for row in wanted]
        assert index.scan(scans, depth) == [row[:depth] for row in near]


def test_no_more_is_asked_of_faiss_than_there_is(
    indexes: dict[tuple[str, str], IvfIndex],
) -> None:
    index = indexes["flat", "l2"]
    found = index.find(QUERIES, 1 << 50, LISTS)  # as arrays it would be more than memory can be
    assert found == index.find(QUERIES, COUNT, LISTS) and len(found[0]) == COUNT
    none = index.change(remove=range(COUNT))
    assert none.find(QUERIES, 1 << 50, LISTS) == [[] for _ in QUERIES]


def test_queries_of_another_length_are_refused() -> None:
    index = build_index(VECTORS, clusters=4)
    with pytest.raises(SpecError, match="16 values each"):
        index.probe(QUERIES[:, :8], 2)
    with pytest.raises(SpecError, match="16 values each"):
        index.scan([part_of(QUERIES[0, :8], (1,))], 5)


@settings(max_examples=30)
@given(few=st.sets(st.integers(0, COUNT - 1), max_size=12), nprobe=st.integers(1, LISTS))
def test_filters_are_searched_for_until_enough_is_found(few: set[int], nprobe: int) -> None:
    index, topk = build_index(VECTORS, clusters=LISTS), 4
    index = index.change(remove=sorted(few)[:2])
    only = Only(np.array(sorted(few), np.int64))
    everywhere = index.find(QUERIES, topk, LISTS, only)
    for row, whole in zip(index.find(QUERIES, topk, nprobe, only), everywhere, strict=True):
        assert len(row) == len(whole) == min(topk, max(0, len(few) - 2))
        assert {i for _, i in row} <= few - set(sorted(few)[:2])
    if few:
        part = index.probe_only(QUERIES[0], nprobe, topk, only)
        assert {index.home(i) for i in few} >= set(part.clusters)
