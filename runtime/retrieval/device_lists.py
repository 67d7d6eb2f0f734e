"""Hot clusters in the memory of a device beside the CPU, and the scans that are given to it.

In: an index, clusters to copy to the device, scans. Out: the same hits as the CPU alone finds
(HedraRAG §4.4). `EmulatedLists` is a device one does not have; those of torch are in
`accelerator/lists.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol

import numpy as np
from msgspec.structs import replace

from dovetail.ir.errors import CapacityError, DeviceError
from dovetail.runtime.retrieval.budget import ScanCost
from dovetail.runtime.retrieval.cursor import Hit, merge_hits
from dovetail.runtime.retrieval.faiss_lists import append, clear, clone_empty, scan_lists
from dovetail.runtime.retrieval.ivf import FaissScanner, IvfIndex
from dovetail.runtime.retrieval.scans import Mask, Scan, Scanner
from dovetail.runtime.retrieval.wire import EmulatedGpu

MEASURED_CLUSTERS, MEASURED_ROUNDS = 8, 5


class DeviceLists(Protocol):
    """Lists of one index in a device's memory. One thread loads while another scans or drops."""

    capacity: int
    """Bytes of stored vectors that may be there."""

    @property
    def used(self) -> int:
        """Bytes of them that are there."""

    @property
    def seconds(self) -> float:
        """Seconds on the clock by which its scans are timed."""

    def load(self, index: IvfIndex, clusters: Iterable[int]) -> None:
        """Copy clusters of the base there; returns when they can be scanned.

        Raises CapacityError where there is no room, DeviceError where the device fails.
        """

    def drop(self, clusters: Iterable[int]) -> None:
        """Forget clusters that are there; no scan that is under way may use them."""

    def holds(self, index: IvfIndex, cluster: int) -> bool:
        """Tell whether a cluster is there as the base of `index` has it."""

    def held(self) -> set[int]:
        """Return the clusters that are there, those of an older base too."""

    def scan(
        self, index: IvfIndex, scans: Sequence[Scan], depth: int, allowed: Mask | None
    ) -> list[list[Hit]]:
        """See `Scanner`; all clusters are there."""

    def close(self) -> None:
        """Give the memory back."""


class EmulatedLists:
    """A device in exact mode (design §7): memory of its own, results by the CPU, a virtual clock.

    It scans copies, as a device would, so a copy that is stale or missing shows. `scan_seconds`
    and `copy_seconds` are what it was to take: scans and copies run beside each other.
    """

    def __init__(self, index: IvfIndex, capacity: int, costs: EmulatedGpu) -> None:
        """`capacity`: bytes of stored vectors that fit."""
        self._lists = clone_empty(index.empty)
        self.capacity, self._costs = capacity, costs
        self._bases: dict[int, object] = {}
        self.used = 0
        self.scan_seconds = self.copy_seconds = 0.0

    @property
    def seconds(self) -> float:
        """See `DeviceLists`."""
        return self.scan_seconds

    def load(self, index: IvfIndex, clusters: Iterable[int]) -> None:
        """See `DeviceLists`."""
        for cluster in clusters:
            self.drop([cluster])
            ids, codes = index.lists(cluster)
            if self.used + codes.nbytes > self.capacity:
                raise CapacityError(
                    f"cluster {cluster} does not fit: {self.used} of {self.capacity} bytes of "
                    "the device are used"
                )
            append(self._lists, cluster, ids, codes)
            self.used += codes.nbytes
            self.copy_seconds += self._costs.launch + codes.nbytes / self._costs.link
            self._bases[cluster] = index.base.index

    def drop(self, clusters: Iterable[int]) -> None:
        """See `DeviceLists`."""
        for cluster in clusters:
            if self._bases.pop(cluster, None) is not None:
                self.used -= clear(self._lists, cluster) * self._lists.code_size

    def holds(self, index: IvfIndex, cluster: int) -> bool:
        """See `DeviceLists`."""
        return self._bases.get(cluster) is index.base.index

    def held(self) -> set[int]:
        """See `DeviceLists`."""
        return set(self._bases)

    def scan(
        self, index: IvfIndex, scans: Sequence[Scan], depth: int, allowed: Mask | None
    ) -> list[list[Hit]]:
        """See `Scanner`."""
        shared = {cluster for scan in scans for cluster in scan.clusters}
        size = sum(self._lists.invlists.list_size(cluster) for cluster in shared)
        self.scan_seconds += (
            self._costs.launch + size * self._lists.code_size / self._costs.bandwidth
        )
        return scan_lists(self._lists, scans, depth, allowed)

    def close(self) -> None:
        """See `DeviceLists`."""
        self.drop(list(self._bases))


