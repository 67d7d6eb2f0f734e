"""Documents that come and go while searches run, against a plain list of what should be there."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("faiss")

from dovetail.ir.errors import RequestError, SpecError
from dovetail.ir.index_file import Passage
from dovetail.runtime.index import ivf
from dovetail.runtime.index.build import METRICS, build_index
from dovetail.runtime.index.cursor import Hit, begin_search
from dovetail.runtime.index.documents import DocumentStore
from dovetail.runtime.index.ivf import IvfIndex
from dovetail.runtime.index.scans import Only
from dovetail.runtime.retrieval import collection as collections
from dovetail.runtime.retrieval.collection import Collection
from tests.runtime.index.parts import part_of

DIM, COUNT, LISTS = 8, 300, 12
RNG = np.random.default_rng(5)
VECTORS = RNG.standard_normal((COUNT, DIM)).astype(np.float32)
SPARE = RNG.standard_normal((200, DIM)).astype(np.float32)
QUERIES = RNG.standard_normal((4, DIM)).astype(np.float32)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def indexes(one_thread: None) -> dict[str, IvfIndex]:
    return {metric: build_index(VECTORS, clusters=LISTS, metric=metric) for metric in METRICS}


def passage(number: int, **metadata: Any) -> Passage:
    return Passage(key=f"k{number}", text=f"text {number}", metadata=metadata)


def collection(index: IvfIndex) -> Collection:
    store = DocumentStore()
    store.add(passage(i, parity=i % 2, tags=[f"t{i % 3}", "all"]) for i in range(COUNT))
    return Collection(index, store)


def nearest(documents: dict[int, np.ndarray], metric: str, query: np.ndarray, k: int) -> list[int]:
    ids = np.array(sorted(documents))
    rows = np.stack([documents[i] for i in ids]).astype(np.float64)
    distances = ((rows - query) ** 2).sum(1) if metric == "l2" else -(rows * query).sum(1)
    return ids[np.argsort(distances, kind="stable")[:k]].tolist()


def ids(hits: list[Hit]) -> list[int]:
    return [id_ for _, id_ in hits]


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6), metric=st.sampled_from(sorted(METRICS)), least=st.integers(1, 90)
)
def test_any_changes_leave_what_a_plain_list_holds(
    indexes: dict[str, IvfIndex], seed: int, metric: str, least: int
) -> None:
    rng, index = random.Random(seed), indexes[metric]
    documents = dict(enumerate(VECTORS))
    with pytest.MonkeyPatch.context() as patch:  # so that some changes rewrite the index
        patch.setattr(ivf, "CHANGED_LEAST", least)
        patch.setattr(ivf, "CHANGED_SHARE", 0.1)
        for turn in range(rng.randint(1, 6)):
            left = [*rng.sample(sorted(documents), rng.randint(0, 40)), 9999]
            added = rng.sample(range(len(SPARE)), rng.randint(0, 20))
            new = {1000 * (turn + 1) + i: SPARE[i] for i in added}
            again = {i: SPARE[7] for i in left[:1] if i != 9999}  # out and in under the same id
            new |= again
            rows = np.stack(list(new.values())) if new else np.empty((0, DIM), np.float32)
            index = index.change(rows, list(new), remove=left)
            documents = {i: v for i, v in documents.items() if i not in left} | new
    assert len(index) == len(documents) and sum(index.sizes) >= len(documents)
    found = index.find(QUERIES, 15, LISTS)
    for query, row in zip(QUERIES, found, strict=True):
        assert row == sorted(set(row)) and set(ids(row)) <= set(documents)
        best = nearest(documents, metric, query, 15)  # nearly equal ones may come in another order
        near, far = (np.stack([documents[i] for i in chosen]) for chosen in (ids(row), best))
        told = [((v - query) ** 2).sum(1) if metric == "l2" else -(v @ query) for v in (near, far)]
        np.testing.assert_allclose(*told, rtol=1e-5, atol=1e-6)
    assert all(index.home(i) is not None for i in documents) and index.home(9999) is None
    told = index.distances(QUERIES[0], [*ids(found[0]), 9999])
    np.testing.assert_allclose(list(told.values()), [d for d, _ in found[0]], rtol=1e-4, atol=1e-5)
    assert index.rewrite().find(QUERIES, 15, LISTS) == found


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6))
def test_equally_near_documents_come_by_id_however_a_search_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    few = VECTORS[[rng.randrange(5) for _ in range(COUNT)]]  # every distance many times over
    index, depth = build_index(few, clusters=5), rng.randint(1, 40)
    (whole,) = index.find(QUERIES[:1], depth, 5)
    assert ids(whole) == nearest(dict(enumerate(few)), "l2", QUERIES[0], depth)
    (probe,) = index.probe(QUERIES[:1], 5)
    cursor = begin_search(probe.clusters, depth)
    while not cursor.done:
        count = rng.randint(1, len(cursor.left))
        scan = part_of(QUERIES[0], cursor.left[:count])
        cursor.advance(count, index.scan([scan], cursor.depth)[0])
    assert cursor.best[:depth] == whole


def test_a_search_in_steps_sees_all_of_a_change_or_nothing(indexes: dict[str, IvfIndex]) -> None:
    served = collection(indexes["l2"])
    before = served.index
    (probe,) = before.probe(QUERIES[:1], LISTS)
    wanted = before.find(QUERIES[:1], 20, LISTS)[0]
    cursor = begin_search(probe.clusters, 20)
    while not cursor.done:
        # the nearest documents move elsewhere between two steps
        moved = [passage(i) for i in ids(wanted)[: 2 + cursor.position]]
        served.change(moved, SPARE[: len(moved)], remove=[f"k{ids(wanted)[-1]}"])
        scan = part_of(QUERIES[0], cursor.left[:3], probe.centroids[cursor.position :][:3])
        cursor.advance(3, before.scan([scan], 20)[0])
    assert cursor.best == wanted
    version, after = served.now
    assert version == 4 and not set(ids(wanted)[:2]) & set(
        ids(after.find(QUERIES[:1], 40, LISTS)[0])
    )
    assert served.at(0) is before and served.at(version) is after
    assert [d.text for d in served.store.documents(wanted[:2], "l2")] == [
        f"text {i}" for i in ids(wanted)[:2]
    ]


def test_threads_that_search_never_see_half_of_a_change(indexes: dict[str, IvfIndex]) -> None:
    served, twin = collection(indexes["l2"]), QUERIES[0][None]
    served.change([passage(1000)], twin)
    faults: list[str] = []
    begun, stop = threading.Event(), threading.Event()

    def read() -> None:
        while not stop.is_set():
            found = served.find(QUERIES[0], 1, LISTS)
            if found[0].score != 0 or found[0].metadata["key"] != "k1000":
                faults.append(str(found[0]))
            begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60)
    for _ in range(60):  # takes the place of the one with the same key
        served.change([passage(1000)], twin)
    stop.set()
    reader.join()
    assert not faults and len(served.index) == COUNT + 1


def test_filters_choose_documents_by_metadata(indexes: dict[str, IvfIndex]) -> None:
    served = collection(indexes["ip"])
    served.change([passage(1000, parity=1, tags="t9")], 9 * QUERIES[:1])
    every = dict(enumerate(VECTORS)) | {COUNT: 9 * QUERIES[0]}
    cases: list[tuple[dict[str, Any], list[int]]] = [
        ({"parity": 1}, [i for i in every if i % 2 or i == COUNT]),
        ({"parity": (0, 7)}, [i for i in range(COUNT) if i % 2 == 0]),
        ({"tags": "t1", "parity": 0}, [i for i in range(COUNT) if i % 3 == 1 and i % 2 == 0]),
        ({"tags": ["t9", "t2"]}, [i for i in every if i % 3 == 2 or i == COUNT]),
        ({"parity": 5}, []),
        ({}, list(every)),
    ]
    for filters, kept in cases:
        found = [d.id for d in served.find(QUERIES[0], 10, LISTS, filters)]
        assert found == (nearest({i: every[i] for i in kept}, "ip", QUERIES[0], 10) if kept else [])
    assert served.only({"parity": 1}) is served.only({"parity": 1})
    for wrong in ({"colour": 1}, {"parity": object()}):
        with pytest.raises(RequestError):
            served.find(QUERIES[0], 1, 1, wrong)


def test_changes_that_cannot_be_made_change_nothing(indexes: dict[str, IvfIndex]) -> None:
    served = collection(indexes["l2"])
    before = served.index
    with pytest.raises(SpecError, match="vectors of 8 values"):
        served.change([passage(1000)], SPARE[:2])
    with pytest.raises(RequestError, match="same key"):
        served.change([passage(1000), passage(1000)], SPARE[:2])
    with pytest.raises(SpecError, match="there already"):
        before.change(SPARE[:1], [4])
    assert served.index is before and len(served.store) == COUNT
    made = served.change(remove=["nobody", 77_777])
    assert served.index.find(QUERIES, 3, 3) == before.find(QUERIES, 3, 3)
    assert not made.removed and not made.forgotten


def test_filters_take_no_more_room_however_many_documents_have_come_and_gone() -> None:
    """Ids are far apart then; masks are as long as there are vectors."""
    store = DocumentStore()
    store.add([Passage(key=f"p{i}", text="", metadata={"odd": i % 2}) for i in range(40)])
    served = Collection(build_index(VECTORS[:40], clusters=2), store)
    for far in (10**9, 3 * 10**12):
        store.skip_to(far)
        added = [Passage(key=f"n{far}{i}", text="", metadata={"odd": i % 2}) for i in range(10)]
        served.change(added, VECTORS[40:50])
    index = served.index
    for seen in (index, index.rewrite()):
        only = served.only({"odd": 1})
        assert only is not None and only.ids.tolist()[-1] == 3 * 10**12 + 9
        (hits,) = seen.find(VECTORS[:1], 60, 2, only)
        assert sorted(i for _, i in hits) == only.ids.tolist() and len(hits) == 30
        assert all(part.allowed(only).nbytes == len(part) for part in (seen.base, *seen.fresh))  # type: ignore[union-attr]
    assert (served.find(VECTORS[43], 1, 2, {"odd": 1})[0].metadata["key"]) == f"n{10**9}3"


def test_filters_that_are_kept_hold_so_many_bytes_at_most(
    indexes: dict[str, IvfIndex], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those not used for longest are found anew."""
    served = collection(indexes["l2"])
    wanted: list[dict[str, Any]] = [{"parity": 0}, {"parity": 1}, {"tags": "all"}]
    first, second, _ = kept = [served.only(filters) for filters in wanted]
    for only in kept:
        served.index.find(QUERIES, 5, LISTS, only)
    assert first is not None and first.nbytes == 8 * COUNT // 2 + COUNT
    monkeypatch.setattr(collections, "KEPT_FILTER_BYTES", 2 * first.nbytes)
    assert served.only({"parity": 0}) is first, "it is the last one used now"
    assert served.only({"parity": 1}) is not second and served.only({"parity": 0}) is first
    monkeypatch.setattr(collections, "KEPT_FILTER_BYTES", 0)
    last = served.only({"tags": "all"})
    assert served.only({"tags": "all"}) is last and served.only({"parity": 0}) is not first


def test_filters_remember_nothing_of_parts_that_are_gone(indexes: dict[str, IvfIndex]) -> None:
    index, only = indexes["l2"].rewrite(), Only(np.arange(0, COUNT, 2))
    for _ in range(3):  # each has ids of its own
        index = index.change(remove=[1]).rewrite()
        assert index.find(QUERIES, 5, LISTS, only) == index.find(QUERIES, 5, LISTS, only)
    assert only.nbytes == only.ids.nbytes + len(index)
