"""What a node of a live graph is about: a search of one request, or a reply to it.

In: clusters and what scans of them found; text as it is written. Out: parts to scan, documents so
far, a history; searches of one index that are scanned together, on one device or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from msgspec.structs import replace

from dovetail.ir.graph import CPU, GPU, MERGE
from dovetail.ir.live_graph import LiveGraph, LiveNode, State
from dovetail.ir.transform import put, roll_back, split_search, use_scout
from dovetail.ir.workflow import Generation, Name, Retrieval
from dovetail.runtime.flows.control.costs import Named, Needed
from dovetail.runtime.flows.control.messages import Catalog, Device, Source
from dovetail.runtime.flows.control.prefixes import Opening
from dovetail.runtime.flows.prompts import pack_vector
from dovetail.runtime.flows.workflow_run import Call
from dovetail.runtime.index.cursor import Cursor, Hit, SearchHistory, reorder_probes, share_until
from dovetail.runtime.index.documents import Document
from dovetail.runtime.index.scans import Part
from dovetail.runtime.retrieval.hot import HotSet

Key: TypeAlias = tuple[Name, int]
"""Node and round: which call of a request."""


@dataclass(slots=True, eq=False)
class Search:
    """A search under way. call: what waits for it; None for a scout, which only makes history.

    node: its next sub-stage in the graph, or the one under way; ended: the last that is over.
    taken: clusters of the sub-stage under way. left: vectors that are not scanned yet.
    """

    graph: LiveGraph
    source: Source
    spec: Retrieval
    call: Call | None
    node: LiveNode = field(init=False)
    query: str | bytes = b""  # a text, or float32 values once it is a vector
    began: float = 0.0
    earlier: int = 0  # searches of its request that are over
    job: int = 0  # that embeds its query, then finds its clusters
    cursor: Cursor | None = None  # None until its clusters are known
    centroids: dict[int, float] = field(default_factory=dict)
    known: SearchHistory | None = None  # that it began with
    version: int = 0  # of the documents, since its clusters are known
    patience: int | None = None  # clusters without change after which it may end
    results: list[Part] = field(default_factory=list)  # what all scans of it found
    shown: list[Document] | None = None  # that were looked up last
    ended: LiveNode | None = None
    taken: tuple[int, ...] = ()
    left: int = 0
    scans: int = 0  # parts of scans under way
    found: list[Hit] = field(default_factory=list)
    nearest: tuple[int, ...] = ()  # ids of documents so far
    tried: tuple[int, ...] = ()  # documents that a generation was begun on last
    seen: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)  # by share: the nearest
    copied: bool = False  # whether clusters were copied to the device beside it
    over: bool = False

    @classmethod
    def ahead_of(cls, reply: Reply) -> Search:
        """Return a scout of the search that will read a reply, with what is written by now."""
        assert reply.ahead is not None and reply.call is not None, "no search will read it"
        source = replace(reply.source, node=reply.ahead.name)
        spec = reply.ahead.filled(reply.call.state)
        return cls(reply.graph, source, spec, None, query=pack_vector(reply.vector))

    @property
    def named(self) -> Named:
        """Its node, by which figures are kept."""
        return self.graph.workflow, self.spec.name

    @property
    def waiting(self) -> bool:
        """Whether its next sub-stage may begin."""
        return self.cursor is not None and not self.scans and not self.over

    @property
    def parts(self) -> list[LiveNode]:
        """Its next sub-stage, or the one under way, and all that is left behind that."""
        parts = [self.node]
        while (rest := self.graph.rest(parts[-1])) is not None:
            parts.append(rest)
        return parts

    @property
    def last(self) -> LiveNode:
        """Its part that others wait for."""
        return self.parts[-1]

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
    def full(self) -> bool:
        """Whether as many documents are found as are wanted."""
        return len(self.nearest) == self.spec.topk

    @property
    def sides(self) -> list[LiveNode]:
        """The nodes that its next sub-stage, or the one under way, scans."""
        if self.node.kind != MERGE:
            return [self.node]
        return [source for source, _ in self.graph.before(self.node)]

    def part(self, clusters: tuple[int, ...]) -> Part:
        """Return what a scan has to know about some clusters."""
        centroids, steps = tuple(map(self.centroids.__getitem__, clusters)), self.steps
        assert isinstance(self.query, bytes), "a text is embedded first"
        wanted = steps.depth, steps.bound, dict(self.spec.filters), self.version
        return Part(self.query, clusters, centroids, *wanted)

    def begin_stage(self) -> None:
        """Begin its next sub-stage, as the graph has it."""
        for side in self.sides:
            self.graph.begin(side)
            self.taken += side.clusters
        self.steps.follow(sum((rest.clusters for rest in self.parts[1:]), self.taken))

    def leave_device(self) -> None:
        """Take that the CPU scans what the device failed to scan of the sub-stage under way."""
        for side in self.sides:
            if side.state is State.RUNNING and side.device == GPU:
                put(self.graph, side, CPU)

    def find(self, found: Part) -> bool:
        """Take what one part of a scan found; tell whether the sub-stage is over with it."""
        self.found += found.hits
        self.results.append(found)
        self.scans -= 1
        if self.scans:
            return False
        self.steps.advance(len(self.taken), self.found)
        self._end_stage()
        self.look()
        self.seen.append((self.share, self.nearest))
        self.taken, self.found = (), []
        return True

    @property
    def homes(self) -> dict[int, int]:
        """The cluster of each document that it has found, or knew."""
        homes = dict[int, int]() if self.known is None else dict(self.known.homes)
        for part in self.results:
            homes.update(zip((id_ for _, id_ in part.hits), part.homes, strict=True))
        return homes

    def documents(self, catalog: Catalog) -> list[Document]:
        """Return what is nearest now, the same list where nothing changed; raises as `catalog`.

        It is looked up each time: a document may be removed meanwhile.
        """
        found = catalog.documents(self.spec, self.steps.partial)
        if self.shown != found:
            self.shown = found
        return self.shown

    def look(self) -> None:
        """Take what is nearest now."""
        self.nearest = tuple(id_ for _, id_ in self.steps.partial)

    def _end_stage(self) -> None:
        for side in self.sides:
            self.graph.finish(side)
        if self.node.kind == MERGE:
            self.graph.begin(self.node)
            self.graph.finish(self.node)
        self.ended, self.node = self.node, self.graph.rest(self.node) or self.node

    def end(self) -> None:
        """Take that it is over: all is scanned, the rest was left out, or there is nothing."""
        if self.ended is None:
            self.graph.begin(self.node)
            self.graph.finish(self.node)
            self.ended = self.node
        self.node = self.ended

    def show(self, later: LiveNode) -> None:
        """Have a search that has come look where this scout found something, if it did."""
        if self.ended is None:
            roll_back(self.graph, self.node)
            return
        use_scout(self.graph, self.ended, later)
        for part in self.parts:
            if part.state is State.WAITING:
                self.graph.remove(part)

    def needed(self) -> Needed | None:
        """Return the parts of its clusters that held what it found; None without a history."""
        if self.known is None:
            return None
        plain, found, homes = tuple(self.centroids), self.nearest, self.homes
        new = {homes[i] for i in found if i not in self.known.homes}
        return Needed(
            alone=share_until(plain, {homes[i] for i in found}),
            plain=share_until(plain, new),
            ordered=share_until(reorder_probes(plain, self.known, self.spec.topk), new),
        )

    def history(self) -> SearchHistory:
        """Return what it leaves to the next search of its request, as far as it got."""
        return self.steps.history(self.homes)


@dataclass(slots=True, eq=False)
class Reply:
    """A generation. call: what waits for it; None while it is a guess.

    node: its sub-stage under way in the graph; ended: the last that is over. steps: decode steps
    between two reports of progress, 0 = none. search: what it was begun on before that was over,
    None for no guess; ids: of what was found; guessed: the call as it was thought then. text: what
    is written so far, in so many tokens. read, reads: the node and the job that make a vector of
    it; vector: of an earlier `text`; drift: how far the one before was from it. ahead: the search
    that will read it. opening: of its prompt, where that has documents in any order.
    """

    graph: LiveGraph
    source: Source
    spec: Generation
    prompt: str
    call: Call | None = None
    ahead: Retrieval | None = None
    search: Search | None = None
    ids: tuple[int, ...] = ()
    guessed: Call | None = None
    node: LiveNode = field(init=False)
    steps: int = 0
    began: float = 0.0
    job: int = 0
    text: str = ""
    tokens: int = 0
    ended: LiveNode | None = None
    over: bool = False
    read: LiveNode | None = None
    reads: int = 0
    vector: Any = None
    drift: float | None = None
    opening: Opening | None = None

    @property
    def asked(self) -> str:
        """Its prompt with documents nearest first."""
        return getattr(self.prompt, "plain", None) or self.prompt

    def holds(self, call: Call) -> bool:
        """Tell whether a call that has come reads the very values that this was begun on."""
        guessed = self.guessed
        return guessed is not None and all(
            call.state[name] is guessed.state[name] for name in call.node.reads
        )

    @property
    def named(self) -> Named:
        """Its node, by which figures are kept."""
        return self.graph.workflow, self.spec.name

    @property
    def key(self) -> Key:
        """Which call of its request it is for."""
        return self.source.node, self.source.round

    @property
    def written(self) -> LiveNode:
        """Its last sub-stage that is over."""
        assert self.ended is not None, "nothing is written before a sub-stage is over"
        return self.ended


Takes: TypeAlias = list[tuple[Search, tuple[int, ...]]]
"""Parts of a scan: clusters of a search. One search may have several, on a thread each."""


@dataclass(frozen=True, slots=True)
class ScanBatch:
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