@dataclass(slots=True)
class Absent:
    """Clusters that were to be on a device and were not, by the base that scans were to see.

    times: how often scans wanted one. A device that has the lists of one base lacks those of the
    others, so what is absent for searches that began before a change may be there for later ones.
    """

    times: int = 0
    left: list[tuple[object, set[int]]] = field(default_factory=list)

    def add(self, index: IvfIndex, scans: Sequence[Scan], left: set[int]) -> None:
        """Take that scans of an index did not find the clusters `left`."""
        self.times += sum(cluster in left for scan in scans for cluster in scan.clusters)
        self.left.append((index.base.index, left))

    def of(self, index: IvfIndex) -> set[int]:
        """Return those that are absent for searches in an index."""
        return set[int]().union(*(left for base, left in self.left if base is index.base.index))


class DeviceScanner:
    """Scans on a device what it holds, and on the CPU what it does not hold or fails to scan.

    One thread scans while another swaps.
    """

    def __init__(self, device: DeviceLists, host: Scanner | None = None) -> None:
        """`host` scans on the CPU, faiss by default."""
        self.device, self._host = device, host or FaissScanner()
        self._absent = Absent()
        self._lock = Lock()  # nothing is dropped that a scan uses

    def scan(
        self, index: IvfIndex, scans: Sequence[Scan], depth: int, allowed: Mask | None
    ) -> list[list[Hit]]:
        """See `Scanner`."""
        wanted = {cluster for scan in scans for cluster in scan.clusters}
        parts = []
        with self._lock:
            there = {cluster for cluster in wanted if self.device.holds(index, cluster)}
            try:
                if there:
                    inside = [_keep(scan, there) for scan in scans]
                    parts.append(self.device.scan(index, inside, depth, allowed))
            except (DeviceError, CapacityError):
                there = set()
        if left := wanted - there:
            self._absent.add(index, scans, left)
            outside = [_keep(scan, left) for scan in scans]
            parts.append(self._host.scan(index, outside, depth, allowed))
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return [[] for _ in scans]
        return [merge_hits(found, depth) for found in zip(*parts, strict=True)]

    def take_absent(self) -> Absent:
        """Return what was scanned on the CPU since the last call."""
        absent, self._absent = self._absent, Absent()
        return absent

    def swap(
        self, index: IvfIndex, load: Sequence[int], keep: Iterable[int], room: int
    ) -> set[int]:
        """Drop all but the clusters `keep`, copy `load` there; return those that did not arrive.

        There is no place for them in `room` bytes, or the device failed: the CPU scans them.
        """
        self.device.capacity = room
        with self._lock:
            try:
                self.device.drop(self.device.held().difference(keep))
            except DeviceError:  # of `load` there may be old copies, which scans may use
                return set(load)
        with suppress(CapacityError, DeviceError):
            self.device.load(index, load)
        return {cluster for cluster in load if not self.device.holds(index, cluster)}

    def close(self) -> None:
        """Give the device's memory back."""
        self.device.close()


def measure_lists(lists: DeviceLists, index: IvfIndex, room: int) -> ScanCost | None:
    """Return what scans on the device cost, None where no cluster fits in `room` bytes of it.

    One cluster and the largest that fit are scanned for one query in turns, then dropped.
    """
    sizes = index.sizes
    chosen, vectors = list[int](), 0
    for cluster in np.argsort(sizes, kind="stable")[::-1].tolist():
        if 0 < sizes[cluster] and (vectors + sizes[cluster]) * index.code_bytes <= room:
            chosen.append(cluster)
            vectors += sizes[cluster]
        if len(chosen) == MEASURED_CLUSTERS:
            break
    if not chosen:
        return None
    lists.load(index, chosen)
    query = np.zeros(index.dim, np.float32)
    times = []
    for _ in range(MEASURED_ROUNDS):
        for count in (1, len(chosen)):
            scan = Scan(query, chosen[:count], np.zeros(count, np.float32))
            start = lists.seconds
            lists.scan(index, [scan], 1, None)
            times.append(lists.seconds - start)
    lists.drop(chosen)
    one, all_, first = min(times[::2]), min(times[1::2]), sizes[chosen[0]]
    per_vector = max(0.0, all_ - one) / (vectors - first) if vectors > first else 0.0
    return ScanCost(max(0.0, one - per_vector * first), per_vector)


def _keep(scan: Scan, clusters: set[int]) -> Scan:
    """Return the part of a scan whose clusters are among `clusters`."""
    places = [i for i, cluster in enumerate(scan.clusters) if cluster in clusters]
    return replace(
        scan, clusters=[scan.clusters[i] for i in places], distances=scan.distances[places]
    )
