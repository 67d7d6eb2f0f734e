"""Hot clusters in the memory of a torch device: products and top-k over the lists that are there.

In: a device, an index of plain vectors, clusters to copy. Out: `TorchLists`, which finds the hits
of the CPU's faiss, bit for bit: products choose a few candidates, whose distances faiss computes.
Copies run on the device's copy stream beside scans.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dovetail.ir.errors import CapacityError, SpecError
from dovetail.runtime.accel.device import TorchDevice
from dovetail.runtime.index.cursor import Hit, merge_hits
from dovetail.runtime.index.faiss_lists import measure_pairs, stack_queries
from dovetail.runtime.index.ivf import IvfIndex
from dovetail.runtime.index.scanner import Rows, share_lists
from dovetail.runtime.index.scans import Ids, Mask, Part, Vectors

SLACK = 1e-5
"""How far a distance by float32 products may be off, relative to the squares that it is made of."""


@dataclass(frozen=True, slots=True)
class _List:
    """A cluster on the device: vectors [n][d], of L2 their squares [n]. base: what it copies."""

    base: object
    vectors: torch.Tensor
    squares: torch.Tensor | None
    longest: float
    nbytes: int


class TorchLists:
    """Lists of one index in a device's memory. One thread loads while another scans or drops.

    capacity: bytes of vectors that may lie there; used: those that do.
    """

    def __init__(self, device: TorchDevice, index: IvfIndex, capacity: int) -> None:
        """Raises SpecError for an index that stores codes."""
        if index.codes != "flat":
            raise SpecError(f"a device scans plain vectors, not {index.codes} codes")
        self._device, self._dim, self._l2 = device, index.dim, index.metric == "l2"
        self.capacity, self.used = capacity, 0
        self._lists: dict[int, _List] = {}

    def load(self, index: IvfIndex, clusters: Iterable[int]) -> None:
        """Copy clusters of the base there; returns when they can be scanned.

        Raises CapacityError where there is no room, DeviceError where the device fails.
        """
        for cluster in clusters:
            self.drop([cluster])
            _, codes = index.lists(cluster)
            if self.used + codes.nbytes > self.capacity:
                raise CapacityError(
                    f"cluster {cluster} does not fit: {self.used} of {self.capacity} bytes for "
                    "clusters are used"
                )
            found = self._copy(index, codes.view(np.float32).reshape(-1, self._dim))
            self.used += found.nbytes
            self._lists[cluster] = found  # scans see it from here on

    def _copy(self, index: IvfIndex, vectors: Vectors) -> _List:
        device = self._device
        with device.working(), device.copying():
            held = torch.empty(vectors.shape, dtype=torch.float32, device=device.device)
            held.copy_(torch.from_numpy(vectors))
            squares = held.square().sum(1)
            longest = float(squares.max()) if len(vectors) else 0.0  # it has arrived by then
        kept = squares if self._l2 else None
        return _List(index.base.index, held, kept, longest**0.5, vectors.nbytes)

    def drop(self, clusters: Iterable[int]) -> None:
        """Forget clusters that are there; no scan that is under way may use them."""
        for cluster in clusters:
            if (found := self._lists.pop(cluster, None)) is not None:
                self.used -= found.nbytes

    def holds(self, index: IvfIndex, cluster: int) -> bool:
        """Tell whether a cluster is there as the base of `index` has it."""
        found = self._lists.get(cluster)
        return found is not None and found.base is index.base.index

    def held(self) -> set[int]:
        """Return the clusters that are there, those of an older base too."""
        return set(self._lists)

    def scan(
        self, index: IvfIndex, scans: Sequence[Part], depth: int, allowed: Mask | None
    ) -> list[list[Hit]]:
        """See `Scanner`; all clusters are there."""
        wanted = sorted({c for scan in scans for c in scan.clusters if len(index.lists(c)[0])})
        sharing = share_lists(scans, wanted)
        if not sharing:
            return [[] for _ in scans]
        ids = np.concatenate([index.lists(c)[0] for c in sharing])
        queries = stack_queries(scans)
        bounds = np.array([scan.bound for scan in scans], np.float32)
        with self._device.working():
            barred = None if allowed is None else ~allowed[ids]
            rows, columns = self._choose(sharing, queries, bounds, depth, barred)
        return _measure(index, list(sharing), queries, bounds, depth, (rows, columns, ids))

    def close(self) -> None:
        """Give the memory back."""
        self.drop(list(self._lists))

    def _choose(
        self,
        sharing: dict[int, Rows],
        queries: Vectors,
        bounds: Vectors,
        depth: int,
        barred: Mask | None,
    ) -> tuple[Ids, Ids]:
        """Return (scan, place in all lists together) of those that may be among the nearest."""
        device = self._device.device
        asked = torch.from_numpy(queries).to(device)
        far = self._distances(sharing, asked)
        if barred is not None:
            far.masked_fill_(torch.from_numpy(barred).to(device), torch.inf)
        longest = max(self._lists[cluster].longest for cluster in sharing)
        scale = (asked.square().sum(1, keepdim=True).sqrt() + longest).square()
        nearest = far.topk(min(depth, far.shape[1]), largest=False).values[:, -1:]
        limit = torch.minimum(nearest, torch.from_numpy(bounds).to(device)[:, None])
        found = ((far <= limit + SLACK * scale) & far.isfinite()).nonzero().cpu().numpy()
        return found[:, 0], found[:, 1]

    def _distances(self, sharing: dict[int, Rows], asked: torch.Tensor) -> torch.Tensor:
        """Return [scans][vectors of all lists]; infinity where a scan does not want the list."""
        lists = [self._lists[cluster] for cluster in sharing]
        far = torch.full(
            (len(asked), sum(len(each.vectors) for each in lists)), torch.inf, device=asked.device
        )
        own, end = asked.square().sum(1, keepdim=True), 0
        for each, rows in zip(lists, sharing.values(), strict=True):
            begin, end = end, end + len(each.vectors)
            every = len(rows) == len(asked)
            chosen = slice(None) if every else torch.from_numpy(rows).to(asked.device)
            if each.squares is None:
                far[chosen, begin:end] = -torch.mm(asked[chosen], each.vectors.t())
            else:
                sums = torch.addmm(each.squares, asked[chosen], each.vectors.t(), alpha=-2)
                far[chosen, begin:end] = sums + own[chosen]
        return far


def _measure(
    index: IvfIndex,
    clusters: Sequence[int],
    queries: Vectors,
    bounds: Vectors,
    depth: int,
    chosen: tuple[Ids, Ids, Ids],
) -> list[list[Hit]]:
    """Return the nearest of each scan's candidates: (scans, their places, the ids of places)."""
    rows, columns, ids = chosen
    ends = np.cumsum([len(index.lists(cluster)[0]) for cluster in clusters])
    places, at = np.unique(columns, return_inverse=True)
    home = np.searchsorted(ends, places, side="right")
    vectors = np.empty((len(places), queries.shape[1]), np.float32)
    for number in np.unique(home).tolist():
        own = home == number
        stored = index.lists(clusters[number])[1].view(np.float32)
        vectors[own] = stored[places[own] - (ends[number - 1] if number else 0)]
    distances = measure_pairs(index.metric, queries, vectors, rows, at)
    found: list[list[Hit]] = [[] for _ in queries]
    for row, distance, id_ in zip(
        rows.tolist(), distances.tolist(), ids[columns].tolist(), strict=True
    ):
        if distance <= bounds[row]:
            found[row].append((distance, id_))
    return [merge_hits([hits], depth) for hits in found]
