"""CPU and device together find what one device finds, whatever is there, in transfer or stale."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from msgspec.structs import replace

from dovetail.ir.errors import CapacityError, DeviceError
from dovetail.runtime.accel.device import TorchDevice
from dovetail.runtime.accel.torch_lists import TorchLists
from dovetail.runtime.index.build import METRICS, build_index
from dovetail.runtime.index.cursor import Hit
from dovetail.runtime.index.faiss_lists import scan_lists
from dovetail.runtime.index.ivf import FaissScanner, IvfIndex, Scanner
from dovetail.runtime.index.scans import Mask, Part
from dovetail.runtime.retrieval.device_lists import DeviceScanner
from dovetail.runtime.retrieval.hot import HotSet
from tests.runtime.index.parts import part_of

DIM, COUNT, LISTS = 16, 800, 20
RNG = np.random.default_rng(13)
VECTORS = RNG.standard_normal((COUNT, DIM)).astype(np.float32)
VECTORS[600:] = VECTORS[RNG.integers(9, size=200)]  # equally near: ids decide
QUERIES = RNG.standard_normal((6, DIM)).astype(np.float32)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def indexes(one_thread: None) -> dict[str, IvfIndex]:
    return {metric: build_index(VECTORS, clusters=LISTS, metric=metric) for metric in METRICS}


def open_lists(index: IvfIndex, room: int = 1 << 20, device: str = "torch:cpu") -> TorchLists:
    return TorchLists(TorchDevice(device, 1), index, room)


def beside(lists: TorchLists, host: Scanner | None = None) -> DeviceScanner:
    """Return what scans on a device, and beside it on a host."""
    return DeviceScanner(lambda: lists, host or FaissScanner(), 60, 60)


class OnlyElsewhere:
    """A host that must not be asked for what is on the device."""

    def __init__(self, there: set[int]) -> None:
        self.there = there

    def scan(
        self, index: IvfIndex, scans: Sequence[Part], depth: int, allowed: Mask | None
    ) -> list[list[Hit]]:
        assert not self.there & {c for scan in scans for c in scan.clusters}
        return scan_lists(index.base.index, scans, depth, allowed)


def scans_of(index: IvfIndex, rng: random.Random) -> list[Part]:
    return [
        replace(part, clusters=part.clusters[:n], centroids=part.centroids[:n])
        for part in index.probe(QUERIES, LISTS)
        for n in [rng.randint(0, LISTS)]
    ]


def test_a6_8_clusters_in_transfer_are_served_by_the_cpu(
    indexes: dict[str, IvfIndex],
) -> None:
    index = indexes["l2"]
    bytes_ = [size * index.code_bytes for size in index.sizes]
    device = open_lists(index, sum(bytes_))
    hot, hybrid = HotSet(bytes_, sum(sorted(bytes_)[:4])), beside(device)
    asked, scan = list[int](), device.scan

    def count(*given: Any) -> list[list[Hit]]:
        asked.append(1)
        return scan(*given)

    device.scan = count  # type: ignore[method-assign]
    wanted = index.find(QUERIES, 10, 8)
    scans = index.probe(QUERIES, 8)
    for probe in scans:
        hot.count(probe.clusters)
    swap = hot.wanted()
    assert swap is not None
    hot.begin(swap)
    assert index.scan(scans, 10, hybrid) == wanted and not asked
    hybrid.swap(index, swap.load, hot.residents, sum(bytes_))
    hot.settle()
    assert hot.residents and all(device.holds(index, c) for c in hot.residents)
    assert index.scan(scans, 10, hybrid) == wanted and asked
    # a rewritten index is another one: what the device has is of no use
    again = index.change(remove=range(0, COUNT, 2)).rewrite()
    spent = len(asked)
    assert again.scan(scans, 10, hybrid) == again.scan(scans, 10) and len(asked) == spent
    hybrid.close()
    assert device.used == 0


def test_what_finds_no_room_or_fails_is_scanned_on_the_cpu(
    indexes: dict[str, IvfIndex],
) -> None:
    index = indexes["ip"]
    room = index.sizes[3] * index.code_bytes
    device = open_lists(index, room)
    with pytest.raises(CapacityError, match="does not fit"):
        device.load(index, [3, 4])
    hybrid = beside(device)
    assert hybrid.swap(index, [3, 5, 6], [3], room) == {5, 6}, "neither has room"
    assert device.holds(index, 3) and device.used == room
    wanted = index.find(QUERIES, 10, LISTS)
    scans = [part_of(q, range(LISTS)) for q in QUERIES]
    assert index.scan(scans, 10, hybrid) == wanted

    def fail(*_: object) -> list[list[Hit]]:
        raise DeviceError("a kernel failed")

    assert hybrid.take_absent(index)[1] == set(range(LISTS)) - {3}
    device.scan = fail  # type: ignore[method-assign]
    assert index.scan(scans, 10, hybrid) == wanted
    assert hybrid.take_absent(index)[1] == set(
        range(LISTS)
    )  # nothing is left on a device that fails


def test_what_searches_before_a_change_lack_is_there_for_later_ones(
    indexes: dict[str, IvfIndex],
) -> None:
    old = indexes["l2"]
    new = old.change(remove=range(0, COUNT, 2)).rewrite()
    device = open_lists(new)
    hybrid, room = beside(device), 1 << 20
    hybrid.swap(new, [1, 2], (), room)
    for index, clusters in ((old, [1, 2]), (new, [1, 2, 3]), (old, [2, 4])):
        scan = part_of(QUERIES[0], clusters)
        assert index.scan([scan], 5, hybrid) == index.scan([scan], 5)
    assert hybrid.take_absent(new) == (5, {3})
    assert hybrid.take_absent(new) == (0, set())


def test_nothing_is_copied_where_what_is_old_cannot_be_dropped(
    indexes: dict[str, IvfIndex],
) -> None:
    """A copy would take away, while it is scanned, what could not be dropped before."""
    index, room = indexes["l2"], 1 << 20
    device = open_lists(index, room)
    hybrid, drop, fails, copied = beside(device), device.drop, [True], list[int]()

    def drop_later(clusters: Iterable[int]) -> None:
        if fails:
            raise DeviceError(f"the device failed {fails.pop()}")
        drop(clusters)

    def load(_: IvfIndex, clusters: Iterable[int]) -> None:
        copied.extend(clusters)

    device.load(index, [1, 2])
    device.drop, device.load = drop_later, load  # type: ignore[method-assign]
    assert hybrid.swap(index, [1, 2], [], room) == {1, 2} and not copied
    assert hybrid.swap(index, [1, 2], [], room) == {1, 2} and copied == [1, 2]
