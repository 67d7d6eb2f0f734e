"""Hot clusters in the memory of an NVIDIA GPU, scanned by the generated kernel.

In: a device, a module with `ivf_scan_l2` or `ivf_scan_ip`, plain vectors. Out: `CudaLists`. Copies
run on a stream beside scans.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.ir.errors import CapacityError, DeviceError, SpecError
from dovetail.runtime.cuda import CudaDevice, CudaModule
from dovetail.runtime.retrieval.cursor import Hit
from dovetail.runtime.retrieval.faiss_lists import stack_queries
from dovetail.runtime.retrieval.ivf import IvfIndex
from dovetail.runtime.retrieval.scanner import Rows, share_lists, take_best
from dovetail.runtime.retrieval.scans import Mask, Scan, Vectors
from dovetail.runtime.streams import GpuStreams

WARPS_PER_MULTIPROCESSOR = 8
STAGING = 4 << 20
"""Bytes of pinned memory through which clusters are copied."""


@dataclass(frozen=True, slots=True)
class _List:
    """A cluster on the device. base: what it is a copy of."""

    base: object
    address: int
    size: int
    nbytes: int


class CudaLists:
    """See `DeviceLists`. Distances may differ from the CPU's in their last bits."""

    def __init__(
        self, device: CudaDevice, module: CudaModule, index: IvfIndex, capacity: int
    ) -> None:
        """`capacity`: bytes of vectors that may lie on the device.

        Raises SpecError for an index that stores codes, or a module without the kernel.
        """
        self._kernel = f"ivf_scan_{index.metric}"
        if index.codes != "flat":
            raise SpecError(f"a GPU scans plain vectors, not {index.codes} codes")
        if self._kernel not in module.kernels:
            raise SpecError(f"{module.path} lacks {self._kernel}; build the index for `cuda`, too")
        self._device, self._module = device, module
        self._negate, self._dim = index.metric == "ip", index.dim
        self.capacity, self.used = capacity, 0
        self._lists: dict[int, _List] = {}
        # one thread copies and another scans: each has streams and events of its own
        self._copying, self._scanning = GpuStreams(device), GpuStreams(device)
        self._staging = self._copying.pinned(STAGING)
        self._room: dict[str, tuple[int, int]] = {}

    @property
    def seconds(self) -> float:
        """See `DeviceLists`."""
        return time.perf_counter()

    def load(self, index: IvfIndex, clusters: Iterable[int]) -> None:
        """See `DeviceLists`."""
        self._device.activate()
        for cluster in clusters:
            self.drop([cluster])
            _, vectors = index.lists(cluster)
            if self.used + vectors.nbytes > self.capacity:
                raise CapacityError(
                    f"cluster {cluster} does not fit: {self.used} of {self.capacity} bytes for "
                    "clusters are used"
                )
            address = self._device.alloc(vectors.nbytes)
            try:
                self._copy(address, vectors.reshape(-1))
            except (CapacityError, DeviceError):
                self._device.free(address)
                raise
            self.used += vectors.nbytes
            self._lists[cluster] = _List(index.base.index, address, len(vectors), vectors.nbytes)

    def drop(self, clusters: Iterable[int]) -> None:
        """See `DeviceLists`."""
        self._device.activate()
        for cluster in clusters:
            if (found := self._lists.get(cluster)) is not None:
                self._device.free(found.address)  # what a lost device keeps is dropped later
                self.used -= found.nbytes
                del self._lists[cluster]

    def holds(self, index: IvfIndex, cluster: int) -> bool:
        """See `DeviceLists`."""
        found = self._lists.get(cluster)
        return found is not None and found.base is index.base.index

    def held(self) -> set[int]:
        """See `DeviceLists`."""
        return set(self._lists)

    def scan(
        self, index: IvfIndex, scans: Sequence[Scan], depth: int, allowed: Mask | None
    ) -> list[list[Hit]]:
        """See `Scanner`: all clusters are launched, then their distances come back at once."""
        self._device.activate()
        streams, dim = self._scanning, self._dim
        sharing = share_lists(scans, sorted({c for scan in scans for c in scan.clusters}))
        queries = stack_queries(scans)
        gathered = np.concatenate([queries[rows] for rows in sharing.values()])
        total = sum(len(rows) * self._lists[c].size for c, rows in sharing.items())
        source, target = self._reserve("queries", gathered.nbytes), self._reserve("out", 4 * total)
        sent, back = np.ascontiguousarray(gathered), np.empty(total, np.float32)
        streams.upload(source, sent, streams.compute)
        begin, row = 0, 0
        for cluster, rows in sharing.items():
            found = self._lists[cluster]
            operands = (len(rows), found.size, dim, source + 4 * dim * row, dim)
            out = (found.address, target + 4 * begin, found.size)
            warps = self._device.multiprocessors * WARPS_PER_MULTIPROCESSOR
            if found.size:
                launch = (self._kernel, (*operands, *out), min(warps, found.size))
                self._module.launch(*launch, streams.compute)
            begin, row = begin + len(rows) * found.size, row + len(rows)
        streams.download(back, target, streams.compute)
        streams.finish()
        if self._negate:
            np.negative(back, out=back)
        return take_best(index, scans, depth, allowed, self._split(sharing, back))

    def close(self) -> None:
        """See `DeviceLists`."""
        self.drop(list(self._lists))
        for address, _ in self._room.values():
            self._device.free(address)
        self._room = {}
        self._copying.close()
        self._scanning.close()

    def _copy(self, address: int, data: NDArray[np.uint8]) -> None:
        for first in range(0, len(data), STAGING):
            part = data[first : first + STAGING]
            self._staging[: len(part)] = part
            streams = self._copying
            streams.upload(address + first, self._staging[: len(part)], streams.copy)
            streams.finish()  # the staging memory is used again

    def _reserve(self, name: str, nbytes: int) -> int:
        """Return device memory of `nbytes` at least, kept for later scans."""
        address, size = self._room.get(name, (0, 0))
        if size < nbytes:
            if size:
                self._device.free(address)
                del self._room[name]
            address = self._device.alloc(nbytes)
            self._room[name] = (address, nbytes)
        return address

    def _split(
        self, sharing: dict[int, Rows], distances: Vectors
    ) -> Iterable[tuple[Sequence[int], Rows, Vectors]]:
        begin = 0
        for cluster, rows in sharing.items():
            size = self._lists[cluster].size
            end = begin + len(rows) * size
            yield [cluster], rows, distances[begin:end].reshape(len(rows), size)
            begin = end
