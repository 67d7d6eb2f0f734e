"""CPU and device together find what one device finds, whatever is there, in transfer or stale."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("faiss")

from dovetail.ir.errors import CapacityError, DeviceError
from dovetail.runtime.retrieval.build import METRICS, build_index
from dovetail.runtime.retrieval.cursor import Hit
from dovetail.runtime.retrieval.device_lists import (
    DeviceScanner,
    EmulatedLists,
    measure_lists,
)
from dovetail.runtime.retrieval.faiss_lists import scan_lists
from dovetail.runtime.retrieval.hot import HotSet
from dovetail.runtime.retrieval.ivf import IvfIndex
from dovetail.runtime.retrieval.scans import Mask, Only, Scan
from dovetail.runtime.retrieval.wire import EmulatedGpu
from dovetail.runtime.sim.machines import MACHINES

DIM, COUNT, LISTS = 16, 800, 20
RNG = np.random.default_rng(13)
VECTORS = RNG.standard_normal((COUNT, DIM)).astype(np.float32)
VECTORS[600:] = VECTORS[RNG.integers(9, size=200)]  # equally near: ids decide
QUERIES = RNG.standard_normal((6, DIM)).astype(np.float32)
COSTS = EmulatedGpu(1e-5, 1e12, 5e10)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def indexes(one_thread: None) -> dict[tuple[str, str], IvfIndex]:
    return {
        (codes, metric): build_index(VECTORS, clusters=LISTS, codes=codes, metric=metric)
        for codes in ("flat", "sq8")
        for metric in METRICS
    }


class OnlyElsewhere:
    """A host that must not be asked for what is on the device."""

    def __init__(self, there: set[int]) -> None:
        self.there = there

    def scan(
        self, index: IvfIndex, scans: Sequence[Scan], depth: int, allowed: Mask | None
    ) -> list[list[Hit]]:
        assert not self.there & {c for scan in scans for c in scan.clusters}
        return scan_lists(index.base.index, scans, depth, allowed)


def scans_of(index: IvfIndex, rng: random.Random) -> list[Scan]:
    probes = index.probe(QUERIES, LISTS)
    masks = (None, Only(np.arange(0, COUNT, 2)))
    return [
        Scan(q, p.clusters[:n], p.distances[:n], rng.choice(masks))
        for q, p in zip(QUERIES, probes, strict=True)
        for n in [rng.randint(0, LISTS)]
    ]


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10**6),
    codes=st.sampled_from(["flat", "sq8"]),
    metric=st.sampled_from(sorted(METRICS)),
    depth=st.sampled_from([1, 5, 20, 100]),
)
def test_a6_9_two_devices_find_what_one_finds(
    indexes: dict[tuple[str, str], IvfIndex], seed: int, codes: str, metric: str, depth: int
) -> None:
    rng, index = random.Random(seed), indexes[codes, metric]
    there = rng.sample(range(LISTS), rng.randint(0, LISTS))
    hybrid = DeviceScanner(EmulatedLists(index, 1 << 20, COSTS), OnlyElsewhere(set(there)))
    hybrid.swap(index, there, (), 1 << 20)
    if rng.random() < 0.5:  # what changes later is seen, too, though the device has the old lists
        index = index.change(QUERIES[:2], [COUNT, COUNT + 1], remove=range(0, COUNT, 5))
    scans = scans_of(index, rng)
    assert index.scan(scans, depth, hybrid) == index.scan(scans, depth)
    missed, wanted = hybrid.take_absent(), [c for s in scans for c in s.clusters]
    assert missed.of(index) == set(wanted).difference(there)
    assert missed.times == sum(c not in there for c in wanted)
    hybrid.close()


def test_a6_8_clusters_in_transfer_are_served_by_the_cpu(
    indexes: dict[tuple[str, str], IvfIndex],
) -> None:
    index = indexes["flat", "l2"]
    bytes_ = [size * index.code_bytes for size in index.sizes]
    device = EmulatedLists(index, sum(bytes_), COSTS)
    hot, hybrid = HotSet(bytes_, sum(sorted(bytes_)[:4])), DeviceScanner(device)
    wanted = index.find(QUERIES, 10, 8)
    probes = index.probe(QUERIES, 8)
    scans = [Scan(q, p.clusters, p.distances) for q, p in zip(QUERIES, probes, strict=True)]
    for probe in probes:
        hot.count(probe.clusters)
    swap = hot.refresh()
    assert swap is not None
    assert index.scan(scans, 10, hybrid) == wanted and device.scan_seconds == 0
    hybrid.swap(index, swap.load, hot.residents, sum(bytes_))
    hot.settle()
    assert hot.residents and all(device.holds(index, c) for c in hot.residents)
    assert index.scan(scans, 10, hybrid) == wanted and device.scan_seconds > 0
    assert device.copy_seconds >= device.used / COSTS.link > 0
    # a rewritten index is another one: what the device has is of no use
    again = index.change(remove=range(0, COUNT, 2)).rewrite()
    spent = device.scan_seconds
    assert again.scan(scans, 10, hybrid) == again.scan(scans, 10) and device.scan_seconds == spent
    hybrid.close()
    assert device.used == 0


def test_what_finds_no_room_or_fails_is_scanned_on_the_cpu(
    indexes: dict[tuple[str, str], IvfIndex],
) -> None:
    index = indexes["flat", "ip"]
    room = index.sizes[3] * index.code_bytes
    device = EmulatedLists(index, room, COSTS)
    with pytest.raises(CapacityError, match="does not fit"):
        device.load(index, [3, 4])
    hybrid = DeviceScanner(device)
    assert hybrid.swap(index, [3, 5, 6], [3], room) == {5, 6}, "neither has room"
    assert device.holds(index, 3) and device.used == room
    wanted = index.find(QUERIES, 10, LISTS)
    scans = [Scan(q, range(LISTS), np.zeros(LISTS, np.float32)) for q in QUERIES]
    assert index.scan(scans, 10, hybrid) == wanted

    def fail(*_: object) -> list[list[Hit]]:
        raise DeviceError("a kernel failed")

    assert hybrid.take_absent().of(index) == set(range(LISTS)) - {3}
    device.scan = fail  # type: ignore[method-assign]
    assert index.scan(scans, 10, hybrid) == wanted
    assert hybrid.take_absent().of(index) == set(
        range(LISTS)
    )  # nothing is left on a device that fails


def test_what_searches_before_a_change_lack_is_there_for_later_ones(
    indexes: dict[tuple[str, str], IvfIndex],
) -> None:
    old = indexes["flat", "l2"]
    new = old.change(remove=range(0, COUNT, 2)).rewrite()
    device = EmulatedLists(new, 1 << 20, COSTS)
    hybrid, room = DeviceScanner(device), 1 << 20
    hybrid.swap(new, [1, 2], (), room)
    for index, clusters in ((old, [1, 2]), (new, [1, 2, 3]), (old, [2, 4])):
        scan = Scan(QUERIES[0], clusters, np.zeros(len(clusters), np.float32))
        assert index.scan([scan], 5, hybrid) == index.scan([scan], 5)
    missed = hybrid.take_absent()
    assert (missed.times, missed.of(new), missed.of(old)) == (5, {3}, {1, 2, 4})
    assert hybrid.take_absent().times == 0


def test_nothing_is_copied_where_what_is_old_cannot_be_dropped(
    indexes: dict[tuple[str, str], IvfIndex],
) -> None:
    """A copy would take away, while it is scanned, what could not be dropped before."""
    index, room = indexes["flat", "l2"], 1 << 20
    device = EmulatedLists(index, room, COSTS)
    hybrid, drop, fails, copied = DeviceScanner(device), device.drop, [True], list[int]()

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


def test_costs_come_from_a_machine_class() -> None:
    costs = EmulatedGpu.of(MACHINES["h100"])
    assert 0 < costs.launch < 1e-3 and costs.bandwidth > costs.link > 1e9


@pytest.mark.parametrize("room", [1 << 20, 3000])
def test_a_device_is_measured_by_its_own_clock_and_left_empty(
    indexes: dict[tuple[str, str], IvfIndex], room: int
) -> None:
    index = indexes["flat", "l2"]
    device = EmulatedLists(index, room, COSTS)
    cost = measure_lists(device, index, room)
    assert cost is not None and cost.fixed == pytest.approx(COSTS.launch, rel=1e-3)
    one = index.code_bytes / COSTS.bandwidth
    assert cost.per_vector == pytest.approx(one if room > 3000 else 0.0, rel=1e-6)
    assert device.used == 0
    assert measure_lists(device, index, 1) is None
