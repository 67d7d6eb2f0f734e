"""The transformations that every app has (HedraRAG §4.2-§4.5), in the order they are asked.

In: the wavefront. Out: places where one fits, what it gains there, the rewrite. The search or reply
that a node is about is its `work`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import ClassVar, Self

from dovetail.ir import transform
from dovetail.ir.errors import DovetailError
from dovetail.ir.graph import EMBEDDING, FUNCTION, GPU, SPECULATIVE
from dovetail.ir.live_graph import COPY, READ, Left, LiveGraph, LiveNode
from dovetail.runtime.flows.control.costs import TINY, Guessed, Learned
from dovetail.runtime.flows.control.front import REORDER, SPLIT, Front, Ticket
from dovetail.runtime.flows.control.prefixes import Opening
from dovetail.runtime.flows.control.transformation import (
    REGISTRY,
    Transformation,
    register_transformation,
    unregister_transformation,
)
from dovetail.runtime.flows.control.work import NextStage, Reply, Search, Weighed
from dovetail.runtime.flows.prompts import prompts_after
from dovetail.runtime.flows.workflow_run import Call
from dovetail.runtime.index.cursor import reorder_probes
from dovetail.runtime.retrieval.budget import count_vectors
from dovetail.runtime.retrieval.hot import HotSet, Swap

__all__ = ["REGISTRY", "Transformation", "register_transformation", "unregister_transformation"]
"""Whoever has these from here has the transformations below, too."""


@register_transformation
@dataclass(frozen=True, slots=True)
class Reorder(Transformation):
    """Scan first where the request's last search found its nearest documents (HedraRAG §4.3)."""

    name: ClassVar[str] = REORDER
    wakes: ClassVar[str] = "found"
    order: tuple[int, ...]

    @classmethod
    def fits(cls, front: Front) -> Iterator[Reorder]:
        """Of searches with a history, as soon as their clusters are known."""
        for search in front.news.found:
            order = reorder_probes(search.node.clusters, search.known, search.spec.topk)
            if order != search.node.clusters:
                yield cls(search.graph, search.node, order)

    def gain(self, costs: Learned) -> float:
        """By how much sooner what is nearest was found so."""
        return costs.order_gain(self.node.work.named)

    def apply(self, graph: LiveGraph) -> None:
        """See `reorder`."""
        transform.reorder(graph, self.node, self.order)


@register_transformation
@dataclass(frozen=True, slots=True)
class Stop(Transformation):
    """Leave out the rest of a search that has found nothing nearer for long (`patience`)."""

    name: ClassVar[str] = "stop"
    wakes: ClassVar[str] = "scanned"

    @classmethod
    def fits(cls, front: Front) -> Iterator[Stop]:
        """Of searches that have got further, where a patience is known."""
        for search in front.news.scanned:
            patience = inf if search.patience is None else search.patience
            if not search.over and search.full and search.steps.unchanged >= patience:
                yield cls(search.graph, search.node)

    def gain(self, costs: Learned) -> float:
        """What the rest would have taken."""
        return costs.scan_seconds([self.node.work.left])

    def apply(self, graph: LiveGraph) -> None:
        """See `stop`."""
        transform.stop(graph, self.node)


@register_transformation
@dataclass(frozen=True, slots=True)
class SpeculateRetrieval(Transformation):
    """Search with what is written of a reply, so that the search behind it has a history (§4.3).

    load: generations under way.
    """

    name: ClassVar[str] = "speculate_retrieval"
    load: int

    @classmethod
    def fits(cls, front: Front) -> Iterator[SpeculateRetrieval]:
        """Of replies: those that got further are read, those whose meaning changes least sent."""
        for reply in front.news.progressed:
            if not reply.over and reply.read is None and cls._helps(front, reply):
                yield _Read(reply.graph, reply.written, front.load)
        steady = [reply for reply in front.replies if reply.drift is not None]
        for reply in sorted(steady, key=lambda reply: reply.drift or 0.0):
            left = front.costs.reply(reply.named) - (front.now - reply.began)
            if left > front.costs.budget() and cls._helps(front, reply):
                yield cls(reply.graph, reply.written, front.load)

    @staticmethod
    def _helps(front: Front, reply: Reply) -> bool:
        """Tell whether it would be looked at: of a request only the first search has no history.

        Without reordering nobody would look where it found something.
        """
        if reply.call is None or reply.ahead is None:
            return False
        ticket, load = front.ticket(reply), len(front.searches)
        return (
            REORDER in front.asked
            and load < front.settings.retrieval_load
            and reply.ahead.name not in ticket.scouts
            and reply.ahead.index not in ticket.ended
        )

    def gain(self, costs: Learned) -> float:
        """By how much sooner a history shows what is nearest, less what others lose."""
        ahead = self.graph.workflow, self.node.work.ahead.name
        return costs.scout_gain(ahead, self.load)

    def apply(self, graph: LiveGraph) -> None:
        """See `speculate_retrieval`."""
        search = Search.ahead_of(self.node.work)
        search.node = transform.speculate_retrieval(graph, self.node, search)


