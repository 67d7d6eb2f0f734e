"""Workflows on a made-up machine: the control plane as it is, all others as events in virtual time.

In: arrivals, a `World` that knows all answers, a `WorkflowMachine` that knows how long they take,
an engine. Out: what each request got and when. Devices work as real ones do: the engine's batch
takes new sequences at each step, a scan holds its device to the end, an encoder takes all texts at
once.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any, Protocol, TypeAlias

import numpy as np

from dovetail.ir.errors import DovetailError
from dovetail.ir.workflow import Rerank, Retrieval
from dovetail.runtime.flows.control.costs import StepCost
from dovetail.runtime.flows.control.messages import (
    Cancel,
    Catalog,
    Choose,
    Copy,
    Deliver,
    Embed,
    Failed,
    FindClusters,
    Finished,
    Generate,
    Invoke,
    Order,
    Probed,
    RankDocuments,
    Report,
    ScanClusters,
    Scanned,
    Started,
)
from dovetail.runtime.flows.workflow_run import Call, WorkflowRun
from dovetail.runtime.index.scans import Part
from dovetail.runtime.retrieval.budget import ScanCost
from scripted_engine import ScriptedEngine

Act: TypeAlias = Callable[[], None]
AT_ONCE = StepCost(fixed=0.0)


class World(Catalog, Protocol):
    """All that encoder, index and functions would answer. Always the same."""

    def embed(self, text: str) -> Any:
        """Return a vector."""

    def probe(self, vector: Any, node: Retrieval) -> tuple[Sequence[int], Sequence[float]]:
        """Return the clusters of a query and the distances to their centroids."""

    def distances(self, vector: Any, ids: Sequence[int], node: Retrieval) -> Mapping[int, float]:
        """Return how far documents are."""

    def scan(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """Return the nearest documents in the clusters of each part."""

    def rank(self, query: str, documents: Any, node: Rerank) -> Sequence[Any]:
        """Return the best of some documents."""

    def invoke(self, call: Call) -> object:
        """Return what a node's function does; DovetailError where it fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowMachine:
    """How long things take, in seconds.

    scan, device: of clusters on CPU and GPU; the engine waits for those on the GPU. turn: from the
    end of a scan until the control plane knows, and back (beta). encode: of a batch of the encoder,
    by texts. probe, function: of each such order; they wait for nothing. copy: of a vector to the
    device. jitter: each time is drawn from 1 - jitter .. 1 + jitter of that.
    """

    scan: ScanCost
    device: ScanCost | None = None
    turn: float = 0.0
    encode: StepCost = AT_ONCE
    probe: float = 0.0
    function: float = 0.0
    copy: float = 0.0
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkflowOutcome:
    """What a request got, seconds after it came."""

    request: int
    arrival: float
    end: float
    state: Mapping[str, Any] | None
    error: DovetailError | None

    @property
    def latency(self) -> float:
        """Seconds from arrival to the end."""
        return self.end - self.arrival


class Plane(Protocol):
    """A control plane: `Wavefront`, or a baseline."""

    def submit(self, run: WorkflowRun, now: float) -> int:
        """Take a run; return its number."""

    def tell(self, report: Report, now: float) -> None:
        """Take a report."""

    def orders(self, now: float) -> Sequence[Order]:
        """Return what is to be done."""


