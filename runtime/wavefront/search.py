"""One search of one request, on its way through clusters, and the sub-stage that it is part of.

In: clusters and what scans of them found. Out: parts to scan, documents so far, a history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from dovetail.ir.workflow import Retrieval
from dovetail.runtime.retrieval.cursor import (
    Cursor,
    Hit,
    SearchHistory,
    reorder_probes,
    share_until,
)
from dovetail.runtime.wavefront.costs import Needed
from dovetail.runtime.wavefront.messages import Device, Found, Part, Source
from dovetail.runtime.workflow_run import Call


@dataclass(slots=True, eq=False)
class Search:
    """A search under way. call: what waits for it; None for a scout, which only makes history.

    counts: clusters of each sub-stage that is over. taken: clusters of the one under way. left:
    vectors that are not scanned yet.
    """

    source: Source
    node: Retrieval
    call: Call | None
    vector: Any
    began: float
    earlier: int = 0  # searches of its request that are over
    job: int = 0  # of its probe
    cursor: Cursor | None = None  # None until its clusters are known
    centroids: dict[int, float] = field(default_factory=dict)
    known: SearchHistory | None = None  # that it began with
    version: int = 0  # of the documents, since its clusters are known
    homes: dict[int, int] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)
    taken: int = 0
    left: int = 0
    scans: int = 0  # queries of scans under way
    found: list[Hit] = field(default_factory=list)
    tried: tuple[int, ...] = ()  # documents that a generation was begun on last
    seen: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)  # by share: the nearest
    on_device: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by sub-stage
    copied: tuple[int, ...] = ()  # clusters that were copied to the device beside it
    sent_from: str = ""  # of a scout: the sub-stage of the reply that it was sent from
    over: bool = False

    @property
    def waiting(self) -> bool:
        """Whether its next sub-stage may begin."""
        return self.cursor is not None and not self.scans and not self.over

    @property
    def steps(self) -> Cursor:
        """Its way through the clusters; they must be known."""
        assert self.cursor is not None, "the clusters of a search must be known first"
        return self.cursor

    @property
    def share(self) -> float:
        """Part of its clusters that are scanned."""
        return self.steps.position / max(1, len(self.steps.clusters))

    @property
    def partial_ids(self) -> tuple[int, ...]:
        """Ids of the nearest documents so far."""
        return tuple(id_ for _, id_ in self.steps.partial)

    def part(self, clusters: tuple[int, ...]) -> Part:
        """Return what a scan has to know about some clusters."""
        centroids = tuple(self.centroids[c] for c in clusters)
        wanted = self.steps.depth, self.steps.bound, self.version
        return Part(self.source.request, self.node, self.vector, clusters, centroids, *wanted)

    def begin_part(self, clusters: tuple[int, ...], device: Device) -> None:
        """Take that a scan of some clusters begins on a device, as part of the next sub-stage."""
        self.scans += 1
        self.taken += len(clusters)
        if device == "gpu":
            self.on_device[len(self.counts)] = clusters

    def give_back(self, clusters: tuple[int, ...]) -> None:
        """Take that the device failed to scan some clusters of the sub-stage under way."""
        self.scans -= 1
        self.taken -= len(clusters)
        self.on_device.pop(len(self.counts), None)

    def find(self, found: Found) -> bool:
        """Take what one query of a scan found; tell whether the sub-stage is over with it."""
        self.found += found.hits
        self.homes.update((hit[1], home) for hit, home in zip(found.hits, found.homes, strict=True))
        self.scans -= 1
        if self.scans:
            return False
        self.steps.advance(self.taken, self.found)
        self.counts.append(self.taken)
        self.seen.append((self.share, self.partial_ids))
        self.taken, self.found = 0, []
        return True

    def needed(self) -> Needed | None:
        """Return the parts of its clusters that held what it found; None without a history."""
        if self.known is None:
            return None
        plain, found = tuple(self.centroids), self.partial_ids
        new = {self.homes[i] for i in found if i not in self.known.homes}
        return Needed(
            alone=share_until(plain, {self.homes[i] for i in found}),
            plain=share_until(plain, new),
            ordered=share_until(reorder_probes(plain, self.known), new),
        )

    def history(self) -> SearchHistory:
        """Return what it leaves to the next search of its request, as far as it got."""
        return self.steps.history(self.homes)


Takes: TypeAlias = list[tuple[Search, tuple[int, ...]]]
"""Queries of a scan: clusters of a search. One search may have several, on a thread each."""


def filter_takes(takes: Takes, keep: Callable[[int], bool]) -> Takes:
    """Return the clusters that are kept, and the searches that have some."""
    kept = ((search, tuple(filter(keep, clusters))) for search, clusters in takes)
    return [(search, clusters) for search, clusters in kept if clusters]


def vectors_of(takes: Takes, sizes: Sequence[int]) -> list[int]:
    """Return the vectors of each query; sizes: of all clusters."""
    return [sum(sizes[c] for c in clusters) for _, clusters in takes]


@dataclass(frozen=True, slots=True)
class Lot:
    """What is scanned together on one device. predicted: its seconds.

    shared: seconds that this would be with no fixed part and all threads busy to the end.
    """

    device: Device
    takes: Takes
    predicted: float
    shared: float = 0.0