class _Read(SpeculateRetrieval):
    """Have what is written turned into a vector: of two, it is known how much it changes."""

    def apply(self, graph: LiveGraph) -> None:
        """Put a node beside the generation, for which nobody waits."""
        reply = self.node.work
        reply.read = LiveNode(self.node.root, EMBEDDING, part=READ, work=reply)
        graph.add(reply.read, [(self.node, SPECULATIVE)])


@register_transformation
@dataclass(frozen=True, slots=True)
class Prefetch(Transformation):
    """Copy the clusters that are scanned most to the device (HedraRAG §4.4)."""

    name: ClassVar[str] = "prefetch"
    index: str | None
    hot: HotSet
    swap: Swap
    vectors: float

    @classmethod
    def fits(cls, front: Front) -> Iterator[Prefetch]:
        """Of indexes whose hot clusters are others now; beside the oldest search, if it waits."""
        for index in front.hot if front.due else ():
            hot = front.hot.get(index)
            if hot is None or (swap := hot.wanted()) is None:
                continue
            graph, node = front.beside, LiveNode("index", FUNCTION, part=COPY)
            for search in front.known[:1]:
                if search.node in front.ready and search.call is not None and not search.copied:
                    graph, node = search.graph, search.node
            sizes = front.catalog.sizes(index)
            vectors = sum(hot.counts[cluster] * sizes[cluster] for cluster in swap.load)
            yield cls(graph, node, index, hot, swap, vectors)

    def gain(self, costs: Learned) -> float:
        """What the CPU takes for scans of them until it is time to look again."""
        return costs.shared_seconds(self.vectors)

    def apply(self, graph: LiveGraph) -> None:
        """See `prefetch`."""
        self.hot.begin(self.swap)
        if self.node in graph:
            self.node.work.copied = True
            transform.prefetch(graph, self.node, self.swap.load, self)
        else:
            self.node.work = self
            graph.add(self.node)


@register_transformation
@dataclass(frozen=True, slots=True)
class Put(Transformation):
    """Have the device scan the clusters that it holds, beside the CPU (HedraRAG §4.4).

    count: clusters of the sub-stage, as of Split; there: those of them for the device. saved,
    lost: seconds by which searches are over sooner and generations later.
    """

    name: ClassVar[str] = "put"
    stage: NextStage
    count: int
    there: tuple[int, ...]
    saved: float
    lost: float

    @classmethod
    def fits(cls, front: Front) -> Iterator[Put]:
        """Of searches of the next sub-stage, if the device is idle; not of scouts."""
        stage, device = front.stage, front.costs.costs.device
        hot = front.hot.get(stage.index) if stage else None
        if not stage or not device or not hot or "gpu" in front.busy or stage.guesses:
            return
        weighed = Weighed(stage.sizes, hot, front.costs.device_weight)
        plan = front.plan(stage, weighed)
        takes = [(search, search.node.clusters[:count]) for search, count in plan if count]
        held = {s: tuple(c for c in clusters if hot.resident(c)) for s, clusters in takes}
        lefts = ((s, tuple(c for c in clusters if c not in held[s])) for s, clusters in takes)
        here = [(search, left) for search, left in lefts if left]
        vectors = [count_vectors(clusters, stage.sizes) for clusters in held.values() if clusters]
        seconds = device.seconds(vectors) if vectors else 0.0
        alone, beside = (front.batch(some, stage.sizes).predicted for some in (takes, here))
        saved = (alone - max(beside, seconds)) * sum(s.call is not None for s in front.searches)
        for search, count in plan:
            there = held.get(search, ())
            if there or count < len(search.node.clusters):
                place = search.graph, search.node, stage, count
                yield cls(*place, there, saved, seconds * front.load)

    def gain(self, costs: Learned) -> float:
        """By how much sooner all searches are over, less what all generations wait for."""
        return self.saved - self.lost

    def apply(self, graph: LiveGraph) -> None:
        """See `split_search` and `put`."""
        self.stage.settled = True
        self.stage.cut(self.node, self.count)
        if self.there:
            self.node.work.node = transform.put(graph, self.node, GPU, self.there)