class WorkflowSimulation:
    """A machine in virtual time, driven by a control plane. One use.

    outcomes: in the order of ends. busy: seconds that `cpu`, `gpu` and `engine` were at work.
    vectors: scanned on each device. scans: ordered. guesses, held: generations begun on a guess,
    and those that held.
    """

    def __init__(
        self,
        plane: Plane,
        world: World,
        machine: WorkflowMachine,
        engine: ScriptedEngine,
        seed: int = 0,
    ) -> None:
        self.plane, self.world, self.machine, self.engine = plane, world, machine, engine
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Act]] = []
        self._numbers = count()
        self._texts: list[Embed] = []
        self._encoding = self._stepping = False
        self._arrivals: dict[int, float] = {}
        self._guessed: set[int] = set()
        self.now = 0.0
        self.outcomes: list[WorkflowOutcome] = []
        self.busy: dict[str, float] = defaultdict(float)
        self.vectors: Counter[str] = Counter()
        self.scans = self.guesses = self.held = 0

    def run(
        self,
        arrivals: Sequence[tuple[float, WorkflowRun]],
        watch: Callable[[float, Sequence[Order]], None] = lambda now, orders: None,
    ) -> list[WorkflowOutcome]:
        """Serve runs that come at given seconds; return what each got, in the order of ends.

        watch: is shown all orders as they are given.
        """
        for at, run in arrivals:
            self._at(at, partial(self._arrive, run, at))
        while self._events:
            self.now = self._events[0][0]
            self._act()
            self._obey(watch)
        return self.outcomes

    def _act(self) -> None:
        """Let all happen that is due."""
        while self._events and self._events[0][0] <= self.now:
            heappop(self._events)[2]()

    def _obey(self, watch: Callable[[float, Sequence[Order]], None]) -> None:
        """Do what is ordered now, and have engine and encoder begin where they are idle."""
        orders = self.plane.orders(self.now)
        watch(self.now, orders)
        for order in orders:
            if (do := _DO.get(type(order))) is not None:
                getattr(self, do)(order)
        self._step(self.now)
        self._encode()

    # ---- orders ----

    def _generate(self, order: Generate) -> None:
        if order.provisional:
            self._guessed.add(order.job)
            self.guesses += 1
        self.engine.add(order)

    def _started(self, order: Started) -> None:
        self.held += order.job in self._guessed

    def _cancel(self, order: Cancel) -> None:
        self.engine.cancel(order.job)

    def _embed(self, order: Embed) -> None:
        self._texts.append(order)

    def _rank(self, order: RankDocuments) -> None:
        best = self.world.rank(order.query, order.documents, order.node)
        self._tell_in(self._drawn(self.machine.function), Finished(order.job, best))

    def _invoke(self, order: Invoke | Choose) -> None:
        try:
            value = order.run() if isinstance(order, Choose) else self.world.invoke(order.call)
            report: Report = Finished(order.job, value)
        except DovetailError as error:
            report = Failed(order.job, error)
        self._tell_in(self._drawn(self.machine.function), report)

    def _probe(self, order: FindClusters) -> None:
        vector = np.frombuffer(order.vector, np.float32)
        clusters, centroids = self.world.probe(vector, order.node)
        known = self.world.distances(vector, order.known, order.node) if order.known else {}
        report = Probed(order.job, tuple(clusters), tuple(centroids), known)
        self._tell_in(self._drawn(self.machine.probe), report)

    def _scan(self, order: ScanClusters) -> None:
        cost = self.machine.scan if order.device == "cpu" else self.machine.device
        assert cost is not None, "a scan for a device that is not there"
        seconds = self._drawn(cost.seconds(self._count_scan(order)))
        self.busy[order.device] += seconds
        if order.device == "gpu":
            self.engine.delay += seconds
        report = Scanned(order.job, self.world.scan(order.parts), seconds)
        self._tell_in(seconds + self._drawn(self.machine.turn), report)

    def _count_scan(self, order: ScanClusters) -> list[int]:
        """Return the vectors of each part."""
        sizes = self.world.sizes(order.index)
        loads = [sum(sizes[c] for c in part.clusters) for part in order.parts]
        self.vectors[order.device] += sum(loads)
        self.scans += 1
        return loads

    def _copy(self, order: Copy) -> None:
        sizes = self.world.sizes(order.index)
        seconds = self.machine.copy * sum(sizes[c] for c in order.load)
        self._tell_in(self._drawn(seconds), Finished(order.job))

    def _deliver(self, order: Deliver) -> None:
        arrival = self._arrivals.pop(order.request)
        outcome = WorkflowOutcome(order.request, arrival, self.now, order.state, order.error)
        self.outcomes.append(outcome)

    # ---- events ----

    def _arrive(self, run: WorkflowRun, at: float) -> None:
        self._arrivals[self.plane.submit(run, self.now)] = at

    def _step(self, start: float) -> None:
        """Begin a step of the engine where none is under way, with what has come by now."""
        if self._stepping or (seconds := self.engine.begin_step()) is None:
            return
        self._stepping = True
        seconds = self._drawn(seconds)
        self.busy["engine"] += seconds
        self._at(start + seconds, partial(self._stepped, start + seconds))

    def _stepped(self, end: float) -> None:
        """End a step. Who sees it late sees the next one begun, without what comes of this one."""
        self._stepping = False
        reports = self.engine.end_step()
        if self.now > end:
            self._step(end)
        for report in reports:
            self.plane.tell(report, self.now)

    def _encode(self) -> None:
        """Have the encoder, where it is idle, take all texts that wait."""
        if self._encoding or not self._texts:
            return
        batch, self._texts, self._encoding = self._texts, [], True
        seconds = self._drawn(self.machine.encode.seconds(len(batch)))
        self._at(self.now + seconds, partial(self._encoded, batch))

    def _encoded(self, batch: Sequence[Embed]) -> None:
        self._encoding = False
        for order in batch:
            self.plane.tell(Finished(order.job, self.world.embed(order.text)), self.now)

    def _tell_in(self, seconds: float, report: Report) -> None:
        self._at(self.now + seconds, lambda: self.plane.tell(report, self.now))

    def _at(self, time: float, act: Act) -> None:
        heappush(self._events, (time, next(self._numbers), act))

    def _drawn(self, seconds: float) -> float:
        jitter = self.machine.jitter
        return seconds * self._random.uniform(1 - jitter, 1 + jitter) if jitter else seconds


_DO = {
    Generate: "_generate",
    Started: "_started",
    Cancel: "_cancel",
    Embed: "_embed",
    RankDocuments: "_rank",
    Invoke: "_invoke",
    Choose: "_invoke",
    FindClusters: "_probe",
    ScanClusters: "_scan",
    Copy: "_copy",
    Deliver: "_deliver",
}
"""Method by which an order is carried out, subclasses' included; others ask for nothing."""
