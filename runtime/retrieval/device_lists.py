"""Hot clusters in the memory of a device beside the CPU, and searches that use both at once.

In: an index, clusters to copy to the device, scans. Out: the same hits as the CPU alone finds
(HedraRAG §4.4). `EmulatedLists` is a device one does not have; `cuda_lists.py` has the real one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from dovetail.ir.errors import CapacityError, DeviceError
from dovetail.runtime.machines import Machine
from dovetail.runtime.retrieval.cursor import Hit, merge_hits
from dovetail.runtime.retrieval.faiss_lists import append, clear, clone_empty, scan_lists
from dovetail.runtime.retrieval.ivf import FaissScanner, IvfIndex, Mask, Scan, Scanner


class DeviceLists(Protocol):
    """Lists of one index in a device's memory. One thread loads and drops, another scans."""

    def load(self, index: IvfIndex, clusters: Iterable[int]) -> None:
        """Copy clusters of the base there; returns when they can be scanned.

        Raises CapacityError where there is no room, DeviceError where the device fails.
        """

    def drop(self, clusters: Iterable[int]) -> None:
        """Forget clusters; no scan that is under way may use them."""

    def holds(self, index: IvfIndex, cluster: int) -> bool:
        """Tell whether a cluster is there as the base of `index` has it."""

    def scan(
        self, index: IvfIndex, scans: Sequence[Scan], depth: int, allowed: Mask | None
    ) -> list[list[Hit]]:
        """See `Scanner`; all clusters are there."""

    def close(self) -> None:
        """Give the memory back."""


@dataclass(frozen=True, slots=True)
class ListCosts:
    """Seconds on a device: `launch` for each scan and copy; bytes/s of its memory and its link."""

    launch: float
    bandwidth: float
    link: float

    @classmethod
    def of(cls, machine: Machine) -> ListCosts:
        """Return the costs on one accelerator of a machine class: a scan is bound by memory."""
        return cls(machine.stage.value, machine.bandwidth.value, machine.link.value)


class EmulatedLists:
    """A device in exact mode (design §7): memory of its own, results by the CPU, a virtual clock.

    It scans copies, as a device would, so a copy that is stale or missing shows. `scan_seconds`
    and `copy_seconds` are what it was to take: scans and copies run beside each other.
    """

    def __init__(self, index: IvfIndex, capacity: int, costs: ListCosts) -> None:
        """`capacity`: bytes of stored vectors that fit."""
        self._lists = clone_empty(index.empty)
        self._capacity, self._costs = capacity, costs
        self._bases: dict[int, object] = {}
        self.used = 0
        self.scan_seconds = self.copy_seconds = 0.0

    def load(self, index: IvfIndex, clusters: Iterable[int]) -> None:
        """See `DeviceLists`."""
        for cluster in clusters:
            self.drop([cluster])
            ids, codes = index.lists(cluster)
            if self.used + codes.nbytes > self._capacity:
                raise CapacityError(
                    f"cluster {cluster} does not fit: {self.used} of {self._capacity} bytes of "
                    "the device are used"
                )
            append(self._lists, cluster, ids, codes)
            self.used += codes.nbytes
            self.copy_seconds += self._costs.launch + codes.nbytes / self._costs.link
            self._bases[cluster] = index.base

    def drop(self, clusters: Iterable[int]) -> None:
        """See `DeviceLists`."""
        for cluster in clusters:
            if self._bases.pop(cluster, None) is not None:
                self.used -= clear(self._lists, cluster) * self._lists.code_size

    def holds(self, index: IvfIndex, cluster: int) -> bool:
        """See `DeviceLists`."""
        return self._bases.get(cluster) is index.base

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


class HybridScanner:
    """Scans what a device holds there and the rest on the CPU, both at once, and merges."""

    def __init__(self, device: DeviceLists, host: Scanner | None = None) -> None:
        """`host` scans on the CPU, faiss by default."""
        self.device, self._host = device, host or FaissScanner()
        self._thread = ThreadPoolExecutor(1, "device-scan")

    def scan(
        self, index: IvfIndex, scans: Sequence[Scan], depth: int, allowed: Mask | None
    ) -> list[list[Hit]]:
        """See `Scanner`. What the device fails to scan, the CPU scans."""
        there = {c for s in scans for c in s.clusters if self.device.holds(index, c)}
        if not there:
            return self._host.scan(index, scans, depth, allowed)
        inside = [_keep(scan, there, inside=True) for scan in scans]
        beside = self._thread.submit(self.device.scan, index, inside, depth, allowed)
        outside = [_keep(scan, there, inside=False) for scan in scans]
        here = self._host.scan(index, outside, depth, allowed)
        try:
            found = beside.result()
        except (DeviceError, CapacityError):
            found = self._host.scan(index, inside, depth, allowed)
        return [merge_hits(parts, depth) for parts in zip(here, found, strict=True)]

    def swap(self, index: IvfIndex, load: Sequence[int], drop: Sequence[int]) -> None:
        """Do a swap of the hot set; beside scans, which use none of these clusters meanwhile.

        A cluster that finds no room is scanned on the CPU, as any that is not there.
        """
        self.device.drop(drop)
        with suppress(CapacityError, DeviceError):
            self.device.load(index, load)

    def close(self) -> None:
        """End the thread and give the device's memory back."""
        self._thread.shutdown()
        self.device.close()


def _keep(scan: Scan, clusters: set[int], *, inside: bool) -> Scan:
    """Return the part of a scan whose clusters are, or are not, among `clusters`."""
    places = [i for i, cluster in enumerate(scan.clusters) if (cluster in clusters) == inside]
    return replace(
        scan, clusters=[scan.clusters[i] for i in places], distances=scan.distances[places]
    )
