"""One search of one request, on its way through clusters, and the sub-stage that it is part of.

In: clusters and what scans of them found. Out: parts to scan, documents so far, a history.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from dovetail.ir.graph import CPU, GPU
from dovetail.ir.live_graph import LiveGraph, LiveNode, State
from dovetail.ir.transform import roll_back, split_devices, split_search, stop, use_scout
from dovetail.ir.workflow import Retrieval
from dovetail.runtime.flows.control.costs import Needed
from dovetail.runtime.flows.control.messages import Device, Source
from dovetail.runtime.flows.workflow_run import Call
from dovetail.runtime.index.cursor import (
    Cursor,
    Hit,
    SearchHistory,
    reorder_probes,
    share_until,
)
from dovetail.runtime.retrieval.wire import Piece, ScannedPiece


@dataclass(slots=True, eq=False)
class Search:
    """A search under way. call: what waits for it; None for a scout, which only makes history.

    work: its next sub-stage in the graph, with all clusters that are left, or the one under way;
    rest: what comes behind that; ended: the last that is over. taken: clusters of the sub-stage
    under way. left: vectors that are not scanned yet.
    """

    graph: LiveGraph
    work: LiveNode

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
    rest: LiveNode | None = None
    ended: LiveNode | None = None
    taken: int = 0
    left: int = 0
    scans: int = 0  # queries of scans under way
    found: list[Hit] = field(default_factory=list)
    tried: tuple[int, ...] = ()  # documents that a generation was begun on last
    seen: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)  # by share: the nearest
    copied: bool = False  # whether clusters were copied to the device beside it
    over: bool = False

    @property
    def waiting(self) -> bool:
        """Whether its next sub-stage may begin."""
        return self.cursor is not None and not self.scans and not self.over

    @property
    def last(self) -> LiveNode:
        """Its part that others wait for."""
        return self.rest or self.work

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

    def part(self, clusters: tuple[int, ...]) -> Piece:
        """Return what a scan has to know about some clusters."""
        centroids = tuple(self.centroids[c] for c in clusters)
        wanted = self.steps.depth, self.steps.bound, self.version
        return Piece(self.vector, dict(self.node.filters), clusters, centroids, *wanted)

    def begin_stage(self, here: Collection[int], there: Collection[int]) -> None:
        """Begin its next sub-stage, of clusters on the CPU and of others on the device."""
        self.taken = len(here) + len(there)
        if self.taken < len(self.work.clusters):
            self.rest = split_search(self.graph, self.work, self.taken)
        sides = [self.work]
        if here and there:
            *sides, self.work = split_devices(self.graph, self.work, there)
        else:
            self.work.device = GPU if there else None
        for side in sides:
            self.graph.begin(side)

    def leave_device(self) -> None:
        """Take that the CPU scans what the device failed to scan of the sub-stage under way."""
        for node in (self.work, *(source for source, _ in self.graph.before(self.work))):
            if node.state is State.RUNNING and node.device == GPU:
                node.device = CPU

    def _end_stage(self) -> None:
        if self.work.state is State.WAITING:  # it merges what two devices found
            for side, _ in self.graph.before(self.work):
                self.graph.finish(side)
            self.graph.begin(self.work)
        self.graph.finish(self.work)
        self.ended, self.work, self.rest = self.work, self.rest or self.work, None

    def end(self) -> None:
        """Take that it is over; what it has not scanned is left out."""
        if self.ended is None:
            self.work.clusters = ()
            self.graph.begin(self.work)
            self.graph.finish(self.work)
        elif self.work is not self.ended:
            stop(self.graph, self.work)
            self.work = self.ended

    def find(self, found: ScannedPiece) -> bool:
        """Take what one query of a scan found; tell whether the sub-stage is over with it."""
        self.found += found.hits
        self.homes.update((hit[1], home) for hit, home in zip(found.hits, found.homes, strict=True))
        self.scans -= 1
        if self.scans:
            return False
        self.steps.advance(self.taken, self.found)
        self._end_stage()
        self.seen.append((self.share, self.partial_ids))
        self.taken, self.found = 0, []
        return True

    def show(self, later: LiveNode) -> None:
        """Have a search that has come look where this scout found something, if it did."""
        if self.ended is None:
            roll_back(self.graph, self.work)
            return
        use_scout(self.graph, self.ended, later)
        if self.last.state is State.WAITING:
            self.graph.remove(self.last)

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
