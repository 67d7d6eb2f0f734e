"""All that is under way: what transformations look at, and what is to be done.

In: requests, searches and replies as they come and go; orders, reports. Out: orders in sequence,
each once; reports to those who wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import ceil
from typing import Any

from msgspec import Struct

from dovetail.ir.errors import DovetailError
from dovetail.ir.graph import ExecutionGraph
from dovetail.ir.live_graph import Left, LiveGraph, LiveNode, Ready
from dovetail.ir.workflow import Function, Generation, Name, Retrieval, label
from dovetail.runtime.flows.control import messages
from dovetail.runtime.flows.control.costs import Learned, StageCosts
from dovetail.runtime.flows.control.prefixes import Opening, Prefixes
from dovetail.runtime.flows.control.settings import WavefrontSettings
from dovetail.runtime.flows.control.transformation import (
    REGISTRY,
    Transformation,
    check_transformations,
)
from dovetail.runtime.flows.control.work import Key, NextStage, Reply, ScanBatch, Search, Takes
from dovetail.runtime.flows.workflow_run import Call, WorkflowRun
from dovetail.runtime.index.cursor import SearchHistory
from dovetail.runtime.retrieval.budget import count_vectors, deal_rows, plan_sub_stage
from dovetail.runtime.retrieval.hot import HotSet

TASTE = 1 / 16
"""Part of a search that is scanned as soon as it comes: mostly it holds what is nearest."""
SPLIT, REORDER = "split", "reorder"
"""Transformations that others look for: whether searches are cut, and whether history is used."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request under way. ended: its last search of each index that is over.

    nodes: of calls that came or will come, the last part of each. guesses: by the call they are
    for. scouts: searches ahead of the node that they prepare. searched: how many searches are over.
    """

    number: int
    run: WorkflowRun
    graph: LiveGraph
    nodes: dict[Key, LiveNode] = field(default_factory=dict)
    ended: dict[str | None, Search] = field(default_factory=dict)
    guesses: dict[Key, Reply] = field(default_factory=dict)
    scouts: dict[Name, Search] = field(default_factory=dict)
    searched: int = 0
    over: bool = False

    def source(self, call: Call) -> messages.Source:
        """Return what a piece of work for a call is marked with."""
        return messages.Source(self.number, call.node.name, call.round)

    def reply(self, call: Call, prompt: str) -> Reply:
        """Return a generation that nobody waits for, to what a call would ask."""
        assert isinstance(call.node, Generation), "it has no prompt"
        workflow = self.run.workflow
        opening = Opening.of(call, workflow.unordered) if workflow.unordered else None
        ahead = workflow.searches[call.node.name]
        return Reply(self.graph, self.source(call), call.node, prompt, ahead=ahead, opening=opening)

    def node(self, call: Call) -> LiveNode:
        """Return the node of a call, which is put behind what it reads if it is new."""
        key = call.node.name, call.round
        if key not in self.nodes:
            self.nodes[key] = self.graph.append(label(key[0]), key[1], self._read(call))
        return self.nodes[key]

    def _read(self, call: Call) -> list[LiveNode]:
        """Return the nodes that have written what a call reads, or will have."""
        writers = self.run.workflow.writers
        names = call.rounds if isinstance(call.node, Function) else call.node.reads
        written = [(writers[n], call.rounds[n]) for n in names if call.rounds[n] >= 0]
        return [self.nodes[key] for key in dict.fromkeys(written)]

    def history(self, node: Retrieval) -> SearchHistory | None:
        """Return what the next search can use: of its scout if there was one, or of the last."""
        scout = self.scouts.get(node.name)
        if scout is not None and scout.cursor is not None and scout.cursor.position:
            return scout.history()
        before = self.ended.get(node.index)
        return None if before is None else before.history()


@dataclass(slots=True)
class Statistics:
    """Guesses begun, those that held, those that did not, and scouts sent.

    left: by transformation, why it was not applied where it fitted last, in any request.
    """

    attempted: int = 0
    accepted: int = 0
    rejected: int = 0
    scouts: int = 0
    left: dict[str, Left] = field(default_factory=dict)

    @property
    def accuracy(self) -> float:
        """Accepted guesses over those that were begun; 0 where none was."""
        return self.accepted / self.attempted if self.attempted else 0.0


@dataclass(slots=True)
class Changes:
    """What was reported since the last cycle.

    found: searches whose clusters are known now. scanned: those that have got further. progressed:
    replies that have. room: whether the engine has more room, or a search has found more. begins:
    whether a generation may begin.
    """

    found: list[Search] = field(default_factory=list)
    scanned: list[Search] = field(default_factory=list)
    progressed: list[Reply] = field(default_factory=list)
    room: bool = False
    begins: bool = False


class Waiter(Struct, frozen=True):
    """Whom a report goes to. request: whose job it is, None where several share it."""

    request: int | None
    take: Callable[[Any], None]
    fail: Callable[[DovetailError], None]


class Front:
    """The wavefront of all requests.

    ready: nodes that may begin, each with its graph. searches: under way, oldest request first;
    left: vectors that are left of them. replies: oldest first. busy: what each device scans.
    choose: gives the sub-stage that may begin. asked: transformations, in this order. pays: whether
    some guess was under way after guesses were weighed last. due: whether it is time to look at
    which clusters are hot. emptied: whether all searches of the next sub-stage ended before it
    began. beside: the graph of copies that no search may wait for. prefixes: with which documents
    prompts have begun.
    """

    choose: Callable[[], NextStage | None]

    def __init__(
        self,
        settings: WavefrontSettings,
        costs: StageCosts,
        catalog: messages.Catalog,
        hot: Mapping[str | None, HotSet],
    ) -> None:
        """Raises SpecError where `settings` name a transformation that is not registered."""
        check_transformations(settings.transformations or ())
        self.settings, self.costs = settings, Learned(costs)
        self.catalog, self.hot = catalog, hot
        self.now = 0.0
        self.ready = Ready()
        self.tickets: dict[int, Ticket] = {}
        self.searches: list[Search] = []
        self.left = 0
        self.replies: dict[Reply, None] = {}
        self.busy: dict[messages.Device, ScanBatch] = {}
        self.news, self.pays, self.due = Changes(), True, False
        self.emptied = False
        self.statistics = Statistics()
        self.prefixes = Prefixes()
        self.beside = LiveGraph(ExecutionGraph(()), self.ready)
        self._stage: tuple[NextStage | None] | None = None
        self._waiters: dict[int, Waiter] = {}
        self._orders: list[messages.Order] = []
        self._numbers = count(1)
        self._kinds: tuple[type[Transformation], ...] = ()
        self.asked: dict[str, type[Transformation]] = {}
        self.ask()

    def ask(self) -> None:
        """Take those transformations that are registered now."""
        chosen, kinds = self.settings.transformations, tuple(REGISTRY.values())
        if kinds != self._kinds:
            self._kinds = kinds
            self.asked = {k.name: k for k in kinds if chosen is None or k.name in chosen}
            self.guessing = any(kind.guesses for kind in self.asked.values())

    def give_up(self, name: str, said: str) -> None:
        """Ask a transformation that has failed no longer, until others are registered."""
        del self.asked[name]
        self.guessing = any(kind.guesses for kind in self.asked.values())
        for graph in (self.beside, *(ticket.graph for ticket in self.tickets.values())):
            self.leave(name, graph, Left("failed", said))

    def wakes(self, kind: type[Transformation]) -> bool:
        """Tell whether there is something for a transformation to look at."""
        return not kind.wakes or bool(getattr(self.news, kind.wakes))

    @property
    def stage(self) -> NextStage | None:
        """The sub-stage that begins in this cycle, as transformations have left it, if one may."""
        if self._stage is None:
            self._stage = (self.choose(),)
        stage = self._stage[0]
        return stage if stage and stage.searches else None

    def leave_out(self, search: Search) -> None:
        """Take out a search that is over; of the next sub-stage, too, if it was chosen for that."""
        self.searches.remove(search)
        self.left -= search.left
        if self._stage and (stage := self._stage[0]) and search in stage.searches:
            stage.searches.remove(search)
            self.emptied = not stage.searches

    def turn(self) -> None:
        """Begin another cycle."""
        self._stage, self.news, self.emptied = None, Changes(), False

    # ---- what is under way ----

    @property
    def load(self) -> int:
        """Generations under way."""
        return len(self.replies)

    @property
    def room(self) -> float:
        """Generations up to which one is begun on a guess."""
        most = self.settings.generation_load
        return self.costs.room if most is None else most

    @property
    def known(self) -> list[Search]:
        """Searches whose clusters are known."""
        return [search for search in self.searches if search.cursor is not None]

    @property
    def guesses(self) -> list[Reply]:
        """Generations begun on a guess that is still open."""
        return [guess for ticket in self.tickets.values() for guess in ticket.guesses.values()]

    def ticket(self, work: Search | Reply) -> Ticket:
        """Return the request that a search or reply is for."""
        return self.tickets[work.source.request]

    @property
    def backlog(self) -> float:
        """Seconds that all threads take for what is left of searches under way."""
        return self.costs.shared_seconds(self.left)

    def batch(self, takes: Takes, sizes: Sequence[int]) -> ScanBatch:
        """Return a scan on the CPU, the clusters of a search dealt to threads that would idle."""
        if SPLIT in self.asked and takes:
            rows = deal_rows([clusters for _, clusters in takes], sizes, self.costs.costs.scan)
            takes = [(takes[row.search][0], row.clusters) for row in rows]
            loads = [row.vectors for row in rows]
        else:
            loads = [count_vectors(clusters, sizes) for _, clusters in takes]
        seconds = self.costs.scan_seconds(loads) if takes else 0.0
        return ScanBatch("cpu", takes, seconds, self.costs.shared_seconds(sum(loads)))

    def plan(self, stage: NextStage, sizes: Sequence[int]) -> list[tuple[Search, int]]:
        """Return how many clusters of each search of a stage are to be scanned now; 0: it waits."""
        lefts, fixed = [s.node.clusters for s in stage.searches], self.settings.fixed_clusters
        counts = list(map(len, lefts))
        if SPLIT in self.asked and fixed is not None:
            counts = [min(fixed, count) for count in counts]
        elif SPLIT in self.asked:
            scan, most = self.costs.costs.scan, self._portions(stage)
            budget = self.costs.budget(self.backlog) / self.costs.speed
            found = dict(plan_sub_stage(lefts, sizes, scan, budget, most=most))
            counts = [found.get(number, 0) for number in range(len(lefts))]
        return list(zip(stage.searches, counts, strict=True))

    def _portions(self, stage: NextStage) -> list[int]:
        """Return how many clusters each search may scan: a taste first, on all threads at least."""
        new = self.new(stage.searches)
        least = self.costs.costs.scan.threads // max(1, len(new))
        return [
            max(least, ceil(count * TASTE)) if search in new else count
            for search, count in ((search, len(search.node.clusters)) for search in stage.searches)
        ]

    def waiting(self, stage: NextStage) -> float:
        """Return how many would wait for less of a stage, were it cut.

        All its searches but one, and those that come while it is scanned; and who looks at what is
        found so far: it may end a search, begin a generation, or be what a scout was sent for.
        """
        looks = self.new(stage.searches) or any(
            search.call is None
            or (search.patience is not None and search.patience < len(search.steps.clusters))
            for search in stage.searches
        )
        return len(stage.searches) - 1 + self.costs.coming(self.backlog, self.now) + bool(looks)

    def new(self, searches: Iterable[Search]) -> set[Search]:
        """Return those that have found nothing that a generation can be begun on, if one may be."""
        if not self.guessing or not self.pays or self.load >= self.room:
            return set()
        return {s for s in searches if self.prompted(s) and not s.steps.position}

    def prompted(self, search: Search) -> bool:
        """Tell whether a generation may begin on a part of what a search finds."""
        workflow = self.ticket(search).run.workflow
        return search.call is not None and search.spec.name in workflow.prompting

    def seconds_left(self) -> dict[Search, float]:
        """Predict how long each search still takes, after those that go before it."""
        ahead, threads, found = 0, self.costs.costs.scan.threads, dict[Search, float]()
        for search in self.known:
            found[search] = self.costs.scan_seconds([(ahead + search.left) // threads])
            ahead += search.left if search.call is not None else 0
        return found

    def leave(self, name: str, graph: LiveGraph, why: Left | str) -> None:
        """Take why a transformation is not applied to the graph of a request."""
        why = why if isinstance(why, Left) else Left("gain", str(why))  # of a user's own
        self.statistics.left[name] = graph.left[name] = why

    # ---- jobs and orders ----

    def post(
        self,
        make: Callable[[int], messages.Order],
        request: int | None,
        take: Callable[[Any], None],
        fail: Callable[[DovetailError], None],
    ) -> int:
        """Order a job, which `make` gets the number of; return the number. For others see Waiter.

        It ends with its last report or by being cancelled, and is never heard of again.
        """
        job = next(self._numbers)
        self._waiters[job] = Waiter(request, take, fail)
        self._orders.append(make(job))
        return job

    def order(self, order: messages.Order) -> None:
        """Order what nobody reports about."""
        self._orders.append(order)

    def cancel(self, job: int) -> None:
        """End a job, if it is under way."""
        if self._waiters.pop(job, None) is not None:
            self._orders.append(messages.Cancel(job))

    def cancel_request(self, request: int) -> None:
        """End all jobs of a request."""
        for job in [j for j, waiter in self._waiters.items() if waiter.request == request]:
            self.cancel(job)

    def tell(self, report: messages.Report) -> None:
        """Hand a report on; nothing happens where nobody waits for it."""
        waiter = self._waiters.get(report.job)
        if waiter is None:
            return
        if not isinstance(report, messages.Progressed):
            del self._waiters[report.job]
        if isinstance(report, messages.Failed):
            waiter.fail(report.error)
        else:
            waiter.take(report)

    def take(self) -> tuple[messages.Order, ...]:
        """Return the orders since the last call."""
        orders, self._orders = tuple(self._orders), []
        return orders