@register_transformation
@dataclass(frozen=True, slots=True)
class Split(Transformation):
    """Cut a search after some clusters: who comes meanwhile waits for less (HedraRAG §4.2).

    count: clusters of the next sub-stage; 0 = it waits for a later one. seconds: of all that is
    left of searches, and of what is planned of it. waiting: how many wait for that. asked: whether
    a user says how many clusters there are to be, or has a transformation that looks at parts.
    """

    name: ClassVar[str] = SPLIT
    stage: NextStage
    count: int
    seconds: tuple[float, float]
    waiting: float
    asked: bool

    @classmethod
    def fits(cls, front: Front) -> Iterator[Split]:
        """Of searches of the next sub-stage that have more left than fits in its time."""
        stage = front.stage
        if not stage or stage.settled:
            return
        plan = front.plan(stage, stage.sizes)
        taken = (count_vectors(s.node.clusters[:count], stage.sizes) for s, count in plan)
        seconds = front.backlog, front.costs.shared_seconds(sum(taken))
        looks = any(kind.looks for kind in front.asked.values())
        asked, waiting = looks or front.settings.fixed_clusters is not None, front.waiting(stage)
        for search, count in plan:
            if count < len(search.node.clusters):
                yield cls(search.graph, search.node, stage, count, seconds, waiting, asked)

    def gain(self, costs: Learned) -> float:
        """By how much less who comes at any time waits, less what more sub-stages cost."""
        gain = costs.split_gain(*self.seconds, self.waiting)
        return max(gain, TINY) if self.asked else gain

    def apply(self, graph: LiveGraph) -> None:
        """See `split_search`."""
        self.stage.cut(self.node, self.count)


