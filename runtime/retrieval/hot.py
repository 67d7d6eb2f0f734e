"""Which clusters of indexes are hot, and so worth a place in a device's memory (HedraRAG §4.4).

In: the clusters that sub-stages scan, their bytes, what a device may hold. Out: a `Swap` when the
hottest are others than those there; what copies have to keep, counters. Pure: who copies says when
it is done. The worker that holds the clusters may lose them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock

from dovetail.runtime.retrieval.wire import Room

KEPT = 0.25
"""Part of a count that is left after a refresh: what was hot long ago does not stay so."""


@dataclass(frozen=True, slots=True)
class Swap:
    """Clusters to copy to the device, and those that make room for them."""

    load: tuple[int, ...]
    drop: tuple[int, ...]


class HotSet:
    """The hot clusters of one index. Invariant: those resident and under way fit `capacity`."""

    def __init__(self, bytes_: Sequence[int], capacity: int) -> None:
        """`bytes_`: of each cluster on the device. `capacity`: bytes there, as planned."""
        self.bytes, self.capacity = list(bytes_), capacity
        self.counts: Counter[int] = Counter()
        self.residents: frozenset[int] = frozenset()  # what can be scanned on the device now
        self._swap: Swap | None = None

    def resident(self, cluster: int) -> bool:
        """Tell whether a cluster can be scanned on the device now."""
        return cluster in self.residents

    def count(self, clusters: Iterable[int]) -> None:
        """Take that these clusters were scanned in one sub-stage, each as often as it is given."""
        self.counts.update(clusters)

    def wanted(self) -> Swap | None:
        """Return the swap to the clusters that are hottest now, None where nothing changes.

        The most frequent come first, as long as they fit; of equally frequent ones those that are
        there stay.
        """
        if self._swap is not None:
            return None
        hottest = self._hottest()
        load = tuple(cluster for cluster in hottest if cluster not in self.residents)
        if not load:  # what is there does no harm
            return None
        return Swap(load, tuple(sorted(self.residents.difference(hottest))))

    def begin(self, swap: Swap) -> None:
        """Take that a swap is under way: neither what comes nor what goes is there."""
        self.fade()
        self._swap = swap
        self.residents = self.residents.difference(swap.drop)

    def fade(self) -> None:
        """Let what was counted so far count less from now on, unless a swap is under way."""
        if self._swap is None:
            kept = {c: n * KEPT for c, n in self.counts.items() if n * KEPT > 0.01}
            self.counts = Counter(kept)

    def settle(self) -> None:
        """Take that the swap is done."""
        assert self._swap is not None, "a swap is settled once"
        self.residents = self.residents.union(self._swap.load)
        self._swap = None

    def lose(self, clusters: Iterable[int]) -> None:
        """Take that clusters are not there, or not as they are now; the next swap brings them."""
        self.residents = self.residents.difference(clusters)

    def resize(self, bytes_: Sequence[int], capacity: int) -> None:
        """Take the bytes of clusters of an index that was changed, and what there is room for."""
        self.bytes, self.capacity = list(bytes_), capacity

    def _hottest(self) -> list[int]:
        order = sorted(self.counts, key=lambda c: (-self.counts[c], c not in self.residents, c))
        chosen, left = [], self.capacity
        for cluster in order:
            if 0 < self.bytes[cluster] <= left:
                chosen.append(cluster)
                left -= self.bytes[cluster]
        return chosen


@dataclass(frozen=True, slots=True)
class HotStatistics:
    """Of one index. scanned: clusters of searches; hits: those of them that the GPU scanned.

    absent: those it was to scan and did not have: its worker was lost, or the index changed.
    copies: clusters copied to it, `copied_bytes` in all. held_bytes of `room_bytes` are in use.
    """

    scanned: int = 0
    hits: int = 0
    absent: int = 0
    copies: int = 0
    copied_bytes: int = 0
    held_bytes: int = 0
    room_bytes: int = 0


class HotSets(Mapping[str | None, HotSet]):
    """Hot sets by the names of indexes. For one thread, but for `room` and `add`."""

    def __init__(self, gpu: str, capacity: int) -> None:
        """`capacity`: bytes for all indexes together; who is added first takes what it can use."""
        self._gpu, self._capacity = gpu, capacity
        self._sets: dict[str | None, HotSet] = {}
        self.statistics: dict[str, HotStatistics] = {}
        self._lock = Lock()

    def __getitem__(self, name: str | None) -> HotSet:
        return self._sets[name]

    def __iter__(self) -> Iterator[str | None]:
        return iter(tuple(self._sets))

    def __len__(self) -> int:
        return len(self._sets)

    def room(self, name: str) -> Room | None:
        """Return what an index that is to be added may use, None for nothing."""
        with self._lock:
            free = self._free(name)
        return Room(self._gpu, free) if free > 0 else None

    def add(self, name: str, bytes_: Sequence[int] | None) -> None:
        """Take that the worker has opened an index, and holds no hot clusters of it.

        bytes_: of each cluster; None where there can be none.
        """
        with self._lock:
            self._sets.pop(name, None)
            self.statistics.pop(name, None)
            if bytes_ is not None:
                used = min(self._free(name), sum(bytes_))
                self.statistics[name] = HotStatistics(room_bytes=used)
                self._sets[name] = HotSet(bytes_, used)

    def kept(self, name: str) -> tuple[tuple[int, ...], int]:
        """Return the clusters of an index that are to stay on the GPU, and its bytes there."""
        with self._lock:
            if (hot := self._sets.get(name)) is None:
                return (), 0
            return tuple(sorted(hot.residents)), hot.capacity

    def renew(self) -> None:
        """Begin with no hot clusters: a control plane that knew of some is gone."""
        with self._lock:
            for name, hot in self._sets.items():
                self._sets[name] = HotSet(hot.bytes, hot.capacity)

    def scanned(self, name: str, clusters: int, absent: int, *, hot: bool) -> None:
        """Count clusters that were scanned, and those absent, as often as searches wanted each."""
        with self._lock:
            if (s := self.statistics.get(name)) is not None:
                self.statistics[name] = replace(
                    s,
                    scanned=s.scanned + clusters,
                    hits=s.hits + (clusters - absent if hot else 0),
                    absent=s.absent + absent,
                )

    def copied(
        self, name: str, clusters: Collection[int], held: int, bytes_: Sequence[int]
    ) -> None:
        """Count clusters that were copied; the GPU holds `held` bytes now.

        bytes_: of all clusters as they are now: where documents have come or gone and there is
        memory left for more of them, it is theirs. What old copies hold stays so.
        """
        with self._lock:
            if (s := self.statistics.get(name)) is not None:
                room = min(self._free(name), max(sum(bytes_), held))
                self._sets[name].resize(bytes_, room)
                self.statistics[name] = replace(
                    s,
                    copies=s.copies + len(clusters),
                    copied_bytes=s.copied_bytes + sum(bytes_[c] for c in clusters),
                    held_bytes=held,
                    room_bytes=room,
                )

    def _free(self, name: str) -> int:
        """Return the bytes that no other index has."""
        others = (s.room_bytes for n, s in self.statistics.items() if n != name)
        return self._capacity - sum(others)
