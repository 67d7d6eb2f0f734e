"""Hot clusters of an app's indexes in the memory of its GPU (HedraRAG §4.4).

In: the GPU, bytes for clusters, indexes as they are added. Out: the hot set of each for the control
plane, what copies have to keep, counters. The worker that holds the clusters may lose them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from threading import Lock

from dovetail.ir.errors import WorkflowError
from dovetail.runtime.flows.indexes import BoundIndex, Indexes
from dovetail.runtime.retrieval.hot import HotSet
from dovetail.runtime.retrieval.wire import Room


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


class HotIndexes(Mapping[str | None, HotSet]):
    """Hot sets by the names that nodes call indexes. For the driver's thread, but for `add`."""

    def __init__(self, gpu: str | None, capacity: int, indexes: Indexes) -> None:
        """`capacity`: bytes for all indexes together; who is added first takes what it can use."""
        self._gpu, self._capacity, self._indexes = gpu, capacity, indexes
        self._sets: dict[str, HotSet] = {}
        self._statistics: dict[str, HotStatistics] = {}
        self._lock = Lock()

    def __getitem__(self, name: str | None) -> HotSet:
        try:
            return self._sets[self._indexes.find(name).name]
        except WorkflowError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._sets))

    def __len__(self) -> int:
        return len(self._sets)

    @property
    def statistics(self) -> Mapping[str, HotStatistics]:
        """What came of it, by index; for any thread."""
        return dict(self._statistics)

    def room(self, name: str) -> Room | None:
        """Return what an index that is to be added may use, None for nothing."""
        with self._lock:
            free = self._free(name)
        return None if self._gpu is None or free <= 0 else Room(self._gpu, free)

    def add(self, index: BoundIndex, room: Room | None) -> None:
        """Take that the worker has opened an index with `room`, and has no hot clusters of it."""
        with self._lock:
            self._sets.pop(index.name, None)
            self._statistics.pop(index.name, None)
            if room is not None and index.opened.hot is not None:
                used = min(self._free(index.name), sum(_bytes(index)))
                self._statistics[index.name] = HotStatistics(room_bytes=used)
                self._sets[index.name] = HotSet(_bytes(index), used)

    def kept(self, name: str) -> tuple[tuple[int, ...], int]:
        """Return the clusters of an index that are to stay on the GPU, and its bytes there."""
        with self._lock:
            if (hot := self._sets.get(name)) is None:
                return (), 0
            return tuple(sorted(hot.residents)), self._statistics[name].room_bytes

    def renew(self) -> None:
        """Begin with no hot clusters: a control plane that knew of some is gone."""
        with self._lock:
            for name, statistics in self._statistics.items():
                self._sets[name] = HotSet(_bytes(self._indexes.find(name)), statistics.room_bytes)

    def scanned(self, name: str, clusters: int, absent: int, *, hot: bool) -> None:
        """Count clusters that were scanned, and those absent, as often as searches wanted each."""
        with self._lock:
            if (s := self._statistics.get(name)) is not None:
                self._statistics[name] = replace(
                    s,
                    scanned=s.scanned + clusters,
                    hits=s.hits + (clusters - absent if hot else 0),
                    absent=s.absent + absent,
                )

    def copied(self, name: str, clusters: Collection[int], held: int) -> None:
        """Count clusters that were copied; the GPU holds `held` bytes now.

        Documents may have come or gone since the last time: clusters are of other sizes, and where
        there is memory left for more of them, it is theirs. What old copies hold stays so.
        """
        with self._lock:
            if (s := self._statistics.get(name)) is not None:
                sizes = _bytes(self._indexes.find(name))
                room = min(self._free(name), max(sum(sizes), held))
                self._sets[name].resize(sizes, room)
                self._statistics[name] = replace(
                    s,
                    copies=s.copies + len(clusters),
                    copied_bytes=s.copied_bytes + sum(sizes[c] for c in clusters),
                    held_bytes=held,
                    room_bytes=room,
                )

    def _free(self, name: str) -> int:
        """Return the bytes that no other index has."""
        others = (s.room_bytes for n, s in self._statistics.items() if n != name)
        return self._capacity - sum(others)


def _bytes(index: BoundIndex) -> list[int]:
    return [size * index.opened.code_bytes for size in index.opened.sizes]
