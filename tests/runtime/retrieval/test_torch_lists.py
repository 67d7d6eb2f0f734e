"""Lists on a torch device: copies, products, merges with the CPU's part, a device that is lost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
from msgspec.structs import replace

from dovetail.ir.errors import CapacityError, DeviceError, SpecError
from dovetail.runtime.accel.torch_lists import TorchLists
from dovetail.runtime.index.build import METRICS, build_index
from dovetail.runtime.index.ivf import IvfIndex
from dovetail.runtime.index.scans import Only
from tests.runtime.index.parts import part_of
from tests.runtime.retrieval.test_device_lists import (
    COUNT,
    LISTS,
    QUERIES,
    VECTORS,
    OnlyElsewhere,
    beside,
    open_lists,
    scans_of,
)

ROOM = 1 << 20
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def indexes(one_thread: None) -> dict[str, IvfIndex]:
    return {metric: build_index(VECTORS, clusters=LISTS, metric=metric) for metric in METRICS}


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    metric=st.sampled_from(sorted(METRICS)),
    depth=st.sampled_from([1, 5, 20, 100, COUNT]),
)
def test_a6_9_device_and_cpu_find_what_the_cpu_finds(
    indexes: dict[str, IvfIndex], seed: int, metric: str, depth: int, accelerator: str
) -> None:
    """Ids and distances, among vectors many of which are equal; a later change is seen, too."""
    rng, index = random.Random(seed), indexes[metric]
    there = rng.sample(range(LISTS), rng.randint(0, LISTS))
    lists = open_lists(index, device=accelerator)
    hybrid = beside(lists, OnlyElsewhere(set(there)))
    assert hybrid.swap(index, there, (), ROOM) == set()
    assert lists.used == sum(index.sizes[c] for c in there) * index.code_bytes
    if rng.random() < 0.5:
        index = index.change(QUERIES[:2], [COUNT, COUNT + 1], remove=range(0, COUNT, 5))
    scans = scans_of(index, rng)
    only = rng.choice((None, Only(np.arange(0, COUNT, 2))))
    wanted = index.scan(scans, depth, only=only)
    assert index.scan(scans, depth, hybrid, only) == wanted
    asked = [c for s in scans for c in s.clusters if c not in there]
    assert hybrid.take_absent(index) == (len(asked), set(asked))
    bounded = [replace(scan, bound=2.0) for scan in scans]
    assert index.scan(bounded, depth, hybrid) == index.scan(bounded, depth)
    hybrid.close()
    assert lists.used == 0


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_long_vectors_far_from_zero_are_told_apart(
    one_thread: None, metric: str, accelerator: str
) -> None:
    """Squares are a million times the differences: products alone would find others."""
    rng = np.random.default_rng(3)
    vectors = (100 + 0.1 * rng.standard_normal((500, 768))).astype(np.float32)
    queries = (100 + 0.1 * rng.standard_normal((5, 768))).astype(np.float32)
    index = build_index(vectors, clusters=4, metric=metric)
    scans = index.probe(queries, 4)
    lists = open_lists(index, 1 << 24, device=accelerator)
    lists.load(index, range(4))
    found = lists.scan(index, scans, 10, None)
    assert found == index.scan(scans, 10)


def test_the_device_chooses_by_what_lies_in_its_own_memory(
    indexes: dict[str, IvfIndex], accelerator: str
) -> None:
    index = build_index(VECTORS[:100], clusters=2)
    lists = open_lists(index, device=accelerator)
    lists.load(index, [0])
    ids, codes = index.lists(0)
    vectors = codes.view(np.float32).reshape(len(ids), -1)
    query, before = vectors[1].copy(), vectors.copy()
    vectors[:] = vectors[::-1].copy()  # the CPU's copy has another order
    ((_, found),) = lists.scan(index, [part_of(query, [0])], 1, None)[0]
    vectors[:] = before
    assert found == ids[1]
    lists.close()


@contextmanager
def lost(lists: TorchLists, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have all that is asked of the device fail."""

    def fail() -> None:
        raise DeviceError("torch has failed: the device is lost")

    with monkeypatch.context() as here:
        here.setattr(lists._device, "working", fail)
        yield


def test_a_lost_device_is_done_without(
    indexes: dict[str, IvfIndex], monkeypatch: pytest.MonkeyPatch, accelerator: str
) -> None:
    """What was there when it was lost is there when it is found again."""
    index = indexes["l2"]
    lists = open_lists(index, device=accelerator)
    hybrid, scan = beside(lists), part_of(QUERIES[0], range(6))
    assert hybrid.swap(index, [0, 1, 2], [], ROOM) == set()
    wanted = index.scan([scan], 5)
    with lost(lists, monkeypatch):
        assert index.scan([scan], 5, hybrid) == wanted
        assert hybrid.take_absent(index)[1] == set(range(6))
        assert hybrid.swap(index, [3, 4], [0, 1, 2], ROOM) == {3, 4}
    assert lists.held() == {0, 1, 2}
    assert hybrid.swap(index, [3, 4], [0, 1, 2], ROOM) == set()
    assert index.scan([scan], 5, hybrid) == wanted
    assert hybrid.take_absent(index)[1] == {5}
    hybrid.close()


def test_a_copy_without_memory_leaves_nothing_there(
    indexes: dict[str, IvfIndex], monkeypatch: pytest.MonkeyPatch, accelerator: str
) -> None:
    index = indexes["l2"]
    lists = open_lists(index, device=accelerator)

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as here:
        here.setattr(torch, "empty", fail)
        with pytest.raises(CapacityError, match="out of memory"):
            lists.load(index, [0])
    assert not lists.held() and lists.used == 0
    lists.load(index, [0])
    assert lists.held() == {0}
    lists.close()


@pytest.mark.parametrize("room", [ROOM, 4000])
def test_scans_are_measured_and_leave_the_device_empty(
    indexes: dict[str, IvfIndex], room: int, accelerator: str
) -> None:
    index = indexes["ip"]
    lists = open_lists(index, room, device=accelerator)
    hybrid = beside(lists)
    cost = hybrid.measure(index, room)
    assert cost is not None and cost.fixed > 0 and lists.used == 0
    assert hybrid.measure(index, 1) is None


def test_what_cannot_be_is_refused(indexes: dict[str, IvfIndex], accelerator: str) -> None:
    index = indexes["l2"]
    lists = open_lists(index, index.sizes[0] * index.code_bytes, device=accelerator)
    lists.load(index, [0])
    with pytest.raises(CapacityError, match="does not fit"):
        lists.load(index, [1])
    lists.close()
    with pytest.raises(SpecError, match="sq8"):
        open_lists(build_index(VECTORS, clusters=4, codes="sq8"), device=accelerator)
