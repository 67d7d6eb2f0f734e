"""Which clusters of an index are hot, and so worth a place in a device's memory (HedraRAG §4.4).

In: the clusters that sub-stages scan, their bytes, what a device may hold. Out: a `Swap` when the
hottest are others than those there. Pure: who copies says when it is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
        self._bytes, self._capacity = list(bytes_), capacity
        self._counts: Counter[int] = Counter()
        self.residents: frozenset[int] = frozenset()  # what can be scanned on the device now
        self._swap: Swap | None = None

    def resident(self, cluster: int) -> bool:
        """Tell whether a cluster can be scanned on the device now."""
        return cluster in self.residents

    def count(self, clusters: Iterable[int]) -> None:
        """Take that these clusters were scanned in one sub-stage, each as often as it is given."""
        self._counts.update(clusters)

    def refresh(self) -> Swap | None:
        """Return the swap to the clusters that are hottest now, None where nothing changes.

        While it is under way, neither what comes nor what goes is there. The most frequent come
        first, as long as they fit; of equally frequent ones those that are there stay.
        """
        if self._swap is not None:
            return None
        wanted = self._hottest()
        self._counts = Counter({c: n * KEPT for c, n in self._counts.items() if n * KEPT > 0.01})
        load = tuple(cluster for cluster in wanted if cluster not in self.residents)
        if not load:  # what is there does no harm
            return None
        self._swap = Swap(load, tuple(sorted(self.residents.difference(wanted))))
        self.residents = self.residents.intersection(wanted)
        return self._swap

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
        self._bytes, self._capacity = list(bytes_), capacity

    def _hottest(self) -> list[int]:
        order = sorted(self._counts, key=lambda c: (-self._counts[c], c not in self.residents, c))
        chosen, left = [], self._capacity
        for cluster in order:
            if 0 < self._bytes[cluster] <= left:
                chosen.append(cluster)
                left -= self._bytes[cluster]
        return chosen