@register_transformation
@dataclass(frozen=True, slots=True)
class SpeculateGeneration(Transformation):
    """Begin a generation on what a search has found so far (HedraRAG §4.3).

    ticket: its request. call, prompt: what would follow the documents so far. guessed: what is
    known of that. load: generations under way.
    """

    name: ClassVar[str] = "speculate_generation"
    guesses: ClassVar[bool] = True
    wakes: ClassVar[str] = "room"
    ticket: Ticket
    call: Call
    prompt: str
    guessed: Guessed
    load: int

    @classmethod
    def fits(cls, front: Front) -> Iterator[Self]:
        """Of searches that have found enough, the one with the nearest k-th document first."""
        if front.load >= front.room:
            said = f"{front.load} generations are under way; guesses begin below {front.room:.0f}"
            for search in front.known:
                if front.prompted(search):
                    front.leave(cls.name, search.graph, Left("load", said))
            return
        open_ = [search for search in front.known if cls.may_begin(front, search)]
        left, weighed = front.seconds_left() if open_ else {}, False
        for search in sorted(open_, key=lambda search: search.steps.partial[-1][0]):
            if front.load >= front.room:
                break
            for found in cls.at(front, search, left[search]):
                weighed = True
                yield found
        if weighed:
            front.pays = bool(front.guesses)

    @classmethod
    def may_begin(cls, front: Front, search: Search) -> bool:
        """Tell whether enough is found and nothing is begun on it yet."""
        if not front.prompted(search) or search.nearest == search.tried or not search.full:
            return False
        guesses = front.ticket(search).guesses.values()
        return search.steps.position > 0 and all(guess.search is not search for guess in guesses)

    @classmethod
    def at(cls, front: Front, search: Search, left: float) -> Iterator[Self]:
        """Yield the generations that would follow if what is found by now were all.

        left: seconds until the search is over.
        """
        assert search.call is not None, "nothing follows a scout"
        ticket = front.ticket(search)
        try:
            documents = search.documents(front.catalog)
        except DovetailError:  # the search tells of it if it finds the same
            return
        for call, prompt in prompts_after(ticket.run, search.call, documents):
            named = search.graph.workflow, call.node.name
            guessed = Guessed(named, len(prompt), search.named, left, search.share)
            yield cls(search.graph, search.last, ticket, call, prompt, guessed, front.load)

    def gain(self, costs: Learned) -> float:
        """What overlaps if it holds, less what it costs others."""
        return costs.guess_gain(self.guessed, self.load)

    def why_not(self, costs: Learned) -> Left:
        """Tell what outweighs it."""
        return costs.why_no_guess(self.guessed, self.load)

    def apply(self, graph: LiveGraph) -> None:
        """See `speculate_generation`."""
        ticket, search = self.ticket, self.node.work
        search.tried = search.nearest
        ticket.nodes[search.source.node, search.source.round] = search.last
        reply = ticket.reply(self.call, self.prompt)
        reply.search, reply.ids, reply.guessed = search, search.tried, self.call
        target = ticket.node(self.call)
        reply.node = transform.speculate_generation(graph, search.ended, target, reply)


@register_transformation
@dataclass(frozen=True, slots=True)
class Arrange(Transformation):
    """Show documents so that their prompt begins as one before it, where their order is free.

    opening: the prompt's, arranged. letters: that it shares more than it would otherwise.
    """

    name: ClassVar[str] = "arrange"
    wakes: ClassVar[str] = "begins"
    opening: Opening
    letters: int

    @classmethod
    def fits(cls, front: Front) -> Iterator[Arrange]:
        """Of generations that are ready, guesses too."""
        for reply in front.replies:
            if reply.opening is not None and reply.node in front.ready:
                best = front.prefixes.arrange(reply.opening)
                letters = front.prefixes.shared(best) - front.prefixes.shared(reply.opening)
                if letters > 0:
                    yield cls(reply.graph, reply.node, best, letters)
                front.prefixes.keep(reply.opening)  # as it is by now; it begins in this cycle

    def gain(self, costs: Learned) -> float:
        """What the engine would take for the KV that it has."""
        return costs.costs.step.prefill * self.letters

    def apply(self, graph: LiveGraph) -> None:
        """Write the prompt anew."""
        reply: Reply = self.node.work
        reply.opening, reply.prompt = self.opening, self.opening.prompt()


@register_transformation
@dataclass(frozen=True, slots=True)
class SplitReply(Transformation):
    """Have a generation tell how far it has got after so many steps, for a search behind it.

    batch: generations under way with it.
    """

    name: ClassVar[str] = "split_reply"
    wakes: ClassVar[str] = "begins"
    steps: int
    batch: int

    @classmethod
    def fits(cls, front: Front) -> Iterator[SplitReply]:
        """Of generations that are ready, where a search follows: else nobody would look."""
        for batch, reply in enumerate(front.replies, 1):
            if reply.node in front.ready and reply.ahead is not None:
                steps = front.costs.steps(reply.named, batch)
                yield cls(reply.graph, reply.node, steps, batch)

    def gain(self, costs: Learned) -> float:
        """What is left of the reply after its first sub-stage, in which the index may be used.

        No more than a scout gains: else nobody would look.
        """
        reply: Reply = self.node.work
        assert reply.ahead is not None, "no search will read it"
        ahead = self.graph.workflow, reply.ahead.name
        left = costs.reply(reply.named) - self.steps * costs.costs.step.seconds(self.batch)
        return min(left, costs.scout_gain(ahead, self.batch))

    def apply(self, graph: LiveGraph) -> None:
        """Cut it wherever it tells; see `split_reply`."""
        self.node.work.steps = self.steps
