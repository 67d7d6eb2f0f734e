"""A retrieval sub-stage: searches of one index that are scanned together, on one device or two.

In: searches whose clusters are known. Out: what each has scanned now, what is left for later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from dovetail.ir.live_graph import LiveNode
from dovetail.ir.transform import split_search
from dovetail.runtime.flows.control.messages import Device
from dovetail.runtime.flows.control.work import Search
from dovetail.runtime.retrieval.hot import HotSet

Takes: TypeAlias = list[tuple[Search, tuple[int, ...]]]
"""Parts of a scan: clusters of a search. One search may have several, on a thread each."""


@dataclass(frozen=True, slots=True)
class Lot:
    """What is scanned together on one device. predicted: its seconds.

    shared: seconds that this would be with no fixed part and all threads busy to the end.
    """

    device: Device
    takes: Takes
    predicted: float
    shared: float = 0.0


@dataclass(slots=True)
class NextStage:
    """Searches of one index whose nodes are scanned together next.

    sizes: vectors of each cluster. settled: whether it has been shared out to devices.
    """

    searches: list[Search]
    index: str | None
    sizes: Sequence[int]
    settled: bool = False

    @property
    def guesses(self) -> bool:
        """Whether they are scouts."""
        return self.searches[0].call is None

    def cut(self, node: LiveNode, count: int) -> None:
        """Have only so many clusters of a search scanned; with none it waits for a later one."""
        search: Search = node.work
        if not count:
            self.searches.remove(search)
        elif count < len(node.clusters):
            split_search(search.graph, node, count)


class Weighed(Sequence[int]):
    """Sizes of clusters as a sub-stage feels them: those on the device take `weight` of the time.

    Both devices work at once; counting their times together keeps each of them to the budget.
    """

    def __init__(self, sizes: Sequence[int], hot: HotSet, weight: float) -> None:
        self._sizes, self._hot, self._weight = sizes, hot, weight

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, cluster: int) -> int:  # type: ignore[override]
        size = self._sizes[cluster]
        return round(size * self._weight) if self._hot.resident(cluster) else size
