"""What the control plane asks of a cache of hot clusters on the device (HedraRAG §4.4)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Swap:
    """Clusters to copy to the device, and those that make room for them."""

    load: tuple[int, ...]
    drop: tuple[int, ...]


class HotClusters(Protocol):
    """The hot set of one index. While a swap is under way its clusters count as absent."""

    def resident(self, cluster: int) -> bool:
        """Tell whether a cluster can be scanned on the device now."""

    def count(self, clusters: Iterable[int]) -> None:
        """Take that these clusters were scanned in one sub-stage, on either device."""

    def refresh(self) -> Swap | None:
        """Return the swap to the clusters that are hottest now, None where nothing changes."""

    def settle(self) -> None:
        """Take that the swap is done."""

    def lose(self, clusters: Iterable[int]) -> None:
        """Take that clusters were not on the device any more when they were to be scanned."""
