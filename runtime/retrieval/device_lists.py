"""Hot clusters in the memory of a device beside the CPU, and the scans that are given to it.

In: an index, clusters to copy to the device, scans. Out: the same hits as the CPU alone finds
(HedraRAG §4.4). The lists of torch devices are in `accel/torch_lists.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from msgspec.structs import replace

from dovetail.ir.errors import CapacityError, DeviceError
from dovetail.runtime.index.cursor import Hit, merge_hits
from dovetail.runtime.index.ivf import IvfIndex, Scanner
from dovetail.runtime.index.scans import Mask, Part
from dovetail.runtime.retrieval.budget import ScanCost

if TYPE_CHECKING:
    from dovetail.runtime.accel.torch_lists import TorchLists

MEASURED_CLUSTERS, MEASURED_ROUNDS = 8, 5
SECONDS, OPENING_SECONDS = 10.0, 60.0
"""Without an answer a device is given up: what is asked of it at once takes milliseconds, but
opening it imports torch and starts its driver."""

log = logging.getLogger("dovetail")

T = TypeVar("T")


class DeviceScanner:
    """Scans on a device what it holds, and on the CPU what it does not hold or fails to scan.

    One thread scans while another swaps. A device that does not answer in time is given up: it
    holds nothing then, and is never asked again. The thread that asked it stays behind, as a call
    of a driver cannot be taken back.
    """

    def __init__(
        self,
        open_lists: Callable[[], TorchLists],
        host: Scanner,
        seconds: float = SECONDS,
        opening_seconds: float = OPENING_SECONDS,
    ) -> None:
        """`host` scans on the CPU. `seconds`: for copying a cluster, for scans of one sub-stage.

        Raises DeviceError where the device does not answer within `opening_seconds` (what is opened
        later is closed at once), and what `open_lists` raises.
        """
        self._host, self._seconds, self._gone = host, seconds, ""
        self._absent: list[tuple[object, int]] = []  # (base, cluster) as often as scans wanted it
        self._lock = Lock()  # nothing is dropped that a scan uses
        self._scanning, self._copying = (ThreadPoolExecutor(1, "gpu-lists") for _ in range(2))
        opening = self._scanning.submit(open_lists)
        try:
            self._lists = self._await(opening, opening_seconds)
        except DeviceError:
            opening.add_done_callback(_close_late)
            raise

    @property
    def used(self) -> int:
        """Bytes of vectors on the device."""
        return 0 if self._gone else self._lists.used

    def holds(self, index: IvfIndex, cluster: int) -> bool:
        """Tell whether the device has a cluster as the base of `index` has it."""
        return not self._gone and self._lists.holds(index, cluster)

    def scan(
        self, index: IvfIndex, scans: Sequence[Part], depth: int, allowed: Mask | None
    ) -> list[list[Hit]]:
        """See `Scanner`."""
        wanted = {cluster for scan in scans for cluster in scan.clusters}
        parts = []
        with self._lock:
            there = {cluster for cluster in wanted if self.holds(index, cluster)}
            try:
                if there:
                    inside = [_keep(scan, there) for scan in scans]
                    given = index, inside, depth, allowed
                    parts.append(self._do(self._scanning, self._lists.scan, *given))
            except (DeviceError, CapacityError):
                there = set()
        if left := wanted - there:
            outside = [_keep(scan, left) for scan in scans]
            self._absent += ((index.base.index, c) for scan in outside for c in scan.clusters)
            parts.append(self._host.scan(index, outside, depth, allowed))
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return [[] for _ in scans]
        return [merge_hits(found, depth) for found in zip(*parts, strict=True)]

    def take_absent(self, index: IvfIndex) -> tuple[int, set[int]]:
        """Return how many clusters were scanned on the CPU since the last call, and which.

        These are those that are absent for searches in `index`: a device that has the lists of one
        base lacks those of the others, so searches that began before a change may miss others.
        """
        absent, self._absent = self._absent, []
        return len(absent), {cluster for base, cluster in absent if base is index.base.index}

    def swap(
        self, index: IvfIndex, load: Sequence[int], keep: Iterable[int], room: int
    ) -> set[int]:
        """Drop all but the clusters `keep`, copy `load` there; return those that did not arrive.

        There is no place for them in `room` bytes, or the device failed: the CPU scans them.
        """
        self._lists.capacity = room
        with self._lock:
            try:
                self._drop(set() if self._gone else self._lists.held().difference(keep))
            except DeviceError:  # of `load` there may be old copies, which scans may use
                return set(load)
        with suppress(CapacityError, DeviceError):
            self._load(index, load)
        return {cluster for cluster in load if not self.holds(index, cluster)}

    def measure(self, index: IvfIndex, room: int) -> ScanCost | None:
        """Return what scans on the device cost, None where no cluster fits in `room` bytes of it.

        One cluster and the largest that fit are scanned for one query in turns, then dropped.
        """
        sizes = index.sizes
        chosen, vectors = list[int](), 0
        for cluster in np.argsort(sizes, kind="stable")[::-1].tolist():
            fits = 0 < sizes[cluster] and (vectors + sizes[cluster]) * index.code_bytes <= room
            if fits and len(chosen) < MEASURED_CLUSTERS:
                chosen.append(cluster)
                vectors += sizes[cluster]
        if not chosen:
            return None
        self._load(index, chosen)
        query = bytes(4 * index.dim)
        times = []
        for _ in range(MEASURED_ROUNDS):
            for count in (1, len(chosen)):
                scan = Part(query, tuple(chosen[:count]), (0.0,) * count)
                start = time.perf_counter()
                self._do(self._scanning, self._lists.scan, index, [scan], 1, None)
                times.append(time.perf_counter() - start)
        self._drop(chosen)
        return ScanCost.of((min(times[::2]), sizes[chosen[0]]), (min(times[1::2]), vectors))

    def close(self) -> None:
        """Give the memory back; a device that fails keeps it until the process ends."""
        with suppress(DeviceError):
            self._do(self._copying, self._lists.close)
        for pool in (self._scanning, self._copying):
            pool.shutdown(wait=False)

    # ---- asking the device ----

    def _load(self, index: IvfIndex, clusters: Iterable[int]) -> None:
        for cluster in clusters:
            self._do(self._copying, self._lists.load, index, [cluster])

    def _drop(self, clusters: Iterable[int]) -> None:
        if not self._gone:  # else nothing is there
            self._do(self._copying, self._lists.drop, clusters)

    def _do(self, pool: ThreadPoolExecutor, work: Callable[..., T], *given: object) -> T:
        if self._gone:
            raise DeviceError(self._gone)
        return self._await(pool.submit(work, *given), self._seconds)

    def _await(self, asked: Future[T], seconds: float) -> T:
        try:
            return asked.result(seconds)
        except TimeoutError:
            self._gone = f"the GPU has not answered for {seconds:g} s"
            log.warning("%s; the CPU scans hot clusters from now on", self._gone)
            raise DeviceError(self._gone) from None


def _close_late(opening: Future[TorchLists]) -> None:
    """Give back what a device has come to hold that was given up meanwhile."""
    if opening.exception() is None:
        with suppress(DeviceError):
            opening.result().close()


def _keep(scan: Part, clusters: set[int]) -> Part:
    """Return what of a part is in some clusters."""
    kept = [pair for pair in zip(scan.clusters, scan.centroids, strict=True) if pair[0] in clusters]
    near, far = zip(*kept, strict=True) if kept else ((), ())
    return replace(scan, clusters=near, centroids=far)
